"""Divides a backward computation into tasks and lays out its workspace."""

from std.sys import size_of

from .blocking import Blocking, CACHE_LINE, Panels, ceildiv
from .parameter_gradients import SUM_ROWS
from .weight_tile import TileMemory
from .workspace import Arena, RowGroups, useful_threads

comptime TILE_ROWS = 512
"""Most rows of the weight in a tile."""

comptime TILE_COLUMNS = 1024
"""Most columns of the weight in a tile, but for rounding up to panels."""


@fieldwise_init
struct Wanted(TrivialRegisterPassable):
    """Says which gradients to compute."""

    var dx: Bool
    """Whether the input's."""
    var dln_weight: Bool
    """Whether LayerNorm's weight's."""
    var dln_bias: Bool
    """Whether LayerNorm's bias's."""
    var dweight: Bool
    """Whether the linear weight's."""
    var dbias: Bool
    """Whether the linear bias's."""

    def product(self) -> Bool:
        """Decides whether `dy^T @ x_hat` is needed.

        Returns:
            Whether a gradient is made from it.
        """
        return self.dweight or self.dln_weight

    def parameters(self) -> Bool:
        """Decides whether there are tiles of the weight to compute.

        Returns:
            Whether any parameter's gradient is wanted.
        """
        return self.product() or self.dln_bias or self.dbias


struct BackwardPlan[dtype: DType](Copyable, Movable):
    """Divides a backward computation into tasks and lays out its workspace.

    Parameters:
        dtype: Element type of the tensors.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    var M: Int
    """Rows."""
    var K: Int
    """Features."""
    var N: Int
    """Outputs."""
    var wanted: Wanted
    """Which gradients to compute."""
    var workers: Int
    """Threads that take tasks."""
    var panels: Panels
    """Panels of features."""
    var groups: RowGroups
    """Groups of rows of dx, and their tasks."""
    var tile_rows: Int
    """Rows of a tile of the weight."""
    var tile_panels: Int
    """Panels across a tile of the weight."""
    var tiles_across: Int
    """Tiles side by side."""
    var tiles: Int
    """Number of tiles."""
    var gamma: Int
    """Offset of LayerNorm's weight in the type of sums."""
    var beta: Int
    """Offset of LayerNorm's bias in the type of sums."""
    var dgamma_partial: Int
    """Offset of partial sums of dgamma."""
    var dbeta_partial: Int
    """Offset of partial sums of dbeta."""
    var dy_in_place: Bool
    """Whether dy has the form of a left operand as it is."""
    var dy: Int
    """Offset of a group's rows of dy, if not."""
    var h: Int
    """Offset of a group's rows of `dy @ weight`."""
    var own: Int
    """Offset of the first worker's own part."""
    var own_bytes: Int
    """Size of a worker's own part."""
    var bytes: Int
    """Size of the workspace, with room to align it."""

    def __init__(
        out self, M: Int, K: Int, N: Int, wanted: Wanted, threads: Int
    ):
        """Plans a computation.

        Args:
            M: Rows.
            K: Features.
            N: Outputs.
            wanted: Which gradients to compute.
            threads: Threads at hand.
        """
        comptime B = Self.B
        self.M = M
        self.K = K
        self.N = N
        self.wanted = wanted
        self.workers = useful_threads(M * K * N, threads)
        self.panels = Panels.of[Self.dtype](K)
        self.groups = RowGroups(
            M,
            B.row_stride[B.accum](K) * size_of[B.accum](),
            self.panels.count,
            B.tile_m,
            self.workers,
        )

        self.tile_rows = _tile_rows(N, ceildiv(N, TILE_ROWS))
        self.tile_panels = ceildiv(self.panels.count, ceildiv(K, TILE_COLUMNS))
        while (
            ceildiv(N, self.tile_rows)
            * ceildiv(self.panels.count, self.tile_panels)
            < self.workers
        ):
            if self.tile_rows > SUM_ROWS:
                self.tile_rows = _tile_rows(self.tile_rows, 2)
            elif self.tile_panels > 1:
                self.tile_panels = ceildiv(self.tile_panels, 2)
            else:
                break
        self.tiles_across = ceildiv(self.panels.count, self.tile_panels)
        self.tiles = 0
        if wanted.parameters():
            self.tiles = ceildiv(N, self.tile_rows) * self.tiles_across

        var arena = Arena(0)
        self.gamma = arena.take[B.accum](K)
        self.beta = arena.take[B.accum](K)
        var partials = ceildiv(N, SUM_ROWS) * K
        self.dgamma_partial = arena.take[B.accum](
            partials if wanted.dln_weight else 0
        )
        self.dbeta_partial = arena.take[B.accum](
            partials if wanted.dln_bias else 0
        )
        self.dy_in_place = Self.dtype == B.operand and N % B.pair == 0
        var rows = self.groups.rows if wanted.dx else 0
        self.dy = arena.take[B.operand](
            0 if self.dy_in_place else rows * B.row_stride[B.operand](N)
        )
        self.h = arena.take[B.accum](rows * B.row_stride[B.accum](K))

        # A worker computes a tile or a panel of dx, never both at a time.
        self.own = arena.next
        var tile = arena
        if self.tiles > 0:
            _ = TileMemory[Self.dtype](tile, self.tile_rows, self.tile_panels)
        _ = arena.take[B.operand](B.block_size if wanted.dx else 0)
        self.own_bytes = max(arena.next, tile.next) - self.own
        self.bytes = self.own + self.own_bytes * self.workers + CACHE_LINE

    def partial_sums(self) -> Int:
        """Counts the partial sums of each feature of dgamma and dbeta.

        Returns:
            Their number.
        """
        return ceildiv(self.N, SUM_ROWS)


def _tile_rows(rows: Int, parts: Int) -> Int:
    """Returns equal shares of whole partial sums."""
    return ceildiv(ceildiv(rows, parts), SUM_ROWS) * SUM_ROWS
