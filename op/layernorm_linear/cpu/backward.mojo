"""Computes the gradients of LayerNorm followed by a Linear layer on the CPU.

Two matrix products make all five gradients:

- `dy^T @ x_hat`, divided into tiles of the weight. One task sums a tile over
  all rows and turns it into its part of the parameters' gradients.
- `dy @ weight`, divided into groups of rows and panels of features, as the
  forward is. When a group is complete, its rows become rows of dx.

Every sum runs in an order that only the shape decides, so the bits depend
neither on the number of threads nor on which of them does what.
"""

from std.atomic import Atomic

from ...team import Data, Team
from .backward_plan import BackwardPlan
from .blocking import Blocking, Buffer, CACHE_LINE, ceildiv
from .input_gradient import finish_input_gradient
from .microkernel import multiply_block
from .pack import copy_rows, pack_panel
from .parameter_gradients import SUM_ROWS, WeightRows, sum_partials
from .parameters import Parameter
from .prefetch import Upcoming
from .weight_tile import TileMemory, WeightTile
from .workspace import Arena, buffer


struct Backward[dtype: DType](Movable):
    """One backward computation.

    Parameters:
        dtype: Element type of the tensors.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    var plan: BackwardPlan[Self.dtype]
    """How the work is divided."""
    var dx: Int
    """Address of the input's gradient `[M, K]`."""
    var dln_weight: Parameter
    """The gradient of LayerNorm's weight `[K]`."""
    var dln_bias: Parameter
    """The gradient of LayerNorm's bias `[K]`."""
    var dweight: Int
    """Address of the linear weight's gradient `[N, K]`."""
    var dbias: Int
    """Address of the linear bias's gradient `[N]`."""
    var dy: Buffer[Self.dtype]
    """Gradient of the output `[M, N]`."""
    var x: Buffer[Self.dtype]
    """Input `[M, K]`."""
    var mean: Buffer[Self.B.accum]
    """Row means `[M]`."""
    var rstd: Buffer[Self.B.accum]
    """Reciprocal standard deviations `[M]`."""
    var gamma: Buffer[Self.B.accum]
    """LayerNorm's weight `[K]` in the type of sums."""
    var beta: Buffer[Self.B.accum]
    """LayerNorm's bias `[K]` in the type of sums."""
    var weight: Buffer[Self.dtype]
    """The Linear layer's weight `[N, K]`."""
    var workspace: Int
    """Address of the workspace, aligned."""
    var group: Int
    """Index of the group of rows that is being computed."""
    var next_task: Int64
    """Counter from which workers take tasks."""

    def __init__(
        out self,
        var plan: BackwardPlan[Self.dtype],
        dx: Int,
        dln_weight: Parameter,
        dln_bias: Parameter,
        dweight: Int,
        dbias: Int,
        dy: Buffer[Self.dtype],
        x: Buffer[Self.dtype],
        mean: Buffer[Self.B.accum],
        rstd: Buffer[Self.B.accum],
        ln_weight: Parameter,
        ln_bias: Parameter,
        weight: Buffer[Self.dtype],
        workspace: Int,
    ):
        """Collects the arguments; gradients are those of the plan.

        Args:
            plan: How the work is divided.
            dx: Address of the input's gradient `[M, K]`.
            dln_weight: The gradient of LayerNorm's weight `[K]`.
            dln_bias: The gradient of LayerNorm's bias `[K]`.
            dweight: Address of the linear weight's gradient `[N, K]`.
            dbias: Address of the linear bias's gradient `[N]`.
            dy: Gradient of the output `[M, N]`.
            x: Input `[M, K]`.
            mean: Row means `[M]`.
            rstd: Reciprocal standard deviations `[M]`.
            ln_weight: LayerNorm's weight `[K]`.
            ln_bias: LayerNorm's bias `[K]`.
            weight: The Linear layer's weight `[N, K]`.
            workspace: Address of at least `plan.bytes` bytes.
        """
        self.workspace = ceildiv(workspace, CACHE_LINE) * CACHE_LINE
        self.dx = dx
        self.dln_weight = dln_weight
        self.dln_bias = dln_bias
        self.dweight = dweight
        self.dbias = dbias
        self.dy = dy
        self.x = x
        self.mean = mean
        self.rstd = rstd
        self.gamma = ln_weight.as_accum[Self.dtype](
            self.workspace + plan.gamma, plan.K, default=1
        )
        self.beta = ln_bias.as_accum[Self.dtype](
            self.workspace + plan.beta, plan.K, default=0
        )
        self.weight = weight
        self.group = 0
        self.next_task = 0
        self.plan = plan^

    def run(mut self, gomp_parallel: Int):
        """Computes the gradients.

        Args:
            gomp_parallel: Address of `GOMP_parallel` in PyTorch's libgomp; 0
                selects Mojo's pool.
        """
        var wanted = self.plan.wanted
        var team = Team(gomp_parallel, self.plan.workers)
        for group in range(self.plan.groups.count if wanted.dx else 1):
            self.group = group
            self.next_task = 0
            if wanted.dx and not self.plan.dy_in_place:
                team.run(_copy_part[Self.dtype], self._chunks(), self)
            team.run(_multiply_part[Self.dtype], self.plan.workers, self)
            if wanted.dx:
                team.run(_finish_part[Self.dtype], self._chunks(), self)
        if wanted.dln_weight or wanted.dln_bias:
            team.run(_sum_part[Self.dtype], self.plan.workers, self)

    def _chunks(self) -> Int:
        """Returns how many parts a group's rows are copied and finished in."""
        var rows = self.plan.groups.rows_of(self.group)
        return 1 if self.plan.workers == 1 else ceildiv(rows, 8)

    def _copy(self, first: Int, last: Int):
        """Copies rows of dy into the form of a left operand."""
        comptime B = Self.B
        var N = self.plan.N
        var stride = B.row_stride[B.operand](N)
        var row = self.group * self.plan.groups.rows + first
        copy_rows[Self.dtype](
            buffer[B.operand](self.workspace + self.plan.dy).unsafe_offset(
                first * stride
            ),
            stride,
            self.dy.unsafe_offset(row * N),
            last - first,
            N,
        )

    def _multiply(self, panel: Int, first: Int, count: Int, own: Int):
        """Computes some of the group's rows of one panel of `dy @ weight`."""
        comptime B = Self.B
        var K = self.plan.K
        var N = self.plan.N
        var row = self.group * self.plan.groups.rows + first
        var stride = N
        var dy = Int(self.dy.unsafe_offset(row * N))
        if not self.plan.dy_in_place:
            stride = B.row_stride[B.operand](N)
            dy = Int(
                buffer[B.operand](self.workspace + self.plan.dy).unsafe_offset(
                    first * stride
                )
            )
        var block = buffer[B.operand](own)
        var column = self.plan.panels.first(panel)
        var vectors = self.plan.panels.vectors(panel)
        var h_stride = B.row_stride[B.accum](K)
        for n in range(0, N, B.depth):
            var depth = min(B.depth, N - n)
            pack_panel[Self.dtype, width=B.width](
                block,
                self.weight.unsafe_offset(n * K + column),
                K,
                self.plan.panels.first(panel + 1) - column,
                vectors,
                depth,
            )
            multiply_block[Self.dtype, a_is_panel=False](
                self._h().unsafe_offset(first * h_stride + column),
                h_stride,
                buffer[B.operand](dy).unsafe_offset(n),
                stride,
                block,
                count,
                vectors,
                ceildiv(depth, B.pair),
                n > 0,
                self._upcoming(panel, n + depth),
            )

    def _upcoming(self, panel: Int, n: Int) -> Upcoming:
        """Returns the block of the weight that the worker will pack next."""
        comptime B = Self.B
        if n == self.plan.N:
            # Workers take panels in turns.
            var next_panel = panel + self.plan.workers
            if next_panel >= self.plan.panels.count:
                return Upcoming.none()
            return self._upcoming(next_panel, 0)
        var column = self.plan.panels.first(panel)
        return Upcoming.block(
            self.weight.unsafe_offset(n * self.plan.K + column),
            self.plan.K,
            min(B.depth, self.plan.N - n),
            self.plan.panels.first(panel + 1) - column,
        )

    def _h(self) -> Buffer[Self.B.accum]:
        return buffer[Self.B.accum](self.workspace + self.plan.h)

    def _finish(self, first: Int, last: Int):
        """Turns rows of `dy @ weight` into rows of dx."""
        var K = self.plan.K
        var stride = Self.B.row_stride[Self.B.accum](K)
        for i in range(first, last):
            var row = self.group * self.plan.groups.rows + i
            finish_input_gradient[Self.dtype](
                buffer[Self.dtype](self.dx).unsafe_offset(row * K),
                self._h().unsafe_offset(i * stride),
                self.x.unsafe_offset(row * K),
                self.gamma,
                self.mean.unsafe_offset(row).unsafe_load(),
                self.rstd.unsafe_offset(row).unsafe_load(),
                K,
            )

    def _compute_tile(self, index: Int, own: Int):
        """Computes a tile's part of the parameters' gradients."""
        ref plan = self.plan
        var arena = Arena(own)
        var first_row = index // plan.tiles_across * plan.tile_rows
        var first_panel = index % plan.tiles_across * plan.tile_panels
        var tile = WeightTile[Self.dtype](
            TileMemory[Self.dtype](arena, plan.tile_rows, plan.tile_panels),
            plan.panels,
            first_row,
            min(plan.tile_rows, plan.N - first_row),
            first_panel,
            min(plan.panels.count, first_panel + plan.tile_panels),
            self.dy,
            self.x,
            self.mean,
            self.rstd,
            plan.M,
            plan.N,
        )
        tile.compute(plan.wanted.product())
        for first in range(0, tile.rows, SUM_ROWS):
            self._finish_rows(tile, first)

    def _finish_rows(self, tile: WeightTile[Self.dtype], first: Int):
        """Makes gradients from some rows of a tile."""
        comptime B = Self.B
        ref plan = self.plan
        var n = tile.first_row + first
        var k = plan.panels.first(tile.first_panel)
        var dbias = buffer[DType.float64](tile.memory.dbias).unsafe_offset(
            first
        )
        var rows = WeightRows[Self.dtype](
            min(SUM_ROWS, tile.rows - first),
            plan.panels.first(tile.last_panel) - k,
            self.weight.unsafe_offset(n * plan.K + k),
            plan.K,
            buffer[B.accum](tile.memory.product).unsafe_offset(
                first * tile.memory.product_stride
            ),
            tile.memory.product_stride,
            dbias,
            self.gamma.unsafe_offset(k),
            self.beta.unsafe_offset(k),
        )
        if plan.wanted.dweight:
            rows.store_weight_gradient(
                buffer[Self.dtype](self.dweight).unsafe_offset(n * plan.K + k)
            )
        if plan.wanted.dln_weight or plan.wanted.dln_bias:
            var sums = n // SUM_ROWS * plan.K + k
            rows.store_partial_sums(
                self._partial(
                    plan.wanted.dln_weight, plan.dgamma_partial, sums
                ),
                self._partial(plan.wanted.dln_bias, plan.dbeta_partial, sums),
            )
        if plan.wanted.dbias and k == 0:
            var target = buffer[Self.dtype](self.dbias).unsafe_offset(n)
            for i in range(rows.rows):
                target.unsafe_offset(i).unsafe_store(
                    dbias.unsafe_offset(i).unsafe_load().cast[Self.dtype]()
                )

    def _partial(
        self, wanted: Bool, offset: Int, index: Int
    ) -> Optional[Buffer[Self.B.accum]]:
        """Returns where partial sums are, if they are wanted."""
        if not wanted:
            return None
        return buffer[Self.B.accum](self.workspace + offset).unsafe_offset(
            index
        )

    def _sum(self, target: Parameter, offset: Int, first: Int, last: Int):
        """Adds up partial sums of some features."""
        sum_partials[Self.dtype](
            target,
            buffer[Self.B.accum](self.workspace + offset),
            self.plan.partial_sums(),
            self.plan.K,
            first,
            last,
        )


