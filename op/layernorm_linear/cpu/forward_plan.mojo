"""Divides a forward computation into tasks, and lays out its workspace."""

from std.sys import size_of

from .blocking import Blocking, CACHE_LINE
from .workspace import Arena, FEW_ROWS, Slabs, useful_threads


@fieldwise_init
struct ForwardPlan[dtype: DType](Copyable, Movable):
    """The tasks and the workspace of a forward computation.

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
    var workers: Int
    """Threads that take tasks."""
    var few_rows: Bool
    """Whether tasks are panels of columns instead of slabs of rows."""
    var slabs: Slabs
    """The slabs of rows."""
    var slab_rows: Int
    """Most rows that one task computes."""
    var panels: Int
    """Number of panels of `tile_n` columns."""
    var gamma: Int
    """Offset of LayerNorm's weight in the type of sums."""
    var beta: Int
    """Offset of LayerNorm's bias in the type of sums."""
    var shared: Int
    """Offset of the normalized rows (few rows) or the packed weight."""
    var own: Int
    """Offset of the first worker's own part."""
    var own_bytes: Int
    """Size of a worker's own part."""
    var bytes: Int
    """Size of the workspace, with room to align it."""

    def __init__(out self, M: Int, K: Int, N: Int, threads: Int):
        """Plans a computation.

        Args:
            M: Rows.
            K: Features.
            N: Outputs.
            threads: Threads at hand.
        """
        comptime B = Self.B
        self.M = M
        self.K = K
        self.N = N
        self.workers = useful_threads(M * K * N, threads)
        self.panels = B.panels(N)
        self.few_rows = M <= FEW_ROWS
        self.slabs = Slabs(M, B.tile_m, self.workers, K * size_of[B.operand]())
        self.slab_rows = M if self.few_rows else self.slabs.most_rows()

        var arena = Arena(0)
        self.gamma = arena.take[B.accum](K)
        self.beta = arena.take[B.accum](K)
        var slab = self.slab_rows * B.row_stride(K)
        self.shared = arena.take[B.operand](
            slab if self.few_rows else self.panels * B.panel_size(K)
        )
        self.own = arena.next
        _ = arena.take[B.accum]((self.slab_rows + 1) * B.tile_n)
        _ = arena.take[B.operand](
            B.panel_size(B.depth) if self.few_rows else slab
        )
        self.own_bytes = arena.next - self.own
        self.bytes = self.own + self.own_bytes * self.workers + CACHE_LINE
