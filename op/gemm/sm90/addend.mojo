"""The addend of a tile, from a tensor of c's shape and type: it is copied through the ring.

Sums start with it; or it stays in its slots, the last of the tile, until what it is added to is stored.
"""

from std.collections.string.string_span import (
    _get_kgen_string,
    get_static_string,
)
from std.utils import StaticTuple

from .config import Config
from .shared_memory import matrix_x4, unpack_pair
from .wgmma import Accumulator, row_elements

comptime BOX_COLUMNS = row_elements[DType.bfloat16]()
"""Columns of a box, of 16 bits each."""
# Pairs of groups of eight columns: one instruction loads 16 rows of a pair.
comptime _PAIRS = BOX_COLUMNS // 16


def boxes_of(columns: Int) -> Int:
    """Counts the boxes that hold some columns.

    Args:
        columns: How many.

    Returns:
        The boxes, of which the last may hold more.
    """
    return (columns + BOX_COLUMNS - 1) // BOX_COLUMNS


@doc_hidden
@fieldwise_init
struct TileAddend[config: Config](TrivialRegisterPassable):
    """Where a warp's rows of what is added to a tile are in the ring, as one of its lanes sees them."""

    comptime boxes_of_half = boxes_of(Self.config.columns)
    """Boxes across the tile."""
    comptime count = Self.config.halves() * Self.boxes_of_half
    """Those that hold rows of the warp."""
    comptime slots = Self.config.addend_slots()
    """Slots that hold the boxes."""

    var boxes: StaticTuple[UInt32, Self.count]
    """Shared addresses of the lane's row of 16, in each box of 64 columns; then those of the other 16."""
    var used: StaticTuple[UInt32, Self.slots]
    """The slots."""

    @always_inline
    def __init__(out self):
        """Knows of none."""
        self.boxes = StaticTuple[UInt32, Self.count](fill=0)
        self.used = StaticTuple[UInt32, Self.slots](fill=0)

    @always_inline
    def sixteen[
        dtype: DType, half: Int, column: Int
    ](self, lane: UInt32) -> SIMD[DType.float32, 8]:
        """Returns what a lane has of 16 columns from `column` on, in the layout of its sums of one half of the rows."""
        comptime box = half * Self.boxes_of_half + column // BOX_COLUMNS
        comptime group = column % BOX_COLUMNS // 8
        # Rows of eight are swizzled: chunks of 16 bytes are permuted by the row.
        var chunk = (UInt32(group) + (lane >> 4)) ^ (lane & 7)
        var words = matrix_x4(self.boxes[box] + (chunk << 4))
        # The upper and lower eight rows of one group of columns, then of the next.
        return (
            unpack_pair[dtype](words[0])
            .join(unpack_pair[dtype](words[1]))
            .join(
                unpack_pair[dtype](words[2]).join(unpack_pair[dtype](words[3]))
            )
        )


def _text[dtype: DType](n: Int, halves: Int) -> String:
    """Loads four 8x8 matrices at a time, and widens what a lane gets of each."""
    var text = String("{\n.reg .b32 t, p, q, r, s;\n.reg .b16 l, h;\n")
    var first_box = n // 2 * halves
    var boxes = halves * boxes_of(n)
    var at = 0
    for box in range(boxes):
        var pairs = min(_PAIRS, n // 16 - box % boxes_of(n) * _PAIRS)
        for pair in range(pairs):
            text += String("add.u32 t, $", first_box + box)
            text += String(", $", first_box + boxes + pair, ";\n")
            text += (
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {p, q, r, s}, [t];\n"
            )
            # The upper and lower eight rows of one group of columns, then of the next.
            var names = [String("p"), String("q"), String("r"), String("s")]
            for i in range(4):
                text += String("mov.b32 {l, h}, ", names[i], ";\n")
                comptime kind = "bf16" if dtype == DType.bfloat16 else "f16"
                text += String("cvt.f32.", kind, " $", at + 2 * i, ", l;\n")
                text += String("cvt.f32.", kind, " $", at + 2 * i + 1, ", h;\n")
            at += 8
    return text + "}"


def _constraints(count: Int, boxes: Int) -> String:
    var text = String()
    for i in range(count):
        text += "=f" if i == 0 else ",=f"
    for _ in range(boxes + _PAIRS):
        text += ",r"
    return text + ",~{memory}"


@always_inline
def load_accumulator[
    dtype: DType, n: Int, halves: Int
](
    boxes: StaticTuple[UInt32, halves * boxes_of(n)], lane: UInt32
) -> Accumulator[n // 2 * halves]:
    """Loads a warp's rows of a tile in the layout of its sums.

    Parameters:
        dtype: Type of the elements, bfloat16 or float16.
        n: Columns of the tile, a multiple of 16: up to 256, or 192 of both halves.
        halves: How many times 16 rows the warp has, 1 or 2.

    Args:
        boxes: Shared addresses of the lane's row of 16, in each box of 64 columns; then
            those of the other 16.
        lane: Lane of the thread.

    Returns:
        The elements, as float32.
    """
    comptime assert dtype != DType.float32
    comptime count = halves * boxes_of(n)
    comptime assert count <= 4 or count == 6
    comptime text = get_static_string[_text[dtype](n, halves)]()
    comptime constraints = get_static_string[
        _constraints(n // 2 * halves, count)
    ]()
    comptime Sums = Accumulator[n // 2 * halves]
    # Rows of eight are swizzled: chunks of 16 bytes are permuted by the row.
    var places = StaticTuple[UInt32, _PAIRS]()
    comptime for pair in range(_PAIRS):
        places[pair] = ((UInt32(2 * pair) + (lane >> 4)) ^ (lane & 7)) << 4
    comptime assembly = _get_kgen_string[text]()
    comptime asked = _get_kgen_string[constraints]()
    comptime if count == 6:
        return __mlir_op.`pop.inline_asm`[
            _type=Sums,
            assembly=assembly,
            constraints=asked,
            hasSideEffects=True.__mlir_i1__(),
            isStackAligned=False.__mlir_i1__(),
        ](
            boxes[0],
            boxes[1],
            boxes[2],
            boxes[3],
            boxes[4],
            boxes[5],
            places[0],
            places[1],
            places[2],
            places[3],
        )
    elif count == 4:
        return __mlir_op.`pop.inline_asm`[
            _type=Sums,
            assembly=assembly,
            constraints=asked,
            hasSideEffects=True.__mlir_i1__(),
            isStackAligned=False.__mlir_i1__(),
        ](
            boxes[0],
            boxes[1],
            boxes[2],
            boxes[3],
            places[0],
            places[1],
            places[2],
            places[3],
        )
    elif count == 3:
        return __mlir_op.`pop.inline_asm`[
            _type=Sums,
            assembly=assembly,
            constraints=asked,
            hasSideEffects=True.__mlir_i1__(),
            isStackAligned=False.__mlir_i1__(),
        ](
            boxes[0],
            boxes[1],
            boxes[2],
            places[0],
            places[1],
            places[2],
            places[3],
        )
    elif count == 2:
        return __mlir_op.`pop.inline_asm`[
            _type=Sums,
            assembly=assembly,
            constraints=asked,
            hasSideEffects=True.__mlir_i1__(),
            isStackAligned=False.__mlir_i1__(),
        ](boxes[0], boxes[1], places[0], places[1], places[2], places[3])
    else:
        return __mlir_op.`pop.inline_asm`[
            _type=Sums,
            assembly=assembly,
            constraints=asked,
            hasSideEffects=True.__mlir_i1__(),
            isStackAligned=False.__mlir_i1__(),
        ](boxes[0], places[0], places[1], places[2], places[3])
