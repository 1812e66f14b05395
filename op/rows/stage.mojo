"""Defines a stage of a row program: {map_in, redo, map_out}."""

from .values import Redo, Row, Values


trait Stage:
    """One {map_in, redo, map_out} of a row program."""

    comptime terms: Int = 1
    """How many terms are reduced together; a stage with 0 only maps, and does not broadcast."""
    comptime redo: Redo = Redo.ADD
    """How they are reduced."""
    comptime broadcast: Bool = True
    """Whether `map_out` gets the totals. If not (`redo'`), it gets zeros; the totals only leave as results,
    and no pass over the row ends here."""
    comptime results: Int = 0
    """How many of the totals are stored for each row."""
    comptime share: Int = 1
    """Of how much of a row the totals may be estimates: its first 1 / `share`. A later stage corrects what comes of
    that, up to roundings that grow with the root of `share`."""
    comptime optional: Bool = False
    """Whether there may be rows whose terms are not needed, as `needs_terms` says."""

    @staticmethod
    @always_inline
    def needs_terms[dtype: DType, //](row: Row[dtype]) -> Bool:
        """Returns whether `finish` needs the terms of a row, or may get zeros: the same for all rows of a call.

        Parameters:
            dtype: The type computed in.

        Args:
            row: The row.

        Returns:
            Whether.
        """
        return True

    @staticmethod
    @always_inline
    def map_in[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width]) -> Values[dtype, width]:
        """Returns the terms to reduce; the values themselves unless defined.

        Parameters:
            dtype: The type computed in.
            width: The number of elements.

        Args:
            row: The row.
            v: The elements' values.

        Returns:
            The terms.
        """
        return v

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], total: Values[dtype, 1]
    ) -> Values[dtype, width]:
        """Returns the values that the next stage sees; unchanged unless defined.

        Parameters:
            dtype: The type computed in.
            width: The number of elements.

        Args:
            row: The row.
            v: The elements' values.
            total: The totals.

        Returns:
            The new values.
        """
        return v

    @staticmethod
    @always_inline
    def finish[
        dtype: DType, //
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        """Returns the totals that `map_out` sees and that are stored; the reduced terms unless defined.

        Parameters:
            dtype: The type computed in.

        Args:
            row: The row.
            total: The reduced terms.
            before: The totals of the stage before.

        Returns:
            The totals.
        """
        return total
