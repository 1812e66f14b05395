"""Centres a row in two stages, so that rows far from zero lose nothing.

The first mean is that of x less the row's first element: a constant row gives exactly zero. It is rounded to
its type; the mean of what is left after it is small, and is taken off in a second stage or in the stage that
follows.
"""

from .stage import Stage
from .values import Row, Values


struct Centre(Stage):
    """(x, ...) -> (x - mean(x), ...), give or take the rounding of the mean."""

    @staticmethod
    @always_inline
    def map_in[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width]) -> Values[dtype, width]:
        """Returns x less the row's first element.

        Parameters:
            dtype: The type computed in.
            width: The number of elements.

        Args:
            row: The row.
            v: The values of the elements.

        Returns:
            The terms.
        """
        return {v[0] - row.first[0]}

    @staticmethod
    @always_inline
    def finish[
        dtype: DType, //
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        """Returns the mean.

        Parameters:
            dtype: The type computed in.

        Args:
            row: The row.
            total: The sum of the terms.
            before: The totals of the stage before.

        Returns:
            The mean.
        """
        return {row.first[0] + total[0] * row.inverse_n}

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], mean: Values[dtype, 1]
    ) -> Values[dtype, width]:
        """Returns the first value less the mean.

        Parameters:
            dtype: The type computed in.
            width: The number of elements.

        Args:
            row: The row.
            v: The values of the elements.
            mean: The mean.

        Returns:
            The centred values.
        """
        var centred = v
        centred[0] = v[0] - mean[0]
        return centred


struct Recentre(Stage):
    """(v, ...) -> (v - mean(v), ...): takes off what the rounding of a mean has left."""

    @staticmethod
    @always_inline
    def finish[
        dtype: DType, //
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        """Returns the mean.

        Parameters:
            dtype: The type computed in.

        Args:
            row: The row.
            total: The sum of the terms.
            before: The totals of the stage before.

        Returns:
            The mean.
        """
        return {total[0] * row.inverse_n}

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], rest: Values[dtype, 1]
    ) -> Values[dtype, width]:
        """Returns the first value less the mean.

        Parameters:
            dtype: The type computed in.
            width: The number of elements.

        Args:
            row: The row.
            v: The values of the elements.
            rest: The mean.

        Returns:
            The centred values.
        """
        var centred = v
        centred[0] = v[0] - rest[0]
        return centred
