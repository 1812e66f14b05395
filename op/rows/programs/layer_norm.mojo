"""Writes LayerNorm, forward and backward, as row programs.

The backward can write y on its way, for who needs it again and has not kept it.

The mean is found twice. First as the mean of x less the row's first element, so that a constant row gives
exactly zero. What its rounding leaves is the mean of v, and is taken off v and off the variance: rows far
from zero lose nothing.
"""

from ...norms.layer_norm import LayerNorm
from ..program import Program
from ..stage import Stage
from ..values import SAME, Row, Values
from .center import _Center


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
        var rest = total[0] * row.inverse_n
        var eps = row.number + row.parameter * row.parameter
        var rstd = LayerNorm.rstd(total[0], total[1], row.inverse_n, eps)
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


struct _Gradient(Stage):
    """(dy, x, gamma, beta) -> (dx, y, dy xhat, dy), given mean and rstd."""

    comptime terms = 2

    @staticmethod
    @always_inline
    def map_in[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width]) -> Values[dtype, width]:
        var g = v[0] * v[2]
        return {g, g * LayerNorm.xhat(v[1], row.saved[0], row.saved[1])}

    @staticmethod
    @always_inline
    def finish[
        dtype: DType, //
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        return {total[0] * row.inverse_n, total[1] * row.inverse_n}

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width], c: Values[dtype, 1]) -> Values[
        dtype, width
    ]:
        var rstd = row.saved[1]
        var xhat = LayerNorm.xhat(v[1], row.saved[0], rstd)
        var dx = LayerNorm.dx(v[0] * v[2], xhat, rstd, c[0], c[1])
        return {dx, xhat * v[2] + v[3], v[0] * xhat, v[0]}


comptime LayerNormForward[narrow: DType = SAME] = Program[
    _Center, _Normalize, _Affine, features_=2, narrow_=narrow
]
"""From x, gamma, beta and the number eps to y, with the results mean and rstd.

Parameters:
    narrow: The type of y, if it is not that of x; else `SAME`.
"""

comptime LayerNormBackward[narrow: DType = SAME, columns: Int = 2] = Program[
    _Gradient,
    inputs_=2,
    features_=2,
    saved_=2,
    outputs_=2,
    columns_=columns,
    narrow_=narrow,
    first_narrow_=1,
]
"""From dy, x, gamma, beta, mean and rstd to dx and y, and the partial sums of dgamma and dbeta.

Parameters:
    narrow: The type of y, if it is not that of x; else `SAME`.
    columns: 0 to leave out the sums.
"""
