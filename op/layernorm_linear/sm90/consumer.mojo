"""The warpgroups that multiply, finish and store."""

from std.memory import OpaquePointer
from std.utils import StaticTuple

from .arguments import Arguments
from .cluster_sum import ClusterSum, meet_cluster
from .config import Config, Ring, Shared
from .epilogue import BIASED, CORRECTED, WIDE, Accumulators, RowFactors
from .finisher import Finisher
from .gather import RowSums, factors_of_row
from .multiplier import Multiplier
from .progress import Progress
from .ptx import (
    map_to_rank,
    mbarrier_arrive,
    mbarrier_wait,
    store_wait_read,
    wait_on_earlier_grids,
)
from .row_sums import TransposedSums
from .tiles import Tiles
from .wgmma import Accumulator, SLICE_BYTES, operand_descriptor, wait_all


@always_inline
def _row_factors(arguments: Arguments, row: UInt32) -> RowFactors:
    var factors = RowFactors(0, 0)
    if row < UInt32(arguments.m):
        factors.rstd = arguments.rstd.unsafe_offset(Int(row)).unsafe_load()
        factors.mean = arguments.mean.unsafe_offset(Int(row)).unsafe_load()
    return factors


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

    var progress = Progress[config.passes](arguments.rows.stored, lane)
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
                accumulator = multiplier.start[config.gather](
                    at, previous, sums, progress, blocks
                )
                accumulator = wait_all[registers](accumulator)
                multiplier.release[True](previous)
                row_sum = sums.finish(shared.vectors(), consumer, thread)
            else:
                accumulator = multiplier.start[config.gather](
                    at, previous, statistics, progress, blocks
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
                at, previous, statistics, progress, blocks
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

        progress.tell()
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
        progress.stored(first_row)
        if sums_here:
            finisher.store_row_sum(row_sum, first_row + thread)
        parity ^= 1
    progress.tell()
    if lane == 0:
        store_wait_read[0]()
