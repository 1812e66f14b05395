"""How a call runs on Hopper: the one place that chooses way, kernels, split and the layout of the workspace.

A `plan_` function reads sizes, conditions, and which addresses there are, and writes the way and the bytes of the
workspace to the call. What runs the call lays the rest out again from the way and the sizes, by the same struct.

The fold is for bfloat16: in float16, sums far from zero lose more to the tensor cores than y to its rounding, and
rounding x as it is to tf32 would lose a row whose mean is far from zero. Tensor cores take no transposed operands
in tf32, so float32 has no backward here.
"""

from std.math import align_up, ceildiv
from std.sys import size_of

from ...call import Call
from ...device import Launcher
from ...gemm.activation import GATED
from ...gemm.sm90.config import Config
from ...gemm.sm90.split_k import SplitK
from ...gemm.sm90.tiling import (
    FEW_ROWS,
    NARROWEST_GATE,
    SHARED_COLUMNS,
    Tiling,
    count_tiles,
    fills,
)
from ...gemm.sm90.wgmma import K_BLOCK
from ...passes.gpu import GpuRunner
from ...passes.normalize_backward import workspace
from ..plan import AROUND_PRODUCTS, DECLINED, FUSED, KEPT_FOLD, NEW_FOLD
from .fold import products
from .launch_row_pass import RowPassLayout, pays
from .measured import MEASURED

# Boxes that TMA copies, and every row, start at multiples of so many bytes.
comptime _ALIGNMENT = 16
# Every part of the workspace starts at a multiple of so many.
comptime _PART = 256

# A tile of y in float32 takes twice as long to store: where many tiles have short sums, that shows
# (docs/hopper-log.md, "float32").
comptime _SHORT_SUMS = 1024
comptime _MANY_OUTPUTS = 1 << 24

# A tile that gathers statistics takes twice as long, and the walk from one to the next of the same rows reads more of
# the weight; a kernel that only finds them reads x once more (docs/hopper-log.md, "Taking turns").
comptime _FEW_OUTPUTS = 1024
comptime _ROWS_PER_FEATURE = 8

# Up to so many tiles for each block there is little to take turns for, and consumers that share a tile find its
# statistics at hardly any cost.
comptime _FEW_WAVES = 4

# Columns of a box.
comptime _BOX = 64

# Up to so many products, the time goes into starting one kernel of the backward after another: on the device in a
# graph, otherwise on the host, where that takes some tens of microseconds.
comptime _FEW_PRODUCTS = 500_000_000
comptime _FEW_PRODUCTS_LAUNCHED = 5_000_000_000


def fastest(m: Int, k: Int, n: Int, in_graph: Bool, may_keep: Bool) -> Int:
    """Finds the way that was fastest at the nearest sizes that were measured.

    Args:
        m: Rows.
        k: Features.
        n: Outputs.
        in_graph: Whether launches cost the host nothing.
        may_keep: Whether a fold may be kept.

    Returns:
        The way, in bfloat16.
    """
    var nearest = Float64.MAX
    var its_k, its_n = 0, 0
    comptime for i in range(len(MEASURED)):
        comptime at = MEASURED[i]
        comptime if (
            i == 0 or at.K != MEASURED[i - 1].K or at.N != MEASURED[i - 1].N
        ):
            var far = _ratio(k, at.K) * _ratio(n, at.N)
            if far < nearest:
                nearest = far
                its_k, its_n = at.K, at.N
    nearest = Float64.MAX
    var way = DECLINED
    comptime for i in range(len(MEASURED)):
        comptime at = MEASURED[i]
        if at.K == its_k and at.N == its_n:
            var far = _ratio(m, at.M)
            if far < nearest:
                nearest = far
                var kept = at.graph_kept if in_graph else at.launched_kept
                var none = at.graph if in_graph else at.launched
                way = kept if may_keep else none
    return way


def _ratio(a: Int, b: Int) -> Float64:
    """Divides the larger by the smaller: distances are those of logarithms."""
    return Float64(max(a, b)) / Float64(min(a, b))


def _has_kernels[dtype: DType](call: Call) -> Bool:
    return (
        call.M > 0
        and call.K > 0
        and call.N > 0
        and (call.K | call.N) * size_of[dtype]() % _ALIGNMENT == 0
    )


