"""Turns sums into y: adds the bias, applies the activation or the gate.

This is separate from the microkernel: an activation takes more instructions than
the rest of a tile's epilogue. Where tile registers multiply, it is interleaved
with them in vector registers, a piece in each step.
"""

from std.sys import size_of

from ...call import Call
from ...gemm.activation import ANY, GATED, RELU, SILU, activate
from ...gemm.cpu.interleave import Interleaved
from ...gemm.cpu.blocking import Blocking
from ...gemm.cpu.memory import (
    Buffer,
    Matrix,
    prefetch_for_write,
    store_first,
)
from ...rounding import converted

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
    """The sums, in whole panels."""
    var bias: Buffer[Self.B.accum]
    """A number for each column of the panel."""

    @always_inline
    def at[
        width: Int
    ](self, row: Int, column: Int) -> SIMD[Self.B.accum, width]:
        """Computes a piece of h.

        Parameters:
            width: Its columns.

        Args:
            row: Row of the panel.
            column: Its first column.

        Returns:
            The sums and the bias.
        """
        return (
            self.sums.at(row, column).unsafe_load[width=width]()
            + self.bias.unsafe_offset(column).unsafe_load[width=width]()
        )


struct FinishRows[dtype: DType](Interleaved):
    """Makes a part of y, and of h where that is kept, row after row, in pieces of some columns.

    Parameters:
        dtype: Element type of the tensors.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""
    comptime width = Self.B.width * (2 if Self.B.tile_vectors == 2 else 1)
    """Columns of a piece."""

    var activation: Int
    """Its number in the record."""
    var half: Half[Self.dtype]
    """The sums; before a gate, those of the gate."""
    var gated: Half[Self.dtype]
    """What a gate multiplies."""
    var y: Matrix[Self.dtype]
    """The part of y."""
    var h: Matrix[Self.dtype]
    """The part of h, that of y where h is not kept."""
    var keeps_h: Bool
    """Whether h is kept."""
    var up: Int
    """Columns of h from a gate to what it multiplies."""
    var rows: Int
    """Rows of the part."""
    var columns: Int
    """Its columns."""
    var pieces: Int
    """Pieces to make in a step."""
    var row: Int
    """The next row."""
    var column: Int
    """Its next column."""

    def __init__(
        out self,
        call: Call,
        first: Int,
        column: Int,
        rows: Int,
        columns: Int,
        half: Half[Self.dtype],
        gated: Half[Self.dtype],
        pieces: Int,
    ):
        """Begins with the first row.

        Args:
            call: The tensors.
            first: The first row.
            column: The first column of y.
            rows: Number of rows; 0 for nothing to do.
            columns: Number of columns.
            half: The sums; before a gate, those of the gate.
            gated: What a gate multiplies.
            pieces: Pieces to make in a step.
        """
        self.activation = call.activation
        self.half = half
        self.gated = gated
        self.y = Matrix[Self.dtype](call.y, call.N).part(first, column)
        self.h = self.y
        self.keeps_h = call.activation != 0 and call.h != 0
        if self.keeps_h:
            self.h = Matrix[Self.dtype](
                call.h, 2 * call.N if call.activation >= GATED else call.N
            ).part(first, column)
        self.up = call.N
        self.rows = rows
        self.columns = columns
        self.pieces = pieces
        self.row = 0
        self.column = 0

    @always_inline
    def step(mut self):
        """Makes some pieces."""
        for _ in range(self.pieces):
            if self.row >= self.rows:
                return
            self._make()

    def finish(mut self):
        """Makes all that is left."""
        comptime for kind in range(Int(RELU), Int(SILU) + 1):
            if self.activation % GATED == kind:
                return self._finish_known[kind]()
        while self.row < self.rows:
            self._make()

    @no_inline
    def _finish_known[kind: Int](mut self):
        """Makes it in a loop for this activation: a call for each piece takes longer than the activation itself."""
        # A copy stays in registers: through a reference, what a piece stores might change it.
        var part = self
        while part.row < part.rows:
            part._activate[kind]()
            part._advance()
        self.row = part.row

    @always_inline
    def _make(mut self):
        if self.activation == 0:
            self._store(
                self.y, 0, self.half.at[Self.width](self.row, self.column)
            )
        else:
            self._activate_any()
        self._advance()

    @always_inline
    def _advance(mut self):
        self.column += Self.width
        if self.column >= self.columns:
            self.column = 0
            self.row += 1

    @always_inline
    def _store(
        self,
        target: Matrix[Self.dtype],
        offset: Int,
        value: SIMD[Self.B.accum, Self.width],
    ):
        prefetch_for_write(target.at(self.row + _AHEAD, offset + self.column))
        store_first(
            target.at(self.row, offset + self.column),
            converted[Self.dtype](value),
            self.columns - self.column,
        )

    @no_inline
    def _activate_any(self):
        self._activate[ANY]()

    @always_inline
    def _activate[kind: Int](self):
        var value = self.half.at[Self.width](self.row, self.column)
        if self.keeps_h:
            self._store(self.h, 0, value)
        value = activate[narrow=size_of[Self.dtype]() == 2, among=kind](
            Int32(self.activation % GATED), value
        )
        if self.activation >= GATED:
            var factor = self.gated.at[Self.width](self.row, self.column)
            if self.keeps_h:
                self._store(self.h, self.up, factor)
            value *= factor
        self._store(self.y, 0, value)


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
    var part = FinishRows[dtype](
        call, first, column, rows, columns, half, gated, 1
    )
    part.finish()
