"""The consumer warpgroups: they multiply, apply the epilogue and store."""

from std.memory import OpaquePointer
from std.sys import size_of

from ...pdl import pdl_wait
from ..epilogue import Epilogue
from ..row_hook import RowHook
from .addend import TileAddend
from .barriers import (
    map_to_rank,
    mbarrier_arrive,
    mbarrier_wait,
    meet_cluster,
    warp_sync,
)
from .boxes import Boxes, box_of, stored_type
from .cluster_sum import ClusterSum
from .config import TILE_ROWS, Config
from .counters import Progress
from .elements import Elements
from .h_rows import HRows
from .inside import stays_inside
from .multiplier import Multiplier
from .parts import (
    HALVES,
    IN_TURN,
    MOST_PARTS,
    SIDE_BY_SIDE,
    STACKED,
    Parts,
    part_of,
    size_of_part,
    stacked_at,
)
from .product import Product
from .ring import RingPlace
from .row_sums import TransposedSums
from .row_terms import Halves, ThreadTerms
from .shared_layout import Shared
from .store import TileRows
from .store_float32 import Float32Rows
from .store_gradients import store_gradients
from .store_quantized import FirstSums, store_quantized
from .sums import Accumulators, Sums
from .tiles import Tiles
from .tma import store_wait_read
from .wgmma import ROW_BYTES, Accumulator, operand_descriptor, wait_all


@always_inline
def _float32_rows[
    E: Epilogue, H: RowHook
](product: Product[E, H], row: UInt32, column: UInt32, lane: UInt32) -> (
    Float32Rows
):
    return Float32Rows(
        {unsafe_from_address = Int(product.float32)},
        row,
        column,
        UInt32(product.m),
        UInt32(product.n),
        lane,
    )


@always_inline
def _sums_any[E: Epilogue, H: RowHook](product: Product[E, H]) -> Bool:
    var any = Int64(0)
    comptime for i in range(MOST_PARTS):
        any |= product.row_sums[i]
    return any != 0


@always_inline
def _store_row_sum[
    E: Epilogue, H: RowHook, //, dtype: DType, config: Config
](product: Product[E, H], sum: Float32, whole_row: UInt32):
    """Stores the sum of a row of a."""
    var row = whole_row
    var sums = product.row_sums[0]
    var rows = product.m
    comptime if config.parts == STACKED:
        var place = stacked_at[config.stacked_rows()](product.sizes, row)
        row = place[1]
        rows = size_of_part(product.sizes, place[0])
        comptime for i in range(1, MOST_PARTS):
            if place[0] == UInt32(i):
                sums = product.row_sums[i]
    if row >= UInt32(rows) or sums == 0:
        return
    var total = sum
    comptime if config.adds:
        var at = Pointer[Float32, MutAnyOrigin](
            unsafe_from_address=Int(sums)
        ).unsafe_offset(Int(row))
        if product.accumulate != 0:
            total += at.unsafe_load()
        at.unsafe_store(total)
    else:
        comptime if config.split:
            if product.follows != 0:
                total += (
                    Pointer[Float32, MutUntrackedOrigin](
                        unsafe_from_address=Int(product.float32_row_sums)
                    )
                    .unsafe_offset(Int(row))
                    .unsafe_load()
                )
        Pointer[Scalar[dtype], MutAnyOrigin](
            unsafe_from_address=Int(sums)
        ).unsafe_offset(Int(row)).unsafe_store(total.cast[dtype]())


