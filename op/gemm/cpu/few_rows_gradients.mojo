"""Products of a backward with few rows: reading the weight and writing its gradient is what takes time.

Both matrices are passed row by row, in the order of the memory. Sums are those of `microkernel.mojo`, bit for
bit.
"""

from std.math import ceildiv

from ...rounding import converted
from .blocking import Blocking
from .memory import (
    Buffer,
    Matrix,
    load_first,
    prefetch_for_read,
    store_first,
)

comptime MOST_ROWS = 8
"""The most rows: with more, arithmetic takes longer than the memory, and packed operands save some."""

comptime _AT_ONCE = 4
"""Rows of the weight whose products are added before sums are stored."""


def is_served[dtype: DType](rows: Int) -> Bool:
    """Tells whether these products are the fastest.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        rows: Rows of the backward.

    Returns:
        Whether they are few enough, and multiplied one by one.
    """
    return Blocking[dtype].pair == 1 and rows <= MOST_ROWS


def multiply_by_rows[
    dtype: DType
](
    c: Matrix[Blocking[dtype].accum],
    a: Matrix[Blocking[dtype].operand],
    weight: Matrix[dtype],
    rows: Int,
    columns: Int,
    depth: Int,
):
    """Multiplies a few rows by a block of the weight: c = a @ weight.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        c: The product, in whole vectors, which stays in the first cache.
        a: Rows of the left operand.
        weight: The block.
        rows: How many rows, at most `MOST_ROWS`.
        columns: Columns of the block.
        depth: Rows of the block, at most `Blocking.depth`.
    """
    comptime for r in range(1, MOST_ROWS + 1):
        if rows == r:
            _multiply[dtype, r](c, a, weight, columns, depth)


@no_inline
def _multiply[
    dtype: DType, rows: Int
](
    c: Matrix[Blocking[dtype].accum],
    a: Matrix[Blocking[dtype].operand],
    weight: Matrix[dtype],
    columns: Int,
    depth: Int,
):
    var whole = depth // _AT_ONCE * _AT_ONCE
    for n in range(0, whole, _AT_ONCE):
        _add_rows[dtype, rows, _AT_ONCE](
            c, a.part(0, n), weight.part(n, 0), columns, n > 0
        )
    for n in range(whole, depth):
        _add_rows[dtype, rows, 1](
            c, a.part(0, n), weight.part(n, 0), columns, n > 0
        )


@always_inline
def _add_rows[
    dtype: DType, rows: Int, count: Int
](
    c: Matrix[Blocking[dtype].accum],
    a: Matrix[Blocking[dtype].operand],
    weight: Matrix[dtype],
    columns: Int,
    accumulate: Bool,
):
    """Adds the products of some rows of the weight to all sums."""
    comptime B = Blocking[dtype]
    comptime Acc = SIMD[B.accum, B.width]
    var factors = Array[Acc, rows * count](fill=Acc(0))
    comptime for r in range(rows):
        comptime for i in range(count):
            factors[r * count + i] = Acc(
                a.at(r, i).unsafe_load().cast[B.accum]()
            )
    for k in range(0, columns, B.width):
        var line = Array[Acc, count](fill=Acc(0))
        comptime for i in range(count):
            # What follows are the next rows, which the hardware does not expect.
            prefetch_for_read(weight.at(count + i, k))
            line[i] = converted[B.accum](
                load_first[B.width](weight.at(i, k), columns - k)
            )
        comptime for r in range(rows):
            var sums = Acc(0)
            if accumulate:
                sums = c.at(r, k).unsafe_load[width=B.width]()
            comptime for i in range(count):
                sums = factors[r * count + i].fma(line[i], sums)
            c.at(r, k).unsafe_store(sums)


def store_outer_products[
    dtype: DType
](
    c: Matrix[dtype],
    a: Matrix[Blocking[dtype].operand],
    b: Buffer[Blocking[dtype].operand],
    rows: Int,
    columns: Int,
    depth: Int,
):
    """Stores a product whose sums are short: c = a @ b.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        c: The product.
        a: Left operand, in panels of `Blocking.tile_m` rows.
        b: Right operand, in panels of `Blocking.tile_n` columns.
        rows: Rows of the product.
        columns: Columns of the product.
        depth: Products to sum, at most `MOST_ROWS`.
    """
    comptime for d in range(1, MOST_ROWS + 1):
        if depth == d:
            _store[dtype, d](c, a, b, rows, columns)


@no_inline
def _store[
    dtype: DType, depth: Int
](
    c: Matrix[dtype],
    a: Matrix[Blocking[dtype].operand],
    b: Buffer[Blocking[dtype].operand],
    rows: Int,
    columns: Int,
):
    comptime B = Blocking[dtype]
    comptime Acc = SIMD[B.accum, B.width]
    var whole = columns // B.tile_n
    var left = columns - whole * B.tile_n
    for row in range(rows):
        var factors = Array[Acc, depth](fill=Acc(0))
        comptime for d in range(depth):
            factors[d] = Acc(
                a.at(row // B.tile_m, d * B.tile_m + row % B.tile_m)
                .unsafe_load()
                .cast[B.accum]()
            )
        for panel in range(whole):
            _store_vectors[dtype, depth, B.tile_vectors](
                c.part(row, panel * B.tile_n),
                factors,
                b.unsafe_offset(panel * B.panel_size(depth)),
                B.tile_n,
            )
        comptime for vectors in range(1, B.tile_vectors + 1):
            if ceildiv(left, B.width) == vectors:
                _store_vectors[dtype, depth, vectors](
                    c.part(row, whole * B.tile_n),
                    factors,
                    b.unsafe_offset(whole * B.panel_size(depth)),
                    left,
                )


@always_inline
def _store_vectors[
    dtype: DType, depth: Int, vectors: Int
](
    c: Matrix[dtype],
    factors: Array[SIMD[Blocking[dtype].accum, Blocking[dtype].width], depth],
    steps: Buffer[Blocking[dtype].operand],
    columns: Int,
):
    """Stores a row's part of a panel: a loop over so few vectors takes longer than they do."""
    comptime B = Blocking[dtype]
    comptime for v in range(vectors):
        var sums = SIMD[B.accum, B.width](0)
        comptime for d in range(depth):
            var step = steps.unsafe_offset((d * vectors + v) * B.width)
            sums = factors[d].fma(
                step.unsafe_load[width=B.width]().cast[B.accum](), sums
            )
        comptime column = v * B.width
        store_first(c.at(0, column), converted[dtype](sums), columns - column)
