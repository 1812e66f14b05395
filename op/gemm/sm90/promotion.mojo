"""Sums of scaled sums: what tensor cores add up over one k block is multiplied by scales and added up in float32.

One assembly statement takes all registers of a thread, so that the compiler has no reason to move any.
"""

from std.collections.string.string_span import (
    _get_kgen_string,
    get_static_string,
)

from ..epilogue import Epilogue
from ..row_hook import RowHook
from .product import Product
from .wgmma import Accumulator


@fieldwise_init
struct BlockScales(TrivialRegisterPassable):
    """The scales of a thread's sums over one k block."""

    var upper: Float32
    """Of row lane / 4 of the warp's 16."""
    var lower: Float32
    """Of the row 8 below."""

    @staticmethod
    @always_inline
    def load[
        E: Epilogue, H: RowHook, //, second: Bool = False
    ](
        product: Product[E, H],
        row: UInt32,
        column: UInt32,
        block: UInt32,
        blocks: UInt32,
    ) -> Self:
        """Loads them; of rows past the last one, which are not stored, those of that one.

        Parameters:
            E: What becomes of the sums.
            H: What is done with the rows.
            second: Whether they are of the second of two matrices in turn.

        Args:
            product: Sizes, and what knows the scales.
            row: The upper row.
            column: A column of the tile, whose columns share a scale.
            block: The k block.
            blocks: How many there are.

        Returns:
            The scales.
        """
        var last = UInt32(product.m) - 1
        var epilogue = product.epilogue
        var of_columns = epilogue.column_block_scale[second](
            Int(column), Int(block), Int(blocks)
        )
        var upper = epilogue.row_block_scale(
            Int(min(row, last)), Int(block), Int(blocks)
        )
        var lower = epilogue.row_block_scale(
            Int(min(row + 8, last)), Int(block), Int(blocks)
        )
        return {upper * of_columns, lower * of_columns}


def _zeros_text(count: Int) -> String:
    var text = String()
    for i in range(count):
        text += String("mov.f32 $", i, ", 0f00000000;\n")
    return text


def _outputs(count: Int) -> String:
    var text = String()
    for i in range(count):
        text += "=f" if i == 0 else ",=f"
    return text


@always_inline
def no_sums[count: Int]() -> Accumulator[count]:
    """Returns sums of nothing.

    Parameters:
        count: Registers.

    Returns:
        Zeros.
    """
    comptime text = get_static_string[_zeros_text(count)]()
    comptime constraints = get_static_string[_outputs(count)]()
    return __mlir_op.`pop.inline_asm`[
        _type=Accumulator[count],
        assembly=_get_kgen_string[text](),
        constraints=_get_kgen_string[constraints](),
        hasSideEffects=False.__mlir_i1__(),
        isStackAligned=False.__mlir_i1__(),
    ]()


def _add_text(count: Int) -> String:
    # Outputs, tied sums, what is added, then both scales.
    var text = String()
    for i in range(count):
        var scale = 3 * count + i % 4 // 2
        text += String(
            "fma.rn.f32 $", i, ", $", 2 * count + i, ", $", scale, ", $", i
        )
        text += ";\n"
    return text


def _add_constraints(count: Int) -> String:
    var text = _outputs(count)
    for i in range(count):
        text += String(",", i)
    for _ in range(count + 2):
        text += ",f"
    return text


@always_inline
def add_scaled[
    count: Int
](
    sums: Accumulator[count], block: Accumulator[count], scales: BlockScales
) -> Accumulator[count]:
    """Adds what a k block adds.

    Parameters:
        count: Registers: of each four, two of the upper row and two of the lower one.

    Args:
        sums: The sums so far.
        block: The block's, complete.
        scales: By which they are multiplied.

    Returns:
        The sums.
    """
    comptime text = get_static_string[_add_text(count)]()
    comptime constraints = get_static_string[_add_constraints(count)]()
    return __mlir_op.`pop.inline_asm`[
        _type=Accumulator[count],
        assembly=_get_kgen_string[text](),
        constraints=_get_kgen_string[constraints](),
        hasSideEffects=False.__mlir_i1__(),
        isStackAligned=False.__mlir_i1__(),
    ](sums, block, scales.upper, scales.lower)