def _fold_pays(call: Call) -> Bool:
    """Tells whether a fold made anew costs less than passes over x, before PyTorch's product, and h, after it.

    An element of each takes 8, 5 and 2 units of time (docs/hopper-log.md, "Activations").
    """
    var n = products(call)
    return 8 * n * call.K < (5 * call.K + 2 * n) * call.M


def choose_forward[dtype: DType](call: Call) -> Int:
    """Chooses the way of a forward.

    Parameters:
        dtype: Type of x, the weight and y.

    Args:
        call: Sizes, conditions, and the addresses of x and the parameters. Its way is 0, or the one to take.

    Returns:
        FUSED, KEPT_FOLD, NEW_FOLD or DECLINED.
    """
    if not _has_kernels[dtype](call) or call.way == AROUND_PRODUCTS:
        return DECLINED
    # Boxes of a gate's h end where its halves do.
    if call.activation >= GATED and call.h != 0 and call.N % _BOX != 0:
        return DECLINED
    var way: Int
    comptime if dtype == DType.float32:
        var stores = call.K <= _SHORT_SUMS and call.M * call.N >= _MANY_OUTPUTS
        way = DECLINED if stores and call.way == 0 else FUSED
    else:
        var folds = (
            dtype == DType.bfloat16
            and (call.x | call.weight | call.gamma | call.beta) % _ALIGNMENT
            == 0
        )
        way = call.way
        if way == 0:
            way = fastest(
                call.M,
                call.K,
                products(call),
                call.in_graph != 0,
                folds and call.may_keep != 0,
            )
        if way in (NEW_FOLD, KEPT_FOLD) and not folds:
            way = FUSED
        if call.activation != 0 and way not in (NEW_FOLD, KEPT_FOLD):
            # Only an epilogue of a fold activates.
            var pays = call.way == 0 and folds and _fold_pays(call)
            way = NEW_FOLD if pays else DECLINED
    # x may start anywhere: only the norm's own kernel reads it.
    if way == FUSED and (call.weight | call.bias) % _ALIGNMENT != 0:
        return DECLINED
    return way


struct ForwardPlan[dtype: DType](TrivialRegisterPassable):
    """A forward of some way: its kernels, and where its tensors are.

    Parameters:
        dtype: Type of x, the weight and y.
    """

    var tiling: Tiling
    """The product's kernel."""
    var gathers: Bool
    """Whether that finds the statistics of x on the way."""
    var folds: Bool
    """Whether the weight is folded first."""
    var z: Int
    """Address of z [M, K]."""
    var mean: Int
    """Address of the means [M]."""
    var rstd: Int
    """Address of the reciprocal deviations [M]."""
    var fold_weight: Int
    """Address of the folded weight [N, K]."""
    var fold_sums: Int
    """Address of its row sums [N]."""
    var fold_constants: Int
    """Address of the constants [N]."""
    var workspace_bytes: Int
    """Size of the workspace."""

    def __init__(out self, call: Call, way: Int, processors: Int):
        """Lays out a forward.

        Args:
            call: The call.
            way: FUSED, KEPT_FOLD or NEW_FOLD.
            processors: SMs of the device.
        """
        comptime size = size_of[Self.dtype]()
        var m, n, k = call.M, products(call), call.K
        self.tiling = Tiling.best(
            m,
            n,
            k,
            processors,
            NARROWEST_GATE if call.activation >= GATED else 0,
        )
        self.folds = way == NEW_FOLD
        # The zeros that fill up a k block would change a variance.
        self.gathers = (
            way != FUSED and k % K_BLOCK == 0 and call.part_count == 0
        )
        if self.gathers and self.tiling.columns != FEW_ROWS:
            comptime shared = Config.of(SHARED_COLUMNS)
            var clusters = processors // shared.cluster
            var waves = ceildiv(count_tiles(shared, m, n), clusters)
            if call.activation != 0:
                self.gathers = False
            elif waves <= _FEW_WAVES and fills(shared, m, n, clusters):
                self.tiling = Tiling(SHARED_COLUMNS, False, True)
            else:
                self.gathers = (
                    self.tiling.takes_turns
                    and n <= _FEW_OUTPUTS
                    and m >= _ROWS_PER_FEATURE * k
                )
        self.mean = call.mean
        self.rstd = call.rstd
        self.fold_weight = call.fold_weight
        self.fold_sums = call.fold_sums
        self.fold_constants = call.fold_constants
        var end = call.workspace
        self.z = end
        if way == FUSED:
            end += m * k * size
        else:
            # The product needs the statistics even if the caller does not.
            if self.mean == 0:
                self.mean = _part(end, 4 * m)
            if self.rstd == 0:
                self.rstd = _part(end, 4 * m)
        if self.folds:
            self.fold_weight = _part(end, n * k * size)
            self.fold_sums = _part(end, 4 * n)
            self.fold_constants = _part(end, 4 * n)
        self.workspace_bytes = end - call.workspace


