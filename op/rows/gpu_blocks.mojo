"""Scales of blocks of a row on a GPU: found and stored by the lanes that have a block."""

from std.memory import bitcast

from ..call import SCALE_BLOCK
from .gpu_elements import GlobalPointer
from .operands import Operands
from .program import RowProgram
from .scales import (
    POWER_OF_TWO,
    divided,
    largest_of_block,
    magnitude_bits,
    scale_of,
)
from .types import eight_bit_type


@doc_hidden
@always_inline
def divided_by_scale[
    accum: DType, width: Int, //, P: RowProgram
](
    operands: Operands[accum],
    kind: Int32,
    index: Int,
    column: Int32,
    elements: SIMD[accum, width],
    valid: Bool,
) -> SIMD[accum, width]:
    """Divides by the scale of the 128 elements that 16 lanes have, and stores that; all lanes of a warp call it."""
    comptime assert 16 * width == SCALE_BLOCK
    var wide = elements.cast[DType.float32]()
    var most = largest_of_block(magnitude_bits(wide) if valid else 0)
    var scale = scale_of[eight_bit_type(P.eight_bits)](
        bitcast[DType.float32](most), kind & POWER_OF_TWO != 0
    )
    if valid and column % SCALE_BLOCK == 0:
        comptime slot = P.results_before(P.stages)
        var blocks = (Int(operands.length) + SCALE_BLOCK - 1) // SCALE_BLOCK
        GlobalPointer[DType.float32](
            unsafe_from_address=Int(operands.results[slot])
        ).unsafe_offset(
            index * blocks + Int(column) // SCALE_BLOCK
        ).unsafe_store(
            scale
        )
    comptime Some = SIMD[DType.float32, width]
    return divided(wide, Some(scale), Some(1 / scale)).cast[accum]()
