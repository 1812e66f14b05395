"""The backward of a Linear layer alone: dgrad, then wgrad.

    dx = dy weight    if x = act(h), dh = dx act'(h) instead, and x again, in the same kernel
    dW = dy^T z, and db in the same kernel; those of several layers on the same rows in one launch, where that pays

The plans decline where PyTorch's product is faster, or where TMA cannot read the layout of a matrix.
"""

from std.utils import StaticTuple

from ...call import Call
from ...device import Gpu, Launcher
from ...gemm.activation import GATED, GELU, SmoothCurve
from ...gemm.differentiated import Differentiated
from ...gemm.epilogues import Plain
from ...gemm.sm90.activated import launch_with_h
from ...gemm.sm90.config import H_COLUMNS
from ...gemm.sm90.launch import launch_product
from ...gemm.sm90.parts import (
    MOST_PARTS,
    STACKED_COLUMNS,
    Matrices,
    steps_of,
)
from ...gemm.sm90.split_k import SplitK, launch_split_k, launch_stacked
from ...gemm.sm90.tiling import FEW_ROWS, Tiling, tiling_with_h
from ..plan import DECLINED, FUSED
from .choice import has_kernels
from .costs import Costs
from .parts import part_at, sizes_of

# From this many rows on, two grids that share them take no longer than PyTorch's product does
# (docs/hopper-log.md, "Several Linear layers on one norm").
comptime _LONG_SUMS = 16384


def _input_gradient_tiling(call: Call, processors: Int) -> Tiling:
    """Chooses the kernel of dx."""
    return Tiling.best(
        call.M, call.K, call.N, processors, invariant=call.invariant != 0
    )


def input_gradient_pays[dtype: DType](call: Call, costs: Costs) -> Bool:
    """Tells whether dx takes less time here than with PyTorch's product.

    Parameters:
        dtype: Type of all.

    Args:
        call: Sizes, conditions, the activation, and the addresses that there are. If it is to be invariant, speed does
            not matter.
        costs: What products cost on the device.

    Returns:
        Whether it is.
    """
    if dtype == DType.float32 or not has_kernels[dtype](call):
        return False
    if call.activation != 0:
        # A pass over h is saved, as are writing and reading dx. Boxes of a gate's gradient end where its halves do.
        var gates = call.activation >= GATED
        var tiling = tiling_with_h[dtype](
            call.M, call.K, call.N, gates, costs.processors
        )
        var kind = Int32(call.activation % GATED)
        var fits = not gates or call.K % H_COLUMNS == 0
        return (
            kind >= GELU
            and fits
            and tiling.columns != FEW_ROWS
            and tiling.fills()
        )
    return call.invariant != 0 or (
        _input_gradient_tiling(call, costs.processors).fills()
        and costs.is_faster(call.M, call.N, call.K)
    )


def plan_input_gradient[dtype: DType](launcher: Launcher, mut call: Call):
    """Chooses the strategy of dx = dy weight.

    Parameters:
        dtype: Type of all.

    Args:
        launcher: Where to run.
        call: The call; its strategy is written, FUSED or DECLINED. It needs no workspace.
    """
    call.strategy = DECLINED
    call.workspace_bytes = 0
    if input_gradient_pays[dtype](call, Costs(launcher)):
        call.strategy = FUSED


def input_gradient[dtype: DType](launcher: Launcher, call: Call) raises:
    """Queues dx = dy weight; with an activation dh, and a if it has an address.

    Parameters:
        dtype: Type of all: bfloat16 or float16.

    Args:
        launcher: Where to run.
        call: A call that `plan_input_gradient` did not decline.

    Raises:
        If the driver refuses.
    """
    ref gpu = launcher.gpu
    if call.activation >= GATED:
        _launch_gradients[dtype, True](gpu, call)
        return
    if call.activation != 0:
        _launch_gradients[dtype, False](gpu, call)
        return
    launch_product[dtype, True](
        gpu,
        _input_gradient_tiling(call, gpu.processors),
        call.dx,
        call.dy,
        call.weight,
        call.M,
        call.K,
        call.N,
        Plain(),
    )


def _launch_gradients[dtype: DType, gates: Bool](gpu: Gpu, call: Call) raises:
    launch_with_h[dtype, True](
        gpu,
        call.dh,
        call.dy,
        call.weight,
        call.M,
        call.K,
        call.N,
        Differentiated[gates](
            Int64(call.h),
            Int64(call.a),
            SmoothCurve.of(call.activation % GATED),
        ),
    )


