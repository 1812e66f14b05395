"""Computes a row's mean and reciprocal standard deviation, and normalizes it.

Two passes over a row that stays in cache. The first finds a point near the
mean, from differences to the row's first element, so that a constant row gives
exactly that constant and the sum of a large row does not overflow. The second
sums the deviations from that point and their squares: the squares give the
variance, and the deviations what the point lacks to be the mean.
"""

from std.math import sqrt

from .blocking import Blocking, Buffer
from .pack import lanes_below, load_first
from .prefetch import prefetch_for_read


@fieldwise_init
struct RowStatistics[accum: DType](TrivialRegisterPassable):
    """Holds a row's mean, in two parts, and reciprocal standard deviation.

    Parameters:
        accum: The type of sums and statistics.
    """

    var center: Scalar[Self.accum]
    """A number near the mean."""
    var correction: Scalar[Self.accum]
    """What is to be added to `center` to give the mean."""
    var rstd: Scalar[Self.accum]
    """Reciprocal of the standard deviation."""

    def mean(self) -> Scalar[Self.accum]:
        """Adds up the mean's parts.

        Returns:
            The mean, rounded once.
        """
        return self.center + self.correction


def row_statistics[
    dtype: DType
](x: Buffer[dtype], K: Int, eps: Float64) -> RowStatistics[
    Blocking[dtype].accum
]:
    """Computes the statistics of one row.

    Parameters:
        dtype: Element type of the row.

    Args:
        x: First element.
        K: Number of elements.
        eps: Added to the variance before the square root.

    Returns:
        The statistics.
    """
    comptime B = Blocking[dtype]
    comptime Lanes = SIMD[B.accum, B.width]
    comptime unroll = 4
    comptime stride = unroll * B.width
    var inverse = Scalar[B.accum](1) / Scalar[B.accum](K)
    var whole = K // stride * stride

    # pass 1: a center
    var first = x.unsafe_load().cast[B.accum]()
    var sums = Array[Lanes, unroll](fill=Lanes(0))
    for k in range(0, whole, stride):
        comptime for u in range(unroll):
            # Rows come one after the other, but a row may be a page, and the
            # hardware prefetcher stops where a page ends.
            prefetch_for_read(x.unsafe_offset(K + k + u * B.width))
            sums[u] += (
                x.unsafe_offset(k + u * B.width)
                .unsafe_load[width=B.width]()
                .cast[B.accum]()
                - first
            )
    for k in range(whole, K, B.width):
        # Lanes beyond the row add zero, not the first element's negative.
        var deviation = _deviation(x.unsafe_offset(k), K - k, first)
        sums[0] += deviation
    var center = first + _total(sums) * inverse

    # pass 2: deviations from it and their squares
    sums = Array[Lanes, unroll](fill=Lanes(0))
    var squares = Array[Lanes, unroll](fill=Lanes(0))
    for k in range(0, whole, stride):
        comptime for u in range(unroll):
            var deviation = (
                x.unsafe_offset(k + u * B.width)
                .unsafe_load[width=B.width]()
                .cast[B.accum]()
                - center
            )
            sums[u] += deviation
            squares[u] = deviation.fma(deviation, squares[u])
    for k in range(whole, K, B.width):
        var deviation = _deviation(x.unsafe_offset(k), K - k, center)
        sums[0] += deviation
        squares[0] = deviation.fma(deviation, squares[0])
    var correction = _total(sums) * inverse
    var variance = _total(squares) * inverse - correction * correction
    # Rounding may leave it just below zero; a NaN must stay one.
    if variance < 0:
        variance = 0
    var rstd = 1 / sqrt(variance + eps.cast[B.accum]())
    return RowStatistics[B.accum](center, correction, rstd)


@always_inline
def _deviation[
    dtype: DType
](x: Buffer[dtype], count: Int, center: Scalar[Blocking[dtype].accum]) -> SIMD[
    Blocking[dtype].accum, Blocking[dtype].width
]:
    comptime B = Blocking[dtype]
    var deviation = load_first[B.width](x, count).cast[B.accum]() - center
    return lanes_below[B.width](count).select(
        deviation, SIMD[B.accum, B.width](0)
    )


@always_inline
def _total[
    dtype: DType, width: Int, count: Int, //
](sums: Array[SIMD[dtype, width], count]) -> Scalar[dtype]:
    var total = SIMD[dtype, width](0)
    comptime for u in range(count):
        total += sums[u]
    return total.reduce_add()


def normalize_row[
    dtype: DType
](
    target: Buffer[Blocking[dtype].operand],
    x: Buffer[dtype],
    gamma: Buffer[Blocking[dtype].accum],
    beta: Buffer[Blocking[dtype].accum],
    K: Int,
    statistics: RowStatistics[Blocking[dtype].accum],
):
    """Writes a normalized row as a row of a left operand.

    Parameters:
        dtype: Element type of the row.

    Args:
        target: Where to write; whole vectors are written, zeros after `K`.
        x: First element of the row.
        gamma: LayerNorm's weight.
        beta: LayerNorm's bias.
        K: Number of elements.
        statistics: The row's statistics.
    """
    comptime B = Blocking[dtype]
    comptime width = B.width * B.pair
    var center = statistics.center
    var rstd = statistics.rstd
    # Deviations from the center are exact or nearly so; the small correction
    # joins them after scaling, in one rounding.
    var shift = -statistics.correction * rstd
    for k in range(0, K, width):
        var left = K - k
        var deviation = (
            load_first[width](x.unsafe_offset(k), left).cast[B.accum]() - center
        )
        var x_hat = deviation.fma(
            SIMD[B.accum, width](rstd), SIMD[B.accum, width](shift)
        )
        var value = x_hat.fma(
            load_first[width](gamma.unsafe_offset(k), left),
            load_first[width](beta.unsafe_offset(k), left),
        )
        if left < width:
            value = lanes_below[width](left).select(
                value, SIMD[B.accum, width](0)
            )
        target.unsafe_offset(k).unsafe_store(value.cast[B.operand]())
