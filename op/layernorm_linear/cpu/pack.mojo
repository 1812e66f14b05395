"""Packs matrices into the order in which the microkernel reads them.

Columns that only fill up the last vector of a panel hold arbitrary values; the
product's columns that they make are never stored. Rows that only fill up the
last pair hold zeros, because they are summed with the others.
"""

from std.math import iota
from std.memory import bitcast
from std.sys import size_of
from std.sys.intrinsics import masked_load, masked_store
from std.utils.index import IndexList

from .blocking import Blocking, Buffer, ceildiv


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


def _interleaving[width: Int, lane: Int](upper_half: Bool) -> IndexList[width]:
    """Makes the mask that interleaves one half of each lane of two vectors."""
    var mask = IndexList[width]()
    for i in range(width):
        var within = i % lane
        mask[i] = i - within + within // 2
        if upper_half:
            mask[i] += lane // 2
        if within % 2 == 1:
            mask[i] += width
    return mask


def _alternating[width: Int, lane: Int](odd: Bool) -> IndexList[width]:
    """Makes the mask that takes every second lane of two vectors."""
    var mask = IndexList[width]()
    for i in range(width):
        var from_lane = i // lane * 2 + (1 if odd else 0)
        mask[i] = from_lane * lane + i % lane
    return mask


@always_inline
def _shuffle_pairs[
    dtype: DType, width: Int, count: Int, //, first: Int, step: Int, lane: Int
](mut rows: Array[SIMD[dtype, width], count]):
    """Interleaves within lanes the first half of some rows and the second."""
    comptime lower = _interleaving[width, lane](False)
    comptime upper = _interleaving[width, lane](True)
    comptime half = lane // 2
    var shuffled = Array[SIMD[dtype, width], lane](uninitialized=True)
    comptime for i in range(half):
        var a = rows[first + i * step]
        var b = rows[first + (i + half) * step]
        shuffled[2 * i] = a.shuffle[lower](b)
        shuffled[2 * i + 1] = a.shuffle[upper](b)
    comptime for i in range(lane):
        rows[first + i * step] = shuffled[i]


