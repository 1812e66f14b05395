"""Which columns a tile for few rows has, where several matrices may stand for b."""

from ..parts import HALVES, SIDE_BY_SIDE, PartSizes, Parts
from .layout import FEW_OUTPUTS


def parts_name(parts: Int) -> String:
    """Names how several matrices make the product.

    Args:
        parts: WHOLE, SIDE_BY_SIDE or HALVES.

    Returns:
        The name.
    """
    if parts == SIDE_BY_SIDE:
        return "_side_by_side"
    return "_halves" if parts == HALVES else ""


def count_maps(parts: Int) -> Int:
    """Counts the tensor maps of b.

    Args:
        parts: WHOLE, SIDE_BY_SIDE or HALVES.

    Returns:
        How many there are.
    """
    return 3 if parts == SIDE_BY_SIDE else 2 if parts == HALVES else 1


@doc_hidden
@fieldwise_init
struct FewRowsTile[parts: Int](TrivialRegisterPassable):
    """The columns of a tile."""

    var part: UInt32
    """Which of several b."""
    var first_output: UInt32
    """The first of its columns there."""

    @always_inline
    def __init__(out self, tile: UInt32, sizes: PartSizes):
        self.part = 0
        self.first_output = tile * FEW_OUTPUTS
        comptime if Self.parts == SIDE_BY_SIDE:
            var found = Parts(sizes, FEW_OUTPUTS).find(tile)
            self.part = found[0]
            self.first_output = found[1] * FEW_OUTPUTS

    @always_inline
    def columns_of(self, warp: UInt32, n: UInt32) -> WarpColumns:
        """Returns the columns of a warp's sums.

        Args:
            warp: Which of the warps that multiply.
            n: Columns of c, of a gate twice as many.

        Returns:
            The columns.
        """
        comptime if Self.parts == HALVES:
            return {
                warp // 2,
                n // 2,
                self.first_output // 2 + (warp & 1) * 16,
            }
        return {0, n, self.first_output + warp * 16}


@doc_hidden
@fieldwise_init
struct WarpColumns(TrivialRegisterPassable):
    """16 columns whose sums a warp has."""

    var half: UInt32
    """Of a gate: which of its two matrices."""
    var width: UInt32
    """How many columns c has, or that half of it."""
    var first: UInt32
    """The first of the 16 there."""
