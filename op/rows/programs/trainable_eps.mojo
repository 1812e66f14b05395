"""LayerNorm whose eps is the square of a trained number o, forward and backward.

    v = x - mean(x);  s = sqrt(o o + mean(v v));  y = v / s
    dx = (dy - mean dy - v mean(dy v) / s^2) / s;  do = sum over rows -o sum(dy v) / s^3
"""

from ...norms.norm import inverse_sqrt
from ..program import Program
from ..stage import Stage
from ..values import Row, Values
from .center import ESTIMATE, _Center
from .norm import _Normalize


struct _CenterBoth(Stage):
    """(dy, x) -> (dy - mean, x - mean), give or take the rounding of the means."""

    comptime terms = 2
    comptime share = ESTIMATE

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


struct _Gradient(Stage):
    """(centered dy, v) -> dx, where s = sqrt(o o + mean(v v)); the result is -o sum(dy v) / s^3.

    What centering left of the means of dy and v is subtracted here.
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


comptime TrainableEpsLayerNorm = Program[_Center, _Normalize, parameter_=True]
"""From x and the parameter o to y: LayerNorm with an eps of o o."""

comptime TrainableEpsLayerNormBackward = Program[
    _CenterBoth,
    _Gradient,
    inputs_=2,
    parameter_=True,
    primed_=True,
]
"""From dy, x and the parameter o to dx; the result is the row's share of the gradient of o."""
