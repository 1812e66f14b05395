"""Packs rows of a matrix as the columns of a panel, transposing them in registers."""

from std.math import ceildiv
from std.memory import bitcast

from ...rounding import converted
from .blocking import Blocking
from .memory import Buffer, Matrix, load_first, prefetch_for_read


@always_inline
def transpose[
    dtype: DType, width: Int, //
](mut rows: Array[SIMD[dtype, width], width]):
    """Transposes a square of registers.

    Parameters:
        dtype: Element type.
        width: Elements of a register, and number of registers.

    Args:
        rows: The registers.
    """
    comptime if width == 8:
        _transpose_halves(rows)
    elif width == 16:
        _transpose_quarters(rows)
    else:
        _shuffle(rows)


@always_inline
def _shuffle[
    dtype: DType, width: Int, //
](mut rows: Array[SIMD[dtype, width], width]):
    """Transposes a square by perfect shuffles of all its elements."""
    comptime for _ in range(_log2(width)):
        var shuffled = Array[SIMD[dtype, width], width](uninitialized=True)
        comptime for i in range(width // 2):
            var mixed = rows[i].interleave(rows[i + width // 2])
            shuffled[2 * i] = mixed.slice[width]()
            shuffled[2 * i + 1] = mixed.slice[width, offset=width]()
        rows = shuffled^


@always_inline
def _transpose_halves[
    dtype: DType, width: Int, //
](mut rows: Array[SIMD[dtype, width], width]):
    """Transposes a square of 8: AVX shuffles within the halves of a register by one instruction, across them by two.

    First the squares of 4 in each half are transposed, then halves change places.
    """
    comptime for _ in range(2):
        var shuffled = Array[SIMD[dtype, width], width](uninitialized=True)
        comptime for i in range(4):
            # The rows 0 and 2, 1 and 3, 4 and 6, 5 and 7.
            comptime first = i // 2 * 4 + i % 2
            comptime to = i // 2 * 4 + i % 2 * 2
            ref a, b = rows[first], rows[first + 2]
            shuffled[to] = a.shuffle[0, 8, 1, 9, 4, 12, 5, 13](b)
            shuffled[to + 1] = a.shuffle[2, 10, 3, 11, 6, 14, 7, 15](b)
        rows = shuffled^
    comptime for i in range(4):
        var a, b = rows[i], rows[i + 4]
        rows[i] = a.shuffle[0, 1, 2, 3, 8, 9, 10, 11](b)
        rows[i + 4] = a.shuffle[4, 5, 6, 7, 12, 13, 14, 15](b)


@always_inline
def _transpose_quarters[
    dtype: DType, width: Int, //
](mut rows: Array[SIMD[dtype, width], width]):
    """Transposes a square of 16: AVX-512 shuffles within the quarters of registers, and whole quarters, faster than it
    does otherwise.

    First the squares of 4 in each quarter are transposed, then quarters change places.
    """
    comptime for _ in range(2):
        var shuffled = Array[SIMD[dtype, width], width](uninitialized=True)
        comptime for i in range(8):
            # The rows 0 and 2, 1 and 3 of each four.
            comptime first = i // 2 * 4 + i % 2
            comptime to = i // 2 * 4 + i % 2 * 2
            ref a, b = rows[first], rows[first + 2]
            shuffled[to] = a.shuffle[
                0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
            ](b)
            shuffled[to + 1] = a.shuffle[
                2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
            ](b)
        rows = shuffled^
    comptime for i in range(4):
        var a, b = rows[i], rows[i + 4]
        var c, d = rows[i + 8], rows[i + 12]
        var ab = a.shuffle[
            0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
        ](b)
        var cd = c.shuffle[
            0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
        ](d)
        rows[i] = ab.shuffle[
            0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
        ](cd)
        rows[i + 4] = ab.shuffle[
            4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
        ](cd)
        ab = a.shuffle[
            8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
        ](b)
        cd = c.shuffle[
            8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
        ](d)
        rows[i + 8] = ab.shuffle[
            0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
        ](cd)
        rows[i + 12] = ab.shuffle[
            4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
        ](cd)


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
        return converted[B.accum](load_first[B.width](source, count))


@always_inline
def load_square[
    dtype: DType, //, fetches: Bool = True
](source: Matrix[dtype], rows: Int, columns: Int, ahead: Int) -> Array[
    SIMD[Blocking[dtype].accum, Blocking[dtype].width], Blocking[dtype].width
]:
    """Loads as many rows of a matrix as there are steps in one of their registers.

    Parameters:
        dtype: Element type of the matrix.
        fetches: Whether to ask for more.

    Args:
        source: The part of the matrix to load.
        rows: How many there are; the last one fills up the rest.
        columns: Elements of each row that are there; zeros fill up the rest.
        ahead: How many elements ahead to ask for; they need not exist.

    Returns:
        The registers.
    """
    comptime B = Blocking[dtype]
    var square = Array[SIMD[B.accum, B.width], B.width](uninitialized=True)
    comptime for i in range(B.width):
        var line = source.at(min(i, rows - 1))
        comptime if fetches:
            prefetch_for_read(line.unsafe_offset(ahead))
        square[i] = _load_units(line, columns)
    return square^


def pack_transposed[
    dtype: DType
](
    panel: Buffer[Blocking[dtype].operand],
    source: Matrix[dtype],
    rows: Int,
    columns: Int,
):
    """Packs rows of a matrix as the columns of a panel as wide as they are many.

    Parameters:
        dtype: Element type of the matrix.

    Args:
        panel: The panel at the first step.
        source: The part of the matrix to pack.
        rows: Rows to pack, each a column of the panel.
        columns: Elements of each row to pack, the steps of the product.
    """
    comptime B = Blocking[dtype]
    var vectors = ceildiv(rows, B.width)
    var steps = ceildiv(columns, B.pair)
    var target = panel.unsafe_bitcast[Scalar[B.accum]]()
    for v in range(vectors):
        for step in range(0, steps, B.width):
            # Ahead is the next block of the same rows: they are too many for the
            # hardware.
            var square = load_square(
                source.part(v * B.width, step * B.pair),
                rows - v * B.width,
                columns - step * B.pair,
                B.depth,
            )
            transpose(square)
            var out = target.unsafe_offset((step * vectors + v) * B.width)
            # Tiles read whole squares, whose rest is zero.
            if B.has_tiles or step + B.width <= steps:
                comptime for i in range(B.width):
                    out.unsafe_offset(i * vectors * B.width).unsafe_store(
                        square[i]
                    )
            else:
                comptime for i in range(B.width):
                    if step + i < steps:
                        out.unsafe_offset(i * vectors * B.width).unsafe_store(
                            square[i]
                        )
