"""How a backward runs on Hopper: its kernels and its workspace.

Tensor cores take no transposed operands in tf32, so float32 has no backward here.
"""

from std.math import align_up
from std.sys import size_of

from ...call import Call
from ...device import Launcher
from ...gemm.sm90.split_k import SplitK
from ...gemm.sm90.tiling import FEW_ROWS, Tiling
from ...passes.gpu import GpuRunner
from ...passes.normalize_backward import workspace
from ..plan import DECLINED, FUSED
from .choice import has_kernels
from .costs import Costs
from .launch_row_pass import RowPassLayout, pays
from .workspace import PART

# Up to this many products, the time goes into starting one kernel of the backward after another: on the device in a
# graph, otherwise on the host, where that takes some tens of microseconds.
comptime _FEW_PRODUCTS = 50_000_000
comptime _FEW_PRODUCTS_LAUNCHED = 5_000_000_000
# With more outputs, PyTorch's products and a pass take 0.97 to 0.98 of the time (docs/hopper-log.md, "The pass in the kernel
# of the product").
comptime _MOST_OUTPUTS = 12288
# Microseconds of the sums of dy, a kernel of its own where the product of dW is PyTorch's.
comptime _SUMS_US = Float64(3)


struct BackwardPlan[dtype: DType](TrivialRegisterPassable):
    """A backward: its kernels and its workspace.

    Parameters:
        dtype: Type of the matrices, of 16 bits.
    """

    var tiling: Tiling
    """The kernel of dz = dy W."""
    var split: SplitK
    """How the sums of dW = dy^T z are shared."""
    var passes_on: Bool
    """Whether the kernel that makes the rows of dz passes over them as well."""
    var partial: Int
    """Offset in the workspace of partial sums and what else the passes need, after dz."""
    var workspace_bytes: Int
    """Size of the workspace."""

    def __init__(out self, launcher: Launcher, call: Call):
        """Chooses for a call.

        Args:
            launcher: Where to run.
            call: The call; gradients that are wanted have an address, any but 0.
        """
        var m, n, k = call.M, call.N, call.K
        ref gpu = launcher.gpu
        self.tiling = Tiling.best(m, k, n, gpu.processors)
        self.split = SplitK.best(
            n,
            k,
            m,
            gpu.processors,
            sums_rows=call.dbias != 0,
            adds=call.accumulate != 0,
        )
        var wants_weight = call.dweight != 0
        # The kernel makes z and dx. Its grid waits until all of its blocks run, so it would wait for a collective, too.
        self.passes_on = (
            launcher.alone
            and call.dx != 0
            and wants_weight
            and pays(gpu.processors, m, n, k)
        )
        self.partial = align_up(m * k * size_of[Self.dtype](), PART)
        # The sums of rows are used up when those of the weight's gradient start.
        var between = call
        if wants_weight:
            between.dbias = 0
        var partial = workspace[Self.dtype, Self.dtype](
            GpuRunner[DType.float32](gpu), between
        ).bytes
        if wants_weight:
            partial = max(partial, self.split.workspace_bytes)
        if self.passes_on:
            partial = max(partial, RowPassLayout(m, k).end)
        self.workspace_bytes = self.partial + partial


def is_too_wide(call: Call) -> Bool:
    """Tells whether a layer has so many outputs that PyTorch's products are faster by more than our kernels save.

    Args:
        call: The sizes; db has an address, any but 0, if it is wanted: a pass of its own without these kernels, as is what
            accumulates dW.

    Returns:
        Whether it has.
    """
    return call.N > _MOST_OUTPUTS and call.dbias == 0 and call.accumulate == 0


def few_rows_pay(call: Call, costs: Costs) -> Bool:
    """Tells whether the kernel for few rows makes dz in about the time of PyTorch's product, which shares sums as long as a
    wide layer's outputs among more SMs.

    Args:
        call: The sizes.
        costs: What products cost on the device.

    Returns:
        Whether it does.
    """
    return costs.is_faster(call.M, call.N, call.K, _SUMS_US)


def plan_backward[dtype: DType](launcher: Launcher, mut call: Call):
    """Chooses the strategy of a backward and the bytes of its workspace.

    Parameters:
        dtype: Type of the matrices.

    Args:
        launcher: Where to run.
        call: The call; its strategy and the bytes of its workspace are written.
    """
    call.strategy = DECLINED
    call.workspace_bytes = 0
    comptime if dtype != DType.float32:
        if not has_kernels[dtype](call):
            return
        var plan = BackwardPlan[dtype](launcher, call)
        var few = (
            _FEW_PRODUCTS if call.in_graph != 0 else _FEW_PRODUCTS_LAUNCHED
        )
        # Either both products are as fast as cuBLAS's, or they are so small that it does not matter.
        if call.M * call.N * call.K <= few or (
            plan.tiling.fills()
            and plan.split.pays
            and not is_too_wide(call)
            and (
                plan.tiling.columns != FEW_ROWS
                or few_rows_pay(call, Costs(launcher))
            )
        ):
            call.strategy = FUSED
            call.workspace_bytes = plan.workspace_bytes