@doc_hidden
@always_inline
def consume[
    E: Epilogue, H: RowHook, //, dtype: DType, config: Config
](
    shared: Shared[config],
    tiles: Tiles,
    rank: UInt32,
    blocks: UInt32,
    consumer: UInt32,
    warp_in_group: UInt32,
    thread: UInt32,
    c_maps: OpaquePointer[ImmUntrackedOrigin],
    h_map: OpaquePointer[ImmUntrackedOrigin],
    product: Product[E, H],
):
    """Computes this warpgroup's half of all tiles of this block, or half of the tiles."""
    comptime columns = config.columns
    comptime halves = config.halves()
    # Otherwise warps load what is added last.
    comptime adds_from_ring = E.adds_last and not config.loads_h
    comptime registers = columns // 2 * halves
    var lane = thread & 31
    # Which of the tiles worked on is this warpgroup's, and its first row in that.
    var tile = UInt32(0)
    var down = consumer * 64
    comptime if config.ping_pong:
        tile = consumer
        down = 0
    var rows = shared.a_tile(0) + down * UInt32(ROW_BYTES)
    var empty = shared.empty(0)
    comptime if config.sharers() > 1:
        empty = map_to_rank(empty, thread & UInt32(config.sharers() - 1))
    var multiplier = Multiplier[dtype, config, H.passes_on, E.adds](
        shared,
        consumer,
        operand_descriptor[config.a_transposed](rows),
        operand_descriptor[config.b_transposed](shared.b_tile(0)),
        rows,
        thread,
        empty,
        thread < UInt32(config.sharers()),
    )
    # Where blocks split a tile, each stores its share of the columns.
    comptime c_dtype = stored_type[E, dtype]()
    comptime box = box_of[E, c_dtype](config)
    comptime Rows = TileRows[E, box, config.any_columns]
    comptime Places = Boxes[16 * box * size_of[c_dtype]()]
    var boxes = Places(shared.boxes(consumer * 4 + warp_in_group))
    var first_sums = FirstSums(shared.first_sums(), consumer * 128 + thread)
    var elements = Elements(product.c, UInt32(product.m), UInt32(product.n))

    var h_rows = HRows[columns, max(E.gradients, 1)](
        shared.h_box(consumer * 4 + warp_in_group),
        shared.h_full(consumer * 4 + warp_in_group),
        h_map,
        UInt32(product.n),
        lane,
    )

    var progress = Progress[H.passes_on](
        {unsafe_from_address = product.hook.counters()}, lane
    )
    var at = RingPlace(0, 0)
    var parity = UInt32(0)
    var terms = ThreadTerms[halves]()
    var index = tiles.first
    var slots_of_tile = blocks
    comptime if E.adds or adds_from_ring:
        slots_of_tile += UInt32(config.addend_slots())
    comptime if config.ping_pong:
        if consumer > 0:
            index += tiles.step
            at.skip[config.stages](slots_of_tile)
    while index < tiles.end:
        var place = tiles.at(index)
        var is_first = index == tiles.first
        # Whether this block has had no tile of these rows before.
        var is_new = is_first or tiles.at(index - tiles.step)[0] != place[0]
        comptime if config.ping_pong:
            index += tiles.step
        index += tiles.step
        var first_row = place[0] * UInt32(config.cluster_rows())
        comptime if config.sharers() > 1:
            first_row += rank * UInt32(TILE_ROWS)
        comptime inside = stays_inside[E, H](config)
        comptime if inside:
            first_row = min(first_row, UInt32(product.last_row))
        first_row += down
        var row = first_row + warp_in_group * 16
        var tile_column = place[1]
        comptime if config.loads_h:
            h_rows.start(row, tile_column * UInt32(columns))
        var c_map = c_maps
        comptime if config.parts == SIDE_BY_SIDE:
            var its_place = Parts(product.sizes, columns).find(tile_column)
            c_map = part_of(c_maps, its_place[0])
            tile_column = its_place[1]
        var column = tile_column * UInt32(columns)
        comptime if inside:
            column = min(column, UInt32(product.last_column))
        var previous = UInt32(0)
        var gathered = Halves[H.Sums, halves]()
        var sums = TransposedSums(0)
        var accumulator: Accumulator[registers]
        var row_sum = Float32(0)
        var addend = TileAddend[config]()
        var gathers: Bool
        comptime if config.a_transposed:
            gathers = config.sums_rows and place[1] == 0 and _sums_any(product)
        else:
            gathers = H.gathers and is_new
        if gathers:
            comptime if config.a_transposed:
                accumulator = multiplier.start[config.sums_rows](
                    at, previous, sums, progress, blocks, False
                )
                accumulator = wait_all[registers](accumulator)
                multiplier.release[True](previous)
                row_sum = sums.finish(shared.vectors(), consumer, thread)
            else:
                accumulator = multiplier.start[H.gathers](
                    at, previous, gathered, progress, blocks, not is_first
                )
                var count = Float32(product.k)
                comptime for half in range(halves):
                    var own = product.hook.terms(
                        gathered.each[half].part(count), count
                    )
                    # Memory hands them on: to the other lanes, and to the other consumer.
                    var its_row = Int(row + (lane >> 1)) + 64 * half
                    if (lane & 1) == 0 and its_row < Int(product.m):
                        product.hook.keep(its_row, own)
                warp_sync()
                if index - tiles.step < tiles.end:
                    multiplier.ping_pong_arrive()
                terms.load(product, row + (lane >> 2))
                accumulator = wait_all[registers](accumulator)
                multiplier.release[True](previous)
        else:
            comptime if E.scales_blocks:
                accumulator = multiplier.scaled(
                    at, blocks, product, row + (lane >> 2), column
                )
                comptime if config.parts == IN_TURN:
                    first_sums.put(Accumulators[registers](accumulator))
                    accumulator = multiplier.scaled[second=True](
                        at, blocks, product, row + (lane >> 2), column
                    )
                elif adds_from_ring:
                    addend = multiplier.addend(at)
            elif config.promotes:
                accumulator = multiplier.promoted(at, blocks)
                comptime if E.has_row_terms:
                    pdl_wait()
                    terms.load(product, row + (lane >> 2))
            else:
                accumulator = multiplier.start[False](
                    at, previous, gathered, progress, blocks, not is_first
                )
                comptime if adds_from_ring:
                    addend = multiplier.addend(at)
                if index - tiles.step < tiles.end:
                    multiplier.ping_pong_arrive()
                comptime if E.has_row_terms:
                    # The last products still run while these are fetched. The grid
                    # that makes them may have overlapped with this one so far.
                    comptime if not H.gathers:
                        pdl_wait()
                    terms.load(product, row + (lane >> 2))
                accumulator = wait_all[registers](accumulator)
                multiplier.release[False](previous)

        progress.tell()
        var stored_row = row
        comptime if config.parts == STACKED:
            var its_place = stacked_at[config.stacked_rows()](
                product.sizes, row
            )
            c_map = part_of(c_maps, its_place[0])
            stored_row = its_place[1]
        var own = Accumulators[registers](accumulator)
        var sums_here = gathers and config.a_transposed and thread < 64
        comptime if config.split:
            # Those of a second vector would start elsewhere.
            comptime assert E.vectors <= 1
            var tile_row = consumer * 64 + thread
            var together = ClusterSum[config](
                shared, rank, consumer * 128 + thread
            )
            # No block's ring is in use anymore.
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
            if product.follows != 0:
                pdl_wait()
                comptime if not config.adds:
                    _float32_rows(product, row, its_column, lane).add_to(
                        totals.values
                    )
            comptime if config.adds:
                _float32_rows(product, row, its_column, lane).store[
                    together.columns
                ](totals, product.accumulate != 0)
            else:
                var vectors = shared.vectors()
                comptime if E.vectors > 0:
                    comptime size = size_of[E.vector_type(0)]()
                    vectors += rank * UInt32(together.columns * size)
                    mbarrier_wait(shared.vectors_full(0), parity)
                Rows(
                    product.epilogue,
                    terms.upper[0],
                    terms.lower[0],
                    stored_row,
                    its_column,
                    lane,
                    elements,
                ).store[c_dtype, together.columns](
                    totals,
                    vectors,
                    boxes,
                    c_map,
                    TileAddend[config](),
                    h_rows,
                )
        elif config.adds:
            _float32_rows(product, row, column, lane).store[columns](
                own, product.accumulate != 0
            )
        else:
            comptime if E.vectors > 0:
                mbarrier_wait(shared.vectors_full(tile), parity)
            comptime for half in range(halves):
                var sums_of_half = Accumulators[
                    registers, half * (columns // 2)
                ](accumulator)
                var rows_of_tile = Rows(
                    product.epilogue,
                    terms.upper[half],
                    terms.lower[half],
                    stored_row + UInt32(64 * half),
                    column,
                    lane,
                    elements,
                )
                comptime if E.gradients > 0:
                    store_gradients[c_dtype, half](
                        rows_of_tile,
                        sums_of_half,
                        shared.vectors(tile),
                        h_rows,
                        c_map,
                    )
                elif E.quantizes:
                    store_quantized[columns, config.parts](
                        rows_of_tile,
                        sums_of_half,
                        first_sums,
                        shared.vectors(tile),
                        boxes,
                        c_map,
                    )
                elif E.activates:
                    rows_of_tile.store_activated[
                        c_dtype, columns, config.parts == HALVES
                    ](
                        sums_of_half,
                        shared.vectors(tile),
                        boxes,
                        c_map,
                        h_map,
                        UInt32(product.n) // 2,
                    )
                else:
                    rows_of_tile.store[c_dtype, columns, half](
                        sums_of_half,
                        shared.vectors(tile),
                        boxes,
                        c_map,
                        addend,
                        h_rows,
                    )
            comptime if config.loads_h:
                h_rows.next_tile()
            comptime if adds_from_ring:
                multiplier.release_addend(addend)
            comptime if E.vectors > 0:
                mbarrier_arrive(shared.vectors_empty(tile))
        progress.stored(first_row)
        if sums_here:
            _store_row_sum[dtype, config](product, row_sum, first_row + thread)
        parity ^= 1
        comptime if config.ping_pong:
            at.skip[config.stages](slots_of_tile)
    progress.tell()
    if lane == 0:
        store_wait_read[0]()
