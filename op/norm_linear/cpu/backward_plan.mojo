"""Divides a backward into tasks and lays out its workspace.

With few rows the time goes into reading the weight and writing its gradient,
with many into the products. The two divisions differ and give the same bits.
"""

from std.math import align_up, ceildiv
from std.sys import size_of

from ...call import Call
from ...gemm.cpu.blocking import Blocking, Slabs
from ...gemm.cpu.memory import Arena, CACHE_LINE
from .division import FEW_ROWS, workers
from .tile_room import TileRoom

comptime TILE_COLUMNS = 512
"""Most columns of the weight in a tile, but for rounding up to panels: these fill a part of a 1 MiB cache."""

comptime TILE_ROWS = 512
"""Most rows of dW in a tile where rows are many."""

comptime OUTPUTS = 32
"""Rows of dW in a tile where rows are few, which share each panel of z while it is in cache."""

comptime SUM_ROWS = 32
"""Outputs whose contributions to dgamma and dbeta make one partial sum."""

comptime BLOCK_STEPS = 128
"""Steps of a product for which dy and x are packed together."""

comptime SHORT_SUMS = 1024
"""Up to this many rows, few of dW's rows and a part of its columns make a tile, if dy and x_hat are packed once."""

comptime SHORT_PANEL_ROWS = 8192
"""Rows of x_hat, over all panels, that such a tile reads from the second cache."""

comptime MOST_PACKED_BYTES = 1 << 26
"""Up to this size dy and x_hat are packed once for all tiles of dW, where packing takes as long as tiles do."""


comptime COUNTER = CACHE_LINE // 8
"""Elements from one counter to the next."""


