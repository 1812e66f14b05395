"""The warpgroups that multiply, finish and store."""

from std.memory import OpaquePointer
from std.utils import StaticTuple

from .arguments import Arguments
from .cluster_sum import ClusterSum, meet_cluster
from .config import Config, Ring, Shared
from .epilogue import (
    BIASED,
    CORRECTED,
    WIDE,
    Accumulators,
    RowFactors,
    Sums,
    store_slice,
)
from .gather import Gathering, RowSums, factors_of_row
from .ptx import (
    map_to_rank,
    mbarrier_arrive,
    mbarrier_arrive_cluster,
    mbarrier_wait,
    named_barrier_sync,
    store_wait_read,
    wait_on_earlier_grids,
)
from .row_sums import TransposedSums
from .tiles import Tiles
from .wide import WideRows
from .wgmma import (
    Accumulator,
    SLICE_BYTES,
    multiply_first,
    multiply_next,
    operand_descriptor,
    wait_all,
    wait_previous,
)


@always_inline
def _row_factors(arguments: Arguments, row: UInt32) -> RowFactors:
    var factors = RowFactors(0, 0)
    if row < UInt32(arguments.m):
        factors.rstd = arguments.rstd.unsafe_offset(Int(row)).unsafe_load()
        factors.mean = arguments.mean.unsafe_offset(Int(row)).unsafe_load()
    return factors


