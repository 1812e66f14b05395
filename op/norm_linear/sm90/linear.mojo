"""A Linear layer alone, on rows that a pass has normalized, or on any rows.

    y = act(rows weight^T + bias)    h, the input of the activation, is stored as well if asked for
    y = rows weight^T + bias + residual
    y = residual + gate (rows weight^T + bias)    each group of rows has a gate of its own

The plan declines where PyTorch's product is faster, or where TMA cannot read the layout of a matrix.
"""

from std.sys import size_of

from ...call import Call
from ...device import Gpu, Launcher
from ...gemm.activation import GATED
from ...gemm.added import Added
from ...gemm.epilogue import Epilogue
from ...gemm.epilogues import Activated, Bias, BiasOfParts
from ...gemm.gated_add import GatedAdd
from ...gemm.sm90.activated import launch_activated, launch_with_h
from ...gemm.sm90.config import TILE_ROWS
from ...gemm.sm90.launch import launch_product
from ...gemm.sm90.tiling import (
    FEW_ROWS,
    MOST_FEW_ROWS,
    VERY_FEW_ROWS,
    Tiling,
    activated_tiling,
    tiling_with_h,
)
from ..plan import DECLINED, FUSED
from .alignment import ALIGNMENT
from .choice import fits_gate, has_kernels
from .costs import Costs
from .fold import products


def linear_tiling(call: Call, processors: Int) -> Tiling:
    """Chooses the kernel of y, unless that is activated.

    Args:
        call: Sizes and conditions.
        processors: SMs of the device.

    Returns:
        The choice.
    """
    return Tiling.best(
        call.M,
        call.N,
        call.K,
        processors,
        invariant=call.invariant != 0,
        splits=(call.invariant | call.residual) == 0,
    )


def linear_pays[dtype: DType](call: Call, costs: Costs) -> Bool:
    """Tells whether y takes less time here than with PyTorch's product and the passes after it.

    Parameters:
        dtype: Type of all.

    Args:
        call: Sizes, conditions, and the addresses that there are. If it is to be invariant, speed does not matter.
        costs: What products cost on the device.

    Returns:
        Whether it is.
    """
    if dtype == DType.float32 or not has_kernels[dtype](call):
        return False
    if call.gate != 0:
        return _fits_groups[dtype](call) and _fills_with_h(call, costs)
    if call.invariant != 0:
        return call.activation == 0
    if call.activation != 0:
        # A pass over h is saved.
        return (
            fits_gate(call)
            and activated_tiling[dtype](
                call.M, products(call), call.K, costs.processors
            ).fills()
        )
    # So is one over y where a residual is added, of up to 16 rows or many: between, cuBLAS reads the weight
    # faster, and adds its third matrix (docs/hopper-log.md, "Decoding").
    if call.residual != 0:
        if VERY_FEW_ROWS < call.M <= MOST_FEW_ROWS:
            return False
        return linear_tiling(call, costs.processors).fills()
    return costs.is_faster(call.M, call.K, call.N)


def _fits_groups[dtype: DType](call: Call) -> Bool:
    """Tells whether each tile of rows has one gate, and TMA copies it."""
    var of_whole_tiles = (
        call.groups == 1 or call.M % (call.groups * TILE_ROWS) == 0
    )
    return (
        of_whole_tiles and call.group_pitch * size_of[dtype]() % ALIGNMENT == 0
    )


def _fills_with_h(call: Call, costs: Costs) -> Bool:
    var tiling = tiling_with_h[DType.bfloat16](
        call.M, call.N, call.K, False, costs.processors
    )
    return tiling.columns != FEW_ROWS and tiling.fills()


def plan_linear[dtype: DType](launcher: Launcher, mut call: Call):
    """Chooses the strategy of y.

    Parameters:
        dtype: Type of all.

    Args:
        launcher: Where to run.
        call: The call; its strategy is written, FUSED or DECLINED. It needs no workspace. Its rows are z if a pass has
            written them that was queued just before, otherwise x.
    """
    call.strategy = DECLINED
    call.workspace_bytes = 0
    if linear_pays[dtype](call, Costs(launcher)):
        call.strategy = FUSED


def linear[dtype: DType](launcher: Launcher, call: Call) raises:
    """Queues y, and h if it has an address.

    Parameters:
        dtype: Type of all: bfloat16 or float16.

    Args:
        launcher: Where to run.
        call: A call that `plan_linear` did not decline; the residual is [M, N], 0 for none, which a gate needs.

    Raises:
        If the driver refuses.
    """
    ref gpu = launcher.gpu
    var is_passed = call.z != 0
    launch_linear[dtype](
        gpu,
        call,
        linear_tiling(call, gpu.processors),
        call.z if is_passed else call.x,
        # Passes wait for all before them, and write no weight.
        b_is_older=is_passed,
    )


def launch_linear[
    dtype: DType
](gpu: Gpu, call: Call, tiling: Tiling, rows: Int, *, b_is_older: Bool) raises:
    """Queues y, and h if it has an address.

    Parameters:
        dtype: Type of all; float32, as tf32, is neither activated nor added to.

    Args:
        gpu: Where to run.
        call: What is multiplied by rows, and what becomes of that.
        tiling: The kernel.
        rows: Address of the rows [M, K].
        b_is_older: As for `launch_product`.

    Raises:
        If the driver refuses.
    """
    var epilogue = Bias[dtype](Int64(call.bias))
    comptime if dtype != DType.float32:
        if call.activation >= GATED:
            var biases = BiasOfParts[dtype](
                Int64(call.bias), Int64(call.up_bias), 0
            )
            _launch_activated[dtype, True](gpu, call, rows, b_is_older, biases)
            return
        if call.gate != 0:
            launch_with_h[dtype, False](
                gpu,
                call.y,
                rows,
                call.weight,
                call.M,
                call.N,
                call.K,
                GatedAdd[dtype](
                    Int64(call.residual),
                    Int64(call.gate),
                    Int64(call.bias),
                    Int64(call.group_pitch),
                    Int32(call.M // call.groups),
                ),
            )
            return
        if call.residual != 0:
            _launch_product[dtype](
                gpu,
                call,
                tiling,
                rows,
                b_is_older,
                Added(epilogue, Int64(call.residual)),
            )
            return
        if call.activation != 0:
            _launch_activated[dtype, False](
                gpu, call, rows, b_is_older, epilogue
            )
            return
    _launch_product[dtype](gpu, call, tiling, rows, b_is_older, epilogue)


def _launch_activated[
    E: Epilogue, //, dtype: DType, gates: Bool
](gpu: Gpu, call: Call, rows: Int, b_is_older: Bool, epilogue: E) raises:
    launch_activated[dtype](
        gpu,
        call.y,
        rows,
        call.weight,
        call.up,
        call.M,
        products(call),
        call.K,
        Activated[E, gates](
            epilogue, Int64(call.h), Int32(call.activation % GATED)
        ),
        b_is_older=b_is_older,
    )


def _launch_product[
    E: Epilogue, //, dtype: DType
](
    gpu: Gpu,
    call: Call,
    tiling: Tiling,
    rows: Int,
    b_is_older: Bool,
    epilogue: E,
) raises:
    launch_product[dtype](
        gpu,
        tiling,
        call.y,
        rows,
        call.weight,
        call.M,
        call.N,
        call.K,
        epilogue,
        b_is_older,
    )
