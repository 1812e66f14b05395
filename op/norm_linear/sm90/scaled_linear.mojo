"""A Linear layer on operands of 8 bits, with the scales that they were quantized by.

    y = act(row_scale column_scale (rows weight^T) + bias)    h, what is activated, is stored beside y if asked for

Rows are e4m3, or e5m2 where they are gradients; the weight is e4m3.
"""

from ...call import Call
from ...device import Gpu
from ...gemm.activation import GATED
from ...gemm.epilogues import Activated
from ...gemm.scaled import Scaled
from ...gemm.sm90.activated import launch_activated
from ...gemm.sm90.launch import launch_product
from ...gemm.sm90.tiling import Tiling
from ...rows.types import E5M2
from ..plan import FUSED
from .fold import products


def scaled_linear(gpu: Gpu, call: Call) raises:
    """Queues y, and h if it has an address.

    Args:
        gpu: Where to run.
        call: Sizes; z, weight and up in 8 bits with their scales; bias, y and h in bfloat16. K and N are
            multiples of 16, addresses too. Its way is FUSED if z is of a pass queued just before, which waits for all
            before it and writes no weight.

    Raises:
        If the driver refuses.
    """
    if call.eight_bits == Int(E5M2):
        _launch_product[DType.float8_e5m2](gpu, call)
    elif call.activation != 0:
        _launch_activated(gpu, call)
    else:
        _launch_product[DType.float8_e4m3fn](gpu, call)


def _scaled(call: Call) -> Scaled[DType.bfloat16]:
    return {
        Int64(call.z_scale),
        Int64(call.weight_scale),
        Int64(call.bias),
        Int64(call.up_scale),
        Int64(call.up_bias),
    }


def _launch_product[dtype: DType](gpu: Gpu, call: Call) raises:
    # Two elements take the place of one of 16 bits, everywhere that time is counted.
    var tiling = Tiling.best(
        call.M,
        call.N,
        call.K // 2,
        gpu.processors,
        invariant=call.invariant != 0,
    )
    launch_product[dtype](
        gpu,
        tiling,
        call.y,
        call.z,
        call.weight,
        call.M,
        call.N,
        call.K,
        _scaled(call),
        b_is_older=call.way == FUSED,
        a_is_new=True,
    )


def _launch_activated(gpu: Gpu, call: Call) raises:
    var kind = Int32(call.activation % GATED)
    comptime for gates in [False, True]:
        if (call.activation >= GATED) == gates:
            launch_activated[DType.float8_e4m3fn](
                gpu,
                call.y,
                call.z,
                call.weight,
                call.up,
                call.M,
                products(call),
                call.K,
                Activated[Scaled[DType.bfloat16], gates](
                    _scaled(call), Int64(call.h), kind
                ),
                a_is_new=True,
                b_is_older=call.way == FUSED,
            )
