"""Packs matrices into the order in which the microkernel reads them.

Columns that only fill up the last vector of a panel hold arbitrary values; the
product's columns that they make are never stored. Rows that only fill up the
last step hold zeros, because they are summed with the others.
"""

from std.math import align_up, ceildiv
from std.sys import size_of

from .blocking import Blocking
from .memory import (
    Buffer,
    CACHE_LINE,
    Matrix,
    lanes_below,
    load_first,
    prefetch_for_read,
)
from .prologue import AsIs, RowPrologue


def pack_rows[
    dtype: DType, Prologue: RowPrologue = AsIs
](
    target: Matrix[Blocking[dtype].operand],
    source: Matrix[dtype],
    first: Int,
    rows: Int,
    columns: Int,
    prologue: Prologue = AsIs(),
):
    """Copies rows of a matrix into the form of a left operand.

    Parameters:
        dtype: Element type of the matrix.
        Prologue: What is done to each row.

    Args:
        target: The left operand, in rows.
        source: The matrix.
        first: The first row to copy.
        rows: Number of rows.
        columns: Number of columns.
        prologue: What is done to each row.
    """
    comptime B = Blocking[dtype]
    comptime width = B.width * B.pair
    for i in range(rows):
        var line = source.at(first + i)
        var out = target.at(i)
        var its = prologue.row(first + i)
        # The stride leaves room for whole vectors; zeros complete a pair.
        for k in range(0, columns, width):
            var left = columns - k
            var value = its.apply(
                load_first[width](line.unsafe_offset(k), left), k, left
            )
            if left < width:
                value = lanes_below[width](left).select(
                    value, SIMD[B.operand, width](0)
                )
            out.unsafe_offset(k).unsafe_store(value)


def _pack_steps[
    dtype: DType, Prologue: RowPrologue, width: Int, ahead: Int
](
    panel: Buffer[Blocking[dtype].operand],
    source: Matrix[dtype],
    row: Int,
    column: Int,
    rows: Int,
    columns: Int,
    prologue: Prologue,
):
    """Packs whole pairs of rows, the last completed by zeros."""
    comptime B = Blocking[dtype]
    var vectors = ceildiv(columns, width)
    var part = source.part(row, column)
    for step in range(ceildiv(rows, B.pair)):
        var first = row + step * B.pair
        var line = part.at(step * B.pair)
        var out = panel.unsafe_offset(step * vectors * width * B.pair)
        comptime if ahead > 0:
            comptime for i in range(B.pair):
                for k in range(0, columns, CACHE_LINE // size_of[dtype]()):
                    prefetch_for_read(
                        line.unsafe_offset((i + ahead) * source.stride + k)
                    )
        var upper = prologue.row(first)
        comptime if B.pair == 1:
            for v in range(vectors):
                out.unsafe_offset(v * width).unsafe_store(
                    _load[dtype, width](line, column, v, columns, upper)
                )
        else:
            var has_lower = step * B.pair + 1 < rows
            var lower = prologue.row(first + 1) if has_lower else upper
            for v in range(vectors):
                var pairs = SIMD[B.operand, width](0)
                if has_lower:
                    pairs = _load[dtype, width](
                        line.unsafe_offset(source.stride),
                        column,
                        v,
                        columns,
                        lower,
                    )
                out.unsafe_offset(v * width * B.pair).unsafe_store(
                    _load[dtype, width](
                        line, column, v, columns, upper
                    ).interleave(pairs)
                )


def pack_panel[
    dtype: DType,
    Prologue: RowPrologue = AsIs,
    *,
    width: Int = Blocking[dtype].width,
    ahead: Int = 0,
](
    panel: Buffer[Blocking[dtype].operand],
    source: Matrix[dtype],
    row: Int,
    column: Int,
    rows: Int,
    columns: Int,
    prologue: Prologue = AsIs(),
):
    """Packs a part of a matrix as a panel as wide as its columns.

    Parameters:
        dtype: Element type of the matrix.
        Prologue: What is done to each row.
        width: Columns in one vector of the panel.
        ahead: How many rows ahead to ask for; they need not exist.

    Args:
        panel: The panel at the first step.
        source: The matrix.
        row: The first row to pack.
        column: The first column.
        rows: Rows to pack, the steps of the product.
        columns: Columns to pack.
        prologue: What is done to each row.
    """
    _pack_steps[dtype, Prologue, width, ahead](
        panel, source, row, column, rows, columns, prologue
    )
    _complete_step[dtype](panel, rows, ceildiv(columns, width) * width)


@always_inline
def _complete_step[
    dtype: DType
](panel: Buffer[Blocking[dtype].operand], rows: Int, columns: Int):
    """Writes zeros after the last pair up to a whole step."""
    comptime B = Blocking[dtype]
    comptime if B.step > B.pair:
        var end = align_up(rows, B.step) * columns
        for i in range(align_up(rows, B.pair) * columns, end, B.width):
            panel.unsafe_offset(i).unsafe_store(SIMD[B.operand, B.width](0))


@always_inline
def _load[
    dtype: DType, width: Int, Prologue: RowPrologue
](
    line: Buffer[dtype],
    column: Int,
    vector: Int,
    columns: Int,
    its: Prologue,
) -> SIMD[Blocking[dtype].operand, width]:
    """Loads a vector of a row that begins at a column."""
    var k = vector * width
    return its.apply(
        load_first[width](line.unsafe_offset(k), columns - k),
        column + k,
        columns - k,
    )


def pack_panels[
    dtype: DType, Prologue: RowPrologue = AsIs, *, width: Int, vectors: Int
](
    panels: Buffer[Blocking[dtype].operand],
    panel_stride: Int,
    source: Matrix[dtype],
    row: Int,
    column: Int,
    rows: Int,
    columns: Int,
    prologue: Prologue = AsIs(),
):
    """Packs a part of a matrix as adjacent panels.

    A few rows at a time, and asked for ahead: long pieces of few rows come
    faster than short pieces of many.

    Parameters:
        dtype: Element type of the matrix.
        Prologue: What is done to each row.
        width: Columns in one vector of a panel.
        vectors: Vectors across a panel; the last panel has as few as it needs.

    Args:
        panels: The first panel.
        panel_stride: Distance between panels.
        source: The matrix.
        row: The first row to pack.
        column: The first column.
        rows: Rows to pack, the steps of the product.
        columns: Columns to pack.
        prologue: What is done to each row.
    """
    comptime at_once = 8
    comptime panel_width = width * vectors
    for step in range(0, rows, at_once):
        for k in range(0, columns, panel_width):
            var left = min(panel_width, columns - k)
            _pack_steps[dtype, Prologue, width, at_once](
                panels.unsafe_offset(
                    k // panel_width * panel_stride
                    + step * ceildiv(left, width) * width
                ),
                source,
                row + step,
                column + k,
                min(at_once, rows - step),
                left,
                prologue,
            )
    for k in range(0, columns, panel_width):
        _complete_step[dtype](
            panels.unsafe_offset(k // panel_width * panel_stride),
            rows,
            ceildiv(min(panel_width, columns - k), width) * width,
        )
