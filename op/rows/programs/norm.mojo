"""Norms, forward and backward, as row programs.

A residual may be added before a norm, and another gradient in its backward. The backward can recompute z, for
callers that did not save it.

LayerNorm's mean is computed twice. First as the mean of x minus the row's first element, so that a constant row
gives exactly zero. The mean of the result v corrects its rounding: it is subtracted from v and from the variance,
so that rows far from zero lose nothing.

RMSNorm's formulas are LayerNorm's with a mean of 0. So one kernel serves both, and `Row.kind` selects: without a mean, the
first pass is left out.
"""

from ...norms.layer_norm import LayerNorm
from ..program import Program
from ..stage import Stage
from ..values import Row, Values
from .center import _Center

comptime RMS_NORM = Int32(1)
"""The bit of `Row.kind` that says that the mean of a row counts as 0; rows are centered otherwise."""


@always_inline
def _mean[
    dtype: DType, //
](row: Row[dtype], mean: Scalar[dtype]) -> Scalar[dtype]:
    """Returns what counts as the mean of a row, or of its gradient."""
    return 0 if row.kind & RMS_NORM != 0 else mean


struct _CenterIfAsked(Stage):
    """(x, ...) -> (x - mean(x), ...), give or take the rounding of the mean, where rows are centered."""

    comptime optional = True

    @staticmethod
    @always_inline
    def needs_terms[dtype: DType, //](row: Row[dtype]) -> Bool:
        return row.kind & RMS_NORM == 0

    @staticmethod
    @always_inline
    def map_in[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width]) -> Values[dtype, width]:
        return _Center.map_in(row, v)

    @staticmethod
    @always_inline
    def finish[
        dtype: DType, //
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        return {_mean(row, _Center.finish(row, total, before)[0])}

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], mean: Values[dtype, 1]
    ) -> Values[dtype, width]:
        return _Center.map_out(row, v, mean)


struct _Normalize(Stage):
    """(v, gamma, beta) -> ((v - mean v) rstd, gamma, beta) for v = x - mean x; the results are mean and rstd."""

    comptime terms = 2
    comptime results = 2

    @staticmethod
    @always_inline
    def map_in[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width]) -> Values[dtype, width]:
        return {v[0], v[0] * v[0]}

    @staticmethod
    @always_inline
    def finish[
        dtype: DType, //
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        var sum = _mean(row, total[0])
        var rest = sum * row.inverse_n
        var eps = row.number + row.parameter * row.parameter
        var rstd = LayerNorm.rstd(sum, total[1], row.inverse_n, eps)
        return {before[0] + rest, rstd, -rest * rstd}

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], total: Values[dtype, 1]
    ) -> Values[dtype, width]:
        return {v[0] * total[1] + total[2], v[1], v[2]}


struct _Affine(Stage):
    """(xhat, gamma, beta) -> xhat gamma + beta."""

    comptime terms = 0
    comptime broadcast = False

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], total: Values[dtype, 1]
    ) -> Values[dtype, width]:
        return {v[0] * v[1] + v[2]}


struct _Given(Stage):
    """(x, gamma, beta) -> (xhat, gamma, beta), given mean and rstd."""

    comptime terms = 0
    comptime broadcast = False

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], total: Values[dtype, 1]
    ) -> Values[dtype, width]:
        return {_xhat(row, v[0]), v[1], v[2]}


@always_inline
def _xhat[
    dtype: DType, width: Int, //
](row: Row[dtype], x: SIMD[dtype, width]) -> SIMD[dtype, width]:
    return LayerNorm.xhat(x, _mean(row, row.saved[0]), row.saved[1])


struct _Gradient(Stage):
    """(dz, x, gamma, beta) -> (dx, z, dz xhat, dz), given mean and rstd."""

    comptime terms = 2

    @staticmethod
    @always_inline
    def map_in[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width]) -> Values[dtype, width]:
        var g = v[0] * v[2]
        return {g, g * _xhat(row, v[1])}

    @staticmethod
    @always_inline
    def finish[
        dtype: DType, //
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        return {
            _mean(row, total[0] * row.inverse_n),
            total[1] * row.inverse_n,
        }

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width], c: Values[dtype, 1]) -> Values[
        dtype, width
    ]:
        var xhat = _xhat(row, v[1])
        # Rounded, as it was for its mean: nothing may be left of a row of one feature.
        var g = v[0].fma(v[2], 0)
        var dx = LayerNorm.dx(g, xhat, row.saved[1], c[0], c[1])
        return {dx, xhat * v[2] + v[3], v[0] * xhat, v[0]}


comptime NormForward[has_residual: Bool = False] = Program[
    _CenterIfAsked,
    _Normalize,
    _Affine,
    features_=2,
    first_narrow_=0,
    has_residual_=has_residual,
]
"""From x, gamma, beta and the number eps to z, with the results mean and rstd.

Parameters:
    has_residual: Whether there is a residual.
"""

comptime NormGiven[has_residual: Bool = False] = Program[
    _Given,
    _Affine,
    features_=2,
    saved_=2,
    first_narrow_=0,
    has_residual_=has_residual,
]
"""From x, gamma, beta, mean and rstd to z.

Parameters:
    has_residual: Whether there is a residual.
"""

comptime NormBackward[columns: Int = 2, has_addend: Bool = False] = Program[
    _Gradient,
    inputs_=2,
    features_=2,
    saved_=2,
    outputs_=2,
    columns_=columns,
    first_narrow_=1,
    has_addend_=has_addend,
]
"""From dz, x, gamma, beta, mean and rstd to dx and z, and the partial sums of dgamma and dbeta.

Parameters:
    columns: 0 to leave out the sums.
    has_addend: Whether another gradient is part of dx.
"""
