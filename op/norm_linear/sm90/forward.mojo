"""The forward, by the strategy that was planned.

    FUSED                  z = norm(x) by the norm's row program, then y = act(z weight^T + bias)
    KEPT_FOLD, NEW_FOLD    y = rstd (x folded^T - mean s) + c: x is read once, and z never exists;
                           the weight itself is multiplied where a fold would not change it;
                           with an activation that is h, stored if asked for, and y = act(h)

A pass adds a residual to x first and computes the statistics of the sum; for z, that is the norm's pass. Statistics
that are given are not computed again. Products of few rows, or of few tile columns, gather the statistics of x.
"""

from ...call import Call
from ...device import Gpu, Launcher
from ...gemm.activation import GATED
from ...gemm.epilogue import Epilogue
from ...gemm.epilogues import Activated, ScaleAndCorrect
from ...gemm.sm90.config import Config
from ...gemm.sm90.few_rows.launch import launch_few_rows
from ...gemm.sm90.launch import launch_product
from ...gemm.sm90.launch_matrix import launch_matrix
from ...gemm.sm90.product import Product
from ...gemm.sm90.tiling import FEW_ROWS, SHARED_COLUMNS
from ...norms.norm import Norm
from ...passes.gpu import GpuRunner
from ...passes.normalize import run_normalize
from ..plan import FUSED
from .fold import launch_fold, products
from .forward_plan import ForwardPlan
from .gather import Statistics
from .linear import launch_linear
from .statistics import launch_rows, waits_for_rows


def forward[dtype: DType, N: Norm](launcher: Launcher, call: Call) raises:
    """Queues y, mean and rstd.

    Parameters:
        dtype: Type of x, the weight and y: bfloat16, float16 or float32 as
            tf32.
        N: The norm.

    Args:
        launcher: Where to run.
        call: A call that was planned.

    Raises:
        If the driver refuses.
    """
    ref gpu = launcher.gpu
    var plan = ForwardPlan[dtype](
        call, call.strategy, gpu.processors, one_weight=True
    )
    if call.strategy == FUSED:
        var norm = call
        norm.z = plan.z
        comptime for is_float32 in [False, True]:
            if (call.norm_is_float32 != 0) == is_float32:
                run_normalize[dtype, DType.float32 if is_float32 else dtype](
                    GpuRunner[DType.float32](gpu), norm
                )
        var layer = call
        layer.residual = 0
        # The norm's kernel waits for all before it, and writes no parameter.
        launch_linear[dtype](gpu, layer, plan.tiling, plan.z, b_is_older=True)
        return
    comptime if dtype == DType.bfloat16:
        _launch_folded[dtype, N](gpu, call, plan)
    else:
        raise Error("only bfloat16 is folded")


def _launch_folded[
    dtype: DType, N: Norm
](gpu: Gpu, call: Call, plan: ForwardPlan[dtype]) raises:
    if plan.folds:
        launch_fold[dtype, N](
            gpu, call, plan.fold_weight, plan.fold_sums, plan.fold_constants
        )
    elif plan.computes_constants:
        var nothing = call
        nothing.K = 0
        launch_fold[dtype, N](
            gpu, nothing, 0, plan.fold_sums, plan.fold_constants
        )
    var rows = call.x
    if not plan.gathers:
        rows = launch_rows[dtype, N](gpu, call, plan.mean, plan.rstd)
    var epilogue = ScaleAndCorrect[N.has_mean](
        {unsafe_from_address = plan.rstd},
        {unsafe_from_address = plan.mean},
        {unsafe_from_address = plan.fold_constants},
        {unsafe_from_address = plan.fold_sums},
    )
    if call.activation == 0:
        _launch_product[dtype, N](gpu, call, plan, rows, epilogue)
        return
    var kind = Int32(call.activation % GATED)
    comptime for gates in [False, True]:
        if (call.activation >= GATED) == gates:
            _launch_product[dtype, N](
                gpu,
                call,
                plan,
                rows,
                Activated[ScaleAndCorrect[N.has_mean], gates](
                    epilogue, Int64(call.h), kind
                ),
            )


def _launch_product[
    E: Epilogue, //, dtype: DType, N: Norm
](
    gpu: Gpu, call: Call, plan: ForwardPlan[dtype], rows: Int, epilogue: E
) raises:
    """Queues the product of rows, which are x if that gathers their statistics, and the folded weight."""
    var m, n, k = call.M, products(call), call.K
    if not plan.gathers:
        launch_product[dtype](
            gpu,
            plan.tiling,
            call.y,
            rows,
            plan.fold_weight,
            m,
            n,
            k,
            epilogue,
            a_is_new=waits_for_rows(call),
        )
        return
    var product = Product(
        m,
        n,
        k,
        epilogue,
        Statistics[N](
            call.eps.cast[DType.float32](),
            {unsafe_from_address = plan.mean},
            {unsafe_from_address = plan.rstd},
        ),
    )
    if plan.tiling.columns == FEW_ROWS:
        launch_few_rows[dtype, False](
            gpu, call.y, call.x, plan.fold_weight, product
        )
    else:
        comptime if not E.activates:
            # In runs: each cluster takes tiles of the same rows one after another.
            launch_matrix[dtype, Config.of(SHARED_COLUMNS)](
                gpu, call.y, call.x, plan.fold_weight, product
            )
