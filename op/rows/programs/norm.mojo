"""Writes norms, forward and backward, as row programs.

Before a norm a residual may be added, and its backward may be joined by another gradient. The backward can
write z on its way, for who needs it again and has not kept it.

LayerNorm's mean is found twice. First as the mean of x less the row's first element, so that a constant row
gives exactly zero. What its rounding leaves is the mean of v, and is taken off v and off the variance: rows far
from zero lose nothing.
"""

from ...norms.norm import Norm
from ..program import Program
from ..stage import Stage
from ..values import Row, Values
from .center import _Center


struct _Normalize[N: Norm](Stage):
    """(v, gamma, beta) -> ((v - mean v) rstd, gamma, beta) for v = x - mean x; the results are mean and rstd."""

    comptime terms = 2
    comptime results = 2

    @staticmethod
    @always_inline
    def map_in[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width]) -> Values[dtype, width]:
        return {v[0] * v[0], v[0]}

    @staticmethod
    @always_inline
    def finish[
        dtype: DType, //
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        var eps = row.number + row.parameter * row.parameter
        var rstd = Self.N.rstd(total[1], total[0], row.inverse_n, eps)
        comptime if Self.N.has_mean:
            var rest = total[1] * row.inverse_n
            return {before[0] + rest, rstd, -rest * rstd}
        else:
            return {0, rstd}

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], total: Values[dtype, 1]
    ) -> Values[dtype, width]:
        var xhat = v[0] * total[1]
        comptime if Self.N.has_mean:
            xhat += total[2]
        return {xhat, v[1], v[2]}


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


struct _Given[N: Norm](Stage):
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
        return {Self.N.xhat(v[0], row.saved[0], row.saved[1]), v[1], v[2]}


struct _Gradient[N: Norm](Stage):
    """(dz, x, gamma, beta) -> (dx, z, dz xhat, dz), given mean and rstd."""

    comptime terms = 2 if Self.N.has_mean else 1

    @staticmethod
    @always_inline
    def map_in[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width]) -> Values[dtype, width]:
        var g = v[0] * v[2]
        return {g * Self.N.xhat(v[1], row.saved[0], row.saved[1]), g}

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
        var xhat = Self.N.xhat(v[1], row.saved[0], rstd)
        var dx = Self.N.dx(v[0] * v[2], xhat, rstd, c[1], c[0])
        return {dx, xhat * v[2] + v[3], v[0] * xhat, v[0]}


comptime NormForward[N: Norm] = Program[
    _Center[N.has_mean],
    _Normalize[N],
    _Affine,
    features_=2,
    first_narrow_=0,
    has_residual_=True,
]
"""From x, gamma, beta and the number eps to z, with the results mean and rstd.

Parameters:
    N: The norm.
"""

comptime NormGiven[N: Norm] = Program[
    _Given[N],
    _Affine,
    features_=2,
    saved_=2,
    first_narrow_=0,
    has_residual_=True,
]
"""From x, gamma, beta, mean and rstd to z.

Parameters:
    N: The norm.
"""

comptime NormBackward[N: Norm, columns: Int = 2] = Program[
    _Gradient[N],
    inputs_=2,
    features_=2,
    saved_=2,
    outputs_=2,
    columns_=columns,
    first_narrow_=1,
    has_addend_=True,
]
"""From dz, x, gamma, beta, mean and rstd to dx and z, and the partial sums of dgamma and dbeta.

Parameters:
    N: The norm.
    columns: 0 to leave out the sums.
"""
