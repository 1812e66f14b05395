"""The terms of a norm in the gradient of the input (dgrad), on a CPU."""

from ...call import CallPointer
from ...gemm.cpu.blocking import Blocking
from ...gemm.cpu.memory import (
    Buffer,
    Matrix,
    lanes_below,
    load_first,
    store_first,
)
from ...norms.norm import Norm
from ...rounding import converted
from .statistics import Statistics


def finish_input_gradient[
    dtype: DType, ThisNorm: Norm
](
    call_at: CallPointer,
    row: Int,
    h: Buffer[Blocking[dtype].accum],
    gamma: Buffer[Blocking[dtype].accum],
    shifts: Int,
):
    """Computes a row of dx from the same row of `dy @ weight`.

    Parameters:
        dtype: Element type of the tensors.
        ThisNorm: The norm.

    Args:
        call_at: The tensors.
        row: Which row.
        h: The row of `dy @ weight`, readable in whole vectors; overwritten.
        gamma: Weight of the norm.
        shifts: Address of what the saved means lack; 0 for nothing.
    """
    ref call = call_at[]
    var K = call.K
    var dx = Matrix[dtype](call.dx, K).at(row)
    var x = Matrix[dtype](call.x, K).at(row)
    var dsum = call.dsum
    var statistics = Statistics[dtype, ThisNorm].saved(call_at, row, shifts)
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
                    converted[B.accum](
                        load_first[B.width](x.unsafe_offset(k), left)
                    )
                )
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
    var c0 = total.reduce_add() * inverse
    var c1 = dot.reduce_add() * inverse
    for k in range(0, K, B.width):
        var left = K - k
        var value = h.unsafe_offset(k).unsafe_load[width=B.width]()
        var x_hat = statistics.normalize(
            converted[B.accum](load_first[B.width](x.unsafe_offset(k), left))
        )
        value = ThisNorm.dx(value, x_hat, statistics.rstd, c0, c1)
        if dsum != 0:
            value += converted[B.accum](
                load_first[B.width](Matrix[dtype](dsum, K).at(row, k), left)
            )
        store_first(dx.unsafe_offset(k), converted[dtype](value), left)
