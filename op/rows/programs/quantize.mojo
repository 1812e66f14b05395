"""Quantizes rows to 8 bits, alone or as the end of a norm.

    scale = max(max |z|, 1e-12) / largest;  q = round(z / scale)

The scale is rounded up to a power of two where that is asked for; then z / scale is exact. The scale of a row with
a NaN or an infinity is not finite, and neither is any element of the row once it is dequantized.
"""

from std.sys import inlined_assembly, is_nvidia_gpu

from ..program import Program
from ..scales import POWER_OF_TWO, divided, scale_of
from ..stage import Stage
from ..types import E4M3, eight_bit_type
from ..values import Redo, Row, Values
from .norm import _Affine, _CenterIfAsked, _Normalize


@always_inline
def _magnitude[
    dtype: DType, width: Int, //
](z: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns |z|, as an operand's modifier: the compiler clears a bit, which takes an instruction."""
    comptime if is_nvidia_gpu() and dtype == DType.float32:
        var magnitude = SIMD[dtype, width]()
        comptime for i in range(width):
            magnitude[i] = rebind[Scalar[dtype]](
                inlined_assembly[
                    "abs.f32 $0, $1;",
                    Float32,
                    constraints="=f,f",
                    has_side_effect=False,
                ](rebind[Float32](z[i]))
            )
        return magnitude
    else:
        return abs(z)


struct _Quantize[eight_bits: Int32](Stage):
    """(z, ...) -> z / scale, where the result is the scale."""

    comptime terms = 1
    comptime redo = Redo.MAX
    comptime results = 1

    @staticmethod
    @always_inline
    def map_in[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width]) -> Values[dtype, width]:
        return {_magnitude(v[0])}

    @staticmethod
    @always_inline
    def finish[
        dtype: DType, //
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        var scale = scale_of[eight_bit_type(Self.eight_bits)](
            total[0].cast[DType.float32](), row.kind & POWER_OF_TWO != 0
        )
        return {scale.cast[dtype](), (1 / scale).cast[dtype]()}

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], total: Values[dtype, 1]
    ) -> Values[dtype, width]:
        comptime Some = SIMD[DType.float32, width]
        return {
            divided(
                v[0].cast[DType.float32](),
                Some(total[0].cast[DType.float32]()),
                Some(total[1].cast[DType.float32]()),
            ).cast[dtype]()
        }


comptime Quantize[eight_bits: Int32] = Program[
    _Quantize[eight_bits], eight_bits_=eight_bits
]
"""From rows to 8 bits, with the result scale.

Parameters:
    eight_bits: The type, E4M3 or E5M2.
"""

comptime NormQuantize[has_residual: Bool = False] = Program[
    _CenterIfAsked,
    _Normalize,
    _Affine,
    _Quantize[E4M3],
    features_=2,
    has_residual_=has_residual,
    eight_bits_=E4M3,
]
"""From x, gamma, beta and the number eps to z in e4m3, with the results mean, rstd and scale.

Parameters:
    has_residual: Whether there is a residual.
"""

comptime NormQuantizeBlocks[has_residual: Bool = False] = Program[
    _CenterIfAsked,
    _Normalize,
    _Affine,
    features_=2,
    has_residual_=has_residual,
    eight_bits_=E4M3,
    block_scales_=True,
]
"""The same with a scale for each 128 elements of a row, and these as the third result.

Parameters:
    has_residual: Whether there is a residual.
"""