def _copy_part[dtype: DType](data: Data, index: Int):
    """Copies one chunk of the group's rows of dy."""
    ref job = data.unsafe_bitcast[Backward[dtype]]()[]
    var rows = job.plan.groups.rows_of(job.group)
    var chunks = job._chunks()
    job._copy(rows * index // chunks, rows * (index + 1) // chunks)


def _multiply_part[dtype: DType](data: Data, worker: Int):
    """Takes tiles of the weight, then panels of dx, until none is left.

    The large tasks come first, so that the small ones fill the gaps.
    """
    ref job = data.unsafe_bitcast[Backward[dtype]]()[]
    ref plan = job.plan
    ref groups = plan.groups
    var own = job.workspace + plan.own + worker * plan.own_bytes
    var tiles = plan.tiles if job.group == 0 else 0
    var tasks = groups.tasks if plan.wanted.dx else 0
    while True:
        var task = Int(Atomic.fetch_add(Pointer(to=job.next_task), 1))
        if task < tiles:
            job._compute_tile(task, own)
            continue
        task -= tiles
        if task >= tasks:
            return
        var block = task % groups.blocks
        var count = groups.rows_of_block(job.group, block)
        if count > 0:
            job._multiply(
                task // groups.blocks, block * groups.block_rows, count, own
            )


def _finish_part[dtype: DType](data: Data, index: Int):
    """Turns one chunk of the group's product into dx."""
    ref job = data.unsafe_bitcast[Backward[dtype]]()[]
    var rows = job.plan.groups.rows_of(job.group)
    var chunks = job._chunks()
    job._finish(rows * index // chunks, rows * (index + 1) // chunks)


def _sum_part[dtype: DType](data: Data, index: Int):
    """Adds up the partial sums of one worker's share of the features."""
    ref job = data.unsafe_bitcast[Backward[dtype]]()[]
    ref plan = job.plan
    var share = ceildiv(plan.K, plan.workers)
    var first = index * share
    var last = min(plan.K, first + share)
    if plan.wanted.dln_weight:
        job._sum(job.dln_weight, plan.dgamma_partial, first, last)
    if plan.wanted.dln_bias:
        job._sum(job.dln_bias, plan.dbeta_partial, first, last)
