"""From sums to c in 8 bits: applies the epilogue, and scales each row of a tile as that says.

Where scales are found, a warp has all columns of its 16 rows, of which four lanes share two: their largest magnitudes
take two exchanges.
"""

from std.memory import OpaquePointer, bitcast
from std.sys import size_of
from std.utils import StaticTuple
from max.gpu.primitives import warp

from ..activation import GELU, GELU_TANH, OTHERS, SILU, SMOOTH
from ..epilogue import Epilogue
from .boxes import Boxes
from .clear_vectors import clear_vectors
from .config import CONSUMERS
from .elements import swizzle
from .half_gelu import (
    HalfGelu,
    fits_half,
    halves_in_eight_bits,
    largest_of_halves,
)
from .parts import HALVES, IN_TURN
from .shared_memory import (
    pack_pair,
    shared_value,
    store_shared_element,
    store_shared_value,
)
from .store import RowPair, TileRows
from .sums import Accumulators, Sums

# Threads of all consumers.
comptime _THREADS = 128 * CONSUMERS
# Groups of eight columns that are activated in one call, so that their special functions overlap.
comptime _TOGETHER = 4
# What an activation is rounded to before it is quantized.
comptime _ROUNDED = DType.bfloat16
# Two of them in e4m3.
comptime _NOT_NUMBERS = UInt16(0x7F7F)


@doc_hidden
@fieldwise_init
struct FirstSums(Sums):
    """A thread's sums of the first of two matrices in turn, which wait in shared memory for the second's."""

    var address: UInt32
    """That of the first of them."""

    @always_inline
    def __init__(out self, base: UInt32, thread: UInt32):
        """Locates them; `thread` counts those of all consumers."""
        self.address = base + thread * 4

    @always_inline
    def put[count: Int](self, sums: Accumulators[count]):
        """Stores them."""
        comptime for i in range(count):
            store_shared_value(
                self.address + UInt32(i * _THREADS * 4), sums.at[i]()
            )

    @always_inline
    def at[i: Int](self) -> Float32:
        """Returns a sum."""
        return shared_value(self.address + UInt32(i * _THREADS * 4))


@always_inline
def _larger(most: UInt32, word: UInt32) -> UInt32:
    """Returns the larger magnitudes of two pairs of numbers of 16 bits, in either half."""
    return bitcast[DType.uint32, 1](
        max(
            bitcast[DType.uint16, 2](most),
            bitcast[DType.uint16, 2](word & 0x7FFF7FFF),
        )
    )


@always_inline
def _largest(most: UInt32) -> UInt32:
    """Returns the bits of the larger of two magnitudes in bfloat16, in float32."""
    return max(most << 16, most & 0xFFFF0000)


@always_inline
def _largest_of_lanes(bits: UInt32) -> UInt32:
    """Returns the largest of four neighboring lanes."""
    var most = bits
    comptime for distance in [1, 2]:
        most = max(most, warp.shuffle_xor(most, UInt32(distance)))
    return most


@always_inline
def _of_c[parts: Int](columns: UInt32) -> UInt32:
    """Returns how many columns of c these are: of those of a tile in halves, the first half gates the other."""
    comptime if parts == HALVES:
        return columns // 2
    else:
        return columns


