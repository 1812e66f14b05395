"""Computes the gradients of LayerNorm followed by a Linear layer on the CPU.

Two matrix products make all five gradients:

- `dy^T @ x_hat`, divided into tiles of the weight, each of which one task sums
  over all rows and then turns into its part of the parameters' gradients;
- `dy @ weight`, divided like the forward, into panels of columns if there are
  few rows and into slabs of rows otherwise; while a slab's product is in cache,
  it becomes dx.

Every sum runs in an order that only the shape decides, so the bits depend
neither on the number of threads nor on which of them does what.
"""

from std.atomic import Atomic
from std.sys import size_of

from ...pages import prefer_large_pages
from ...team import Data, Team
from .blocking import Blocking, Buffer, CACHE_LINE
from .input_gradient import finish_input_gradient
from .microkernel import multiply_block
from .pack import copy_rows, pack_panel
from .parameter_gradients import (
    SUM_ROWS,
    WeightRows,
    add_column_sums,
    sum_partials,
)
from .parameters import Parameter
from .workspace import (
    Arena,
    FEW_ROWS,
    Slabs,
    buffer,
    ceildiv,
    useful_threads,
)

comptime TILE_ROWS = 512
"""Most rows of the weight in a tile."""

comptime TILE_COLUMNS = 512
"""Most columns of the weight in a tile, but for rounding up to panels."""

