"""Multiplies blocks of matrices in vector registers.

The right operand is a packed panel: for each step along the depth, the panel's
columns lie next to each other, `Blocking.pair` values of each. The left operand
is read in place, one value (or pair) broadcast at a time, and comes in one of
two shapes: rows of the workspace, or a panel packed like the right one but
`Blocking.tile_m` wide.

Every element of the product is the same sequence of operations whatever rows
and columns are computed beside it.
"""

from std.memory import bitcast
from std.sys import llvm_intrinsic

from .blocking import Blocking, Buffer, ceildiv
from .pack import store_first
from .prefetch import Upcoming, prefetch_for_write


@always_inline
def _broadcast[
    dtype: DType
](source: Buffer[Blocking[dtype].operand]) -> SIMD[
    Blocking[dtype].operand, Blocking[dtype].width * Blocking[dtype].pair
]:
    """Repeats one value, or one pair of values, in every accumulator's lane."""
    comptime B = Blocking[dtype]
    comptime if B.has_dot:
        var pair = source.unsafe_bitcast[UInt32]().unsafe_load[alignment=2]()
        return rebind[SIMD[B.operand, B.width * B.pair]](
            bitcast[DType.bfloat16, 32](SIMD[DType.uint32, 16](pair))
        )
    else:
        return SIMD[B.operand, B.width * B.pair](source.unsafe_load())


