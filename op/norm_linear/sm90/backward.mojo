"""The backward: two products, and between them one pass over their common rows.

    dz = dy W;  dx, dgamma, dbeta from dz, x and dsum;  z = norm(x) in place of dz;  dW = dy^T z, db

Where the first product takes long enough, its kernel runs the pass as well.
"""

from ...call import Call
from ...device import Gpu, Launcher
from ...gemm.epilogues import Plain
from ...gemm.sm90.launch import launch_product
from ...gemm.sm90.split_k import launch_split_k
from ...norms.norm import Norm
from ...passes.gpu import GpuRunner
from ...passes.passes import normalize_backward_of
from .backward_plan import BackwardPlan
from .launch_row_pass import launch_row_pass


def backward[dtype: DType, N: Norm](launcher: Launcher, call: Call) raises:
    """Queues the gradients that are wanted.

    Parameters:
        dtype: Type of the matrices: bfloat16 or float16.
        N: The norm.

    Args:
        launcher: Where to run.
        call: A call that was planned.

    Raises:
        If the driver refuses.
    """
    ref gpu = launcher.gpu
    var plan = BackwardPlan[dtype](launcher, call)
    var dz = call.workspace
    var partial = call.workspace + plan.partial
    comptime for is_float32 in [False, True]:
        if (call.norm_is_float32 != 0) == is_float32:
            comptime norm_dtype = DType.float32 if is_float32 else dtype
            if plan.passes_on:
                launch_row_pass[dtype, norm_dtype, N](gpu, call, dz, partial)
            else:
                _launch_apart[dtype, norm_dtype](gpu, call, plan, dz, partial)
    if call.dweight == 0:
        return
    comptime for is_float32 in [False, True]:
        if (call.accumulate != 0) == is_float32:
            launch_split_k[dtype, DType.float32 if is_float32 else dtype](
                gpu,
                plan.split,
                call.dweight,
                call.dbias,
                call.dy,
                dz,
                partial,
                call.N,
                call.K,
                call.M,
                is_float32,
            )


def _launch_apart[
    dtype: DType, norm_dtype: DType
](
    gpu: Gpu, call: Call, plan: BackwardPlan[dtype], dz: Int, partial: Int
) raises:
    """Queues dz, then the pass over its rows as separate kernels."""
    if call.dx != 0 or call.dgamma != 0 or call.dbeta != 0:
        launch_product[dtype, True](
            gpu,
            plan.tiling,
            dz,
            call.dy,
            call.weight,
            call.M,
            call.K,
            call.N,
            Plain(),
        )
    var between = call
    between.dz = dz
    between.workspace = partial
    between.z = 0
    if call.dweight != 0:
        # The weight's gradient takes z in place of dz, and brings the bias's.
        between.z = dz
        between.dbias = 0
    var runner = GpuRunner[DType.float32](gpu)
    normalize_backward_of[dtype, norm_dtype, dtype](runner, between)
