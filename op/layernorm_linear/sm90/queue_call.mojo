"""A forward or a backward whose tensors are in one struct, for callers of both kinds: Python and C++."""

from ...rows.launch import launch_rows
from ...rows.layernorm import LayerNorm
from ...rows.operands import Operands, accumulator
from ..between_products import BetweenProducts
from ...call import Call
from .epilogue import BIASED
from .launch_backward import launch_backward
from .launch_product import launch_product
from .launcher import launcher_at


def queue_composed[dtype: DType](call: Call) raises:
    """Queues z = LayerNorm(x), mean and rstd, and y = z W^T + b.

    Parameters:
        dtype: Type of x, the weight and y.

    Args:
        call: The tensors, z as its workspace, and the launcher as its context.

    Raises:
        If the driver refuses.
    """
    ref launcher = launcher_at[dtype](call.context)[]
    var operands = Operands[accumulator[dtype]()](call.M, call.K)
    operands.inputs[0] = Int64(call.x)
    operands.features[0] = Int64(call.ln_weight)
    operands.features[1] = Int64(call.ln_bias)
    operands.absent[0] = 1
    operands.outputs[0] = Int64(call.workspace)
    operands.results[0] = Int64(call.mean)
    operands.results[1] = Int64(call.rstd)
    operands.number = call.eps.cast[accumulator[dtype]()]()
    comptime for wide in [False, True]:
        if (call.ln_is_float32 != 0) == wide:
            launch_rows[LayerNorm, dtype, DType.float32 if wide else dtype](
                launcher.gpu, operands
            )
    var y, z, w = call.y, call.workspace, call.weight
    var m, n, k = call.M, call.N, call.K
    if call.bias == 0:
        launch_product[dtype, False](launcher.gpu, y, z, w, m, n, k)
    else:
        launch_product[dtype, False, BIASED](
            launcher.gpu, y, z, w, m, n, k, call.bias
        )


def queue_backward[dtype: DType](call: Call, accumulates: Bool) raises:
    """Queues the gradients that are wanted.

    Parameters:
        dtype: Type of the matrices; float32 has no backward here.

    Args:
        call: The tensors, and the launcher as its context.
        accumulates: Whether the gradients of the weight and of the Linear
            layer's bias are float32 and are added to.

    Raises:
        If the driver refuses.
    """
    ref launcher = launcher_at[dtype](call.context)[]
    var between = BetweenProducts(
        M=call.M,
        K=call.K,
        N=call.N,
        dx=Int64(call.dx),
        dgamma=Int64(call.dln_weight),
        dbeta=Int64(call.dln_bias),
        db=Int64(call.dbias),
        z=0,
        dz=0,
        dy=Int64(call.dy),
        x=Int64(call.x),
        gamma=Int64(call.ln_weight),
        beta=Int64(call.ln_bias),
        mean=Int64(call.mean),
        rstd=Int64(call.rstd),
        eps=call.eps,
        workspace=Int64(call.workspace),
    )
    comptime if dtype == DType.float32:
        raise Error("float32 has no backward here")
    else:
        comptime for wide in [False, True]:
            if (call.ln_is_float32 != 0) == wide:
                launch_backward[dtype, DType.float32 if wide else dtype](
                    launcher.gpu,
                    between,
                    call.dweight,
                    call.weight,
                    accumulates,
                    launcher.alone,
                )
