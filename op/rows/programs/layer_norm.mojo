"""Writes LayerNorm, forward and backward, as row programs; also the one whose eps is trained.

    mean = sum x / K;  v = x - mean;  rstd = 1 / sqrt(sum v v / K + eps);  y = v rstd gamma + beta
    xhat = v rstd;  g = dy gamma
    dx = rstd (g - sum g / K - xhat sum g xhat / K);  dgamma = sum over rows dy xhat;  dbeta = sum over rows dy

The backward can write y on its way, for who needs it again and has not kept it.

The mean is found twice. First as the mean of x less the row's first element, so that a constant row gives
exactly zero. What its rounding leaves is the mean of v, and is taken off v and off the variance: rows far
from zero lose nothing.
"""

from .arithmetic import inverse_sqrt
from .centre import Centre
from .program import Program
from .stage import Stage
from .values import SAME, Row, Values


struct _Normalise(Stage):
    """(v, gamma, beta) -> ((v - mean v) rstd, gamma, beta); the results are mean and rstd."""

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
        var variance = total[1] * row.inverse_n - rest * rest
        var eps = row.number + row.parameter * row.parameter
        var rstd = inverse_sqrt(variance + eps)
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


@always_inline
def _xhat[
    dtype: DType, width: Int
](row: Row[dtype], x: SIMD[dtype, width]) -> SIMD[dtype, width]:
    return (x - row.saved[0]) * row.saved[1]


struct _Gradient(Stage):
    """(dy, x, gamma, beta) -> (dx, y, dy xhat, dy), given mean and rstd."""

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
        return {total[0] * row.inverse_n, total[1] * row.inverse_n}

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], along: Values[dtype, 1]
    ) -> Values[dtype, width]:
        var xhat = _xhat(row, v[1])
        var dx = row.saved[1] * (v[0] * v[2] - along[0] - xhat * along[1])
        return {dx, xhat * v[2] + v[3], v[0] * xhat, v[0]}


struct _CentreBoth(Stage):
    """(dy, x) -> (dy - mean, x - mean), give or take the rounding of the means."""

    comptime terms = 2

    @staticmethod
    @always_inline
    def map_in[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width]) -> Values[dtype, width]:
        return {v[0] - row.first[0], v[1] - row.first[1]}

    @staticmethod
    @always_inline
    def finish[
        dtype: DType, //
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        return {
            row.first[0] + total[0] * row.inverse_n,
            row.first[1] + total[1] * row.inverse_n,
        }

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], mean: Values[dtype, 1]
    ) -> Values[dtype, width]:
        return {v[0] - mean[0], v[1] - mean[1]}


struct _TrainableEpsGradient(Stage):
    """(centred dy, v) -> dx, where s = sqrt(o o + mean(v v)); the result is -o sum(dy v) / s^3.

    dx = (dy - v mean(dy v) / s^2) / s, of centred dy and v; what centring left of their means is taken off
    here.
    """

    comptime terms = 4
    comptime results = 1

    @staticmethod
    @always_inline
    def map_in[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width]) -> Values[dtype, width]:
        return {v[0], v[1], v[0] * v[1], v[1] * v[1]}

    @staticmethod
    @always_inline
    def finish[
        dtype: DType, //
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        var rest_dy = total[0] * row.inverse_n
        var rest_v = total[1] * row.inverse_n
        var along_v = total[2] * row.inverse_n - rest_dy * rest_v
        var variance = total[3] * row.inverse_n - rest_v * rest_v
        var o = row.parameter
        var inverse = inverse_sqrt(o * o + variance)
        var slope = along_v * inverse * inverse
        return {
            -o * along_v * row.n * inverse * inverse * inverse,
            inverse,
            -slope * inverse,
            (slope * rest_v - rest_dy) * inverse,
        }

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], total: Values[dtype, 1]
    ) -> Values[dtype, width]:
        return {v[0] * total[1] + v[1] * total[2] + total[3]}


comptime LayerNormTo[narrow: DType] = Program[
    Centre, _Normalise, _Affine, features_=2, narrow_=narrow
]
"""From x, gamma, beta and the number eps to y, with the results mean and rstd.

Parameters:
    narrow: The type of y, if it is not that of x; else `SAME`.
"""

comptime LayerNorm = LayerNormTo[SAME]
"""The same, in one type."""

comptime TrainableEpsLayerNorm = Program[Centre, _Normalise, parameter_=True]
"""From x and the parameter o to v / sqrt(o o + mean(v v)) with v = x - mean(x): eps is o o."""

comptime TrainableEpsLayerNormBackward = Program[
    _CentreBoth,
    _TrainableEpsGradient,
    inputs_=2,
    parameter_=True,
    primed_=True,
]
"""From dy, x and the parameter o to dx; the result is the row's share of the gradient of o."""

comptime LayerNormBackward[narrow: DType = SAME] = Program[
    _Gradient,
    inputs_=2,
    features_=2,
    saved_=2,
    outputs_=2,
    columns_=2,
    narrow_=narrow,
    first_narrow_=1,
]
"""From dy, x, gamma, beta, mean and rstd to dx and y, and the partial sums of dgamma and dbeta.

Parameters:
    narrow: The type of y, if it is not that of x; else `SAME`.
"""

comptime LayerNormBackwardRows[narrow: DType = SAME] = Program[
    _Gradient,
    inputs_=2,
    features_=2,
    saved_=2,
    outputs_=2,
    narrow_=narrow,
    first_narrow_=1,
]
"""From dy, x, gamma, beta, mean and rstd to dx and y.

Parameters:
    narrow: The type of y, if it is not that of x; else `SAME`.
"""
