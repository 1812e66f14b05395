"""Activates a panel of the product while its sums are in cache.

Beside the product rather than in its register tiles: an activation takes more
instructions than a tile's whole epilogue, and there is a tile for every number
of rows and vectors. Writing sums and reading them again costs a hundredth of
the product, and lets the two halves of a gate meet.
"""

from ...call import Call
from ...gemm.cpu.blocking import Blocking
from ...gemm.cpu.memory import (
    Buffer,
    Matrix,
    prefetch_for_write,
    store_first,
)
from ...gemm.activation import GATED, SILU, activate

comptime _AHEAD = 4
"""Rows ahead of which the lines to write are asked for."""


@fieldwise_init
struct Half[dtype: DType](TrivialRegisterPassable):
    """A panel's sums, and their bias. Before a gate there are two such halves.

    Parameters:
        dtype: Element type of the tensors.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    var sums: Matrix[Self.B.accum]
    """The sums, in whole vectors."""
    var bias: Buffer[Self.B.accum]
    """A number for each column of the panel."""

    @always_inline
    def at(self, row: Int, column: Int) -> SIMD[Self.B.accum, Self.B.width]:
        """Computes a vector of h.

        Args:
            row: Row of the panel.
            column: Its first column.

        Returns:
            The sums and the bias.
        """
        comptime width = Self.B.width
        return (
            self.sums.at(row, column).unsafe_load[width=width]()
            + self.bias.unsafe_offset(column).unsafe_load[width=width]()
        )


def finish_columns[
    dtype: DType
](
    call: Call,
    first: Int,
    column: Int,
    rows: Int,
    columns: Int,
    half: Half[dtype],
    gated: Half[dtype],
):
    """Makes a part of y, activated or not.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        call: The tensors.
        first: The first row.
        column: The first column of y.
        rows: Number of rows.
        columns: Number of columns.
        half: The sums; before a gate, those of the gate.
        gated: What a gate multiplies.
    """
    if call.activation != 0:
        activate_panel(call, first, column, rows, columns, half, gated)
        return
    comptime B = Blocking[dtype]
    var y = Matrix[dtype](call.y, call.N).part(first, column)
    for row in range(rows):
        for j in range(0, columns, B.width):
            prefetch_for_write(y.at(row + _AHEAD, j))
            store_first(
                y.at(row, j), half.at(row, j).cast[dtype](), columns - j
            )


def activate_panel[
    dtype: DType
](
    call: Call,
    first: Int,
    column: Int,
    rows: Int,
    columns: Int,
    half: Half[dtype],
    gated: Half[dtype],
):
    """Makes a part of y, and of h where its address is given.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        call: The tensors.
        first: The first row.
        column: The first column of y.
        rows: Number of rows.
        columns: Number of columns.
        half: The sums; before a gate, those of the gate.
        gated: What a gate multiplies.
    """
    comptime for kind in range(1, Int(SILU) + 1):
        if call.activation % GATED == kind:
            _activate[dtype, kind](
                call, first, column, rows, columns, half, gated
            )


def _activate[
    dtype: DType, kind: Int
](
    call: Call,
    first: Int,
    column: Int,
    rows: Int,
    columns: Int,
    half: Half[dtype],
    gated: Half[dtype],
):
    comptime B = Blocking[dtype]
    var is_gated = call.activation >= GATED
    var y = Matrix[dtype](call.y, call.N).part(first, column)
    # Where h is not wanted nothing is written there.
    var h = y
    if call.h != 0:
        h = Matrix[dtype](call.h, 2 * call.N if is_gated else call.N).part(
            first, column
        )
    for row in range(rows):
        for j in range(0, columns, B.width):
            var left = columns - j
            prefetch_for_write(y.at(row + _AHEAD, j))
            var value = half.at(row, j)
            if call.h != 0:
                prefetch_for_write(h.at(row + _AHEAD, j))
                store_first(h.at(row, j), value.cast[dtype](), left)
            value = activate(Int32(kind), value)
            if is_gated:
                var factor = gated.at(row, j)
                if call.h != 0:
                    prefetch_for_write(h.at(row + _AHEAD, call.N + j))
                    store_first(
                        h.at(row, call.N + j), factor.cast[dtype](), left
                    )
                value *= factor
            store_first(y.at(row, j), value.cast[dtype](), left)
