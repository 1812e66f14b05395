"""Multiplies blocks of matrices in vector registers.

The right operand is a packed panel: for each step along the depth, the panel's
columns are adjacent, `Blocking.pair` values of each. The left operand
is read in place, one value (or pair) broadcast at a time, and comes in one of
two shapes: rows of the workspace, or a panel packed like the right one but
`Blocking.tile_m` wide.

Every element of the product is the same sequence of operations whatever rows
and columns are computed with it.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.sys import llvm_intrinsic, size_of

from ...rounding import converted
from .blocking import Blocking
from .epilogue import NoEpilogue, Output, TileEpilogue
from .memory import (
    Buffer,
    CACHE_LINE,
    Matrix,
    prefetch_for_read,
    prefetch_for_write,
    store_first,
)
from .tile_product import multiply_block_by_tiles


@always_inline
def broadcast[
    dtype: DType
](source: Buffer[Blocking[dtype].operand]) -> SIMD[
    Blocking[dtype].operand, Blocking[dtype].width * Blocking[dtype].pair
]:
    """Repeats one value, or one pair of values, in every accumulator's lane.

    Parameters:
        dtype: Element type of the weight.

    Args:
        source: Where the value or the pair is.

    Returns:
        The vector.
    """
    comptime B = Blocking[dtype]
    comptime if B.has_dot:
        var pair = source.unsafe_bitcast[UInt32]().unsafe_load()
        return rebind[SIMD[B.operand, B.width * B.pair]](
            bitcast[DType.bfloat16, 32](SIMD[DType.uint32, 16](pair))
        )
    else:
        return SIMD[B.operand, B.width * B.pair](source.unsafe_load())


@always_inline
def add_product[
    dtype: DType
](
    acc: SIMD[Blocking[dtype].accum, Blocking[dtype].width],
    a: SIMD[
        Blocking[dtype].operand, Blocking[dtype].width * Blocking[dtype].pair
    ],
    b: SIMD[
        Blocking[dtype].operand, Blocking[dtype].width * Blocking[dtype].pair
    ],
) -> SIMD[Blocking[dtype].accum, Blocking[dtype].width]:
    """Adds a product, or the sum of a pair of products, to each lane.

    Parameters:
        dtype: Element type of the weight.

    Args:
        acc: The sums.
        a: A number or a pair for each lane.
        b: What it is multiplied by.

    Returns:
        The new sums.
    """
    comptime B = Blocking[dtype]
    comptime Acc = SIMD[B.accum, B.width]
    comptime if B.has_dot:
        return rebind[Acc](
            llvm_intrinsic[
                "llvm.x86.avx512bf16.dpbf16ps.512",
                SIMD[DType.float32, 16],
                has_side_effect=False,
            ](
                rebind[SIMD[DType.float32, 16]](acc),
                rebind[SIMD[DType.bfloat16, 32]](a),
                rebind[SIMD[DType.bfloat16, 32]](b),
            )
        )
    else:
        return rebind[Acc](a).fma(rebind[Acc](b), acc)


@always_inline
def _add_step[
    dtype: DType, rows: Int, vectors: Int, a_is_panel: Bool
](
    mut acc: Array[
        SIMD[Blocking[dtype].accum, Blocking[dtype].width], rows * vectors
    ],
    a: Buffer[Blocking[dtype].operand],
    a_stride: Int,
    b: Buffer[Blocking[dtype].operand],
    step: Int,
):
    """Adds the products of one step to all sums of a tile."""
    comptime B = Blocking[dtype]
    comptime lanes = B.width * B.pair
    var b_row = Array[SIMD[B.operand, lanes], vectors](uninitialized=True)
    comptime for j in range(vectors):
        b_row[j] = b.unsafe_offset((step * vectors + j) * lanes).unsafe_load[
            width=lanes
        ]()
    comptime for i in range(rows):
        comptime a_step = B.tile_m * B.pair if a_is_panel else B.pair
        var row = i * B.pair if a_is_panel else i * a_stride
        var a_value = broadcast[dtype](a.unsafe_offset(row + step * a_step))
        comptime for j in range(vectors):
            acc[i * vectors + j] = add_product[dtype](
                acc[i * vectors + j], a_value, b_row[j]
            )


@no_inline
def _multiply_tile[
    dtype: DType,
    rows: Int,
    vectors: Int,
    Epilogue: TileEpilogue,
    a_is_panel: Bool,
](
    c: Matrix[Blocking[dtype].accum],
    a: Matrix[Blocking[dtype].operand],
    b: Buffer[Blocking[dtype].operand],
    steps: Int,
    accumulate: Bool,
    output: Optional[Output[dtype, Epilogue]],
    first: Int,
):
    """Computes one register tile of the product, from a row of the block on."""
    comptime B = Blocking[dtype]
    comptime Acc = SIMD[B.accum, B.width]
    comptime b_step = vectors * B.width * B.pair
    comptime a_step = B.tile_m * B.pair if a_is_panel else B.pair
    if output:
        # The stores must not wait for their lines when the sums are there.
        var block = output.value().c.part(first, 0)
        comptime for i in range(rows):
            comptime for j in range(vectors):
                prefetch_for_write(block.at(i, j * B.width))
    var acc = Array[Acc, rows * vectors](fill=Acc(0))
    # Rows are far apart: their addresses, worked out anew in each step, would
    # cost the products issue slots.
    comptime unroll = 1 if a_is_panel else 4
    var whole = steps // unroll * unroll
    for step in range(0, whole, unroll):
        comptime for u in range(unroll):
            _add_step[dtype, rows, vectors, a_is_panel](
                acc,
                a.start.unsafe_offset(step * a_step),
                a.stride,
                b.unsafe_offset(step * b_step),
                u,
            )
    comptime if unroll > 1:
        for step in range(whole, steps):
            _add_step[dtype, rows, vectors, a_is_panel](
                acc,
                a.start.unsafe_offset(step * a_step),
                a.stride,
                b.unsafe_offset(step * b_step),
                0,
            )
    if accumulate:
        comptime for i in range(rows):
            comptime for j in range(vectors):
                acc[i * vectors + j] += c.at(i, j * B.width).unsafe_load[
                    width=B.width
                ]()
    if output:
        var out = output.value()
        # All of them before the first store, which might change what they read.
        comptime for i in range(rows):
            comptime for j in range(vectors):
                acc[i * vectors + j] = out.epilogue.finish(
                    first + i,
                    j * B.width,
                    acc[i * vectors + j],
                )
        var block = out.c.part(first, 0)
        comptime for j in range(vectors):
            comptime for i in range(rows):
                store_first(
                    block.at(i, j * B.width),
                    converted[dtype](acc[i * vectors + j]),
                    out.columns - j * B.width,
                )
    else:
        comptime for i in range(rows):
            comptime for j in range(vectors):
                c.at(i, j * B.width).unsafe_store(acc[i * vectors + j])


@always_inline
def _multiply_rows[
    dtype: DType, vectors: Int, Epilogue: TileEpilogue, a_is_panel: Bool
](
    c: Matrix[Blocking[dtype].accum],
    a: Matrix[Blocking[dtype].operand],
    b: Buffer[Blocking[dtype].operand],
    rows: Int,
    steps: Int,
    accumulate: Bool,
    output: Optional[Output[dtype, Epilogue]],
    next_follows: Bool,
):
    comptime B = Blocking[dtype]
    var tiles = ceildiv(rows, B.tile_m)
    var first = 0
    for tile in range(tiles):
        # Rows in place are dealt out evenly, because a tile with very few rows
        # waits for its accumulators; panels are as they were packed.
        var count = min(B.tile_m, rows - first)
        comptime if not a_is_panel:
            count = rows * (tile + 1) // tiles - first
        if next_follows:
            # It is further away than this block: each tile asks for a share.
            comptime line = CACHE_LINE // size_of[B.operand]()
            var block = steps * vectors * B.width * B.pair
            for i in range(
                block * tile // tiles, block * (tile + 1) // tiles, line
            ):
                prefetch_for_read(b.unsafe_offset(block + i))
        comptime for r in range(1, B.tile_m + 1):
            if count == r:
                _multiply_tile[dtype, r, vectors, Epilogue, a_is_panel](
                    c.part(first, 0),
                    a.part(tile if a_is_panel else first, 0),
                    b,
                    steps,
                    accumulate,
                    output,
                    first,
                )
        first += count


def multiply_block[
    dtype: DType, Epilogue: TileEpilogue = NoEpilogue, *, a_is_panel: Bool
](
    c: Matrix[Blocking[dtype].accum],
    a: Matrix[Blocking[dtype].operand],
    b: Buffer[Blocking[dtype].operand],
    rows: Int,
    columns: Int,
    depth: Int,
    accumulate: Bool,
    output: Optional[Output[dtype, Epilogue]] = None,
    next_follows: Bool = False,
):
    """Multiplies rows of the left operand by a block of one panel of the right one.

    Parameters:
        dtype: Element type of the tensors.
        Epilogue: What is done to complete sums.
        a_is_panel: Whether `a` is packed in panels of `tile_m` instead of in
            rows.

    Args:
        c: Sums that are not complete, in whole vectors.
        a: Left operand at the block's first step: rows, or panels.
        b: The panel at the block's first step.
        rows: Rows of the product.
        columns: Columns of the panel.
        depth: Products to sum, at most `Blocking.depth`.
        accumulate: Whether to add what `c` holds.
        output: Where the sum goes instead of to `c`, if it is complete.
        next_follows: Whether the panel's block that is multiplied next is in
            memory behind this one.
    """
    comptime B = Blocking[dtype]
    comptime if B.has_tiles:
        multiply_block_by_tiles[dtype, Epilogue, a_is_panel=a_is_panel](
            c, a, b, rows, columns, depth, accumulate, output, next_follows
        )
        return
    var vectors = ceildiv(columns, B.width)
    var steps = ceildiv(depth, B.pair)
    comptime for v in range(1, B.tile_vectors + 1):
        if vectors == v:
            _multiply_rows[dtype, v, Epilogue, a_is_panel](
                c, a, b, rows, steps, accumulate, output, next_follows
            )