def _part(mut end: Int, bytes: Int) -> Int:
    var start = end
    end += align_up(bytes, _PART)
    return start


def plan_forward[dtype: DType](launcher: Launcher, mut call: Call):
    """Chooses the way of a forward and the bytes of its workspace.

    Parameters:
        dtype: Type of x, the weight and y.

    Args:
        launcher: Where to run.
        call: The call; its way and the bytes of its workspace are written. A way that is not 0 is taken where it can
            be: tests and measurements ask for one.
    """
    call.way = choose_forward[dtype](call)
    call.workspace_bytes = 0
    if call.way != DECLINED:
        call.workspace_bytes = ForwardPlan[dtype](
            call, call.way, launcher.gpu.processors
        ).workspace_bytes


def linear_tiling(call: Call, processors: Int) -> Tiling:
    """Chooses the kernel of y = x weight^T + bias + residual.

    Args:
        call: Sizes and conditions.
        processors: SMs of the device.

    Returns:
        The choice.
    """
    return Tiling.best(
        call.M, call.N, call.K, processors, invariant=call.invariant != 0
    )


def input_gradient_tiling(call: Call, processors: Int) -> Tiling:
    """Chooses the kernel of dx = dy weight where a row's bits may depend on no other row.

    Args:
        call: Sizes.
        processors: SMs of the device.

    Returns:
        The choice.
    """
    return Tiling.best(call.M, call.K, call.N, processors, invariant=True)


def plan_linear_add[dtype: DType](launcher: Launcher, mut call: Call):
    """Chooses the way of y = x weight^T + bias + residual.

    Parameters:
        dtype: Type of all.

    Args:
        launcher: Where to run.
        call: The call; its way is written, FUSED or DECLINED. It needs no workspace. If it is to be invariant,
            speed does not matter.
    """
    call.way = DECLINED
    call.workspace_bytes = 0
    var tensors = call.x | call.weight | call.bias | call.residual | call.y
    if _has_kernels[dtype](call) and tensors % _ALIGNMENT == 0:
        var tiling = linear_tiling(call, launcher.gpu.processors)
        if tiling.fills or call.invariant != 0:
            call.way = FUSED


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
        self.split = SplitK.best(n, k, m, gpu.processors)
        var wants_weight = call.dweight != 0
        # The kernel makes z and dx. Its grid waits until all of its blocks run, so it would wait for a collective, too.
        self.passes_on = (
            launcher.alone
            and call.dx != 0
            and wants_weight
            and pays(gpu.processors, m, n, k)
        )
        self.partial = align_up(m * k * size_of[Self.dtype](), _PART)
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


def plan_backward[dtype: DType](launcher: Launcher, mut call: Call):
    """Chooses the way of a backward and the bytes of its workspace.

    Parameters:
        dtype: Type of the matrices.

    Args:
        launcher: Where to run.
        call: The call; its way and the bytes of its workspace are written.
    """
    call.way = DECLINED
    call.workspace_bytes = 0
    comptime if dtype != DType.float32:
        var matrices = call.dy | call.x | call.weight
        if call.accumulate != 0:
            matrices |= call.dweight
        if not _has_kernels[dtype](call) or matrices % _ALIGNMENT != 0:
            return
        var plan = BackwardPlan[dtype](launcher, call)
        var few = (
            _FEW_PRODUCTS if call.in_graph != 0 else _FEW_PRODUCTS_LAUNCHED
        )
        # Either both products fill the device, or they are so small that it does not matter.
        if call.M * call.N * call.K <= few or (
            plan.tiling.fills and plan.split.fills
        ):
            call.way = FUSED
            call.workspace_bytes = plan.workspace_bytes
