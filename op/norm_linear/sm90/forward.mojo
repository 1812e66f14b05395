"""The forward, in the way that was planned.

    FUSED                  z = norm(x) by the norm's row program, then y = z weight^T + bias
    KEPT_FOLD, NEW_FOLD    y = rstd (x folded^T - mean s) + c: x is read once, and z never exists;
                           the weight itself is multiplied where a fold would not change it;
                           with an activation that is h, stored if asked for, and y = act(h)

Few rows, and tiles of few columns in all, gather the statistics of x while they multiply it.
"""

from ...call import Call
from ...device import Gpu, Launcher
from ...gemm.activation import GATED
from ...gemm.epilogue import Epilogue, Plain
from ...gemm.epilogues import Activated, Added, Bias, ScaleAndCorrect
from ...gemm.sm90.config import Config
from ...gemm.sm90.launch import (
    launch_few_rows,
    launch_matrix,
    launch_product,
)
from ...gemm.sm90.product import Product
from ...gemm.sm90.tiling import FEW_ROWS, SHARED_COLUMNS, Tiling
from ...norms.norm import Norm
from ...passes.gpu import GpuRunner
from ...passes.normalize import run_normalize
from ..plan import FUSED
from .fold import launch_fold, products
from .forward_plan import ForwardPlan, linear_tiling
from .gather import Statistics
from .statistics import launch_statistics


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
        call, call.way, gpu.processors, one_weight=True
    )
    if call.way == FUSED:
        var norm = call
        norm.z = plan.z
        comptime for is_float32 in [False, True]:
            if (call.norm_is_float32 != 0) == is_float32:
                run_normalize[dtype, DType.float32 if is_float32 else dtype](
                    GpuRunner[DType.float32](gpu), norm
                )
        var m, n, k = call.M, call.N, call.K
        # The norm's kernel waits for all before it, and writes z alone.
        if call.bias == 0:
            launch_product[dtype](
                gpu,
                plan.tiling,
                call.y,
                plan.z,
                call.weight,
                m,
                n,
                k,
                Plain(),
                b_is_older=True,
            )
        else:
            launch_product[dtype](
                gpu,
                plan.tiling,
                call.y,
                plan.z,
                call.weight,
                m,
                n,
                k,
                Bias[dtype](Int64(call.bias)),
                b_is_older=True,
            )
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
    elif plan.finds_constants:
        var nothing = call
        nothing.K = 0
        launch_fold[dtype, N](
            gpu, nothing, 0, plan.fold_sums, plan.fold_constants
        )
    if not plan.gathers:
        launch_statistics[dtype, N](
            gpu,
            plan.mean,
            plan.rstd,
            call.x,
            call.M,
            call.K,
            call.eps.cast[DType.float32](),
        )
    var epilogue = ScaleAndCorrect[N.has_mean](
        {unsafe_from_address = plan.rstd},
        {unsafe_from_address = plan.mean},
        {unsafe_from_address = plan.fold_constants},
        {unsafe_from_address = plan.fold_sums},
    )
    if call.activation == 0:
        _launch_product[dtype, N](gpu, call, plan, epilogue)
        return
    var kind = Int32(call.activation % GATED)
    comptime for gates in [False, True]:
        if (call.activation >= GATED) == gates:
            _launch_product[dtype, N](
                gpu,
                call,
                plan,
                Activated[ScaleAndCorrect[N.has_mean], gates](
                    epilogue, Int64(call.h), kind
                ),
            )


def _launch_product[
    E: Epilogue, //, dtype: DType, N: Norm
](gpu: Gpu, call: Call, plan: ForwardPlan[dtype], epilogue: E) raises:
    """Queues the product of x and the folded weight."""
    var m, n, k = call.M, products(call), call.K
    if not plan.gathers:
        launch_product[dtype](
            gpu,
            plan.tiling,
            call.y,
            call.x,
            plan.fold_weight,
            m,
            n,
            k,
            epilogue,
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
            if plan.tiling.takes_turns:
                launch_matrix[dtype, Config.of(128, takes_turns=True)](
                    gpu, call.y, call.x, plan.fold_weight, product
                )
            else:
                launch_matrix[dtype, Config.of(SHARED_COLUMNS)](
                    gpu, call.y, call.x, plan.fold_weight, product
                )


def linear_add[dtype: DType](launcher: Launcher, call: Call) raises:
    """Queues y = x weight^T + bias + residual, which no norm is part of, nor need a residual be.

    Parameters:
        dtype: Type of all: bfloat16 or float16.

    Args:
        launcher: Where to run.
        call: A call that `plan_linear_add` did not decline; the residual is [M, N], 0 for none.

    Raises:
        If the driver refuses.
    """
    ref gpu = launcher.gpu
    var tiling = linear_tiling(call, gpu.processors)
    if call.bias == 0:
        _launch_added[dtype](gpu, call, tiling, Plain())
    else:
        _launch_added[dtype](gpu, call, tiling, Bias[dtype](Int64(call.bias)))


def _launch_added[
    E: Epilogue, //, dtype: DType
](gpu: Gpu, call: Call, tiling: Tiling, epilogue: E) raises:
    if call.residual == 0:
        _launch_linear[dtype](gpu, call, tiling, epilogue)
    else:
        _launch_linear[dtype](
            gpu, call, tiling, Added[E](epilogue, Int64(call.residual))
        )


def _launch_linear[
    E: Epilogue, //, dtype: DType
](gpu: Gpu, call: Call, tiling: Tiling, epilogue: E) raises:
    launch_product[dtype](
        gpu,
        tiling,
        call.y,
        call.x,
        call.weight,
        call.M,
        call.N,
        call.K,
        epilogue,
    )
