"""The thread that keeps the ring filled."""

from std.memory import OpaquePointer
from std.sys import size_of

from .arguments import Arguments
from .config import Config, Ring, Shared
from .epilogue import BIASED, CORRECTED
from .ptx import (
    load_bytes,
    load_tile,
    load_tile_multicast,
    mbarrier_expect_bytes,
    mbarrier_wait,
)
from .tiles import Tiles
from .wgmma import SLICE_BYTES, row_elements


@always_inline
def _load[
    rows: Int, transposed: Bool, blocks: Int = 1
](
    tile: UInt32,
    map: OpaquePointer[ImmUntrackedOrigin],
    barrier: UInt32,
    row: Int32,
    k: Int32,
):
    """Copies rows of an operand's k block, into all of a number of blocks."""
    comptime boxes = rows // 64 if transposed else 1
    comptime for box in range(boxes):
        var at = tile + UInt32(box * SLICE_BYTES)
        var column = row + Int32(box * 64) if transposed else k
        var down = k if transposed else row
        comptime if blocks > 1:
            load_tile_multicast(
                at, map, barrier, column, down, UInt16((1 << blocks) - 1)
            )
        else:
            load_tile(at, map, barrier, column, down)


@always_inline
def produce[
    dtype: DType, config: Config, mode: Int
](
    shared: Shared[config],
    tiles: Tiles,
    rank: UInt32,
    first_block: UInt32,
    blocks: UInt32,
    x_map: OpaquePointer[ImmUntrackedOrigin],
    w_map: OpaquePointer[ImmUntrackedOrigin],
    arguments: Arguments,
):
    """Copies the operands of all tiles of this block, in order.

    Parameters:
        dtype: Type of the operands and of the bias.
        config: Compile-time choices.
        mode: Epilogue.

    Args:
        shared: Shared memory of the block.
        tiles: The tiles.
        rank: Rank of the block among those that share tiles of the weight.
        first_block: First of the k blocks that the block multiplies.
        blocks: How many those are.
        x_map: Tensor map of x.
        w_map: Tensor map of the weight.
        arguments: What goes with the matrices.
    """
    comptime sharers = config.sharers()
    comptime columns = config.columns
    comptime w_rows = columns // sharers
    var at = Ring(0, 1)
    var parity = UInt32(1)
    var index = tiles.first
    while index < tiles.end:
        var place = tiles.at(index)
        index += tiles.step
        var row = Int32(
            (place[0] * UInt32(sharers) + rank) * UInt32(config.rows())
        )
        var column = Int32(place[1] * UInt32(columns))
        var w_row = column + Int32(rank) * Int32(w_rows)
        for block in range(first_block, first_block + blocks):
            var full = shared.full(at.slot)
            mbarrier_wait(shared.empty(at.slot), at.parity)
            mbarrier_expect_bytes(
                full, Int32(config.x_bytes() + config.w_bytes())
            )
            var k = Int32(block) * Int32(row_elements[dtype]())
            _load[config.rows(), config.x_transposed](
                shared.x_tile(at.slot), x_map, full, row, k
            )
            # Each block fetches its part of the weight for all of them.
            _load[w_rows, config.w_transposed, sharers](
                shared.w_tile(at.slot)
                + rank * UInt32(config.w_bytes() // sharers),
                w_map,
                full,
                w_row,
                k,
            )
            at.advance[config.stages]()

        # By now the consumers are past the tile before, whose vectors these
        # replace.
        comptime if mode == BIASED:
            comptime size = size_of[dtype]()
            var bytes = min(Int32(columns), arguments.n - column) * Int32(size)
            var full = shared.vectors_full()
            mbarrier_wait(shared.vectors_empty(), parity)
            parity ^= 1
            mbarrier_expect_bytes(full, bytes)
            load_bytes(
                shared.vectors(),
                {
                    unsafe_from_address = Int(arguments.bias)
                    + size * Int(column)
                },
                bytes,
                full,
            )
        comptime if mode == CORRECTED:
            var bytes = min(Int32(columns), arguments.n - column) * 4
            var full = shared.vectors_full()
            mbarrier_wait(shared.vectors_empty(), parity)
            parity ^= 1
            mbarrier_expect_bytes(full, 2 * bytes)
            load_bytes(
                shared.vectors() + UInt32(columns * 4),
                arguments.s.unsafe_offset(Int(column)),
                bytes,
                full,
            )
            load_bytes(
                shared.vectors(),
                arguments.c.unsafe_offset(Int(column)),
                bytes,
                full,
            )
