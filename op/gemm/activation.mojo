"""Activations as formulas of single elements, chosen by a number at run time.

With a = act(h): relu max(h, 0); gelu h Phi(h); gelu_tanh, quick_gelu and silu h s(z), where s(z) = 1 / (1 + e^-z),
z = 2 sqrt(2 / pi) (h + 0.044715 h^3), 1.702 h and h. NaN and infinities become what PyTorch makes of them.

On a GPU, results that are rounded to 16 bits next are computed to a few bits more: division is the hardware's
reciprocal, and Phi(h) is s(h p(h^2)) with a cubic p, whose relative error is 1.8e-3 for |h| < 4 and absolute error
1.4e-4.
"""

from std.math import exp2, fma
from std.sys import inlined_assembly, is_gpu, is_nvidia_gpu

from .elementary import LOG2_E, error_function, exponential, reciprocal

comptime NOTHING = Int32(0)
"""Leaves h as it is."""
comptime RELU = Int32(1)
"""The larger of h and 0."""
comptime GELU = Int32(2)
"""With the exact error function."""
comptime GELU_TANH = Int32(3)
"""With an approximation of it."""
comptime QUICK_GELU = Int32(4)
"""With a coarse approximation of it."""
comptime SILU = Int32(5)
"""Also called swish."""
comptime GATED = 8
"""Added to one of these: half of the product is a gate, a = act(gate) h."""

comptime ANY = -1
"""Stands for all of these."""
comptime SMOOTH = -2
"""Stands for those from `GELU` on, h s(z)."""
comptime OTHERS = -3
"""Stands for those before."""

comptime _SQRT_HALF = 0.70710678118654752440
comptime _INVERSE_SQRT_TAU = 0.39894228040143267794
comptime _TANH_LINEAR = 1.5957691216057307117
comptime _TANH_CUBIC = _TANH_LINEAR * 0.044715
comptime _QUICK = 1.702
# p(t) for t = h^2 up to the last: minimax of the relative error of Phi(-h) for h < 4, and with ever less weight to 6.5.
comptime _CDF_0 = 1.59387106
comptime _CDF_1 = 0.0754147883
comptime _CDF_2 = -0.000949938622
comptime _CDF_3 = 8.08569757e-06
# q(t) = p(0) + this, with which s (1 - s) q(h^2) is the density of the normal distribution: h times its error is at most
# 1.7e-4.
comptime _DENSITY_1 = 0.22380067
comptime _DENSITY_2 = -0.00366674
# Beyond this h^2, s is 0 or 1 long since, and powers of h are far from overflow. p only grows.
comptime _END = 1e4