def weight_gradient_pays[dtype: DType](call: Call, costs: Costs) -> Bool:
    """Tells whether dW and db take less time here than with PyTorch's product and a pass.

    Parameters:
        dtype: Type of the matrices.

    Args:
        call: Sizes, conditions, and the addresses that there are; that of db is any but 0 if it is wanted.
        costs: What products cost on the device.

    Returns:
        Whether they are.
    """
    if dtype == DType.float32 or not has_kernels[dtype](call):
        return False
    if costs.address == 0:
        return True
    # dW alone is PyTorch's: where our tiles fill the device it takes as long, and elsewhere less.
    var split = _split(call, costs.processors)
    return (
        call.dbias != 0
        and split.pays
        and (split.grids == 1 or call.M >= _LONG_SUMS)
    )


def plan_weight_gradient[dtype: DType](launcher: Launcher, mut call: Call):
    """Chooses the strategy of dW = dy^T z and db, the gradients of the parameters.

    Parameters:
        dtype: Type of the matrices.

    Args:
        launcher: Where to run.
        call: The call; its strategy is written, FUSED or DECLINED, and the bytes of its workspace. db has an address,
            any but 0, if it is wanted. Or its parts have those of several layers, which need no workspace.
    """
    call.strategy = DECLINED
    call.workspace_bytes = 0
    if call.part_count > 0:
        if _stacking_pays[dtype](call, Costs(launcher)):
            call.strategy = FUSED
        return
    if weight_gradient_pays[dtype](call, Costs(launcher)):
        call.strategy = FUSED
        call.workspace_bytes = _split(
            call, launcher.gpu.processors
        ).workspace_bytes


def _stacking_pays[dtype: DType](call: Call, costs: Costs) -> Bool:
    """Tells whether one launch takes less time than the products one after another."""
    if dtype == DType.float32:
        return False
    var wants_sums = False
    var apart = 0
    for i in range(call.part_count):
        var part = part_at(call, i)
        var own = call
        own.N = part.N
        if not has_kernels[dtype](own):
            return False
        wants_sums = wants_sums or part.bias != 0
        apart += SplitK.best(
            part.N,
            call.K,
            call.M,
            costs.processors,
            sums_rows=part.bias != 0,
        ).cost
    if costs.address == 0:
        return True
    # dW alone is PyTorch's, as for one layer.
    return wants_sums and _stacked(call, costs.processors).cost < apart


def _stacked(call: Call, processors: Int) -> SplitK:
    var rows = steps_of(sizes_of(call), STACKED_COLUMNS) * STACKED_COLUMNS
    return SplitK.best(
        rows, call.K, call.M, processors, sums_rows=True, stacked=True
    )


def _split(call: Call, processors: Int) -> SplitK:
    return SplitK.best(
        call.N, call.K, call.M, processors, sums_rows=call.dbias != 0
    )


def weight_gradient[dtype: DType](launcher: Launcher, call: Call) raises:
    """Queues dW = dy^T z and db; or those of each part, from its dy, at y and bias.

    Parameters:
        dtype: Type of the matrices: bfloat16 or float16.

    Args:
        launcher: Where to run.
        call: A call that `plan_weight_gradient` did not decline.

    Raises:
        If the driver refuses.
    """
    ref gpu = launcher.gpu
    if call.part_count > 0:
        var gradients = Matrices(0)
        var outputs = Matrices(0)
        var sums = StaticTuple[Int64, MOST_PARTS](fill=0)
        for i in range(call.part_count):
            var part = part_at(call, i)
            gradients.addresses[i] = part.dy
            outputs.addresses[i] = part.y
            sums[i] = Int64(part.bias)
        launch_stacked[dtype](
            gpu,
            _stacked(call, gpu.processors),
            outputs,
            sums,
            gradients,
            call.z,
            sizes_of(call),
            call.K,
            call.M,
        )
        return
    launch_split_k[dtype, dtype](
        gpu,
        _split(call, gpu.processors),
        call.dweight,
        call.dbias,
        call.dy,
        call.z,
        call.workspace,
        call.N,
        call.K,
        call.M,
        False,
    )
