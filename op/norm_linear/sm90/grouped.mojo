"""Grouped Linear layers: one launch for all of their products.

    folded      y_i = rstd (x folded_i^T - mean s_i) + c_i, from one pass over x for its statistics
    products    y_i = z weight_i^T + bias_i, of rows that a pass has normalized

Weights are not concatenated: each has its own tensor map. Folds are written side by side.
"""

from std.sys import size_of

from ...call import Call
from ...device import Gpu, Launcher
from ...gemm.epilogue import Epilogue
from ...gemm.epilogues import BiasOfParts, ScaleAndCorrect
from ...gemm.row_hook import NoHook
from ...gemm.sm90.config import Config
from ...gemm.sm90.few_rows.launch import launch_few_rows_of_parts
from ...gemm.sm90.launch_matrix import BAND, launch_parts
from ...gemm.sm90.parts import Matrices
from ...gemm.sm90.parts import (
    MOST_PARTS,
    SIDE_BY_SIDE,
    first_of,
    steps_of,
)
from ...gemm.sm90.product import Product
from ...gemm.sm90.tiling import Tiling, is_for_few_rows
from ...norms.norm import Norm
from ..plan import DECLINED, FUSED, KEPT_FOLD, NEW_FOLD
from .alignment import ALIGNMENT, are_aligned
from .costs import Costs
from .fold import launch_fold
from .forward_plan import ForwardPlan
from .parts import part_at, sizes_of
from .statistics import launch_rows, waits_for_rows

comptime COLUMNS = 128
"""Columns of a tile."""
comptime BESIDE = Config.of(COLUMNS, ping_pong=True, parts=SIDE_BY_SIDE)
"""The kernel of several matrices."""


def can[dtype: DType](call: Call) -> Bool:
    """Tells whether there are kernels for the layout of a call's matrices.

    Parameters:
        dtype: Type of all.

    Args:
        call: The call.

    Returns:
        Whether there are.
    """
    if (
        dtype == DType.float32
        or call.part_count < 2
        or call.part_count > MOST_PARTS
        or call.M <= 0
    ):
        return False
    var lengths = call.K | call.pitch
    for i in range(call.part_count):
        var part = part_at(call, i)
        if part.N <= 0:
            return False
        lengths |= part.N
    return (
        call.K > 0
        and lengths * size_of[dtype]() % ALIGNMENT == 0
        and are_aligned(call)
    )


def fills(tiling: Tiling) -> Bool:
    """Tells whether the kernel that several matrices have is the one to take.

    Args:
        tiling: What suits their sizes.

    Returns:
        Whether it is, and keeps the device busy.
    """
    return tiling.ping_pong and tiling.columns == COLUMNS and tiling.fills()


def products_pay[dtype: DType](call: Call, processors: Int) -> Bool:
    """Tells whether one launch makes all products of the same rows sooner than one for each.

    Parameters:
        dtype: Type of all.

    Args:
        call: The call.
        processors: SMs of the device.

    Returns:
        Whether their tiles, of which each product begins its own, keep the device busy, or the rows are few.
    """
    if not can[dtype](call):
        return False
    # Each weight is read once in any case; launches are saved.
    if is_for_few_rows(call.M, call.K):
        return call.invariant == 0
    var n = steps_of(sizes_of(call), COLUMNS) * COLUMNS
    return fills(Tiling.best(call.M, n, call.K, processors, common=True))


def folded_strategy[dtype: DType](call: Call, costs: Costs) -> Int:
    """Chooses whether a forward of several Linear layers folds.

    Parameters:
        dtype: Type of x, the weights and the outputs.

    Args:
        call: The call.
        costs: What the strategies cost on the device.

    Returns:
        KEPT_FOLD, NEW_FOLD or DECLINED.
    """
    if dtype != DType.bfloat16 or not products_pay[dtype](
        call, costs.processors
    ):
        return DECLINED
    var strategy = call.strategy
    if strategy == 0:
        strategy = costs.fastest(
            call.M, call.K, call.N, call.in_graph != 0, call.may_keep != 0
        )
    return strategy if strategy in (KEPT_FOLD, NEW_FOLD) else DECLINED


def plan_folded[dtype: DType](launcher: Launcher, mut call: Call):
    """Chooses whether a forward of several Linear layers folds, or others normalize for it.

    Parameters:
        dtype: Type of x, the weights and the outputs.

    Args:
        launcher: Where to run.
        call: The call; its strategy is written, KEPT_FOLD, NEW_FOLD or DECLINED, and the bytes of its workspace. A
            strategy that is not 0 is taken where it can be.
    """
    call.strategy = folded_strategy[dtype](call, Costs(launcher))
    call.workspace_bytes = 0
    if call.strategy != DECLINED:
        call.workspace_bytes = ForwardPlan[dtype](
            call, call.strategy, launcher.gpu.processors
        ).workspace_bytes


