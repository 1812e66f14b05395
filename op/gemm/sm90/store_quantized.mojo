"""From sums to c in 8 bits: applies the epilogue, and scales each row of a tile as that says.

Where scales are found, a warp has all columns of its 16 rows, of which four lanes share two: their largest magnitudes
take two exchanges.
"""

from std.memory import OpaquePointer
from std.sys import size_of
from std.utils import StaticTuple
from max.gpu.primitives import warp

from ..epilogue import Epilogue
from .boxes import Boxes
from .config import CONSUMERS
from .elements import swizzle
from .parts import HALVES, IN_TURN
from .shared_memory import (
    pack_pair,
    shared_value,
    store_shared_element,
    store_shared_value,
    unpack_pair,
)
from .store import TileRows
from .sums import Accumulators, Sums

# Threads of all consumers.
comptime _THREADS = 128 * CONSUMERS
# Groups of eight columns that are activated in one call, so that their special functions overlap.
comptime _TOGETHER = 4
# What an activation is rounded to before it is quantized.
comptime _ROUNDED = DType.bfloat16
comptime _Four = SIMD[DType.float32, 4]


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
def _largest(word: UInt32) -> UInt32:
    """Returns the bits of the larger magnitude of two numbers in bfloat16, in float32."""
    return max((word << 16) & 0x7FFFFFFF, word & 0x7FFF0000)


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
    bits first has the bits of a product in these, quantized."""
    comptime groups = width // 8
    comptime own_columns = Int(_of_c[parts](UInt32(columns)))
    comptime assert E.is_gate == (parts == HALVES)
    # Scales are found of all columns that share them.
    comptime assert not E.finds_scales or width == columns
    var lane = rows.lane
    var row = lane >> 2
    var n = _of_c[parts](rows.elements.n)
    var first_column = _of_c[parts](rows.column)
    comptime for start in range(0, own_columns, width):
        var left = Int32(n) - Int32(first_column) - Int32(start)
        # Of each group, what the lane has of its upper row and of its lower one: two columns in 16 bits.
        var words = StaticTuple[UInt32, 2 * groups]()
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
            var a = rows.epilogue.activated[4 * _TOGETHER](h, other)
            comptime for i in range(_TOGETHER):
                comptime group = first + i
                var four = a.slice[4, offset=4 * i]()
                var above = pack_pair[_ROUNDED](four.slice[2]())
                var below = pack_pair[_ROUNDED](four.slice[2, offset=2]())
                words[2 * group] = above
                words[2 * group + 1] = below
                # Columns past the last one may be anything. There are multiples of 16 of them.
                if left > Int32(8 * group):
                    most_above = max(most_above, _largest(above))
                    most_below = max(most_below, _largest(below))
        comptime if E.finds_scales:
            most_above = _largest_of_lanes(most_above)
            most_below = _largest_of_lanes(most_below)
        var above = rows.epilogue.block_scale(most_above)
        var below = rows.epilogue.block_scale(most_below)
        var box = boxes.take(lane)
        var place = box + row * UInt32(width) + (lane & 3) * 2
        var scales = _Four(above, above, below, below)
        var up, down = 1 / above, 1 / below
        var inverses = _Four(up, up, down, down)
        comptime for group in range(groups):
            var four = unpack_pair[_ROUNDED](words[2 * group]).join(
                unpack_pair[_ROUNDED](words[2 * group + 1])
            )
            var eight_bits = rows.epilogue.in_eight_bits(four, scales, inverses)
            var chunk = UInt32(group // 2) ^ swizzle[width](row)
            var at = place + (chunk << 4) + UInt32(group % 2 * 8)
            store_shared_element[DType.uint16](
                at, (eight_bits & 0xFFFF).cast[DType.uint16]()
            )
            store_shared_element[DType.uint16](
                at + UInt32(8 * width), (eight_bits >> 16).cast[DType.uint16]()
            )
        rows.send[DType.uint8](c_map, box, Int32(first_column) + Int32(start))
        if lane & 3 == 0:
            var blocks = (Int(n) + width - 1) // width
            var block = (Int(first_column) + start) // width
            var its_row = rows.row + row
            if its_row < rows.elements.m:
                rows.epilogue.keep_block_scale(
                    Int(its_row), block, blocks, above
                )
            if its_row + 8 < rows.elements.m:
                rows.epilogue.keep_block_scale(
                    Int(its_row + 8), block, blocks, below
                )
