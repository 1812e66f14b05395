"""Packs columns of a matrix as the rows of a left operand, in panels of `tile_m` rows."""

from std.memory import bitcast

from .blocking import Blocking
from .memory import Buffer, Matrix, load_first, prefetch_for_read
from .pack import pack_panels
from .pack_transposed import transpose

comptime _HALF = 16


def pack_left_panels[
    dtype: DType
](
    panels: Matrix[Blocking[dtype].operand],
    source: Matrix[dtype],
    row: Int,
    column: Int,
    depth: Int,
    columns: Int,
):
    """Packs a part of a matrix, transposed.

    Parameters:
        dtype: Element type of the matrix.

    Args:
        panels: The panels, one in each row.
        source: The matrix.
        row: The first row to pack.
        column: The first column.
        depth: Rows to pack, the steps of the product.
        columns: Columns to pack, each a row of the left operand.
    """
    comptime B = Blocking[dtype]
    comptime if B.has_tiles:
        for step in range(0, depth, B.step):
            for i in range(0, columns, _HALF):
                _pack_tile[dtype](
                    panels.at(i // B.tile_m, step * B.tile_m).unsafe_offset(
                        i % B.tile_m * B.step
                    ),
                    source.part(row + step, column + i),
                    min(B.step, depth - step),
                    columns - i,
                )
    else:
        pack_panels[dtype, width=B.tile_m, vectors=1](
            panels.start, panels.stride, source, row, column, depth, columns
        )


@always_inline
def _pack_tile[
    dtype: DType
](
    tile: Buffer[Blocking[dtype].operand],
    source: Matrix[dtype],
    rows: Int,
    columns: Int,
):
    """Packs up to 32 rows and 16 columns as 16 rows, zeros after the last product."""
    comptime Part = SIMD[DType.bfloat16, _HALF]
    var pairs = Array[SIMD[DType.uint32, _HALF], _HALF](uninitialized=True)
    comptime for i in range(_HALF):
        var upper = Part(0)
        var lower = Part(0)
        if 2 * i < rows:
            prefetch_for_read(source.at(2 * i + Blocking[dtype].step))
            upper = _load[dtype](source.at(2 * i), columns)
        if 2 * i + 1 < rows:
            prefetch_for_read(source.at(2 * i + 1 + Blocking[dtype].step))
            lower = _load[dtype](source.at(2 * i + 1), columns)
        pairs[i] = bitcast[DType.uint32, _HALF](upper.interleave(lower))
    transpose[dtype=DType.uint32, width=_HALF](pairs)
    comptime for i in range(_HALF):
        tile.unsafe_bitcast[UInt32]().unsafe_offset(i * _HALF).unsafe_store(
            pairs[i]
        )


@always_inline
def _load[
    dtype: DType
](source: Buffer[dtype], count: Int) -> SIMD[DType.bfloat16, _HALF]:
    return load_first[_HALF](source, count).cast[DType.bfloat16]()
