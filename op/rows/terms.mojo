"""Adds up the terms of a pass, each stage's in its own way."""

from .program import RowProgram
from .values import Terms


@always_inline
def identities[
    P: RowProgram, dtype: DType, width: Int
]() -> Terms[dtype, width]:
    """Returns the terms of no elements.

    Parameters:
        P: The row program.
        dtype: The type computed in.
        width: The number of elements side by side.

    Returns:
        What changes no sum.
    """
    var sums = Terms[dtype, width](fill={})
    comptime for s in range(P.stages):
        comptime redo = P.redo_of[s]()
        var none = materialize[redo]().identity[dtype, width]()
        sums[s] = {none, none, none, none}
    return sums


@always_inline
def combine[
    dtype: DType, width: Int, //, P: RowProgram, pass_index: Int
](a: Terms[dtype, width], b: Terms[dtype, width]) -> Terms[dtype, width]:
    """Reduces the terms of two groups of elements.

    Parameters:
        dtype: The type computed in.
        width: The number of elements side by side.
        P: The row program.
        pass_index: The pass, of whose stages the terms are.

    Args:
        a: The terms of one group.
        b: The terms of the other.

    Returns:
        The terms of both.
    """
    var sums = a
    comptime for s in range(P.stages):
        comptime if P.pass_of(s) == pass_index:
            comptime redo = P.redo_of[s]()
            var sum = a[s]
            comptime for t in range(P.terms_of[s]()):
                sum[t] = materialize[redo]().combine[dtype, width](
                    sum[t], b[s][t]
                )
            sums[s] = sum
    return sums