@always_inline
def _add_product[
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
    """Adds a product, or the sum of a pair of products, to each lane."""
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


@fieldwise_init
struct Output[dtype: DType](TrivialRegisterPassable):
    """Says where a block of the product goes, if it is complete.

    Parameters:
        dtype: Element type of the output.
    """

    var y: Buffer[Self.dtype]
    """First element of the block in the output."""
    var stride: Int
    """Distance between rows of the output."""
    var columns: Int
    """Columns to store, at most `tile_n`; 0 if the product is not complete."""
    var bias: Buffer[Blocking[Self.dtype].accum]
    """What to add to each column, `tile_n` values."""

    @staticmethod
    def none() -> Self:
        """Makes the output of a product that is not complete.

        Returns:
            An output without columns.
        """
        return Self(
            Buffer[Self.dtype].unsafe_dangling(),
            0,
            0,
            Buffer[Blocking[Self.dtype].accum].unsafe_dangling(),
        )

    def rows_from(self, first: Int) -> Self:
        """Moves on to later rows.

        Args:
            first: Number of rows to skip.

        Returns:
            The output of the rows from there.
        """
        return Self(
            self.y.unsafe_offset(first * self.stride),
            self.stride,
            self.columns,
            self.bias,
        )


@no_inline
def _multiply_tile[
    dtype: DType, rows: Int, vectors: Int, a_is_panel: Bool
](
    c: Buffer[Blocking[dtype].accum],
    c_stride: Int,
    a: Buffer[Blocking[dtype].operand],
    a_stride: Int,
    b: Buffer[Blocking[dtype].operand],
    steps: Int,
    accumulate: Bool,
    output: Output[dtype],
):
    """Computes one register tile of the product."""
    comptime B = Blocking[dtype]
    comptime Acc = SIMD[B.accum, B.width]
    comptime Operand = SIMD[B.operand, B.width * B.pair]
    comptime b_step = vectors * B.width * B.pair
    comptime a_step = B.tile_m * B.pair if a_is_panel else B.pair
    # What the sums are added to must be there when they are complete, and the
    # stores must not wait for their lines.
    if a_is_panel and accumulate:
        comptime for i in range(rows):
            comptime for j in range(vectors):
                prefetch_for_write(c.unsafe_offset(i * c_stride + j * B.width))
    if output.columns > 0:
        comptime for i in range(rows):
            comptime for j in range(vectors):
                prefetch_for_write(
                    output.y.unsafe_offset(i * output.stride + j * B.width)
                )
    var acc = Array[Acc, rows * vectors](fill=Acc(0))
    for step in range(steps):
        var b_row = Array[Operand, vectors](uninitialized=True)
        comptime for j in range(vectors):
            b_row[j] = b.unsafe_offset(
                step * b_step + j * B.width * B.pair
            ).unsafe_load[width=B.width * B.pair]()
        comptime for i in range(rows):
            var row = i * B.pair if a_is_panel else i * a_stride
            var a_value = _broadcast[dtype](
                a.unsafe_offset(row + step * a_step)
            )
            comptime for j in range(vectors):
                acc[i * vectors + j] = _add_product[dtype](
                    acc[i * vectors + j], a_value, b_row[j]
                )
    if accumulate:
        comptime for i in range(rows):
            comptime for j in range(vectors):
                acc[i * vectors + j] += c.unsafe_offset(
                    i * c_stride + j * B.width
                ).unsafe_load[width=B.width]()
    if output.columns > 0:
        comptime for j in range(vectors):
            var bias = output.bias.unsafe_offset(j * B.width).unsafe_load[
                width=B.width
            ]()
            comptime for i in range(rows):
                store_first(
                    output.y.unsafe_offset(i * output.stride + j * B.width),
                    (acc[i * vectors + j] + bias).cast[dtype](),
                    output.columns - j * B.width,
                )
    else:
        comptime for i in range(rows):
            comptime for j in range(vectors):
                c.unsafe_offset(i * c_stride + j * B.width).unsafe_store(
                    acc[i * vectors + j]
                )


@always_inline
def _multiply_rows[
    dtype: DType, vectors: Int, a_is_panel: Bool
](
    c: Buffer[Blocking[dtype].accum],
    c_stride: Int,
    a: Buffer[Blocking[dtype].operand],
    a_stride: Int,
    b: Buffer[Blocking[dtype].operand],
    rows: Int,
    steps: Int,
    accumulate: Bool,
    output: Output[dtype],
    var upcoming: Upcoming,
):
    comptime B = Blocking[dtype]
    var tiles = ceildiv(rows, B.tile_m)
    # Rows in place are dealt out evenly, because a tile with very few rows
    # waits for its accumulators; panels are as they were packed.
    var fewest = rows // tiles
    var larger = rows - fewest * tiles
    var fetched_rows = ceildiv(upcoming.rows, tiles)
    var first = 0
    for tile in range(tiles):
        var count = min(B.tile_m, rows - first)
        comptime if not a_is_panel:
            count = fewest + 1 if tile < larger else fewest
        var a_row = (tile if a_is_panel else first) * a_stride
        upcoming.fetch(fetched_rows)
        comptime for r in reversed(range(1, B.tile_m + 1)):
            if count == r:
                _multiply_tile[dtype, r, vectors, a_is_panel](
                    c.unsafe_offset(first * c_stride),
                    c_stride,
                    a.unsafe_offset(a_row),
                    a_stride,
                    b,
                    steps,
                    accumulate,
                    output.rows_from(first),
                )
        first += count


def multiply_block[
    dtype: DType, *, a_is_panel: Bool
](
    c: Buffer[Blocking[dtype].accum],
    c_stride: Int,
    a: Buffer[Blocking[dtype].operand],
    a_stride: Int,
    b: Buffer[Blocking[dtype].operand],
    rows: Int,
    vectors: Int,
    steps: Int,
    accumulate: Bool,
    upcoming: Upcoming,
    output: Output[dtype] = Output[dtype].none(),
):
    """Multiplies rows of the left operand by a block of a packed panel.

    Parameters:
        dtype: Element type of the tensors.
        a_is_panel: Whether `a` is packed in panels of `tile_m` instead of in
            rows.

    Args:
        c: The product's block, `rows` by `vectors` full vectors.
        c_stride: Distance between rows of `c`, in elements.
        a: Left operand at the first step.
        a_stride: Distance between rows, or panels, of `a`.
        b: Packed block.
        rows: Rows of the block.
        vectors: Vectors across the panel.
        steps: Products (or pairs of products) to sum.
        accumulate: Whether to add what `c` holds.
        upcoming: What to fetch meanwhile.
        output: Where the sum goes, instead of to `c`, if it is complete.
    """
    comptime for v in range(1, Blocking[dtype].tile_vectors + 1):
        if vectors == v:
            _multiply_rows[dtype, v, a_is_panel](
                c,
                c_stride,
                a,
                a_stride,
                b,
                rows,
                steps,
                accumulate,
                output,
                upcoming,
            )
