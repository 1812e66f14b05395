"""LayerNorm on a CPU: a row's statistics, and its part in the gradient of the input."""

from std.math import sqrt

from ...call import CallPointer
from ...gemm.cpu.blocking import Blocking
from ...gemm.cpu.memory import (
    Buffer,
    buffer,
    lanes_below,
    load_first,
    prefetch_for_read,
    store_first,
)
from .norm import Norm, Statistics


struct LayerNorm(Norm):
    """LayerNorm: x_hat = (x - mean) * rstd."""

    @staticmethod
    def statistics[
        dtype: DType
    ](x: Buffer[dtype], K: Int, eps: Float64) -> Statistics[
        Blocking[dtype].accum
    ]:
        """Computes the statistics of a row, in two passes while it stays in cache.

        The first finds a point near the mean, from differences to the row's
        first element, so that a constant row gives exactly that constant and
        the sum of a large row does not overflow. The second sums the deviations
        from that point and their squares: the squares give the variance, and
        the deviations what the point lacks to be the mean.

        Parameters:
            dtype: Element type of the row.

        Args:
            x: The row.
            K: Number of features.
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
        return {center + correction, rstd, center, -correction * rstd}

    @always_inline
    @staticmethod
    def saved[accum: DType](call: CallPointer, row: Int) -> Statistics[accum]:
        """Reads the statistics that a forward left to its backward.

        Parameters:
            accum: The type of statistics.

        Args:
            call: The backward.
            row: Which row.

        Returns:
            The statistics.
        """
        var mean = buffer[accum](call[].mean).unsafe_offset(row).unsafe_load()
        var rstd = buffer[accum](call[].rstd).unsafe_offset(row).unsafe_load()
        # -0 is what changes nothing when it is added.
        return {mean, rstd, mean, -0.0}

    @staticmethod
    def finish_input_gradient[
        dtype: DType
    ](
        dx: Buffer[dtype],
        h: Buffer[Blocking[dtype].accum],
        x: Buffer[dtype],
        gamma: Buffer[Blocking[dtype].accum],
        K: Int,
        statistics: Statistics[Blocking[dtype].accum],
    ):
        """Computes a row of dx from the same row of `dy @ weight`.

        With h = (dy @ weight) * gamma, dx = rstd * (h - mean(h) - x_hat *
        mean(h * x_hat)).

        Parameters:
            dtype: Element type of the tensors.

        Args:
            dx: The row of the gradient.
            h: The row of `dy @ weight`, readable in whole vectors; overwritten.
            x: The row of the input.
            gamma: Weight of the norm.
            K: Number of features.
            statistics: Those of the row.
        """
        comptime B = Blocking[dtype]
        comptime Lanes = SIMD[B.accum, B.width]
        comptime unroll = 2
        var sums = Array[Lanes, unroll](fill=Lanes(0))
        var dots = Array[Lanes, unroll](fill=Lanes(0))
        for start in range(0, K, unroll * B.width):
            comptime for u in range(unroll):
                var k = start + u * B.width
                if k < K:
                    var left = K - k
                    var value = h.unsafe_offset(k).unsafe_load[width=B.width]()
                    value *= load_first[B.width](gamma.unsafe_offset(k), left)
                    var x_hat = statistics.normalize(
                        load_first[B.width](x.unsafe_offset(k), left).cast[
                            B.accum
                        ]()
                    )
                    # Beyond the row, h holds whatever the padded columns made.
                    if left < B.width:
                        value = lanes_below[B.width](left).select(
                            value, Lanes(0)
                        )
                        x_hat = lanes_below[B.width](left).select(
                            x_hat, Lanes(0)
                        )
                    h.unsafe_offset(k).unsafe_store(value)
                    sums[u] += value
                    dots[u] = value.fma(x_hat, dots[u])
        var total = Lanes(0)
        var dot = Lanes(0)
        comptime for u in range(unroll):
            total += sums[u]
            dot += dots[u]
        var inverse = Scalar[B.accum](1) / Scalar[B.accum](K)
        var mean_h = total.reduce_add() * inverse
        var mean_dot = dot.reduce_add() * inverse
        for k in range(0, K, B.width):
            var left = K - k
            var value = h.unsafe_offset(k).unsafe_load[width=B.width]()
            var x_hat = statistics.normalize(
                load_first[B.width](x.unsafe_offset(k), left).cast[B.accum]()
            )
            store_first(
                dx.unsafe_offset(k),
                ((value - mean_h - x_hat * mean_dot) * statistics.rstd).cast[
                    dtype
                ](),
                left,
            )


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
