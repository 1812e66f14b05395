"""Packs matrices into the order in which the microkernel reads them.

Columns that only fill up the last vector of a panel hold arbitrary values; the
product's columns that they make are never stored. Rows that only fill up the
last pair hold zeros, because they are summed with the others.
"""

from std.math import iota
from std.sys import size_of
from std.sys.intrinsics import masked_load, masked_store

from .blocking import Blocking, Buffer, CACHE_LINE
from .prefetch import prefetch_for_read


@always_inline
def lanes_below[width: Int](count: Int) -> SIMD[DType.bool, width]:
    """Returns a mask whose first `count` lanes are true.

    Parameters:
        width: Number of lanes.

    Args:
        count: Number of true lanes; more than `width` counts as all.

    Returns:
        The mask.
    """
    return iota[DType.int32, width]().lt(Int32(min(count, width)))


@always_inline
def load_first[
    dtype: DType, //, width: Int
](source: Buffer[dtype], count: Int) -> SIMD[dtype, width]:
    """Loads up to `width` elements and fills the rest with zeros.

    Parameters:
        dtype: Element type.
        width: Number of lanes.

    Args:
        source: First element.
        count: Number of elements that may be read.

    Returns:
        The elements.
    """
    if count >= width:
        return source.unsafe_load[width=width]()
    return masked_load[width](
        source,
        lanes_below[width](count),
        SIMD[dtype, width](0),
    )


@always_inline
def store_first[
    dtype: DType, width: Int, //
](target: Buffer[dtype], value: SIMD[dtype, width], count: Int):
    """Stores up to `width` elements.

    Parameters:
        dtype: Element type.
        width: Number of lanes.

    Args:
        target: First element to overwrite.
        value: The elements.
        count: Number of elements that may be written.
    """
    if count >= width:
        target.unsafe_store(value)
    else:
        masked_store[width](value, target, lanes_below[width](count))


@always_inline
def _load_operand[
    dtype: DType, width: Int, normalize: Bool
](
    source: Buffer[dtype],
    count: Int,
    mean: Scalar[Blocking[dtype].accum],
    rstd: Scalar[Blocking[dtype].accum],
    gamma: Optional[Buffer[Blocking[dtype].accum]],
    beta: Optional[Buffer[Blocking[dtype].accum]],
) -> SIMD[Blocking[dtype].operand, width]:
    comptime B = Blocking[dtype]
    var value = load_first[width](source, count)
    comptime if normalize:
        var z = (value.cast[B.accum]() - mean) * rstd
        if gamma:
            z = z.fma(
                load_first[width](gamma.value(), count),
                load_first[width](beta.value(), count),
            )
        return z.cast[B.operand]()
    else:
        return value.cast[B.operand]()


@always_inline
def _at[
    dtype: DType, //
](vector: Optional[Buffer[dtype]], index: Int) -> Optional[Buffer[dtype]]:
    if vector:
        return vector.value().unsafe_offset(index)
    return None


