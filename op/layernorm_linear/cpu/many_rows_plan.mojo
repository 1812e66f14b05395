"""Divides the backward of many rows into tasks and lays out its workspace."""

from std.sys import size_of

from .blocking import Blocking, CACHE_LINE
from .gradients import Wanted
from .parameter_gradients import SUM_ROWS
from .workspace import Arena, Slabs, ceildiv

comptime TILE_ROWS = 512
"""Most rows of the weight in a tile."""

comptime TILE_COLUMNS = 512
"""Most columns of the weight in a tile, but for rounding up to panels."""

comptime BLOCK_STEPS = 128
"""Steps of a product for which dy and x are packed together."""


@fieldwise_init
struct WeightTile[dtype: DType](TrivialRegisterPassable):
    """Lays out what a worker needs for a tile of `dy^T @ x_hat`.

    Parameters:
        dtype: Element type of the tensors.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    var product: Int
    """Address of the tile."""
    var product_stride: Int
    """Distance between its rows."""
    var dy: Int
    """Address of packed columns of dy."""
    var dy_stride: Int
    """Distance between their panels."""
    var x_hat: Int
    """Address of packed panels of x_hat."""

    def __init__(out self, mut arena: Arena, rows: Int, panels: Int, base: Int):
        """Reserves the arrays.

        Args:
            arena: Where from.
            rows: Rows of the tile.
            panels: Panels across the tile.
            base: What to add to each address.
        """
        comptime B = Self.B
        self.product_stride = panels * B.tile_n + CACHE_LINE // 4
        self.product = base + arena.take[B.accum](rows * self.product_stride)
        self.dy_stride = BLOCK_STEPS * B.pair * B.tile_m
        self.dy = base + arena.take[B.operand](
            ceildiv(rows, B.tile_m) * self.dy_stride
        )
        self.x_hat = base + arena.take[B.operand](
            panels * BLOCK_STEPS * B.pair * B.tile_n
        )


struct ManyRowsPlan[dtype: DType](Copyable, Movable):
    """Divides the computation into tasks and lays out its workspace.

    Parameters:
        dtype: Element type of the tensors.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    var wanted: Wanted
    """Which gradients to compute."""
    var workers: Int
    """Threads that take tasks."""
    var slabs: Slabs
    """The slabs of rows."""
    var slab_rows: Int
    """Most rows of a slab."""
    var slab_tasks: Int
    """Tasks of dx."""
    var panels: Int
    """Panels of `tile_n` features."""
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
    var dbias: Int
    """Offset of column sums of dy."""
    var dgamma_partial: Int
    """Offset of partial sums of dgamma."""
    var dbeta_partial: Int
    """Offset of partial sums of dbeta."""
    var packed_weight: Int
    """Offset of the packed weight."""
    var own: Int
    """Offset of the first worker's own part."""
    var own_bytes: Int
    """Size of a worker's own part."""
    var bytes: Int
    """Size of the workspace."""

    def __init__(
        out self, M: Int, K: Int, N: Int, wanted: Wanted, workers: Int
    ):
        """Plans a computation.

        Args:
            M: Rows.
            K: Features.
            N: Outputs.
            wanted: Which gradients to compute.
            workers: Threads that take tasks.
        """
        comptime B = Self.B
        self.wanted = wanted
        self.workers = workers
        self.panels = B.panels(K)
        self.slabs = Slabs(
            M,
            B.tile_m,
            workers,
            N * size_of[B.operand]() + K * size_of[B.accum](),
        )
        self.slab_rows = self.slabs.most_rows()
        self.slab_tasks = self.slabs.count if wanted.dx else 0

        self.tile_rows = (
            ceildiv(ceildiv(N, ceildiv(N, TILE_ROWS)), SUM_ROWS) * SUM_ROWS
        )
        self.tile_panels = ceildiv(self.panels, ceildiv(K, TILE_COLUMNS))
        while (
            ceildiv(N, self.tile_rows) * ceildiv(self.panels, self.tile_panels)
            < workers
        ):
            if self.tile_rows > SUM_ROWS:
                self.tile_rows = (
                    ceildiv(self.tile_rows // 2, SUM_ROWS) * SUM_ROWS
                )
            elif self.tile_panels > 1:
                self.tile_panels = ceildiv(self.tile_panels, 2)
            else:
                break
        self.tiles_across = ceildiv(self.panels, self.tile_panels)
        self.tiles = 0
        if wanted.affine() or wanted.dweight or wanted.dbias:
            self.tiles = ceildiv(N, self.tile_rows) * self.tiles_across

        var arena = Arena(0)
        self.gamma = arena.take[B.accum](K)
        self.beta = arena.take[B.accum](K)
        self.dbias = arena.take[DType.float64](
            N + B.width if self.tiles > 0 else 0
        )
        var chunks = ceildiv(N, SUM_ROWS)
        self.dgamma_partial = arena.take[B.accum](
            chunks * K if wanted.dln_weight else 0
        )
        self.dbeta_partial = arena.take[B.accum](
            chunks * K if wanted.dln_bias else 0
        )
        self.packed_weight = arena.take[B.operand](
            self.panels * B.panel_size(N) if wanted.dx else 0
        )

        self.own = arena.next
        var tile = Arena(self.own)
        if self.tiles > 0:
            _ = WeightTile[Self.dtype](
                tile, self.tile_rows, self.tile_panels, 0
            )
        if wanted.dx:
            _ = arena.take[B.operand](self.slab_rows * B.row_stride(N))
            _ = arena.take[B.accum](self.slab_rows * self.panels * B.tile_n)
        self.own_bytes = max(arena.next, tile.next) - self.own
        self.bytes = self.own + self.own_bytes * workers