@always_inline
def _transpose[
    dtype: DType, width: Int, //
](mut rows: Array[SIMD[dtype, width], width]):
    """Transposes a square of registers.

    First every 128-bit lane transposes a small square of its own, then whole
    lanes change places; shuffles that cross lanes and elements at once are
    slower than both. Each part is a network of perfect shuffles, forwards for
    the elements and backwards for the lanes.
    """
    comptime lane = min(16 // size_of[dtype](), width)
    comptime lanes = width // lane
    comptime for group in range(lanes):
        comptime for _ in range(_log2(lane)):
            _shuffle_pairs[group * lane, 1, lane](rows)
    comptime even = _alternating[width, lane](False)
    comptime odd = _alternating[width, lane](True)
    comptime for _ in range(_log2(lanes)):
        var shuffled = Array[SIMD[dtype, width], width](uninitialized=True)
        comptime for i in range(lanes // 2):
            comptime for j in range(lane):
                var a = rows[2 * i * lane + j]
                var b = rows[(2 * i + 1) * lane + j]
                shuffled[i * lane + j] = a.shuffle[even](b)
                shuffled[(i + lanes // 2) * lane + j] = a.shuffle[odd](b)
        rows = shuffled^


def _log2(value: Int) -> Int:
    var result = 0
    while (1 << result) < value:
        result += 1
    return result


@always_inline
def _load_units[
    dtype: DType
](source: Buffer[dtype], count: Int) -> SIMD[
    Blocking[dtype].accum, Blocking[dtype].width
]:
    """Loads what one row contributes to `width` steps, as accumulator lanes."""
    comptime B = Blocking[dtype]
    comptime if B.has_dot:
        return bitcast[B.accum, B.width](
            load_first[B.width * B.pair](source, count)
        )
    else:
        return load_first[B.width](source, count).cast[B.accum]()


@always_inline
def _pack_columns[
    dtype: DType, all_columns: Bool
](
    panel: Buffer[Blocking[dtype].operand],
    source: Buffer[dtype],
    source_stride: Int,
    columns: Int,
    vectors: Int,
    depth: Int,
):
    """Packs rows of a matrix as the columns of one vector of a panel."""
    comptime B = Blocking[dtype]
    comptime Lanes = SIMD[B.accum, B.width]
    var steps = ceildiv(depth, B.pair)
    var target = panel.unsafe_bitcast[Scalar[B.accum]]()
    for step in range(0, steps, B.width):
        var square = Array[Lanes, B.width](uninitialized=True)
        comptime for i in range(B.width):
            var row = i
            comptime if not all_columns:
                row = min(i, columns - 1)
            square[i] = _load_units(
                source.unsafe_offset(row * source_stride + step * B.pair),
                depth - step * B.pair,
            )
        _transpose(square)
        var out = target.unsafe_offset(step * vectors * B.width)
        comptime for i in range(B.width):
            if step + i < steps:
                out.unsafe_offset(i * vectors * B.width).unsafe_store(square[i])


def pack_transposed[
    dtype: DType
](
    panel: Buffer[Blocking[dtype].operand],
    source: Buffer[dtype],
    source_stride: Int,
    columns: Int,
    vectors: Int,
    depth: Int,
):
    """Packs rows of a matrix as the columns of a panel.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        panel: The panel, `vectors` wide.
        source: First element, at the panel's first column and first step.
        source_stride: Distance between rows of the source.
        columns: Rows of the source to pack, each a column of the panel.
        vectors: Vectors across the panel.
        depth: Elements of each row to pack.
    """
    comptime B = Blocking[dtype]
    for v in range(vectors):
        var target = panel.unsafe_offset(v * B.width * B.pair)
        var rows = source.unsafe_offset(v * B.width * source_stride)
        var left = columns - v * B.width
        if left >= B.width:
            _pack_columns[dtype, True](
                target, rows, source_stride, left, vectors, depth
            )
        else:
            _pack_columns[dtype, False](
                target, rows, source_stride, left, vectors, depth
            )


@always_inline
def _load_operand[
    dtype: DType, width: Int, normalize: Bool
](
    source: Buffer[dtype],
    count: Int,
    mean: Scalar[Blocking[dtype].accum],
    rstd: Scalar[Blocking[dtype].accum],
) -> SIMD[Blocking[dtype].operand, width]:
    comptime B = Blocking[dtype]
    var value = load_first[width](source, count)
    comptime if normalize:
        return ((value.cast[B.accum]() - mean) * rstd).cast[B.operand]()
    else:
        return value.cast[B.operand]()


def pack_panel[
    dtype: DType, *, width: Int, normalize: Bool = False
](
    panel: Buffer[Blocking[dtype].operand],
    source: Buffer[dtype],
    source_stride: Int,
    columns: Int,
    vectors: Int,
    depth: Int,
    mean: Optional[Buffer[Blocking[dtype].accum]] = None,
    rstd: Optional[Buffer[Blocking[dtype].accum]] = None,
):
    """Packs columns of a matrix as the columns of a panel.

    Parameters:
        dtype: Element type of the tensors.
        width: Columns in one vector of the panel.
        normalize: Whether to subtract each row's mean and multiply by its
            reciprocal standard deviation.

    Args:
        panel: The panel, `vectors` wide.
        source: First element, at the panel's first column and first step.
        source_stride: Distance between rows of the source.
        columns: Columns of the source to pack.
        vectors: Vectors across the panel.
        depth: Rows of the source to pack.
        mean: Mean of each row, when normalizing.
        rstd: Reciprocal standard deviation of each row, when normalizing.
    """
    comptime B = Blocking[dtype]
    comptime Shift = Scalar[B.accum]
    var steps = (depth + B.pair - 1) // B.pair
    for step in range(steps):
        var row = step * B.pair
        var line = source.unsafe_offset(row * source_stride)
        var out = panel.unsafe_offset(step * vectors * width * B.pair)
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
                )
                var second = SIMD[B.operand, width](0)
                if has_second:
                    second = _load_operand[dtype, width, normalize](
                        line.unsafe_offset(source_stride + v * width),
                        columns - v * width,
                        shift2,
                        scale2,
                    )
                out.unsafe_offset(v * width * B.pair).unsafe_store(
                    first.interleave(second)
                )


def copy_rows[
    dtype: DType
](
    target: Buffer[Blocking[dtype].operand],
    target_stride: Int,
    source: Buffer[dtype],
    rows: Int,
    columns: Int,
):
    """Copies rows of a dense matrix into the form of a left operand.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        target: The left operand, in rows.
        target_stride: Distance between its rows.
        source: First element of the matrix.
        rows: Number of rows.
        columns: Number of columns.
    """
    comptime B = Blocking[dtype]
    comptime width = B.width * B.pair
    for i in range(rows):
        var line = source.unsafe_offset(i * columns)
        var out = target.unsafe_offset(i * target_stride)
        # The stride leaves room for whole vectors; zeros complete a pair.
        for k in range(0, columns, width):
            out.unsafe_offset(k).unsafe_store(
                load_first[width](line.unsafe_offset(k), columns - k).cast[
                    B.operand
                ]()
            )
