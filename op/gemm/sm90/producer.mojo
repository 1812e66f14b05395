"""The producer thread: it copies operands into the ring."""

from std.memory import OpaquePointer
from std.sys import size_of
from std.utils import StaticTuple

from ...pdl import pdl_wait
from ..epilogue import Epilogue
from ..row_hook import RowHook
from .addend import boxes_of
from .barriers import mbarrier_expect_bytes, mbarrier_wait
from .config import SLICE_COLUMNS, TILE_ROWS, Config
from .eight_bits import result_type
from .inside import (
    box_columns_of_b,
    box_rows,
    stays_inside,
)
from .parts import (
    HALVES,
    IN_TURN,
    ONE_SUM,
    SIDE_BY_SIDE,
    STACKED,
    Parts,
    PartSizes,
    first_of,
    part_of,
    size_of_part,
    stacked_at,
)
from .product import Product
from .ring import RingPlace
from .shared_layout import Shared
from .shared_memory import store_shared_element, store_shared_pair
from .tiles import Tiles
from .tma import load_bytes, load_tile, load_tile_multicast
from .wgmma import ROW_BYTES, SLICE_BYTES, row_elements


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
    """Copies rows of an operand's k block into this block, or into each of several."""
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
def _load_stacked[
    config: Config
](
    tile: UInt32,
    maps: OpaquePointer[ImmUntrackedOrigin],
    barrier: UInt32,
    sizes: PartSizes,
    row: Int32,
    k: Int32,
):
    """Copies a k block of a tile's rows of several a with K first."""
    comptime for box in range(TILE_ROWS // 64):
        var place = stacked_at[config.stacked_rows()](
            sizes, UInt32(row) + UInt32(box * 64)
        )
        load_tile(
            tile + UInt32(box * SLICE_BYTES),
            part_of(maps, place[0]),
            barrier,
            Int32(place[1]),
            k,
        )


@always_inline
def _load_slices[
    config: Config
](
    tile: UInt32,
    map: OpaquePointer[ImmUntrackedOrigin],
    barrier: UInt32,
    column: Int32,
    k: Int32,
    rank: UInt32,
):
    """Copies this block's rows of every slice of a transposed b into each block."""
    comptime rows = config.b_box_rows()
    comptime blocks = UInt16((1 << config.sharers()) - 1)
    comptime for slice in range(config.b_slices()):
        var at = (
            tile + UInt32(slice * SLICE_BYTES) + rank * UInt32(rows * ROW_BYTES)
        )
        var across = column + Int32(slice * SLICE_COLUMNS)
        var down = k + Int32(rank) * Int32(rows)
        comptime if config.sharers() > 1:
            load_tile_multicast(at, map, barrier, across, down, blocks)
        else:
            load_tile(at, map, barrier, across, down)


@always_inline
def _load_vectors[
    E: Epilogue, H: RowHook, //, config: Config
](
    shared: Shared[config],
    product: Product[E, H],
    consumer: UInt32,
    n: Int32,
    column: Int32,
    row: Int32,
    part: Int,
):
    """Copies the elements of the epilogue's vectors that go with a tile's columns, and its first row."""
    comptime columns = config.columns
    comptime first_size = size_of[E.vector_type(0)]()
    var epilogue = product.epilogue
    var vectors = shared.vectors(consumer)
    var full = shared.vectors_full(consumer)
    comptime of_two = config.parts in (HALVES, IN_TURN)
    comptime turns = config.turns()
    var first = 0 if of_two else first_of(product.sizes, part)
    var count = min(Int32(columns), n - column)
    var copied = Int32(0)
    var copies = StaticTuple[Bool, E.vectors](fill=True)
    comptime for i in range(E.vectors):
        comptime size = size_of[E.vector_type(i)]()
        var place = vectors + UInt32(i * columns * first_size)
        comptime if E.may_lack_vectors:
            if epilogue.vector_address[i](0, 0, 0, 0) == 0:
                for at in range(turns * columns * size // 8):
                    store_shared_pair(place + UInt32(8 * at), 0)
                copies[i] = False
                continue
        var elements = count
        comptime if config.any_columns:
            # Only multiples of 16 bytes can be copied like the rest.
            comptime step = Int32(16 // size)
            elements = count // step * step
            for at in range(elements, count):
                store_shared_element[E.vector_type(i)](
                    place + UInt32(Int(at) * size),
                    Pointer[Scalar[E.vector_type(i)], MutUntrackedOrigin](
                        unsafe_from_address=epilogue.vector_address[i](
                            part, first, Int(column + at), Int(row)
                        )
                    ).unsafe_load(),
                )
            copies[i] = elements != 0
        copied += elements * Int32(turns * size)
    mbarrier_expect_bytes(full, copied)
    comptime for i in range(E.vectors):
        if not copies[i]:
            continue
        comptime size = size_of[E.vector_type(i)]()
        var place = vectors + UInt32(i * columns * first_size)
        comptime if of_two:
            # Two have a tile's columns, or each has as many.
            comptime share = 2 // turns
            comptime for half in range(2):
                load_bytes(
                    place + UInt32(half * columns // share * size),
                    epilogue.vector_address[i](
                        half, 0, Int(column) // share, Int(row)
                    ),
                    count * Int32(size) // Int32(share),
                    full,
                )
        else:
            var elements = count
            comptime if config.any_columns:
                elements = count // Int32(16 // size) * Int32(16 // size)
            load_bytes(
                place,
                epilogue.vector_address[i](part, first, Int(column), Int(row)),
                elements * Int32(size),
                full,
            )


@always_inline
def _load_addend[
    config: Config, dtype: DType
](
    shared: Shared[config],
    mut at: RingPlace,
    map: OpaquePointer[ImmUntrackedOrigin],
    row: Int32,
    column: Int32,
):
    """Copies what is added to a tile, in the ring like a k block; `dtype` is its type."""
    comptime boxes = boxes_of(config.columns)
    comptime for slot in range(config.addend_slots()):
        comptime first = slot * config.boxes_of_slot()
        comptime last = min(first + config.boxes_of_slot(), boxes)
        var full = shared.full(at.slot)
        mbarrier_wait(shared.empty(at.slot), at.parity)
        mbarrier_expect_bytes(full, Int32((last - first) * config.a_bytes()))
        comptime for box in range(first, last):
            load_tile(
                shared.box_in_slot(at.slot, box - first),
                map,
                full,
                column + Int32(box * row_elements[dtype]()),
                row,
            )
        at.advance[config.stages]()


@doc_hidden
@always_inline
def produce[
    E: Epilogue, H: RowHook, //, dtype: DType, config: Config
](
    shared: Shared[config],
    tiles: Tiles,
    rank: UInt32,
    first_block: UInt32,
    blocks: UInt32,
    a_maps: OpaquePointer[ImmUntrackedOrigin],
    b_maps: OpaquePointer[ImmUntrackedOrigin],
    addend_map: OpaquePointer[ImmUntrackedOrigin],
    product: Product[E, H],
):
    """Copies the operands of all tiles of this block, in order."""
    comptime sharers = config.sharers()
    comptime columns = config.columns
    comptime b_rows = columns // sharers
    comptime inside = stays_inside[E, H](config)
    var bytes = Int32(config.a_bytes() + config.b_bytes())
    comptime if inside:
        bytes = Int32(box_rows[E, H](config, Int(product.m)) * ROW_BYTES)
        comptime if config.b_transposed:
            bytes += Int32(config.b_bytes())
        else:
            bytes += Int32(
                box_columns_of_b[E, H](config, Int(product.n))
                * sharers
                * ROW_BYTES
            )
    var at = RingPlace(0, 1)
    var parity = UInt32(1)
    var consumer = UInt32(0)
    var parts = Parts(
        product.sizes,
        columns if config.parts == SIDE_BY_SIDE else row_elements[dtype](),
    )
    var a_map = a_maps
    var index = tiles.first
    while index < tiles.end:
        var place = tiles.at(index)
        index += tiles.step
        var row = Int32((place[0] * UInt32(sharers) + rank) * UInt32(TILE_ROWS))
        var tile_column = place[1]
        var n = product.n
        var part = UInt32(0)
        comptime if config.parts == SIDE_BY_SIDE:
            part, tile_column = parts.find(tile_column)
            n = size_of_part(product.sizes, part)
        var column = Int32(tile_column * UInt32(columns))
        comptime if inside:
            row = min(row, product.last_row)
            column = min(column, product.last_column)
        var b_row = column + Int32(rank) * Int32(b_rows)
        comptime if config.parts == HALVES:
            # Each of two blocks fetches one of the halves for both.
            comptime assert sharers == 2
            part = rank
            b_row = column // 2
        comptime if E.adds:
            # What the sums start with.
            _load_addend[config, result_type[dtype]()](
                shared, at, addend_map, row, column
            )
        var b_map = part_of(b_maps, part)
        var last_block = first_block + blocks * UInt32(config.turns())
        for its_block in range(first_block, last_block):
            var block = its_block
            comptime if config.parts == ONE_SUM:
                part, block = parts.find(its_block)
                a_map = part_of(a_maps, part)
                b_map = part_of(b_maps, part)
            elif config.parts == IN_TURN:
                part = UInt32(its_block >= blocks)
                block = its_block - part * blocks
                b_map = part_of(b_maps, part)
            var full = shared.full(at.slot)
            mbarrier_wait(shared.empty(at.slot), at.parity)
            mbarrier_expect_bytes(full, bytes)
            var k = Int32(block) * Int32(row_elements[dtype]())
            comptime if config.parts == STACKED and config.a_transposed:
                _load_stacked[config](
                    shared.a_tile(at.slot), a_maps, full, product.sizes, row, k
                )
            else:
                _load[TILE_ROWS, config.a_transposed](
                    shared.a_tile(at.slot), a_map, full, row, k
                )
            # Each block fetches its part of b for all of them.
            comptime if config.b_transposed and config.shares_slices():
                _load_slices[config](
                    shared.b_tile(at.slot), b_map, full, column, k, rank
                )
            else:
                _load[b_rows, config.b_transposed, sharers](
                    shared.b_tile(at.slot)
                    + rank * UInt32(config.b_bytes() // sharers),
                    b_map,
                    full,
                    b_row,
                    k,
                )
            at.advance[config.stages]()

        comptime if E.adds_last and not config.loads_h:
            # Where only terms of rows are waited for, nothing else says that it is complete.
            comptime if E.has_row_terms:
                pdl_wait()
            _load_addend[config, result_type[dtype]()](
                shared, at, addend_map, row, column
            )
        # By now the consumers are past the tile whose vectors these replace.
        comptime if E.vectors > 0:
            mbarrier_wait(shared.vectors_empty(consumer), parity)
            # Of the last cluster's blocks, some may have no rows.
            var last = min(row, product.m - 1)
            _load_vectors(shared, product, consumer, n, column, last, Int(part))
            comptime if config.ping_pong:
                consumer ^= 1
            if consumer == 0:
                parity ^= 1
