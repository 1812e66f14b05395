"""Prologues of a CPU's products, applied to an operand while it is packed."""

from ...rounding import converted
from .blocking import Blocking


trait RowPrologue(TrivialRegisterPassable):
    """Turns rows of a matrix into rows of an operand, vector by vector.

    Packing asks for `row` once, and then passes that row's vectors.
    """

    def row(self, index: Int) -> Self:
        """Prepares for a row.

        Args:
            index: Which row of the matrix.

        Returns:
            What to apply to its vectors.
        """
        ...

    def apply[
        dtype: DType, width: Int
    ](self, value: SIMD[dtype, width], column: Int, count: Int) -> SIMD[
        Blocking[dtype].operand, width
    ]:
        """Turns a vector of the row into one of the operand.

        Parameters:
            dtype: Element type of the matrix.
            width: Number of lanes.

        Args:
            value: The vector.
            column: Index of its first element in the row.
            count: Number of elements that are there; any value may follow them.

        Returns:
            The operand's vector.
        """
        ...


@fieldwise_init
struct AsIs(RowPrologue):
    """Packs a matrix unchanged."""

    @always_inline
    def row(self, index: Int) -> Self:
        """Does nothing.

        Args:
            index: Which row.

        Returns:
            The same.
        """
        return self

    @always_inline
    def apply[
        dtype: DType, width: Int
    ](self, value: SIMD[dtype, width], column: Int, count: Int) -> SIMD[
        Blocking[dtype].operand, width
    ]:
        """Converts a vector.

        Parameters:
            dtype: Element type of the matrix.
            width: Number of lanes.

        Args:
            value: The vector.
            column: Index of its first element.
            count: Number of its elements.

        Returns:
            The operand's vector.
        """
        return converted[Blocking[dtype].operand](value)