def pack_panel[
    dtype: DType, *, width: Int, normalize: Bool = False, ahead: Int = 0
](
    panel: Buffer[Blocking[dtype].operand],
    source: Buffer[dtype],
    source_stride: Int,
    columns: Int,
    vectors: Int,
    depth: Int,
    mean: Optional[Buffer[Blocking[dtype].accum]] = None,
    rstd: Optional[Buffer[Blocking[dtype].accum]] = None,
    gamma: Optional[Buffer[Blocking[dtype].accum]] = None,
    beta: Optional[Buffer[Blocking[dtype].accum]] = None,
):
    """Packs columns of a matrix as the columns of a panel.

    Parameters:
        dtype: Element type of the tensors.
        width: Columns in one vector of the panel.
        normalize: Whether to subtract each row's mean and multiply by its
            reciprocal standard deviation.
        ahead: How many rows ahead to ask for; they need not exist.

    Args:
        panel: The panel, `vectors` wide.
        source: First element, at the panel's first column and first step.
        source_stride: Distance between rows of the source.
        columns: Columns of the source to pack.
        vectors: Vectors across the panel.
        depth: Rows of the source to pack.
        mean: Mean of each row, when normalizing.
        rstd: Reciprocal standard deviation of each row, when normalizing.
        gamma: What to multiply each column with after that, if anything.
        beta: What to add to each column then, if `gamma` is given.
    """
    comptime B = Blocking[dtype]
    comptime Shift = Scalar[B.accum]
    var steps = (depth + B.pair - 1) // B.pair
    for step in range(steps):
        var row = step * B.pair
        var line = source.unsafe_offset(row * source_stride)
        var out = panel.unsafe_offset(step * vectors * width * B.pair)
        comptime if ahead > 0:
            comptime for i in range(B.pair):
                for k in range(0, columns, CACHE_LINE // size_of[dtype]()):
                    prefetch_for_read(
                        line.unsafe_offset((i + ahead) * source_stride + k)
                    )
        var shift = Shift(0)
        var scale = Shift(1)
        comptime if normalize:
            shift = mean.value().unsafe_offset(row).unsafe_load()
            scale = rstd.value().unsafe_offset(row).unsafe_load()
        comptime if B.pair == 1:
            for v in range(vectors):
                out.unsafe_offset(v * width).unsafe_store(
                    _load_operand[dtype, width, normalize](
                        line.unsafe_offset(v * width),
                        columns - v * width,
                        shift,
                        scale,
                        _at(gamma, v * width),
                        _at(beta, v * width),
                    )
                )
        else:
            var has_second = row + 1 < depth
            var shift2 = Shift(0)
            var scale2 = Shift(0)
            comptime if normalize:
                if has_second:
                    shift2 = mean.value().unsafe_offset(row + 1).unsafe_load()
                    scale2 = rstd.value().unsafe_offset(row + 1).unsafe_load()
            for v in range(vectors):
                var first = _load_operand[dtype, width, normalize](
                    line.unsafe_offset(v * width),
                    columns - v * width,
                    shift,
                    scale,
                    _at(gamma, v * width),
                    _at(beta, v * width),
                )
                var second = SIMD[B.operand, width](0)
                if has_second:
                    second = _load_operand[dtype, width, normalize](
                        line.unsafe_offset(source_stride + v * width),
                        columns - v * width,
                        shift2,
                        scale2,
                        _at(gamma, v * width),
                        _at(beta, v * width),
                    )
                out.unsafe_offset(v * width * B.pair).unsafe_store(
                    first.interleave(second)
                )


def pack_panels[
    dtype: DType, *, width: Int, vectors: Int, normalize: Bool = False
](
    panels: Buffer[Blocking[dtype].operand],
    panel_stride: Int,
    source: Buffer[dtype],
    source_stride: Int,
    columns: Int,
    depth: Int,
    mean: Optional[Buffer[Blocking[dtype].accum]] = None,
    rstd: Optional[Buffer[Blocking[dtype].accum]] = None,
):
    """Packs columns of a matrix as panels that lie side by side.

    A few rows at a time, and asked for ahead: long pieces of few rows come
    faster than short pieces of many.

    Parameters:
        dtype: Element type of the tensors.
        width: Columns in one vector of a panel.
        vectors: Vectors across a panel; the last panel has as few as it needs.
        normalize: Whether to subtract each row's mean and multiply by its
            reciprocal standard deviation.

    Args:
        panels: The first panel.
        panel_stride: Distance between panels.
        source: First element, at the first column and first step.
        source_stride: Distance between rows of the source.
        columns: Columns of the source to pack.
        depth: Rows of the source to pack.
        mean: Mean of each row, when normalizing.
        rstd: Reciprocal standard deviation of each row, when normalizing.
    """
    comptime rows = 8
    for row in range(0, depth, rows):
        for column in range(0, columns, width * vectors):
            var left = min(width * vectors, columns - column)
            var across = (left + width - 1) // width
            pack_panel[dtype, width=width, normalize=normalize, ahead=rows](
                panels.unsafe_offset(
                    column // (width * vectors) * panel_stride
                    + row * across * width
                ),
                source.unsafe_offset(row * source_stride + column),
                source_stride,
                left,
                across,
                min(rows, depth - row),
                _at(mean, row),
                _at(rstd, row),
            )


def copy_rows[
    dtype: DType
](
    target: Buffer[Blocking[dtype].operand],
    target_stride: Int,
    source: Buffer[dtype],
    source_stride: Int,
    rows: Int,
    columns: Int,
):
    """Copies rows of a matrix into the form of a left operand.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        target: The left operand, in rows.
        target_stride: Distance between its rows.
        source: First element of the matrix.
        source_stride: Distance between its rows.
        rows: Number of rows.
        columns: Number of columns.
    """
    comptime B = Blocking[dtype]
    comptime width = B.width * B.pair
    for i in range(rows):
        var line = source.unsafe_offset(i * source_stride)
        var out = target.unsafe_offset(i * target_stride)
        # The stride leaves room for whole vectors; zeros complete a pair.
        for k in range(0, columns, width):
            out.unsafe_offset(k).unsafe_store(
                load_first[width](line.unsafe_offset(k), columns - k).cast[
                    B.operand
                ]()
            )
