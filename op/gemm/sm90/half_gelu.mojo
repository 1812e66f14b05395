"""GELU of two numbers at once in float16, for results that are rounded to 8 bits next.

    gelu(h) = h / 2 (1 + tanh(h (p + q h^2)))

This is its approximation by tanh, and with other p and q GELU itself. With both as float16 has them, a result is off by at
most 1e-3 |h|, of which the hardware's tanh has a fourth: a 30th of what e4m3 rounds away of a number like h. Where h is
far below 0, that is more than gelu(h) itself. As p and q are positive, no h changes the sign, however large it is.
"""

from std.memory import bitcast
from std.sys import inlined_assembly

from ..activation import GELU
from .shared_memory import pack_pair

comptime _HALF = DType.float16
# Numbers up to 448 of the largest scale are far from float16's overflow, and those that e4m3 rounds to 0 with the least
# one far above what float16 does. Half of its reciprocal is a number in float16 as well.
comptime _LEAST_SCALE = Float32(1.0 / 4096)
comptime _MOST_SCALE = Float32(64)
# With p and q twice each, as float16 has them; of GELU: the least error relative to h.
comptime _EXACT = StaticString(
    "{.reg .b32 t, u, q;\nmov.b32 u, 0x3a643a64;\nmov.b32 q, 0x28832883;\n"
    "mul.rn.f16x2 t, $1, $1;\nfma.rn.f16x2 u, t, q, u;\n"
    "mul.rn.f16x2 u, $1, u;\ntanh.approx.f16x2 u, u;\n"
    "mul.rn.f16x2 t, $1, $2;\nfma.rn.f16x2 $0, t, u, t;}"
)
comptime _BY_TANH = StaticString(
    "{.reg .b32 t, u, q;\nmov.b32 u, 0x3a623a62;\nmov.b32 q, 0x28912891;\n"
    "mul.rn.f16x2 t, $1, $1;\nfma.rn.f16x2 u, t, q, u;\n"
    "mul.rn.f16x2 u, $1, u;\ntanh.approx.f16x2 u, u;\n"
    "mul.rn.f16x2 t, $1, $2;\nfma.rn.f16x2 $0, t, u, t;}"
)


@doc_hidden
@always_inline
def fits_half(scale: Float32) -> Bool:
    """Returns whether float16 has the numbers that a scale is for."""
    return _LEAST_SCALE <= scale and scale <= _MOST_SCALE


@doc_hidden
struct HalfGelu[kind: Int](TrivialRegisterPassable):
    """GELU or its approximation, divided by a scale, a power of two."""

    var half_inverse: UInt32
    """1 / (2 scale), twice."""

    @always_inline
    def __init__(out self, scale: Float32):
        """Takes the scale."""
        self.half_inverse = pack_pair[_HALF](
            SIMD[DType.float32, 2](0.5 / scale)
        )

    @always_inline
    def of(self, pair: SIMD[DType.float32, 2]) -> UInt32:
        """Returns the results of two numbers."""
        return inlined_assembly[
            _EXACT if Self.kind == Int(GELU) else _BY_TANH,
            UInt32,
            constraints="=r,r,r",
            has_side_effect=False,
        ](pack_pair[_HALF](pair), self.half_inverse)


@doc_hidden
@always_inline
def halves_in_eight_bits(pairs: SIMD[DType.uint32, 2]) -> UInt32:
    """Rounds two pairs to e4m3, and returns their bytes, the first one lowest."""
    return inlined_assembly[
        (
            "{.reg .b16 l, h;\ncvt.rn.satfinite.e4m3x2.f16x2 l, $1;\n"
            "cvt.rn.satfinite.e4m3x2.f16x2 h, $2;\nmov.b32 $0, {l, h};}"
        ),
        UInt32,
        constraints="=r,r,r",
        has_side_effect=False,
    ](pairs[0], pairs[1])


@doc_hidden
@always_inline
def largest_of_halves(most: UInt32, scale: Float32) -> UInt32:
    """Returns the bits of the larger of two magnitudes, times a scale, in float32; NaN is the largest."""
    var larger = max(most & 0xFFFF, most >> 16).cast[DType.uint16]()
    return bitcast[DType.uint32](
        bitcast[_HALF](larger).cast[DType.float32]() * scale
    )
