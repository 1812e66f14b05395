"""LayerNorm as three ops, each with its own backward: div(mean(x), norm(mean(x))).

    mean(x) = x - sum x / K;  norm(v) = sqrt(sum v v / K) for every element;  div(a, b) = a / b

Their names are those of the Spiral language's LayerNorm, which they follow.
"""

from std.math import sqrt

from .center import _Center, _Recenter
from ..program import Program
from ..stage import Stage
from ..values import Row, Values


struct _Norm(Stage):
    """v -> sqrt(mean(v v))."""

    @staticmethod
    @always_inline
    def map_in[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width]) -> Values[dtype, width]:
        return {v[0] * v[0]}

    @staticmethod
    @always_inline
    def finish[
        dtype: DType, //
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        return {sqrt(total[0] * row.inverse_n)}

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], norm: Values[dtype, 1]
    ) -> Values[dtype, width]:
        return {norm[0]}


struct _NormGradient(Stage):
    """(dr, v) -> sum(dr) v / (norm K)."""

    comptime terms = 2

    @staticmethod
    @always_inline
    def map_in[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width]) -> Values[dtype, width]:
        return {v[0], v[1] * v[1]}

    @staticmethod
    @always_inline
    def finish[
        dtype: DType, //
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        var norm = sqrt(total[1] * row.inverse_n)
        return {total[0] * row.inverse_n / norm}

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], slope: Values[dtype, 1]
    ) -> Values[dtype, width]:
        return {v[1] * slope[0]}


struct _Div(Stage):
    """(a, b) -> a / b."""

    comptime terms = 0
    comptime broadcast = False

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], total: Values[dtype, 1]
    ) -> Values[dtype, width]:
        return {v[0] / v[1]}


struct _DivGradient(Stage):
    """(dr, a, b) -> (dr / b, -dr a / b^2)."""

    comptime terms = 0
    comptime broadcast = False

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], total: Values[dtype, 1]
    ) -> Values[dtype, width]:
        var da = v[0] / v[2]
        return {da, -da * (v[1] / v[2])}


comptime Mean = Program[_Center, _Recenter, primed_=True]
"""From x to x - mean(x). It is its own backward."""

comptime Norm = Program[_Norm]
"""From v to sqrt(mean(v v)), for every element of the row."""

comptime NormBackward = Program[_NormGradient, inputs_=2, primed_=True]
"""From the gradient and v to the gradient of v."""

comptime Div = Program[_Div, inputs_=2]
"""From a and b to a / b."""

comptime DivBackward = Program[
    _DivGradient, inputs_=3, outputs_=2, primed_=True
]
"""From the gradient, a and b to the gradients of a and b."""