comptime BLOCK_ROWS = 256
"""Rows of dy and x that are packed together."""


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
    var few_rows: Bool
    """Whether tasks of dx are panels of columns instead of slabs of rows."""
    var slabs: Slabs
    """The slabs of rows."""
    var slab_rows: Int
    """Most rows that one task of dx computes."""
    var input_tasks: Int
    """Number of tasks that `dy @ weight` is divided into."""
    var panels: Int
    """Number of panels of `tile_n` features."""
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
    var shared: Int
    """Offset of dy in rows (few rows) or of the packed weight."""
    var h: Int
    """Offset of `dy @ weight` (few rows)."""
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
        self.panels = B.panels(K)

        self.few_rows = M <= FEW_ROWS
        self.slabs = Slabs(M, B.tile_m, self.workers)
        self.slab_rows = M if self.few_rows else self.slabs.most_rows()
        self.input_tasks = 0
        if wanted.dx:
            self.input_tasks = (
                self.panels if self.few_rows else self.slabs.count
            )

        self.tile_rows = (
            ceildiv(ceildiv(N, ceildiv(N, TILE_ROWS)), SUM_ROWS) * SUM_ROWS
        )
        self.tile_panels = ceildiv(self.panels, ceildiv(K, TILE_COLUMNS))
        while (
            ceildiv(N, self.tile_rows) * ceildiv(self.panels, self.tile_panels)
            < self.workers
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
        if wanted.parameters():
            self.tiles = ceildiv(N, self.tile_rows) * self.tiles_across

        var arena = Arena(0)
        self.gamma = arena.take[B.accum](K)
        self.beta = arena.take[B.accum](K)
        var chunks = ceildiv(N, SUM_ROWS)
        self.dgamma_partial = arena.take[B.accum](
            chunks * K if wanted.dln_weight else 0
        )
        self.dbeta_partial = arena.take[B.accum](
            chunks * K if wanted.dln_bias else 0
        )
        self.shared = arena.next
        self.h = 0
        var slab = self.slab_rows * B.row_stride(N)
        var h = self.slab_rows * self.panels * B.tile_n
        if wanted.dx:
            _ = arena.take[B.operand](
                slab if self.few_rows else self.panels * B.panel_size(N)
            )
            if self.few_rows:
                self.h = arena.take[B.accum](h)

        self.own = arena.next
        var tile = Arena(self.own)
        _ = WeightTile[Self.dtype](tile, self.tile_rows, self.tile_panels, 0)
        if wanted.dx:
            if self.few_rows:
                _ = arena.take[B.operand](B.panel_size(B.depth))
            else:
                _ = arena.take[B.operand](slab)
                _ = arena.take[B.accum](h)
        self.own_bytes = (
            max(arena.next, tile.next if wanted.parameters() else 0) - self.own
        )
        self.bytes = self.own + self.own_bytes * self.workers + CACHE_LINE


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
    """Address of a packed panel of x_hat."""
    var dbias: Int
    """Address of column sums of dy."""

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
        self.dy_stride = BLOCK_ROWS * B.tile_m
        self.dy = base + arena.take[B.operand](
            ceildiv(rows, B.tile_m) * self.dy_stride
        )
        self.x_hat = base + arena.take[B.operand](BLOCK_ROWS * B.tile_n)
        self.dbias = base + arena.take[DType.float64](rows + B.width)


@fieldwise_init
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
        self.next_task = 0
        self.plan = plan^

    def run(mut self, gomp_parallel: Int):
        """Computes the gradients.

        Args:
            gomp_parallel: Address of `GOMP_parallel` in PyTorch's libgomp; 0
                selects Mojo's pool.
        """
        ref plan = self.plan
        comptime bytes = size_of[Self.dtype]()
        if plan.wanted.dx:
            prefer_large_pages(self.dx, plan.M * plan.K * bytes)
        if plan.wanted.dweight:
            prefer_large_pages(self.dweight, plan.N * plan.K * bytes)
        prefer_large_pages(self.workspace, plan.bytes)
        var team = Team(gomp_parallel, plan.workers)
        var chunks = self._chunks()
        if plan.wanted.dx:
            if plan.few_rows:
                team.run(_copy_part[Self.dtype], chunks, self)
            else:
                team.run(_pack_part[Self.dtype], plan.panels, self)
        team.run(_multiply_part[Self.dtype], plan.workers, self)
        if plan.wanted.dx and plan.few_rows:
            team.run(_finish_part[Self.dtype], chunks, self)
        if plan.wanted.dln_weight or plan.wanted.dln_bias:
            team.run(_sum_part[Self.dtype], plan.workers, self)

    def _chunks(self) -> Int:
        """Returns how many parts rows are copied and finished in."""
        return min(self.plan.workers * 4, self.plan.M)

    def _shared(self) -> Buffer[Self.B.operand]:
        return buffer[Self.B.operand](self.workspace + self.plan.shared)

    def _shared_h(self) -> Buffer[Self.B.accum]:
        return buffer[Self.B.accum](self.workspace + self.plan.h)

    def _multiply_panel(
        self,
        h: Buffer[Self.B.accum],
        dy: Buffer[Self.B.operand],
        rows: Int,
        panel: Int,
        room: Optional[Buffer[Self.B.operand]],
    ):
        """Computes one panel of `dy @ weight`.

        Args:
            h: The product's rows.
            dy: The rows of dy.
            rows: Number of rows.
            panel: Index of the panel.
            room: Room for a block of a panel, if the weight is not packed yet.
        """
        comptime B = Self.B
        var N = self.plan.N
        var column = panel * B.tile_n
        var columns = min(B.tile_n, self.plan.K - column)
        var vectors = ceildiv(columns, B.width)
        for n in range(0, N, B.depth):
            var depth = min(B.depth, N - n)
            var block: Buffer[B.operand]
            if room:
                block = room.value()
                pack_panel[Self.dtype, width=B.width](
                    block,
                    self.weight.unsafe_offset(n * self.plan.K + column),
                    self.plan.K,
                    columns,
                    vectors,
                    depth,
                )
            else:
                block = self._shared().unsafe_offset(
                    panel * B.panel_size(N) + n * vectors * B.width
                )
            multiply_block[Self.dtype, a_is_panel=False](
                h.unsafe_offset(column),
                self.plan.panels * B.tile_n,
                dy.unsafe_offset(n),
                B.row_stride(N),
                block,
                rows,
                vectors,
                ceildiv(depth, B.pair),
                n > 0,
            )

    def _finish(self, h: Buffer[Self.B.accum], first: Int, count: Int):
        """Turns rows of `dy @ weight` into rows of dx."""
        var K = self.plan.K
        for i in range(count):
            var row = first + i
            finish_input_gradient[Self.dtype](
                buffer[Self.dtype](self.dx).unsafe_offset(row * K),
                h.unsafe_offset(i * self.plan.panels * Self.B.tile_n),
                self.x.unsafe_offset(row * K),
                self.gamma,
                self.mean.unsafe_offset(row).unsafe_load(),
                self.rstd.unsafe_offset(row).unsafe_load(),
                K,
            )

    def _input_task(self, task: Int, own: Int):
        """Computes a panel of `dy @ weight`, or a slab of dx."""
        comptime B = Self.B
        ref plan = self.plan
        if plan.few_rows:
            self._multiply_panel(
                self._shared_h(),
                self._shared(),
                plan.M,
                task,
                buffer[B.operand](own),
            )
            return
        var arena = Arena(own)
        var dy = buffer[B.operand](
            arena.take[B.operand](plan.slab_rows * B.row_stride(plan.N))
        )
        var h = buffer[B.accum](arena.next)
        var first = plan.slabs.first(task)
        var count = plan.slabs.first(task + 1) - first
        copy_rows[Self.dtype](
            dy,
            B.row_stride(plan.N),
            self.dy.unsafe_offset(first * plan.N),
            count,
            plan.N,
        )
        for panel in range(plan.panels):
            self._multiply_panel(h, dy, count, panel, None)
        self._finish(h, first, count)

    def _weight_task(self, task: Int, own: Int):
        """Computes a tile's part of the parameters' gradients."""
        comptime B = Self.B
        ref plan = self.plan
        var N = plan.N
        var K = plan.K
        var arena = Arena(0)
        var tile = WeightTile[Self.dtype](
            arena, plan.tile_rows, plan.tile_panels, own
        )
        var n = task // plan.tiles_across * plan.tile_rows
        var k = task % plan.tiles_across * plan.tile_panels * B.tile_n
        var rows = min(plan.tile_rows, N - n)
        var columns = min(plan.tile_panels * B.tile_n, K - k)
        var dbias = buffer[DType.float64](tile.dbias)
        for i in range(rows + B.width):
            dbias.unsafe_offset(i).unsafe_store(0)
        for m in range(0, plan.M, BLOCK_ROWS):
            var depth = min(BLOCK_ROWS, plan.M - m)
            var dy = self.dy.unsafe_offset(m * N + n)
            add_column_sums[Self.dtype](dbias, dy, N, depth, rows)
            if plan.wanted.product():
                self._add_product(tile, dy, m, depth, rows, k, columns)

        var product = buffer[B.accum](tile.product)
        for first in range(0, rows, SUM_ROWS):
            var chunk = (n + first) // SUM_ROWS
            var weight_rows = WeightRows[Self.dtype](
                min(SUM_ROWS, rows - first),
                columns,
                self.weight.unsafe_offset((n + first) * K + k),
                K,
                product.unsafe_offset(first * tile.product_stride),
                tile.product_stride,
                dbias.unsafe_offset(first),
                self.gamma.unsafe_offset(k),
                self.beta.unsafe_offset(k),
            )
            if plan.wanted.dweight:
                weight_rows.store_weight_gradient(
                    buffer[Self.dtype](self.dweight).unsafe_offset(
                        (n + first) * K + k
                    )
                )
            if plan.wanted.dln_weight or plan.wanted.dln_bias:
                weight_rows.store_partial_sums(
                    self._partial(
                        plan.wanted.dln_weight, plan.dgamma_partial, chunk, k
                    ),
                    self._partial(
                        plan.wanted.dln_bias, plan.dbeta_partial, chunk, k
                    ),
                )
        if plan.wanted.dbias and k == 0:
            for i in range(rows):
                buffer[Self.dtype](self.dbias).unsafe_offset(
                    n + i
                ).unsafe_store(
                    dbias.unsafe_offset(i).unsafe_load().cast[Self.dtype]()
                )

    def _add_product(
        self,
        tile: WeightTile[Self.dtype],
        dy: Buffer[Self.dtype],
        m: Int,
        depth: Int,
        rows: Int,
        k: Int,
        columns: Int,
    ):
        """Adds what a block of rows of dy and x contributes to a tile."""
        comptime B = Self.B
        var packed_dy = buffer[B.operand](tile.dy)
        for i in range(0, rows, B.tile_m):
            pack_panel[Self.dtype, width=B.tile_m](
                packed_dy.unsafe_offset(i // B.tile_m * tile.dy_stride),
                dy.unsafe_offset(i),
                self.plan.N,
                min(B.tile_m, rows - i),
                1,
                depth,
            )
        var x_hat = buffer[B.operand](tile.x_hat)
        for column in range(0, columns, B.tile_n):
            var width = min(B.tile_n, columns - column)
            var vectors = ceildiv(width, B.width)
            pack_panel[Self.dtype, width=B.width, normalize=True](
                x_hat,
                self.x.unsafe_offset(m * self.plan.K + k + column),
                self.plan.K,
                width,
                vectors,
                depth,
                self.mean.unsafe_offset(m),
                self.rstd.unsafe_offset(m),
            )
            for d in range(0, depth, B.depth):
                multiply_block[Self.dtype, a_is_panel=True](
                    buffer[B.accum](tile.product).unsafe_offset(column),
                    tile.product_stride,
                    packed_dy.unsafe_offset(d * B.tile_m),
                    tile.dy_stride,
                    x_hat.unsafe_offset(d * vectors * B.width),
                    rows,
                    vectors,
                    ceildiv(min(B.depth, depth - d), B.pair),
                    m + d > 0,
                )

    def _partial(
        self, wanted: Bool, offset: Int, chunk: Int, k: Int
    ) -> Optional[Buffer[Self.B.accum]]:
        """Returns where a chunk's partial sums go, if they are wanted."""
        if not wanted:
            return None
        return buffer[Self.B.accum](self.workspace + offset).unsafe_offset(
            chunk * self.plan.K + k
        )

    def _sum(self, target: Parameter, offset: Int, first: Int, last: Int):
        """Adds up partial sums of some features."""
        sum_partials[Self.dtype](
            target,
            buffer[Self.B.accum](self.workspace + offset),
            ceildiv(self.plan.N, SUM_ROWS),
            self.plan.K,
            first,
            last,
        )


def _copy_part[dtype: DType](data: Data, index: Int):
    """Copies one chunk of the rows of dy that all tasks share."""
    ref job = data.unsafe_bitcast[Backward[dtype]]()[]
    var stride = Blocking[dtype].row_stride(job.plan.N)
    var chunks = job._chunks()
    var first = job.plan.M * index // chunks
    var last = job.plan.M * (index + 1) // chunks
    copy_rows[dtype](
        job._shared().unsafe_offset(first * stride),
        stride,
        job.dy.unsafe_offset(first * job.plan.N),
        last - first,
        job.plan.N,
    )


def _pack_part[dtype: DType](data: Data, panel: Int):
    """Packs one panel of the weight."""
    ref job = data.unsafe_bitcast[Backward[dtype]]()[]
    comptime B = Blocking[dtype]
    var columns = min(B.tile_n, job.plan.K - panel * B.tile_n)
    pack_panel[dtype, width=B.width](
        job._shared().unsafe_offset(panel * B.panel_size(job.plan.N)),
        job.weight.unsafe_offset(panel * B.tile_n),
        job.plan.K,
        columns,
        ceildiv(columns, B.width),
        job.plan.N,
    )


def _multiply_part[dtype: DType](data: Data, worker: Int):
    """Takes tiles of the weight, then tasks of dx, until none is left.

    The large tasks come first, so that the small ones fill the gaps.
    """
    ref job = data.unsafe_bitcast[Backward[dtype]]()[]
    ref plan = job.plan
    var own = job.workspace + plan.own + worker * plan.own_bytes
    while True:
        var task = Int(Atomic.fetch_add(Pointer(to=job.next_task), 1))
        if task < plan.tiles:
            job._weight_task(task, own)
        elif task < plan.tiles + plan.input_tasks:
            job._input_task(task - plan.tiles, own)
        else:
            return


def _finish_part[dtype: DType](data: Data, index: Int):
    """Turns one chunk of the shared product into dx."""
    ref job = data.unsafe_bitcast[Backward[dtype]]()[]
    var chunks = job._chunks()
    var first = job.plan.M * index // chunks
    var last = job.plan.M * (index + 1) // chunks
    job._finish(
        job._shared_h().unsafe_offset(
            first * job.plan.panels * Blocking[dtype].tile_n
        ),
        first,
        last - first,
    )


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