@doc_hidden
@always_inline
def store_quantized[
    E: Epilogue,
    width: Int,
    any_columns: Bool,
    S: Sums,
    bytes: Int,
    //,
    columns: Int,
    parts: Int,
](
    rows: TileRows[E, width, any_columns],
    sums: S,
    first_sums: FirstSums,
    vectors: UInt32,
    mut boxes: Boxes[bytes],
    c_map: OpaquePointer[ImmUntrackedOrigin],
):
    """Finishes, activates, rounds and stores the rows in 8 bits, box by box, and their scales. What is rounded to 16
    bits first has the bits of a product in these, quantized; a GELU with a given scale is computed in float16."""
    # Columns past the last one, whose sums are 0, count among the largest magnitudes.
    comptime matrices = 2 if parts in (HALVES, IN_TURN) else 1
    clear_vectors[E, columns, matrices, Int(_of_c[parts](UInt32(columns)))](
        vectors,
        _of_c[parts](rows.elements.n) - _of_c[parts](rows.column),
        rows.lane,
    )
    var kind = rows.epilogue.activation()
    comptime may_be_half = not E.finds_scales and parts not in (HALVES, IN_TURN)
    # Without branches between them, special functions of some columns overlap with all else of others.
    comptime usual = Int(SILU if parts in (HALVES, IN_TURN) else GELU)
    comptime other = Int(GELU_TANH) if may_be_half else usual
    comptime for only in [usual, other]:
        var is_it = kind == Int32(only)
        comptime if may_be_half:
            is_it = is_it and fits_half(rows.epilogue.block_scale(0))
        if is_it:
            return _store[columns, parts, only, may_be_half](
                rows, sums, first_sums, vectors, boxes, c_map
            )
    if kind >= GELU:
        _store[columns, parts, SMOOTH](
            rows, sums, first_sums, vectors, boxes, c_map
        )
    else:
        _store[columns, parts, OTHERS](
            rows, sums, first_sums, vectors, boxes, c_map
        )


