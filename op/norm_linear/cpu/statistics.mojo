"""A row's statistics on a CPU: how they are computed, and how they normalize the row."""

from std.math import sqrt

from ...call import CallPointer
from ...gemm.cpu.blocking import Blocking
from ...gemm.cpu.memory import (
    Buffer,
    buffer,
    lanes_below,
    load_first,
    prefetch_for_read,
)
from ...norms.norm import Norm
from ...rounding import converted


@fieldwise_init
struct Statistics[dtype: DType, ThisNorm: Norm](TrivialRegisterPassable):
    """A row's statistics, and how they normalize it.

    Parameters:
        dtype: Element type of the row.
        ThisNorm: The norm.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    var mean: Scalar[Self.B.accum]
    """The row's mean, 0 where rows are not centered."""
    var rstd: Scalar[Self.B.accum]
    """What the row is divided by, as a factor."""
    var center: Scalar[Self.B.accum]
    """A number near the mean, which is subtracted first."""
    var shift: Scalar[Self.B.accum]
    """What is added to the scaled deviations from it."""

    @staticmethod
    def of_row(x: Buffer[Self.dtype], K: Int, eps: Float64) -> Self:
        """Computes the statistics of a row while it stays in cache, in two passes if rows are centered.

        The first computes a point near the mean, from differences to the row's
        first element, so that a constant row gives exactly that constant and
        the sum of a large row does not overflow. The second sums the deviations
        from that point and their squares: the squares give the variance, and
        the deviations what the point lacks to be the mean.

        Args:
            x: The row.
            K: Number of features.
            eps: Added to the variance before the square root.

        Returns:
            The statistics.
        """
        comptime if not Self.ThisNorm.has_rstd:
            return {0, 1, 0, 0}
        comptime B = Self.B
        comptime Lanes = SIMD[B.accum, B.width]
        comptime unroll = 4
        comptime stride = unroll * B.width
        var inverse = Scalar[B.accum](1) / Scalar[B.accum](K)
        var whole = K // stride * stride

        var sums = Array[Lanes, unroll](fill=Lanes(0))
        # Where rows are not centered, 0 is what their squares are about.
        var center = Scalar[B.accum](0)
        comptime if Self.ThisNorm.has_mean:
            # pass 1: a center
            var first = x.unsafe_load().cast[B.accum]()
            for k in range(0, whole, stride):
                comptime for u in range(unroll):
                    _prefetch_next_row(x.unsafe_offset(K + k + u * B.width))
                    sums[u] += (
                        converted[B.accum](
                            x.unsafe_offset(k + u * B.width).unsafe_load[
                                width=B.width
                            ]()
                        )
                        - first
                    )
            for k in range(whole, K, B.width):
                # Lanes beyond the row add zero, not the first element's negative.
                var deviation = _deviation(x.unsafe_offset(k), K - k, first)
                sums[0] += deviation
            center = first + _total(sums) * inverse

        # pass 2: deviations from it and their squares
        sums = Array[Lanes, unroll](fill=Lanes(0))
        var squares = Array[Lanes, unroll](fill=Lanes(0))
        for k in range(0, whole, stride):
            comptime for u in range(unroll):
                comptime if not Self.ThisNorm.has_mean:
                    _prefetch_next_row(x.unsafe_offset(K + k + u * B.width))
                var deviation = (
                    converted[B.accum](
                        x.unsafe_offset(k + u * B.width).unsafe_load[
                            width=B.width
                        ]()
                    )
                    - center
                )
                sums[u] += deviation
                squares[u] = deviation.fma(deviation, squares[u])
        for k in range(whole, K, B.width):
            var deviation = _deviation(x.unsafe_offset(k), K - k, center)
            sums[0] += deviation
            squares[0] = deviation.fma(deviation, squares[0])
        var sum = _total(sums)
        var variance = Self.ThisNorm.variance(sum, _total(squares), inverse)
        # Rounding may leave it just below zero; a NaN must stay one.
        if variance < 0:
            variance = 0
        var rstd = 1 / sqrt(variance + eps.cast[B.accum]())
        comptime if not Self.ThisNorm.has_mean:
            return {0, rstd, 0, 0}
        var correction = sum * inverse
        return {center + correction, rstd, center, -correction * rstd}

    @always_inline
    @staticmethod
    def saved(call: CallPointer, row: Int, shifts: Int) -> Self:
        """Reads the statistics that a forward left to its backward.

        Args:
            call: The backward.
            row: Which row.
            shifts: Address of each row's shift from its rounded mean; 0 if there are none.

        Returns:
            The statistics.
        """
        comptime if not Self.ThisNorm.has_rstd:
            return {0, 1, 0, 0}
        comptime accum = Self.B.accum
        var rstd = buffer[accum](call[].rstd).unsafe_offset(row).unsafe_load()
        comptime if not Self.ThisNorm.has_mean:
            return {0, rstd, 0, 0}
        var mean = buffer[accum](call[].mean).unsafe_offset(row).unsafe_load()
        # -0 is what changes nothing when it is added.
        var shift = Scalar[accum](-0.0)
        if shifts != 0:
            shift = buffer[accum](shifts).unsafe_offset(row).unsafe_load()
        return {mean, rstd, mean, shift}

    @staticmethod
    def is_far(call: CallPointer, row: Int) -> Bool:
        """Tells whether rounding a row's mean loses more than rounding one of its normalized features.

        Args:
            call: The backward.
            row: Which row.

        Returns:
            Whether it does: the row's mean is farther from zero than its deviation.
        """
        comptime if not Self.ThisNorm.has_mean:
            return False
        var its = Self.saved(call, row, 0)
        return abs(its.mean) * its.rstd > 1

    @staticmethod
    def shift_of(call: CallPointer, row: Int) -> Scalar[Self.B.accum]:
        """Finds what the rounded mean of a row lacks: its normalized features add up to zero.

        The gradients of a weight and of gamma add up what all of a row's features have in common.

        Args:
            call: The backward.
            row: Which row.

        Returns:
            What is added to the deviations from the rounded mean, scaled.
        """
        comptime B = Self.B
        ref its = call[]
        var x = buffer[Self.dtype](its.x).unsafe_offset(row * its.K)
        var known = Self.saved(call, row, 0)
        var sums = Array[SIMD[B.accum, B.width], 1](fill=0)
        for k in range(0, its.K, B.width):
            sums[0] += _deviation(x.unsafe_offset(k), its.K - k, known.mean)
        return -(_total(sums) / Scalar[B.accum](its.K)) * known.rstd

    @always_inline
    def normalize[
        width: Int
    ](self, x: SIMD[Self.B.accum, width]) -> SIMD[Self.B.accum, width]:
        """Normalizes a vector of the row.

        Parameters:
            width: Number of lanes.

        Args:
            x: The vector.

        Returns:
            The vector x_hat.
        """
        var x_hat = Self.ThisNorm.xhat(x, self.center, self.rstd)
        comptime if not Self.ThisNorm.has_mean:
            return x_hat
        # Deviations from the center are exact or nearly so; the small shift
        # joins them after scaling, in one rounding.
        return x_hat + self.shift


@always_inline
def _prefetch_next_row[dtype: DType, //](x: Buffer[dtype]):
    """Asks for the next row, which the next call is for.

    A row may be a page, and the hardware prefetcher stops where a page ends.
    """
    prefetch_for_read(x)


@always_inline
def _deviation[
    dtype: DType
](x: Buffer[dtype], count: Int, center: Scalar[Blocking[dtype].accum]) -> SIMD[
    Blocking[dtype].accum, Blocking[dtype].width
]:
    comptime B = Blocking[dtype]
    var deviation = converted[B.accum](load_first[B.width](x, count)) - center
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
