"""Divides a forward into tasks and lays out its workspace.

With few rows the time goes into reading the weight, with many into the
products. The two divisions differ and give the same bits.
"""

from std.math import align_up, ceildiv
from std.sys import size_of

from ...call import Call
from ...gemm.activation import GATED
from ...gemm.cpu.blocking import Blocking, Slabs
from ...gemm.cpu.few_rows import FewRows
from ...gemm.cpu.memory import Arena, CACHE_LINE
from ...gemm.cpu.tiles import TILES_ROWS
from .division import FEW_ROWS, workers
from .tile_columns import TileColumns

comptime FEW_ROWS_ON_TILES = 512
"""The same of a forward on tiles, which reads the weight in place where rows are few."""

comptime FEW_ELEMENTS_ON_TILES = 1 << 21
"""And as many elements of these rows."""

comptime SHARED_ELEMENTS = 1 << 19
"""As many elements of these rows stay in the second cache while every row of the weight meets them."""

comptime MOST_TASK_COLUMNS = 256
"""Most columns that a task takes where rows are few."""

comptime TILES_WIDTH = 256
"""Most columns whose packed weight stays in the second cache together with a slab of rows, on tiles."""

comptime TILES_WEIGHT = 1 << 18
"""As many elements of a packed weight do."""


struct ForwardPlan[dtype: DType](Copyable, Movable):
    """The tasks and the workspace of a forward, as offsets from its start.

    Parameters:
        dtype: Element type of the tensors.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    var few_rows: Bool
    """Whether tasks are panels of columns instead of slabs of rows."""
    var in_place: Bool
    """Whether they are so few that nothing of the weight is copied."""
    var workers: Int
    """Threads that take tasks."""
    var panels: Int
    """Panels of `tile_n` outputs."""
    var halves: Int
    """Columns of the product for each output: 2 before a gate."""
    var slabs: Slabs
    """The slabs of rows."""
    var slab_rows: Int
    """Most rows that one task computes."""
    var rooms: Int
    """Rooms of a worker for bias and sums: one for each half, twice where y is made while tiles compute."""
    var width: Int
    """Most columns of y that are computed side by side."""
    var sum_rows: Int
    """Rows of sums that a worker keeps for them."""
    var sum_stride: Int
    """Distance between those rows."""
    var task_columns: Int
    """Columns of y that a task takes where rows are few."""
    var sums_at_once: Int
    """How many times 32 rows of the weight it multiplies at once then, both halves counted."""
    var gamma: Int
    """Weight of the norm in the type of sums."""
    var beta: Int
    """Bias of the norm in the type of sums."""
    var shared: Int
    """The normalized rows (few rows) or the packed weight."""
    var left: Int
    """The normalized rows as they are multiplied in place."""
    var own: Int
    """The first worker's own part: bias and sums of each half of a panel, then a block of the weight
    (few rows) or normalized rows."""
    var own_bytes: Int
    """Size of a worker's own part."""
    var bytes: Int
    """Size of the workspace, with room to align it."""

    def __init__(out self, call: Call):
        """Plans a forward.

        Args:
            call: Its sizes and conditions.
        """
        comptime B = Self.B
        self.few_rows = call.M <= FEW_ROWS
        comptime if B.has_tiles:
            self.few_rows = (
                call.M <= FEW_ROWS_ON_TILES
                and call.M * call.K <= FEW_ELEMENTS_ON_TILES
            )
        self.in_place = self.few_rows and FewRows[Self.dtype].takes(
            call.M, call.N * call.K
        )
        self.workers = workers(call)
        self.panels = B.panels(call.N)
        self.halves = 2 if call.activation >= GATED else 1
        self.slabs = Slabs(
            call.M, B.tile_m, self.workers, call.K * size_of[B.operand]()
        )
        self.slab_rows = call.M if self.few_rows else self.slabs.most_rows()
        self.rooms = self.halves
        self.width = B.tile_n
        self.sum_rows = self.slab_rows
        self.sum_stride = B.tile_n
        comptime if B.has_tiles:
            if not self.few_rows:
                # One to make y from while the other is filled.
                self.rooms = 2 * self.halves
                self.width = max(
                    B.tile_n,
                    min(TILES_WIDTH, TILES_WEIGHT // call.K) // self.halves,
                )
                self.width = self.width // B.tile_n * B.tile_n
                self.sum_rows = TILES_ROWS
            # A line more keeps rows from sharing the same few cache sets.
            self.sum_stride = self.width + CACHE_LINE // 4
        self.task_columns = min(
            MOST_TASK_COLUMNS,
            align_up(ceildiv(call.N, 4 * self.workers), B.tile_n),
        )
        if self.in_place or not B.has_tiles:
            # As many as follow each other, of which the first lines alone are
            # not asked for ahead. Tasks of more than one panel seldom write to
            # the same lines of y.
            var columns = align_up(ceildiv(call.N, 8 * self.workers), B.width)
            if columns > B.tile_n:
                columns = columns // B.tile_n * B.tile_n
            self.task_columns = min(MOST_TASK_COLUMNS, columns)
        self.sums_at_once = self.halves
        if call.M * call.K > SHARED_ELEMENTS:
            self.sums_at_once *= self.task_columns // TILES_ROWS

        var arena = Arena(0)
        self.gamma = arena.take[B.accum](call.K)
        self.beta = arena.take[B.accum](call.K)
        var rows = self.slab_rows * B.row_stride(call.K)
        var own_rows = rows
        if self.in_place:
            own_rows = 0
        elif self.few_rows:
            own_rows = B.panel_size(B.depth)
            comptime if B.has_tiles:
                rows = (
                    ceildiv(call.M, TILES_ROWS) * 2 * B.row_panel_size(call.K)
                )
                own_rows = 0
        self.shared = arena.take[B.operand](
            rows if self.few_rows else self.panels
            * self.halves
            * B.panel_size(call.K)
        )
        self.left = self.shared
        comptime if FewRows[Self.dtype].left != B.operand:
            if self.in_place:
                self.left = arena.take[B.accum](call.M * B.row_stride(call.K))
        self.own = arena.next
        _ = arena.take[B.accum](self.rooms * self.width)
        _ = arena.take[B.accum](self.rooms * self.sum_rows * self.sum_stride)
        _ = arena.take[B.operand](own_rows)
        comptime if B.has_tiles:
            if self.few_rows and not self.in_place:
                TileColumns[Self.dtype].reserve(arena, call, self.sums_at_once)
        self.own_bytes = arena.next - self.own
        self.bytes = self.own + self.own_bytes * self.workers + CACHE_LINE