struct BackwardPlan[dtype: DType](Copyable, Movable):
    """The tasks and the workspace of a backward, as offsets from its start.

    Parameters:
        dtype: Element type of the tensors.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    var few_rows: Bool
    """Whether dx is divided into tiles of columns instead of slabs of rows."""
    var workers: Int
    """Threads that take tasks."""
    var counters: Int
    """Few rows: how many tiles of dW were taken of each worker's."""
    var panels: Int
    """Panels of `tile_n` features."""
    var slabs: Slabs
    """The slabs of rows of dx."""
    var slab_rows: Int
    """Most rows of a slab."""
    var tile_rows: Int
    """Rows of a tile of dW."""
    var tile_panels: Int
    """Panels across a tile of dW, and of h = dy @ weight where rows are few."""
    var tiles_across: Int
    """Tiles side by side."""
    var input_tasks: Int
    """Tasks of h and what is made from it: tiles, or slabs."""
    var weight_tasks: Int
    """Tasks of dW and what is made with it."""
    var gamma: Int
    """Weight of the norm in the type of sums."""
    var beta: Int
    """Bias of the norm in the type of sums."""
    var dbias: Int
    """Column sums of dy."""
    var shifts: Int
    """What the rounded means of the rows lack."""
    var dy: Int
    """Few rows: dy in rows."""
    var dy_panels: Int
    """Dy in panels of `tile_m` outputs: few rows, or blocks of many."""
    var dy_stride: Int
    """Few rows: distance between those panels."""
    var z: Int
    """Few rows: z in panels of `tile_n` features. Many rows: blocks of x_hat in such panels."""
    var h: Int
    """Few rows: dy @ weight."""
    var packed_weight: Int
    """Many rows: the packed weight."""
    var block_rows: Int
    """Many rows: rows of dy and x that are packed together."""
    var packs_once: Bool
    """Many rows: whether all of them are packed before, in blocks, instead of by each tile of dW."""
    var dy_block: Int
    """Elements of a packed block of dy."""
    var x_block: Int
    """Elements of a packed block of x_hat."""
    var dgamma_partial: Int
    """Many rows: partial sums of dgamma."""
    var dbeta_partial: Int
    """Many rows: partial sums of dbeta."""
    var own: Int
    """The first worker's own part."""
    var own_bytes: Int
    """Size of a worker's own part."""
    var bytes: Int
    """Size of the workspace, with room to align it."""

    def __init__(out self, call: Call):
        """Plans a backward.

        Args:
            call: Its sizes and conditions, and which gradients are wanted; without an activation.
        """
        comptime B = Self.B
        var M = call.M
        var K = call.K
        var N = call.N
        self.few_rows = M <= FEW_ROWS
        self.workers = workers(call)
        self.panels = B.panels(K)
        self.slabs = Slabs(
            M,
            B.tile_m,
            self.workers,
            min(N, B.depth) * size_of[B.operand]() + K * size_of[B.accum](),
        )
        self.slab_rows = self.slabs.most_rows()
        var needs_affine = call.dgamma != 0 or call.dbeta != 0
        var needs_h = call.dx != 0
        var needs_weight = call.dweight != 0
        var needs_dbias = call.dbias != 0
        var tile_rows = OUTPUTS
        var tile_panels = min(
            ceildiv(TILE_COLUMNS, B.tile_n),
            ceildiv(self.panels, self.workers),
        )
        if self.few_rows:
            needs_h = needs_h or needs_affine
        else:
            # dgamma and dbeta come from the product that makes dW.
            needs_weight = needs_weight or needs_affine or needs_dbias
            needs_dbias = needs_weight
            tile_rows = align_up(ceildiv(N, ceildiv(N, TILE_ROWS)), SUM_ROWS)
            tile_panels = ceildiv(self.panels, ceildiv(K, TILE_COLUMNS))
            while (
                ceildiv(N, tile_rows) * ceildiv(self.panels, tile_panels)
                < self.workers
            ):
                if tile_rows > SUM_ROWS:
                    tile_rows = align_up(tile_rows // 2, SUM_ROWS)
                elif tile_panels > 1:
                    tile_panels = ceildiv(tile_panels, 2)
                else:
                    break
        # Sums on tiles are read and written again after every block.
        self.block_rows = BLOCK_STEPS * B.pair * (2 if B.has_tiles else 1)
        self.dy_block = align_up(N, B.tile_m) * self.block_rows
        self.x_block = self.panels * B.tile_n * self.block_rows
        var packed = (
            ceildiv(M, self.block_rows)
            * (self.dy_block + self.x_block)
            * size_of[B.operand]()
        )
        self.packs_once = (
            B.has_tiles
            and needs_weight
            and not self.few_rows
            and packed <= MOST_PACKED_BYTES
        )
        if self.packs_once and M <= SHORT_SUMS:
            # Nothing is packed for a tile, so that it may be as small as stays
            # in cache until it is finished.
            tile_rows = SUM_ROWS
            tile_panels = min(
                tile_panels, max(1, SHORT_PANEL_ROWS // align_up(M, B.step))
            )
        self.tile_rows = tile_rows
        self.tile_panels = tile_panels
        self.tiles_across = ceildiv(self.panels, tile_panels)
        self.input_tasks = 0
        if needs_h:
            self.input_tasks = (
                self.tiles_across if self.few_rows else self.slabs.count
            )
        self.weight_tasks = 0
        if needs_weight:
            self.weight_tasks = ceildiv(N, tile_rows) * self.tiles_across

        var arena = Arena(0)
        self.gamma = arena.take[B.accum](K)
        self.beta = arena.take[B.accum](K)
        self.dbias = arena.take[DType.float64](
            N + B.width if needs_dbias else 0
        )
        # Narrower rows have no features as fine.
        self.shifts = arena.take[B.accum](
            M if size_of[Self.dtype]() == size_of[B.accum]() else 0
        )
        self.dy_stride = align_up(M, B.step) * B.tile_m
        # A line for each, as they are written at the same time.
        self.counters = arena.take[DType.int64](
            self.workers * COUNTER if self.few_rows else 0
        )
        self.dy = arena.next
        self.dy_panels = arena.next
        self.z = arena.next
        self.h = arena.next
        self.packed_weight = arena.next
        self.dgamma_partial = arena.next
        self.dbeta_partial = arena.next
        # A worker's own part holds one task at a time.
        var input_room = Arena(0)
        var weight_room = Arena(0)
        if self.few_rows:
            if needs_h:
                self.dy = arena.take[B.operand](M * B.row_stride(N))
                self.h = arena.take[B.accum](M * self.panels * B.tile_n)
                _ = input_room.take[B.operand](
                    self.tile_panels * B.panel_size(B.depth)
                )
            if needs_weight:
                self.dy_panels = arena.take[B.operand](
                    ceildiv(N, B.tile_m) * self.dy_stride
                )
                self.z = arena.take[B.operand](self.panels * B.panel_size(M))
                _ = weight_room.take[B.accum](OUTPUTS * B.tile_n)
        else:
            var partials = ceildiv(N, SUM_ROWS) * K
            if call.dgamma != 0:
                self.dgamma_partial = arena.take[B.accum](partials)
            if call.dbeta != 0:
                self.dbeta_partial = arena.take[B.accum](partials)
            if needs_h:
                self.packed_weight = arena.take[B.operand](
                    self.panels * B.panel_size(N)
                )
                _ = input_room.take[B.operand](
                    self.slab_rows * B.row_stride(B.depth)
                )
                _ = input_room.take[B.accum](
                    self.slab_rows * self.panels * B.tile_n
                )
            var blocks = ceildiv(M, self.block_rows)
            if self.packs_once:
                self.dy_panels = arena.take[B.operand](blocks * self.dy_block)
                self.z = arena.take[B.operand](blocks * self.x_block)
            if needs_weight:
                _ = TileRoom[Self.dtype](
                    weight_room,
                    self.tile_rows,
                    self.tile_panels,
                    self.block_rows,
                    self.packs_once,
                )
        self.own = arena.next
        self.own_bytes = max(input_room.next, weight_room.next)
        self.bytes = self.own + self.own_bytes * self.workers + CACHE_LINE
