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
