"""Divides the backward of few rows into tasks and lays out its workspace."""

from .blocking import Blocking
from .gradients import Wanted
from .workspace import Arena, ceildiv

comptime TILE_COLUMNS = 512
"""Most columns of a tile, but for rounding up to panels: a block of the weight
of so many fills a part of a 1 MiB cache."""

comptime OUTPUTS = 32
"""Rows of dW in a block, which share each panel of z while it is in cache."""


struct FewRowsPlan[dtype: DType](Copyable, Movable):
    """Divides the computation into tasks and lays out its workspace.

    Parameters:
        dtype: Element type of the tensors.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    var wanted: Wanted
    """Which gradients to compute."""
    var has_h: Bool
    """Whether `dy @ weight` is needed."""
    var panels: Int
    """Panels of `tile_n` features."""
    var tile_panels: Int
    """Panels of a tile."""
    var tiles: Int
    """Tiles of columns."""
    var h_tasks: Int
    """Tasks of `dy @ weight`."""
    var weight_tasks: Int
    """Tasks of dW."""
    var workers: Int
    """Threads that take tasks."""
    var gamma: Int
    """Offset of LayerNorm's weight in the type of sums."""
    var beta: Int
    """Offset of LayerNorm's bias in the type of sums."""
    var no_bias: Int
    """Offset of zeros to add to a block of dW."""
    var dbias: Int
    """Offset of column sums of dy."""
    var dy: Int
    """Offset of dy in rows."""
    var dy_panels: Int
    """Offset of dy in panels of `tile_m` outputs."""
    var dy_stride: Int
    """Distance between those panels."""
    var z: Int
    """Offset of z in panels of `tile_n` features."""
    var h: Int
    """Offset of `dy @ weight`."""
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
        self.has_h = wanted.dx or wanted.affine()
        self.panels = B.panels(K)
        var widest = ceildiv(TILE_COLUMNS, B.tile_n)
        self.tile_panels = min(widest, ceildiv(self.panels, workers))
        self.tiles = ceildiv(self.panels, self.tile_panels)
        self.h_tasks = self.tiles if self.has_h else 0
        self.weight_tasks = 0
        if wanted.dweight:
            self.weight_tasks = ceildiv(N, OUTPUTS) * self.tiles
        self.dy_stride = ceildiv(M, B.pair) * B.pair * B.tile_m

        var arena = Arena(0)
        self.gamma = arena.take[B.accum](K)
        self.beta = arena.take[B.accum](K)
        self.no_bias = arena.take[B.accum](B.tile_n)
        self.dbias = arena.take[DType.float64](
            N + B.width if wanted.dbias else 0
        )
        self.dy = arena.take[B.operand](
            M * B.row_stride(N) if self.has_h else 0
        )
        self.h = arena.take[B.accum](
            M * self.panels * B.tile_n if self.has_h else 0
        )
        self.dy_panels = arena.next
        self.z = arena.next
        if wanted.dweight:
            _ = arena.take[B.operand](ceildiv(N, B.tile_m) * self.dy_stride)
            self.z = arena.take[B.operand](self.panels * B.panel_size(M))
        self.own = arena.next
        _ = arena.take[B.operand](
            self.tile_panels * B.panel_size(B.depth) if self.has_h else 0
        )
        var block = Arena(self.own)
        _ = block.take[B.accum](OUTPUTS * B.tile_n if wanted.dweight else 0)
        self.own_bytes = max(arena.next, block.next) - self.own
        self.bytes = self.own + self.own_bytes * workers