@fieldwise_init
struct Multiplier[dtype: DType, config: Config](TrivialRegisterPassable):
    """What a warpgroup needs to multiply the tiles in the ring.

    Parameters:
        dtype: Type of the operands.
        config: Compile-time choices.
    """

    var shared: Shared[Self.config]
    """Shared memory of the block."""
    var consumer: UInt32
    """Which of the consumer warpgroups this is."""
    var x_tiles: UInt32
    """Descriptor of its rows of x in the first slot."""
    var w_tiles: UInt32
    """Descriptor of the weight in the first slot."""
    var rows: UInt32
    """Address of its rows of x in the first slot."""
    var thread: UInt32
    """Thread in its warpgroup."""
    var empty: UInt32
    """Barrier of the first slot of the block to tell."""
    var releases: Bool
    """Whether this thread tells a block that a slot is used up."""

    @always_inline
    def release[gathers: Bool](self, slot: UInt32):
        """Tells every block of the cluster that a slot is used up.

        A warpgroup's products end together, so that one thread may tell;
        reads by its threads do not.

        Parameters:
            gathers: Whether threads have read the slot.

        Args:
            slot: The slot.
        """
        comptime if gathers:
            named_barrier_sync(Int32(self.consumer) + 1, 128)
        if self.releases:
            comptime if Self.config.sharers() > 1:
                mbarrier_arrive_cluster(self.empty + slot * 8)
            else:
                mbarrier_arrive(self.empty + slot * 8)

    @always_inline
    def start[
        G: Gathering, //, gathers: Bool
    ](
        self,
        mut at: Ring,
        mut previous: UInt32,
        mut gathered: G,
        blocks: UInt32,
    ) -> Accumulator[Self.config.slices * Self.config.columns // 2]:
        """Starts the products of a tile; the last ones still run on return.

        Parameters:
            G: What can be gathered.
            gathers: Whether to do that.

        Args:
            at: Place in the ring.
            previous: Receives the slot still in use.
            gathered: Receives what is gathered.
            blocks: K blocks of the tile.

        Returns:
            The accumulators.
        """
        comptime columns = Self.config.columns
        comptime slices = Self.config.slices
        comptime x_step = UInt32(Self.config.x_bytes())
        comptime w_step = UInt32(Self.config.w_bytes() // 16)
        mbarrier_wait(self.shared.full(at.slot), at.parity)
        var accumulator = multiply_first[
            Self.dtype,
            columns,
            slices,
            Self.config.x_transposed,
            Self.config.w_transposed,
        ](
            self.x_tiles + at.slot * (x_step // 16),
            self.w_tiles + at.slot * w_step,
        )
        comptime if gathers:
            gathered.add[Self.dtype, True](
                self.rows + at.slot * x_step, self.thread
            )
        previous = at.slot
        at.advance[Self.config.stages]()
        for _ in range(UInt32(1), blocks):
            mbarrier_wait(self.shared.full(at.slot), at.parity)
            accumulator = multiply_next[
                Self.dtype,
                columns,
                slices,
                Self.config.x_transposed,
                Self.config.w_transposed,
            ](
                accumulator,
                self.x_tiles + at.slot * (x_step // 16),
                self.w_tiles + at.slot * w_step,
            )
            # One group stays in flight; those before it have read their slot.
            wait_previous()
            self.release[gathers](previous)
            comptime if gathers:
                gathered.add[Self.dtype, False](
                    self.rows + at.slot * x_step, self.thread
                )
            previous = at.slot
            at.advance[Self.config.stages]()
        return accumulator


@fieldwise_init
struct Finisher[dtype: DType, config: Config, mode: Int](
    TrivialRegisterPassable
):
    """What a warp needs to finish and store its rows of a tile.

    Parameters:
        dtype: Type of x, w and y.
        config: Compile-time choices.
        mode: Epilogue.
    """

    comptime Factors = StaticTuple[RowFactors, Self.config.slices]
    """Factors of one row in each slice."""

    var shared: Shared[Self.config]
    """Shared memory of the block."""
    var boxes: UInt32
    """Shared address of the warp's output boxes."""
    var lane: UInt32
    """Lane of the thread."""
    var y_map: OpaquePointer[ImmUntrackedOrigin]
    """Tensor map of y."""
    var arguments: Arguments
    """What goes with the matrices."""

    @always_inline
    def store[
        S: Sums, //, columns: Int
    ](
        self,
        sums: S,
        upper: Self.Factors,
        lower: Self.Factors,
        row: UInt32,
        column: UInt32,
    ):
        """Stores the warp's rows.

        Parameters:
            S: How the sums are kept.
            columns: Columns to store.

        Args:
            sums: The sums of those columns.
            upper: Factors of row lane / 4 of each slice.
            lower: Factors of row lane / 4 + 8 of each slice.
            row: First of the warp's rows.
            column: First of the columns.
        """
        comptime for slice in range(Self.config.slices):
            comptime first = slice * columns // 2
            var slice_row = row + UInt32(slice * 64)
            comptime if Self.mode == WIDE:
                self.wide(slice_row, column).store[columns, first](
                    sums, self.arguments.accumulate != 0
                )
            else:
                store_slice[Self.dtype, Self.mode, columns, first](
                    sums,
                    upper[slice],
                    lower[slice],
                    self.shared.vectors(),
                    self.boxes,
                    self.lane,
                    self.y_map,
                    Int32(column),
                    Int32(slice_row),
                )

    @always_inline
    def wide(self, row: UInt32, column: UInt32) -> WideRows:
        """Finds the warp's rows in float32.

        Args:
            row: First of the rows.
            column: First of the columns.

        Returns:
            The places of this thread's sums.
        """
        return WideRows(
            self.arguments.wide,
            row,
            column,
            UInt32(self.arguments.m),
            UInt32(self.arguments.n),
            self.lane,
        )

    @always_inline
    def store_row_sum(self, sum: Float32, row: UInt32):
        """Stores the sum of a row of x.

        Args:
            sum: The sum.
            row: The row.
        """
        if row >= UInt32(self.arguments.m):
            return
        comptime if Self.mode == WIDE:
            var at = Pointer[Float32, MutAnyOrigin](
                unsafe_from_address=Int(self.arguments.row_sums)
            ).unsafe_offset(Int(row))
            var total = sum
            if self.arguments.accumulate != 0:
                total += at.unsafe_load()
            at.unsafe_store(total)
        else:
            var total = sum
            comptime if Self.config.split:
                if self.arguments.follows != 0:
                    total += self.arguments.wide_row_sums.unsafe_offset(
                        Int(row)
                    ).unsafe_load()
            Pointer[Scalar[Self.dtype], MutAnyOrigin](
                unsafe_from_address=Int(self.arguments.row_sums)
            ).unsafe_offset(Int(row)).unsafe_store(total.cast[Self.dtype]())


@always_inline
def consume[
    dtype: DType, config: Config, mode: Int
](
    shared: Shared[config],
    tiles: Tiles,
    rank: UInt32,
    blocks: UInt32,
    consumer: UInt32,
    warp_in_group: UInt32,
    thread: UInt32,
    y_map: OpaquePointer[ImmUntrackedOrigin],
    arguments: Arguments,
):
    """Computes this warpgroup's half of all tiles of this block.

    Parameters:
        dtype: Type of x, w and y.
        config: Compile-time choices.
        mode: Epilogue.

    Args:
        shared: Shared memory of the block.
        tiles: The tiles.
        rank: Rank of the block in its cluster.
        blocks: K blocks of a tile that the block multiplies.
        consumer: Which of the consumer warpgroups this is.
        warp_in_group: Warp of the thread in its warpgroup.
        thread: Thread in its warpgroup.
        y_map: Tensor map of y.
        arguments: What goes with the matrices.
    """
    comptime slices = config.slices
    comptime columns = config.columns
    comptime registers = slices * columns // 2
    comptime Factors = StaticTuple[RowFactors, slices]
    var lane = thread & 31
    var rows = shared.x_tile(0) + consumer * UInt32(slices * SLICE_BYTES)
    var empty = shared.empty(0)
    comptime if config.sharers() > 1:
        empty = map_to_rank(empty, thread & UInt32(config.sharers() - 1))
    var multiplier = Multiplier[dtype, config](
        shared,
        consumer,
        operand_descriptor[config.x_transposed](rows),
        operand_descriptor[config.w_transposed](shared.w_tile(0)),
        rows,
        thread,
        empty,
        thread < UInt32(config.sharers()),
    )
    var finisher = Finisher[dtype, config, mode](
        shared,
        shared.boxes(consumer * 4 + warp_in_group),
        lane,
        y_map,
        arguments,
    )

    var at = Ring(0, 0)
    var parity = UInt32(0)
    var upper = Factors(RowFactors(1, 0))
    var lower = Factors(RowFactors(1, 0))
    var known = ~UInt32(0)
    var index = tiles.first
    while index < tiles.end:
        var place = tiles.at(index)
        index += tiles.step
        var first_row = place[0] * UInt32(
            config.cluster_rows()
        ) + consumer * UInt32(slices * 64)
        comptime if config.sharers() > 1:
            first_row += rank * UInt32(config.rows())
        var row = first_row + warp_in_group * 16
        var column = place[1] * UInt32(columns)
        var previous = UInt32(0)
        var statistics = RowSums(0, 0, 0)
        var sums = TransposedSums(0)
        var accumulator: Accumulator[registers]
        var row_sum = Float32(0)
        var gathers: Bool
        comptime if config.x_transposed:
            gathers = (
                config.gather and place[1] == 0 and arguments.row_sums != 0
            )
        else:
            gathers = config.gather and place[0] != known
        if gathers:
            comptime if config.x_transposed:
                accumulator = multiplier.start[True](at, previous, sums, blocks)
                accumulator = wait_all[registers](accumulator)
                multiplier.release[True](previous)
                row_sum = sums.finish(shared.vectors(), consumer, thread)
            else:
                accumulator = multiplier.start[True](
                    at, previous, statistics, blocks
                )
                known = place[0]
                var own = statistics.finish(Float32(arguments.k), arguments.eps)
                upper[0] = factors_of_row(own, lane >> 2)
                lower[0] = factors_of_row(own, (lane >> 2) + 8)
                var its_row = Int(row + (lane >> 1))
                if (
                    place[1] == 0
                    and (lane & 1) == 0
                    and its_row < Int(arguments.m)
                ):
                    arguments.mean.unsafe_offset(its_row).unsafe_store(own.mean)
                    arguments.rstd.unsafe_offset(its_row).unsafe_store(own.rstd)
                accumulator = wait_all[registers](accumulator)
                multiplier.release[True](previous)
        else:
            accumulator = multiplier.start[False](
                at, previous, statistics, blocks
            )
            comptime if mode == CORRECTED and not config.gather:
                # The last products still run while these are fetched. The grid
                # that makes them may have been running beside this one so far.
                wait_on_earlier_grids()
                comptime for slice in range(slices):
                    var first = row + UInt32(slice * 64) + (lane >> 2)
                    upper[slice] = _row_factors(arguments, first)
                    lower[slice] = _row_factors(arguments, first + 8)
            accumulator = wait_all[registers](accumulator)
            multiplier.release[False](previous)

        var own = Accumulators[registers](accumulator)
        var sums_here = gathers and config.x_transposed and thread < 64
        comptime if config.split:
            var tile_row = consumer * 64 + thread
            var together = ClusterSum[config](
                shared, rank, consumer * 128 + thread
            )
            # Nobody's ring is in use any more.
            meet_cluster()
            together.send(own)
            if sums_here:
                together.send_row_sum(row_sum, tile_row)
            meet_cluster()
            sums_here = sums_here and rank == 0
            if sums_here:
                row_sum = together.total_row_sum(tile_row)
            var its_column = column + rank * UInt32(together.columns)
            var totals = together.total()
            if arguments.follows != 0:
                wait_on_earlier_grids()
                comptime if mode != WIDE:
                    finisher.wide(row, its_column).add_to(totals.values)
            finisher.store[together.columns](
                totals, upper, lower, row, its_column
            )
        else:
            comptime has_vectors = mode == CORRECTED or mode == BIASED
            comptime if has_vectors:
                mbarrier_wait(shared.vectors_full(), parity)
            finisher.store[columns](own, upper, lower, row, column)
            comptime if has_vectors:
                if lane == 0:
                    mbarrier_arrive(shared.vectors_empty())
        if sums_here:
            finisher.store_row_sum(row_sum, first_row + thread)
        parity ^= 1
    if lane == 0:
        store_wait_read[0]()
