"""The warpgroups that multiply, finish and store."""

from std.memory import OpaquePointer
from std.utils import StaticTuple

from .config import Config, Ring, Shared
from .epilogue import CORRECTED, PLAIN, RowFactors, store_slice
from .gather import RowSums, factors_of_row
from .ptx import (
    map_to_rank,
    mbarrier_arrive,
    mbarrier_arrive_cluster,
    mbarrier_wait,
    named_barrier_sync,
    store_wait_read,
    wait_on_earlier_grids,
)
from .tiles import Tiles
from .wgmma import (
    Accumulator,
    multiply_first,
    multiply_next,
    operand_descriptor,
    wait_all,
    wait_previous,
)


@always_inline
def _row_factors[
    mode: Int
](
    mean: Pointer[Float32, MutAnyOrigin],
    rstd: Pointer[Float32, MutAnyOrigin],
    row: UInt32,
    m: UInt32,
) -> RowFactors:
    var factors = RowFactors(0, 0)
    if row < m:
        factors.rstd = rstd.unsafe_offset(Int(row)).unsafe_load()
        comptime if mode == CORRECTED:
            factors.mean = mean.unsafe_offset(Int(row)).unsafe_load()
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
    var gathered: UInt32
    """Address of this warp's 16 rows of x in the first slot."""
    var lane: UInt32
    """Lane of the thread."""
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
            comptime if Self.config.cluster > 1:
                mbarrier_arrive_cluster(self.empty + slot * 8)
            else:
                mbarrier_arrive(self.empty + slot * 8)

    @always_inline
    def start[
        gathers: Bool
    ](
        self,
        mut at: Ring,
        mut previous: UInt32,
        mut sums: RowSums,
        blocks: UInt32,
    ) -> Accumulator[Self.config.slices * Self.config.columns // 2]:
        """Starts the products of a tile; the last ones still run on return.

        Parameters:
            gathers: Whether to gather row statistics too.

        Args:
            at: Place in the ring.
            previous: Receives the slot still in use.
            sums: Receives the sums of the rows.
            blocks: K blocks of the tile.

        Returns:
            The accumulators.
        """
        comptime columns = Self.config.columns
        comptime slices = Self.config.slices
        comptime x_step = UInt32(Self.config.x_bytes())
        comptime w_step = UInt32(Self.config.w_bytes() // 16)
        mbarrier_wait(self.shared.full(at.slot), at.parity)
        var accumulator = multiply_first[Self.dtype, columns, slices](
            self.x_tiles + at.slot * (x_step // 16),
            self.w_tiles + at.slot * w_step,
        )
        comptime if gathers:
            sums.add[Self.dtype, True](
                self.gathered + at.slot * x_step, self.lane
            )
        previous = at.slot
        at.advance[Self.config.stages]()
        for _ in range(UInt32(1), blocks):
            mbarrier_wait(self.shared.full(at.slot), at.parity)
            accumulator = multiply_next[Self.dtype, columns, slices](
                accumulator,
                self.x_tiles + at.slot * (x_step // 16),
                self.w_tiles + at.slot * w_step,
            )
            # One group stays in flight; those before it have read their slot.
            wait_previous()
            self.release[gathers](previous)
            comptime if gathers:
                sums.add[Self.dtype, False](
                    self.gathered + at.slot * x_step, self.lane
                )
            previous = at.slot
            at.advance[Self.config.stages]()
        return accumulator


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
    thread_in_group: UInt32,
    y_map: OpaquePointer[ImmutAnyOrigin],
    mean: Pointer[Float32, MutAnyOrigin],
    rstd: Pointer[Float32, MutAnyOrigin],
    eps: Float32,
    m: UInt32,
    k: UInt32,
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
        blocks: K blocks of a tile.
        consumer: Which of the consumer warpgroups this is.
        warp_in_group: Warp of the thread in its warpgroup.
        thread_in_group: Thread in its warpgroup.
        y_map: Tensor map of y.
        mean: Means of the rows.
        rstd: Reciprocal deviations of the rows.
        eps: Added to gathered variances.
        m: Rows of y.
        k: Columns of x.
    """
    comptime slices = config.slices
    comptime columns = config.columns
    comptime gathers = config.gather and mode != PLAIN
    var lane = thread_in_group & 31
    var boxes = shared.boxes(consumer * 4 + warp_in_group)
    var first_rows = shared.x_tile(0) + consumer * UInt32(slices * 64 * 128)
    var empty = shared.empty(0)
    comptime if config.cluster > 1:
        empty = map_to_rank(empty, thread_in_group & UInt32(config.cluster - 1))
    var multiplier = Multiplier[dtype, config](
        shared,
        consumer,
        operand_descriptor(first_rows),
        operand_descriptor(shared.w_tile(0)),
        first_rows + warp_in_group * 2048,
        lane,
        empty,
        thread_in_group < UInt32(config.cluster),
    )

    var at = Ring(0, 0)
    var parity = UInt32(0)
    var upper = StaticTuple[RowFactors, slices](RowFactors(1, 0))
    var lower = StaticTuple[RowFactors, slices](RowFactors(1, 0))
    var known = ~UInt32(0)
    var index = tiles.first
    while index < tiles.end:
        var place = tiles.at(index)
        index += tiles.step
        var row = (
            (place[0] * UInt32(config.cluster) + rank) * UInt32(config.rows())
            + consumer * UInt32(slices * 64)
            + warp_in_group * 16
        )
        var previous = UInt32(0)
        var sums = RowSums(0, 0, 0)
        var accumulator: Accumulator[slices * columns // 2]
        if gathers and place[0] != known:
            accumulator = multiplier.start[True](at, previous, sums, blocks)
            known = place[0]
            var own = sums.finish(Float32(k), eps)
            upper[0] = factors_of_row(own, lane >> 2)
            lower[0] = factors_of_row(own, (lane >> 2) + 8)
            var its_row = row + (lane >> 1)
            if place[1] == 0 and (lane & 1) == 0 and its_row < m:
                mean.unsafe_offset(Int(its_row)).unsafe_store(own.mean)
                rstd.unsafe_offset(Int(its_row)).unsafe_store(own.rstd)
            accumulator = wait_all[slices * columns // 2](accumulator)
            multiplier.release[True](previous)
        else:
            accumulator = multiplier.start[False](at, previous, sums, blocks)
            comptime if mode != PLAIN and not gathers:
                # The last products still run while these are fetched. The grid
                # that makes them may have been running beside this one so far.
                wait_on_earlier_grids()
                comptime for slice in range(slices):
                    var first = row + UInt32(slice * 64) + (lane >> 2)
                    upper[slice] = _row_factors[mode](mean, rstd, first, m)
                    lower[slice] = _row_factors[mode](mean, rstd, first + 8, m)
            accumulator = wait_all[slices * columns // 2](accumulator)
            multiplier.release[False](previous)

        comptime if mode != PLAIN:
            mbarrier_wait(shared.vectors_full(), parity)
        comptime for slice in range(slices):
            store_slice[
                slices * columns // 2,
                dtype,
                mode,
                columns,
                slice * columns // 2,
            ](
                accumulator,
                upper[slice],
                lower[slice],
                shared.vectors(),
                boxes,
                lane,
                y_map,
                Int32(place[1] * UInt32(columns)),
                Int32(row + UInt32(slice * 64)),
            )
        comptime if mode != PLAIN:
            if lane == 0:
                mbarrier_arrive(shared.vectors_empty())
        parity ^= 1
    if lane == 0:
        store_wait_read[0]()
