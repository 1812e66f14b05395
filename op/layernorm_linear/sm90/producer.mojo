"""The thread that keeps the ring filled."""

from std.memory import OpaquePointer

from .config import Config, Ring, Shared
from .epilogue import CORRECTED, PLAIN
from .ptx import (
    load_bytes,
    load_tile,
    load_tile_multicast,
    mbarrier_expect_bytes,
    mbarrier_wait,
)
from .tiles import Tiles
from .wgmma import K_BLOCK


@always_inline
def produce[
    config: Config, mode: Int
](
    shared: Shared[config],
    tiles: Tiles,
    rank: UInt32,
    blocks: UInt32,
    x_map: OpaquePointer[ImmutAnyOrigin],
    w_map: OpaquePointer[ImmutAnyOrigin],
    s: Pointer[Float32, ImmutAnyOrigin],
    c: Pointer[Float32, ImmutAnyOrigin],
    n: Int32,
):
    """Copies the operands of all tiles of this block, in order.

    Parameters:
        config: Compile-time choices.
        mode: Epilogue.

    Args:
        shared: Shared memory of the block.
        tiles: The tiles.
        rank: Rank of the block in its cluster.
        blocks: K blocks of a tile.
        x_map: Tensor map of x.
        w_map: Tensor map of the weight.
        s: Row sums of the weight.
        c: Constants of the columns.
        n: Columns of y.
    """
    comptime cluster = UInt32(config.cluster)
    comptime columns = config.columns
    var at = Ring(0, 1)
    var parity = UInt32(1)
    var index = tiles.first
    while index < tiles.end:
        var place = tiles.at(index)
        index += tiles.step
        var row = Int32((place[0] * cluster + rank) * UInt32(config.rows()))
        var column = Int32(place[1] * UInt32(columns))
        var w_row = column + Int32(rank) * Int32(columns // config.cluster)
        for block in range(blocks):
            var full = shared.full(at.slot)
            mbarrier_wait(shared.empty(at.slot), at.parity)
            mbarrier_expect_bytes(
                full, Int32(config.x_bytes() + config.w_bytes())
            )
            var from_column = Int32(block) * K_BLOCK
            load_tile(shared.x_tile(at.slot), x_map, full, from_column, row)
            comptime if config.cluster > 1:
                # Each block fetches its part of the weight for all of them.
                load_tile_multicast(
                    shared.w_tile(at.slot)
                    + rank * UInt32(config.w_bytes() // config.cluster),
                    w_map,
                    full,
                    from_column,
                    w_row,
                    UInt16((1 << config.cluster) - 1),
                )
            else:
                load_tile(
                    shared.w_tile(at.slot), w_map, full, from_column, w_row
                )
            at.advance[config.stages]()

        # By now the consumers are past the tile before, whose vectors these
        # replace.
        comptime if mode != PLAIN:
            var bytes = min(Int32(columns), n - column) * 4
            var full = shared.vectors_full()
            mbarrier_wait(shared.vectors_empty(), parity)
            parity ^= 1
            comptime if mode == CORRECTED:
                mbarrier_expect_bytes(full, 2 * bytes)
                load_bytes(
                    shared.vectors() + UInt32(columns * 4),
                    s.unsafe_offset(Int(column)),
                    bytes,
                    full,
                )
            else:
                mbarrier_expect_bytes(full, bytes)
            load_bytes(
                shared.vectors(), c.unsafe_offset(Int(column)), bytes, full
            )