@always_inline
def activate[
    dtype: DType,
    width: Int,
    //,
    narrow: Bool = False,
    among: Int = ANY,
](kind: Int32, h: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Applies an activation.

    Parameters:
        dtype: The type, float32 or float64.
        width: The number of elements.
        narrow: Whether the results are rounded to 16 bits next.
        among: Which ones it may be, or the only one. A caller that knows saves branches, across which special functions do
            not overlap with all else.

    Args:
        kind: Which activation.
        h: The elements.

    Returns:
        Their activations.
    """
    comptime if narrow and is_gpu() and among == Int(GELU):
        return h * _narrow_share[Int(GELU)](GELU, h)
    comptime if among >= 0:
        return activate[narrow=narrow](Int32(among), h)
    comptime if among != SMOOTH:
        if kind == NOTHING:
            return h
        if among == OTHERS or kind == RELU:
            return _rectified(h)
    comptime if narrow and is_gpu():
        return h * _narrow_share(kind, h)
    if kind == GELU:
        return h * _normal_cdf(h)
    return h * _Logistic[dtype, width, narrow](_argument(kind, h)).share


struct Backward[dtype: DType, width: Int, narrow: Bool = False](
    TrivialRegisterPassable
):
    """What the backward of an activation needs of elements.

    Parameters:
        dtype: The type, float32 or float64.
        width: The number of elements.
        narrow: Whether the results are rounded to 16 bits next.
    """

    var a: SIMD[Self.dtype, Self.width]
    """The activations."""
    var dh: SIMD[Self.dtype, Self.width]
    """The gradient of h."""

    @always_inline
    def __init__(
        out self,
        kind: Int32,
        h: SIMD[Self.dtype, Self.width],
        da: SIMD[Self.dtype, Self.width],
    ):
        """Computes both.

        Args:
            kind: Which activation.
            h: The elements.
            da: The gradient of act(h).
        """
        comptime Lanes = SIMD[Self.dtype, Self.width]
        if kind == NOTHING:
            self.a = h
            self.dh = da
        elif kind == RELU:
            self.a = h.lt(0).select(Lanes(0), h)
            self.dh = h.le(0).select(Lanes(0), da)
        elif kind == GELU:
            var cdf: Lanes
            comptime if Self.narrow and is_gpu():
                cdf = _narrow_share(GELU, h)
            else:
                cdf = _normal_cdf(h)
            var density = (
                exponential[Self.narrow](h * h * -0.5) * _INVERSE_SQRT_TAU
            )
            self.a = h * cdf
            self.dh = da * fma(h, density, cdf)
        else:
            var slope = Lanes(1)
            if kind == QUICK_GELU:
                slope = Lanes(_QUICK)
            elif kind == GELU_TANH:
                slope = fma(h * h, Lanes(3 * _TANH_CUBIC), Lanes(_TANH_LINEAR))
            var s = _Logistic[Self.dtype, Self.width, Self.narrow](
                _argument(kind, h)
            )
            self.a = h * s.share
            self.dh = da * fma(h * s.share * s.rest, slope, s.share)


struct SmoothBackward[width: Int](TrivialRegisterPassable):
    """What the backward of an activation from `GELU` on needs of elements, on a GPU for 16 bits.

    Parameters:
        width: The number of elements.
    """

    var a: SIMD[DType.float32, Self.width]
    """The activations."""
    var dh: SIMD[DType.float32, Self.width]
    """The gradient of h."""

    @always_inline
    def __init__(
        out self,
        curve: SmoothCurve,
        h: SIMD[DType.float32, Self.width],
        da: SIMD[DType.float32, Self.width],
    ):
        """Computes both.

        Args:
            curve: Which activation.
            h: The elements.
            da: The gradient of act(h).
        """
        comptime Lanes = SIMD[DType.float32, Self.width]
        var t = min(h * h, Lanes(_END))
        var p = (
            t.fma(Lanes(curve.p3), Lanes(curve.p2))
            .fma(t, Lanes(curve.p1))
            .fma(t, Lanes(curve.p0))
        )
        var q = t.fma(Lanes(curve.q2), Lanes(curve.q1)).fma(t, Lanes(curve.p0))
        var s = reciprocal(1 + exp2(h * p * -LOG2_E))
        self.a = h * s
        # Where 1 - s is rounded away, so is what it is multiplied by.
        self.dh = da * fma(self.a * (1 - s), q, s)


@fieldwise_init
struct SmoothCurve(TrivialRegisterPassable):
    """An activation from `GELU` on as numbers, so that one formula with no branches serves all: the code of an epilogue
    that unrolls it stays short.

    With z = h p(h^2), s = 1 / (1 + e^-z): a = h s, dh = da (s + a (1 - s) q(h^2)). Both polynomials begin with p0.
    """

    var p0: Float32
    """First coefficient of p and q."""
    var p1: Float32
    """Second of p."""
    var p2: Float32
    """Third of p."""
    var p3: Float32
    """Last of p."""
    var q1: Float32
    """Second of q."""
    var q2: Float32
    """Last of q."""

    @staticmethod
    def of(kind: Int) -> Self:
        """Finds the numbers of an activation.

        Args:
            kind: Which one.

        Returns:
            Its numbers.
        """
        if kind == Int(GELU):
            return {_CDF_0, _CDF_1, _CDF_2, _CDF_3, _DENSITY_1, _DENSITY_2}
        if kind == Int(GELU_TANH):
            return {_TANH_LINEAR, _TANH_CUBIC, 0, 0, 3 * _TANH_CUBIC, 0}
        if kind == Int(QUICK_GELU):
            return {_QUICK, 0, 0, 0, 0, 0}
        return {1, 0, 0, 0, 0, 0}


@always_inline
def _argument[
    dtype: DType, width: Int, //
](kind: Int32, h: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns the argument of the logistic function."""
    comptime Lanes = SIMD[dtype, width]
    if kind == QUICK_GELU:
        return h * _QUICK
    if kind == GELU_TANH:
        return h * fma(h * h, Lanes(_TANH_CUBIC), Lanes(_TANH_LINEAR))
    return h


@always_inline
def _rectified[
    dtype: DType, width: Int, //
](h: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns the larger of h and 0, NaN where h is."""
    comptime if is_nvidia_gpu() and dtype == DType.float32:
        var larger = SIMD[dtype, width]()
        comptime for i in range(width):
            # As if it had side effects: or it would be computed for every kind of activation, and selected after.
            larger[i] = rebind[Scalar[dtype]](
                inlined_assembly[
                    "max.NaN.f32 $0, $1, 0f00000000;",
                    Float32,
                    constraints="=f,f",
                    has_side_effect=True,
                ](rebind[Float32](h[i]))
            )
        return larger
    else:
        return h.lt(0).select(SIMD[dtype, width](0), h)


@always_inline
def _narrow_share[
    dtype: DType, width: Int, //, only: Int = ANY
](kind: Int32, h: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns what h is multiplied by, s(h p(h^2)), on a GPU.

    All kinds are one formula, with coefficients that are chosen once: a branch for every few elements would leave
    their special functions nothing to overlap with.
    """
    comptime Lanes = SIMD[dtype, width]
    var c0 = Scalar[dtype](-LOG2_E)
    var c1 = Scalar[dtype](0)
    var c2 = Scalar[dtype](0)
    var c3 = Scalar[dtype](0)
    var end = Scalar[dtype](0)
    if kind == GELU:
        c0 = -LOG2_E * _CDF_0
        c1 = -LOG2_E * _CDF_1
        c2 = -LOG2_E * _CDF_2
        c3 = -LOG2_E * _CDF_3
        end = _END
    elif kind == GELU_TANH:
        c0 = -LOG2_E * _TANH_LINEAR
        c1 = -LOG2_E * _TANH_CUBIC
        end = _END
    elif kind == QUICK_GELU:
        c0 = -LOG2_E * _QUICK
    var t = h * h
    # A polynomial whose last coefficient is not 0 does without: overflow has the right sign.
    comptime if only != Int(GELU):
        t = min(t, Lanes(end))
    var p = t.fma(Lanes(c3), Lanes(c2)).fma(t, Lanes(c1)).fma(t, Lanes(c0))
    comptime assert dtype.is_floating_point(), "must be a floating-point type"
    return reciprocal(1 + exp2(h * p))


struct _Logistic[dtype: DType, width: Int, narrow: Bool = False](
    TrivialRegisterPassable
):
    """1 / (1 + e^-z) and 1 minus that, both to their last bits, or to those of e^-z."""

    var share: SIMD[Self.dtype, Self.width]
    var rest: SIMD[Self.dtype, Self.width]

    @always_inline
    def __init__(out self, z: SIMD[Self.dtype, Self.width]):
        var e = exponential[Self.narrow](-abs(z))
        var larger: SIMD[Self.dtype, Self.width]
        comptime if Self.narrow and is_gpu():
            larger = reciprocal(1 + e)
        else:
            larger = 1 / (1 + e)
        var smaller = e * larger
        var negative = z.lt(0)
        self.share = negative.select(smaller, larger)
        self.rest = negative.select(larger, smaller)


@always_inline
def _normal_cdf[
    dtype: DType, width: Int, //
](h: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns the share of the normal distribution below h."""
    return fma(
        error_function(h * _SQRT_HALF),
        SIMD[dtype, width](0.5),
        SIMD[dtype, width](0.5),
    )
