"""Sums over rows, without any stage before them."""

from ..program import Program
from ..stage import Stage


struct _Itself(Stage):
    """Maps elements to themselves."""

    comptime terms = 0
    comptime broadcast = False


comptime ColumnSum = Program[_Itself, outputs_=0, columns_=1]
"""From x to the partial sums of its rows."""

comptime Nothing = Program[_Itself, outputs_=0]
"""The same, where the sums are not wanted."""
