"""Turns `dy @ weight` into the gradients of the input and of the LayerNorm."""

from .blocking import Blocking, Buffer
from .gradients import Gradients
from .pack import lanes_below, load_first, store_first


@always_inline
def _x_hat[
    dtype: DType
](
    x: Buffer[dtype],
    count: Int,
    mean: Scalar[Blocking[dtype].accum],
    rstd: Scalar[Blocking[dtype].accum],
) -> SIMD[Blocking[dtype].accum, Blocking[dtype].width]:
    comptime B = Blocking[dtype]
    return (load_first[B.width](x, count).cast[B.accum]() - mean) * rstd


def finish_input_gradient[
    dtype: DType
](
    dx: Buffer[dtype],
    h: Buffer[Blocking[dtype].accum],
    x: Buffer[dtype],
    gamma: Buffer[Blocking[dtype].accum],
    mean: Scalar[Blocking[dtype].accum],
    rstd: Scalar[Blocking[dtype].accum],
    K: Int,
):
    """Computes one row of dx from the same row of `dy @ weight`.

    With h = (dy @ weight) * gamma, dx = rstd * (h - mean(h) - x_hat *
    mean(h * x_hat)).

    Parameters:
        dtype: Element type of the tensors.

    Args:
        dx: The row of the gradient.
        h: The row of `dy @ weight`, readable in whole vectors; overwritten.
        x: The row of the input.
        gamma: LayerNorm's weight.
        mean: The row's mean.
        rstd: The row's reciprocal standard deviation.
        K: Number of features.
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
                var x_hat = _x_hat(x.unsafe_offset(k), left, mean, rstd)
                # Beyond the row, h holds whatever the padded columns made.
                if left < B.width:
                    value = lanes_below[B.width](left).select(value, Lanes(0))
                    x_hat = lanes_below[B.width](left).select(x_hat, Lanes(0))
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
        var x_hat = _x_hat(x.unsafe_offset(k), left, mean, rstd)
        store_first(
            dx.unsafe_offset(k),
            ((value - mean_h - x_hat * mean_dot) * rstd).cast[dtype](),
            left,
        )


def store_affine_gradients[
    dtype: DType
](
    tensors: Gradients[dtype],
    h: Buffer[Blocking[dtype].accum],
    h_stride: Int,
    first: Int,
    last: Int,
):
    """Computes dgamma and dbeta of some features, where they are wanted.

    With h = dy @ weight, dgamma = sum over rows of h * x_hat, and dbeta = sum
    over rows of h.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        tensors: The gradients and what they are made from.
        h: First row of `dy @ weight`, readable in whole vectors.
        h_stride: Distance between its rows.
        first: First feature.
        last: End of the features; may be beyond `K`.
    """
    comptime B = Blocking[dtype]
    comptime Lanes = SIMD[DType.float64, B.width]
    for k in range(first, min(last, tensors.K), B.width):
        var left = tensors.K - k
        var dgamma = Lanes(0)
        var dbeta = Lanes(0)
        for m in range(tensors.M):
            var value = h.unsafe_offset(m * h_stride + k).unsafe_load[
                width=B.width
            ]()
            var x_hat = _x_hat(
                tensors.x.unsafe_offset(m * tensors.K + k),
                left,
                tensors.mean.unsafe_offset(m).unsafe_load(),
                tensors.rstd.unsafe_offset(m).unsafe_load(),
            )
            dgamma += (value * x_hat).cast[DType.float64]()
            dbeta += value.cast[DType.float64]()
        if tensors.dln_weight.address != 0:
            tensors.dln_weight.store[dtype](k, dgamma.cast[B.accum](), left)
        if tensors.dln_bias.address != 0:
            tensors.dln_bias.store[dtype](k, dbeta.cast[B.accum](), left)
