"""Centers a row in two stages, so that rows far from zero lose nothing.

The first mean is that of x minus the row's first element: a constant row gives exactly zero. It is rounded to
its type; the mean of the rest is small, and is subtracted in a second stage or in the stage that follows.
It may be the mean of the row's first elements alone: the mean of 1 / n of a row is within sqrt(n - 1) standard deviations
of its whole mean, so the squares of what is left sum up to at most n times those of the centered row.
"""

from ..stage import Stage
from ..values import Row, Values


comptime ESTIMATE = 8
"""The first mean may be that of the first 1 / `ESTIMATE` of a row."""


struct _Center(Stage):
    """(x, ...) -> (x - mean(x), ...), give or take the rounding of the mean."""

    comptime share = ESTIMATE

    @staticmethod
    @always_inline
    def map_in[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width]) -> Values[dtype, width]:
        return {v[0] - row.first[0]}

    @staticmethod
    @always_inline
    def finish[
        dtype: DType, //
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        return {row.first[0] + total[0] * row.inverse_n}

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], mean: Values[dtype, 1]
    ) -> Values[dtype, width]:
        var centered = v
        centered[0] = v[0] - mean[0]
        return centered


struct _Recenter(Stage):
    """(v, ...) -> (v - mean(v), ...): subtracts what the rounding of a mean has left."""

    @staticmethod
    @always_inline
    def finish[
        dtype: DType, //
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        return {total[0] * row.inverse_n}

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], rest: Values[dtype, 1]
    ) -> Values[dtype, width]:
        var centered = v
        centered[0] = v[0] - rest[0]
        return centered