@always_inline
def _put[
    E: Epilogue, width: Int, any_columns: Bool, //, group: Int, in_half: Bool
](
    rows: TileRows[E, width, any_columns],
    box: UInt32,
    pairs: SIMD[DType.uint32, 2],
    scales: RowPair,
    inverses: RowPair,
):
    """Stores what a lane has of eight columns in a box, in 8 bits."""
    var row = rows.lane >> 2
    var chunk = UInt32(group // 2) ^ swizzle[width](row)
    var place = box + row * UInt32(width) + (rows.lane & 3) * 2
    var at = place + (chunk << 4) + UInt32(group % 2 * 8)
    var eight_bits: UInt32
    comptime if in_half:
        # They are divided already.
        eight_bits = halves_in_eight_bits(pairs)
    else:
        eight_bits = rows.epilogue.in_eight_bits(pairs, scales, inverses)
    store_shared_element[DType.uint16](
        at, (eight_bits & 0xFFFF).cast[DType.uint16]()
    )
    store_shared_element[DType.uint16](
        at + UInt32(8 * width), (eight_bits >> 16).cast[DType.uint16]()
    )


@always_inline
def _store[
    E: Epilogue,
    width: Int,
    any_columns: Bool,
    S: Sums,
    bytes: Int,
    //,
    columns: Int,
    parts: Int,
    among: Int,
    in_half: Bool = False,
](
    rows: TileRows[E, width, any_columns],
    sums: S,
    first_sums: FirstSums,
    vectors: UInt32,
    mut boxes: Boxes[bytes],
    c_map: OpaquePointer[ImmUntrackedOrigin],
):
    """Stores the rows, as `store_quantized` says, of some kinds of activations."""
    comptime groups = width // 8
    comptime own_columns = Int(_of_c[parts](UInt32(columns)))
    comptime assert E.is_gate == (parts == HALVES)
    # Scales are found of all columns that share them.
    comptime assert not E.finds_scales or width == columns
    var lane = rows.lane
    var row = lane >> 2
    var n = _of_c[parts](rows.elements.n)
    var first_column = _of_c[parts](rows.column)
    var gelu = HalfGelu[among](rows.epilogue.block_scale(0))
    comptime for start in range(0, own_columns, width):
        # Of each group, what the lane has of its upper row and of its lower one: two columns in 16 bits.
        var words = StaticTuple[SIMD[DType.uint32, 2], groups]()
        # A given scale is that of no numbers.
        var scales = RowPair(rows.epilogue.block_scale(0))
        var inverses = 1 / scales
        var box = UInt32(0)
        comptime if not E.finds_scales:
            box = boxes.take[by_all=True](lane)
        var most_above = UInt32(0)
        var most_below = UInt32(0)
        comptime for first in range(0, groups, _TOGETHER):
            var h = SIMD[DType.float32, 4 * _TOGETHER]()
            var other = SIMD[DType.float32, 4 * _TOGETHER]()
            comptime for i in range(_TOGETHER):
                comptime column = start + 8 * (first + i)
                comptime if parts == IN_TURN:
                    comptime beyond = columns * size_of[E.vector_type(0)]()
                    h = h.insert[offset=4 * i](
                        rows.finish[columns, column](first_sums, vectors)
                    )
                    other = other.insert[offset=4 * i](
                        rows.finish[columns, column](
                            sums, vectors + UInt32(beyond)
                        )
                    )
                else:
                    h = h.insert[offset=4 * i](
                        rows.finish[columns, column](sums, vectors)
                    )
                    comptime if parts == HALVES:
                        comptime gated = own_columns + column
                        other = other.insert[offset=4 * i](
                            rows.finish[columns, gated](sums, vectors)
                        )
            var a = h
            comptime if not in_half:
                a = rows.epilogue.activated[4 * _TOGETHER, among](h, other)
            comptime for i in range(_TOGETHER):
                comptime group = first + i
                var four = a.slice[4, offset=4 * i]()
                var above: UInt32
                var below: UInt32
                comptime if in_half:
                    above = gelu.of(four.slice[2]())
                    below = gelu.of(four.slice[2, offset=2]())
                else:
                    above = pack_pair[_ROUNDED](four.slice[2]())
                    below = pack_pair[_ROUNDED](four.slice[2, offset=2]())
                # Columns past the last one have zeros.
                most_above = _larger(most_above, above)
                most_below = _larger(most_below, below)
                words[group] = {above, below}
                comptime if not E.finds_scales:
                    _put[group, in_half](
                        rows, box, words[group], scales, inverses
                    )
        comptime if in_half:
            most_above = largest_of_halves(most_above, scales[0])
            most_below = largest_of_halves(most_below, scales[1])
        else:
            most_above = _largest(most_above)
            most_below = _largest(most_below)
        comptime if E.finds_scales:
            most_above = _largest_of_lanes(most_above)
            most_below = _largest_of_lanes(most_below)
        scales = RowPair(
            rows.epilogue.block_scale(most_above),
            rows.epilogue.block_scale(most_below),
        )
        comptime if E.finds_scales:
            inverses = 1 / scales
            box = boxes.take[by_all=True](lane)
            comptime for group in range(groups):
                _put[group, in_half](rows, box, words[group], scales, inverses)
        else:
            _overwrite(rows, box, scales)
        rows.send[DType.uint8](c_map, box, Int32(first_column) + Int32(start))
        if lane & 3 == 0:
            var blocks = (Int(n) + width - 1) // width
            var block = (Int(first_column) + start) // width
            comptime for i in range(2):
                var its_row = rows.row + row + UInt32(8 * i)
                if its_row < rows.elements.m:
                    rows.epilogue.keep_block_scale(
                        Int(its_row), block, blocks, scales[i]
                    )


@always_inline
def _overwrite[
    E: Epilogue, width: Int, any_columns: Bool, //
](rows: TileRows[E, width, any_columns], box: UInt32, scales: RowPair):
    """Makes NaN of what a lane has in a box of a row whose numbers are too large for the scale, and whose own is NaN."""
    var row = rows.lane >> 2
    comptime for i in range(2):
        if scales[i] != scales[i]:
            var place = (
                box
                + (row + UInt32(8 * i)) * UInt32(width)
                + (rows.lane & 3) * 2
            )
            for column in range(0, width, 8):
                store_shared_element[DType.uint16](
                    place + UInt32(column), _NOT_NUMBERS
                )
