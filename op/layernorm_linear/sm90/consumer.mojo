"""The warpgroups that multiply, finish and store."""

from std.memory import OpaquePointer
from std.utils import StaticTuple

from .config import BOX_BYTES, Config, Ring, Shared
from .epilogue import CORRECTED, PLAIN, RowFactors, shared_pair, store_slice
from .ptx import (
    map_to_rank,
    mbarrier_arrive,
    mbarrier_arrive_cluster,
    mbarrier_wait,
    store_wait_read,
    wait_on_earlier_grids,
)
from .tiles import Tiles
from .wgmma import (
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


@always_inline
def _gathered(address: UInt32) -> RowFactors:
    var pair = shared_pair(address)
    return RowFactors(pair[0], pair[1])


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
    m: UInt32,
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
        m: Rows of y.
    """
    comptime slices = config.slices
    comptime columns = config.columns
    comptime gathers = config.gather and mode != PLAIN
    var lane = thread_in_group & 31
    var boxes = shared.boxes(consumer * 4 + warp_in_group)
    var x_tiles = operand_descriptor(
        shared.x_tile(0) + consumer * UInt32(slices * 64 * 128)
    )
    var w_tiles = operand_descriptor(shared.w_tile(0))
    # A warpgroup's products end together, so that one thread may tell each
    # block of the cluster that a slot is used up.
    var releases = thread_in_group < UInt32(config.cluster)
    var empty = shared.empty(0)
    comptime if config.cluster > 1:
        empty = map_to_rank(
            empty, thread_in_group & UInt32(config.cluster - 1)
        )

    @always_inline
    def release(slot: UInt32) {imm}:
        if releases:
            comptime if config.cluster > 1:
                mbarrier_arrive_cluster(empty + slot * 8)
            else:
                mbarrier_arrive(empty + slot * 8)

    var at = Ring(0, 0)
    var parity = UInt32(0)
    var index = tiles.first
    while index < tiles.count():
        mbarrier_wait(shared.full(at.slot), at.parity)
        var accumulator = multiply_first[dtype, columns, slices](
            x_tiles + at.slot * UInt32(config.x_bytes() // 16),
            w_tiles + at.slot * UInt32(config.w_bytes() // 16),
        )
        comptime if gathers:
            # The last tile's boxes may be overwritten once they are read.
            if lane == 0:
                store_wait_read[0]()
                mbarrier_arrive(shared.statistics_empty())
        var previous = at.slot
        at.advance[config.stages]()
        for _ in range(UInt32(1), blocks):
            mbarrier_wait(shared.full(at.slot), at.parity)
            accumulator = multiply_next[dtype, columns, slices](
                accumulator,
                x_tiles + at.slot * UInt32(config.x_bytes() // 16),
                w_tiles + at.slot * UInt32(config.w_bytes() // 16),
            )
            # One group stays in flight; those before it have read their slot.
            wait_previous()
            release(previous)
            previous = at.slot
            at.advance[config.stages]()

        var place = tiles.at(index)
        index += tiles.step
        var row = (
            (place[0] * UInt32(config.cluster) + rank) * UInt32(config.rows())
            + consumer * UInt32(slices * 64)
            + warp_in_group * 16
        )
        var upper = StaticTuple[RowFactors, slices](RowFactors(1, 0))
        var lower = StaticTuple[RowFactors, slices](RowFactors(1, 0))
        comptime if mode != PLAIN and not gathers:
            # The last products still run while these are fetched. The grid
            # that makes them may have been running beside this one so far.
            wait_on_earlier_grids()
            comptime for slice in range(slices):
                var first = row + UInt32(slice * 64) + (lane >> 2)
                upper[slice] = _row_factors[mode](mean, rstd, first, m)
                lower[slice] = _row_factors[mode](mean, rstd, first + 8, m)
        accumulator = wait_all[slices * columns // 2](accumulator)
        release(previous)

        comptime if gathers:
            mbarrier_wait(shared.statistics_full(), parity)
            var statistics = boxes + BOX_BYTES + (lane >> 2) * 8
            upper[0] = _gathered(statistics)
            lower[0] = _gathered(statistics + 64)
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