def fold_parts[
    dtype: DType, N: Norm
](gpu: Gpu, call: Call, folded: Int, sums: Int, constants: Int) raises:
    """Queues the folds of a call's weights, side by side.

    Parameters:
        dtype: Type of the weights and the biases.
        N: The norm.

    Args:
        gpu: Where to run.
        call: The parameters.
        folded: Address of the folded weights [sum of all outputs, K].
        sums: Address of their row sums.
        constants: Address of the columns' constants.

    Raises:
        If the driver refuses.
    """
    var first = 0
    for i in range(call.part_count):
        var part = part_at(call, i)
        var own = call
        own.N = part.N
        own.weight = part.weight
        own.bias = part.bias
        launch_fold[dtype, N](
            gpu,
            own,
            folded + first * call.K * size_of[dtype](),
            sums + 4 * first,
            constants + 4 * first,
        )
        first += part.N


def forward_folded[dtype: DType, N: Norm](gpu: Gpu, call: Call) raises:
    """Queues the outputs, mean and rstd.

    Parameters:
        dtype: Type of x, the weights and the outputs.
        N: The norm.

    Args:
        gpu: Where to run.
        call: A call that `plan_folded` did not decline.

    Raises:
        If the driver refuses.
    """
    var plan = ForwardPlan[dtype](call, call.strategy, gpu.processors)
    if plan.folds:
        fold_parts[dtype, N](
            gpu, call, plan.fold_weight, plan.fold_sums, plan.fold_constants
        )
    var rows = launch_rows[dtype, N](gpu, call, plan.mean, plan.rstd)
    var sizes = sizes_of(call)
    var folded = Matrices(plan.fold_weight)
    comptime for i in range(MOST_PARTS):
        folded.addresses[i] += first_of(sizes, i) * call.K * size_of[dtype]()
    _launch_beside[dtype](
        gpu,
        call,
        rows,
        folded,
        ScaleAndCorrect[N.has_mean](
            {unsafe_from_address = plan.rstd},
            {unsafe_from_address = plan.mean},
            {unsafe_from_address = plan.fold_constants},
            {unsafe_from_address = plan.fold_sums},
        ),
    )


def _launch_beside[
    E: Epilogue, //, dtype: DType
](gpu: Gpu, call: Call, rows: Int, weights: Matrices, epilogue: E) raises:
    var product = Product(call.M, call.N, call.K, epilogue, NoHook())
    product.band = BAND
    product.a_is_new = Int32(waits_for_rows(call))
    product.sizes = sizes_of(call)
    var outputs = Matrices(0)
    outputs.pitch = call.pitch
    for i in range(call.part_count):
        outputs.addresses[i] = part_at(call, i).y
    if is_for_few_rows(call.M, call.K):
        # Passes wait for all before them, and write no weight.
        product.b_is_older = Int32(call.z != 0)
        launch_few_rows_of_parts[dtype, False, SIDE_BY_SIDE](
            gpu, outputs, rows, weights, product
        )
        return
    launch_parts[dtype, BESIDE](gpu, outputs, Matrices(rows), weights, product)


def plan_products[dtype: DType](launcher: Launcher, mut call: Call):
    """Chooses the strategy of y_i = z weight_i^T + bias_i.

    Parameters:
        dtype: Type of all.

    Args:
        launcher: Where to run.
        call: The call; its strategy is written, FUSED or DECLINED. It needs no workspace. Either all parts have a bias
            or none has.
    """
    call.workspace_bytes = 0
    call.strategy = DECLINED
    if products_pay[dtype](call, launcher.gpu.processors):
        call.strategy = FUSED


def products[dtype: DType](launcher: Launcher, call: Call) raises:
    """Queues y_i = z weight_i^T + bias_i.

    Parameters:
        dtype: Type of all: bfloat16 or float16.

    Args:
        launcher: Where to run.
        call: A call that `plan_products` did not decline.

    Raises:
        If the driver refuses.
    """
    ref gpu = launcher.gpu
    var weights = Matrices(0)
    var biases = Matrices(0)
    for i in range(call.part_count):
        var part = part_at(call, i)
        weights.addresses[i] = part.weight
        biases.addresses[i] = part.bias
    _launch_beside[dtype](
        gpu,
        call,
        call.z,
        weights,
        BiasOfParts[dtype](
            Int64(biases.addresses[0]),
            Int64(biases.addresses[1]),
            Int64(biases.addresses[2]),
        ),
    )
