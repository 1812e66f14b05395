"""How a forward runs on Hopper: kernels and the layout of the workspace.

A `plan_` function reads sizes, conditions, and which tensors there are, and writes the strategy and the bytes of the
workspace to the call. The function that runs the call computes the layout again from the strategy and the sizes, with
the same struct.
"""

from std.math import ceildiv
from std.sys import size_of

from ...call import Call
from ...device import Launcher
from ...gemm.activation import GATED
from ...gemm.sm90.config import Config
from ...gemm.sm90.tiling import (
    FEW_ROWS,
    NARROWEST_GATE,
    SHARED_COLUMNS,
    Tiling,
    count_tiles,
    fewest_cycles,
    gathering_cycles,
)
from ...gemm.sm90.wgmma import K_BLOCK
from ..plan import DECLINED, FUSED, NEW_FOLD
from .alignment import ALIGNMENT
from .choice import choose_forward, is_fold
from .costs import Costs
from .fold import products
from .linear import linear_pays
from .workspace import part

# A kernel for statistics alone reads x once more; gathering them takes less by the time in which so many elements of x
# are read in a cycle (docs/hopper-log.md, "Statistics in the product").
comptime _ELEMENTS_PER_CYCLE = 1350
# From more waves on, the order of tiles of the same rows reads more of the weight than is saved.
comptime _MOST_WAVES = 8


struct ForwardPlan[dtype: DType](TrivialRegisterPassable):
    """A forward by one strategy: its kernels, and where its tensors are.

    Parameters:
        dtype: Type of x, the weight and y.
    """

    var tiling: Tiling
    """The product's kernel."""
    var gathers: Bool
    """Whether that gathers the statistics of x."""
    var folds: Bool
    """Whether the weight is folded first."""
    var computes_constants: Bool
    """Whether the weight is its own fold, and only the constants have to be computed."""
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

    def __init__(
        out self,
        call: Call,
        strategy: Int,
        processors: Int,
        one_weight: Bool = False,
    ):
        """Lays out a forward.

        Args:
            call: The call.
            strategy: FUSED, KEPT_FOLD or NEW_FOLD.
            processors: SMs of the device.
            one_weight: Whether the call's weight is all that multiplies x, and may stand for its own fold.
        """
        comptime size = size_of[Self.dtype]()
        var m, n, k = call.M, products(call), call.K
        var is_plain = Self.dtype != DType.float32 and call.activation == 0
        self.tiling = Tiling.best(
            m,
            n,
            k,
            processors,
            NARROWEST_GATE if call.activation >= GATED else 0,
            common=Self.dtype == DType.float32 or call.activation != 0,
            splits=is_plain and strategy == FUSED,
        )
        self.computes_constants = (
            strategy == NEW_FOLD and one_weight and is_fold(call)
        )
        self.folds = strategy == NEW_FOLD and not self.computes_constants
        # The zeros that fill up a k block would change a variance.
        self.gathers = (
            strategy != FUSED
            and k % K_BLOCK == 0
            and call.part_count == 0
            and call.residual == 0
            and call.has_statistics == 0
        )
        if self.gathers and self.tiling.columns != FEW_ROWS:
            comptime shared = Config.of(SHARED_COLUMNS)
            var waves = ceildiv(
                count_tiles(shared, m, n), processors // shared.cluster
            )
            var most = (
                fewest_cycles(m, n, k, processors)
                + m * k // _ELEMENTS_PER_CYCLE
            )
            self.gathers = (
                call.activation == 0
                and n * size % ALIGNMENT == 0
                and waves <= _MOST_WAVES
                and gathering_cycles(m, n, k, processors) <= most
            )
            if self.gathers:
                self.tiling = Tiling(SHARED_COLUMNS, False, 100)
        self.mean = call.mean
        self.rstd = call.rstd
        self.fold_weight = call.fold_weight
        self.fold_sums = call.fold_sums
        self.fold_constants = call.fold_constants
        var end = call.workspace
        self.z = end
        if strategy == FUSED:
            end += m * k * size
        else:
            # The product needs the statistics even if the caller does not.
            if self.mean == 0:
                self.mean = part(end, 4 * m)
            if self.rstd == 0:
                self.rstd = part(end, 4 * m)
        if self.computes_constants:
            self.fold_weight = call.weight
        if self.folds:
            self.fold_weight = part(end, n * k * size)
        if strategy == NEW_FOLD:
            self.fold_sums = part(end, 4 * n)
            self.fold_constants = part(end, 4 * n)
        self.workspace_bytes = end - call.workspace


def plan_forward[dtype: DType](launcher: Launcher, mut call: Call):
    """Chooses the strategy of a forward and the bytes of its workspace.

    Parameters:
        dtype: Type of x, the weight and y.

    Args:
        launcher: Where to run.
        call: The call; its strategy and the bytes of its workspace are written. A strategy that is not 0 is taken where
            it can be: tests and measurements ask for one.
    """
    var costs = Costs(launcher)
    call.strategy = choose_forward[dtype](
        call,
        costs,
        call.activation != 0
        and call.strategy in (0, FUSED)
        and linear_pays[dtype](call, costs),
    )
    call.workspace_bytes = 0
    if call.strategy != DECLINED:
        call.workspace_bytes = ForwardPlan[dtype](
            call, call.strategy, launcher.gpu.processors, one_weight=True
        ).workspace_bytes
