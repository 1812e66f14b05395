"""Computes LayerNorm followed by a Linear layer on the CPU.

Rows are normalized while they are copied into the form that the matrix product
reads, so the normalized rows never leave the cache. Two plans differ in who
shares what; both give the same bits:

- few rows: the normalized rows are shared, and each task takes some columns of
  the output, packing its part of the weight just before use, block by block;
- many rows: the weight is packed once and shared, and each task takes a slab
  of rows, which it normalizes for itself.
"""

from std.atomic import Atomic
from std.sys import size_of

from ...pages import prefer_large_pages
from ...team import Data, Team
from .blocking import Blocking, Buffer, CACHE_LINE
from .forward_plan import ForwardPlan
from .microkernel import multiply_block, Output
from .pack import load_first
from .pack_transposed import pack_transposed
from .parameters import Parameter
from .statistics import normalize_row, row_statistics
from .workspace import Arena, buffer, ceildiv


struct Forward[dtype: DType](Movable):
    """One forward computation.

    Parameters:
        dtype: Element type of `x`, `y` and the Linear layer.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    var plan: ForwardPlan[Self.dtype]
    """How the work is divided."""
    var y: Buffer[Self.dtype]
    """Output `[M, N]`."""
    var mean: Optional[Buffer[Self.B.accum]]
    """Row means `[M]`, if wanted."""
    var rstd: Optional[Buffer[Self.B.accum]]
    """Reciprocal standard deviations `[M]`, if wanted."""
    var x: Buffer[Self.dtype]
    """Input `[M, K]`."""
    var gamma: Buffer[Self.B.accum]
    """LayerNorm's weight `[K]` in the type of sums."""
    var beta: Buffer[Self.B.accum]
    """LayerNorm's bias `[K]` in the type of sums."""
    var weight: Buffer[Self.dtype]
    """The Linear layer's weight `[N, K]`."""
    var bias: Optional[Buffer[Self.dtype]]
    """The Linear layer's bias `[N]`, if there is one."""
    var eps: Float64
    """Added to the variance before the square root."""
    var workspace: Int
    """Address of the workspace, aligned."""
    var next_task: Int64
    """Counter from which workers take tasks."""

    def __init__(
        out self,
        var plan: ForwardPlan[Self.dtype],
        y: Buffer[Self.dtype],
        mean: Optional[Buffer[Self.B.accum]],
        rstd: Optional[Buffer[Self.B.accum]],
        x: Buffer[Self.dtype],
        ln_weight: Parameter,
        ln_bias: Parameter,
        weight: Buffer[Self.dtype],
        bias: Optional[Buffer[Self.dtype]],
        eps: Float64,
        workspace: Int,
    ):
        """Collects the arguments.

        Args:
            plan: How the work is divided.
            y: Output `[M, N]`.
            mean: Row means `[M]`, if wanted.
            rstd: Reciprocal standard deviations `[M]`, if wanted.
            x: Input `[M, K]`.
            ln_weight: LayerNorm's weight `[K]`.
            ln_bias: LayerNorm's bias `[K]`.
            weight: The Linear layer's weight `[N, K]`.
            bias: The Linear layer's bias `[N]`, if there is one.
            eps: Added to the variance before the square root.
            workspace: Address of at least `plan.bytes` bytes.
        """
        self.workspace = ceildiv(workspace, CACHE_LINE) * CACHE_LINE
        self.y = y
        self.mean = mean
        self.rstd = rstd
        self.x = x
        self.gamma = ln_weight.as_accum[Self.dtype](
            self.workspace + plan.gamma, plan.K, default=1
        )
        self.beta = ln_bias.as_accum[Self.dtype](
            self.workspace + plan.beta, plan.K, default=0
        )
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self.next_task = 0
        self.plan = plan^

    def run(mut self, gomp_parallel: Int):
        """Computes the output.

        Args:
            gomp_parallel: Address of `GOMP_parallel` in PyTorch's libgomp; 0
                selects Mojo's pool.
        """
        ref plan = self.plan
        comptime bytes = size_of[Self.dtype]()
        prefer_large_pages(Int(self.y), plan.M * plan.N * bytes)
        prefer_large_pages(self.workspace, plan.bytes)
        var team = Team(gomp_parallel, self.plan.workers)
        if self.plan.few_rows:
            team.run(_normalize_part[Self.dtype], self._chunks(), self)
        else:
            team.run(_pack_part[Self.dtype], self.plan.panels, self)
        team.run(_multiply_part[Self.dtype], self.plan.workers, self)

    def _chunks(self) -> Int:
        """Returns how many parts the rows are normalized in."""
        return min(self.plan.workers * 4, self.plan.M)

    def _shared(self) -> Buffer[Self.B.operand]:
        return buffer[Self.B.operand](self.workspace + self.plan.shared)

    def _normalize(
        self, target: Buffer[Self.B.operand], first: Int, count: Int
    ):
        """Normalizes rows of the input and stores their statistics."""
        var K = self.plan.K
        for i in range(count):
            var row = first + i
            var x_row = self.x.unsafe_offset(row * K)
            var statistics = row_statistics[Self.dtype](x_row, K, self.eps)
            if self.mean:
                self.mean.value().unsafe_offset(row).unsafe_store(
                    statistics.mean()
                )
            if self.rstd:
                self.rstd.value().unsafe_offset(row).unsafe_store(
                    statistics.rstd
                )
            normalize_row[Self.dtype](
                target.unsafe_offset(i * Self.B.row_stride(K)),
                x_row,
                self.gamma,
                self.beta,
                K,
                statistics,
            )

    def _multiply(
        self,
        rows: Buffer[Self.B.operand],
        first: Int,
        count: Int,
        panel: Int,
        product: Buffer[Self.B.accum],
        room: Optional[Buffer[Self.B.operand]],
    ):
        """Computes some rows of one panel of the output.

        Args:
            rows: The normalized rows.
            first: Index of the first of them.
            count: Number of rows.
            panel: Index of the panel.
            product: Room for `count` rows of the product and the bias.
            room: Room for a block of a panel, if the weight is not packed yet.
        """
        comptime B = Self.B
        var K = self.plan.K
        var column = panel * B.tile_n
        var columns = min(B.tile_n, self.plan.N - column)
        var vectors = ceildiv(columns, B.width)
        var bias = product.unsafe_offset(count * B.tile_n)
        self._load_bias(bias, panel)
        for k in range(0, K, B.depth):
            var depth = min(B.depth, K - k)
            var output: Optional[Output[Self.dtype]] = None
            if k + depth == K:
                output = Output[Self.dtype](
                    self.y.unsafe_offset(first * self.plan.N + column),
                    self.plan.N,
                    columns,
                    bias,
                )
            var block: Buffer[B.operand]
            if room:
                block = room.value()
                pack_transposed[Self.dtype](
                    block,
                    self.weight.unsafe_offset(column * K + k),
                    K,
                    columns,
                    vectors,
                    depth,
                )
            else:
                block = self._shared().unsafe_offset(
                    panel * B.panel_size(K) + k * vectors * B.width
                )
            multiply_block[Self.dtype, a_is_panel=False](
                product,
                B.tile_n,
                rows.unsafe_offset(k),
                B.row_stride(K),
                block,
                count,
                vectors,
                ceildiv(depth, B.pair),
                k > 0,
                output,
                next_follows=not self.plan.few_rows,
            )

    def _load_bias(self, target: Buffer[Self.B.accum], panel: Int):
        """Copies the bias of a panel's columns in the type of sums."""
        comptime B = Self.B
        var column = panel * B.tile_n
        for j in range(0, B.tile_n, B.width):
            var values = SIMD[B.accum, B.width](0)
            if self.bias and column + j < self.plan.N:
                values = load_first[B.width](
                    self.bias.value().unsafe_offset(column + j),
                    self.plan.N - column - j,
                ).cast[B.accum]()
            target.unsafe_offset(j).unsafe_store(values)


def _normalize_part[dtype: DType](data: Data, index: Int):
    """Normalizes one chunk of the rows that all tasks share."""
    ref job = data.unsafe_bitcast[Forward[dtype]]()[]
    var chunks = job._chunks()
    var first = job.plan.M * index // chunks
    var last = job.plan.M * (index + 1) // chunks
    job._normalize(
        job._shared().unsafe_offset(
            first * Blocking[dtype].row_stride(job.plan.K)
        ),
        first,
        last - first,
    )


def _pack_part[dtype: DType](data: Data, panel: Int):
    """Packs one panel of the weight."""
    ref job = data.unsafe_bitcast[Forward[dtype]]()[]
    comptime B = Blocking[dtype]
    var K = job.plan.K
    var columns = min(B.tile_n, job.plan.N - panel * B.tile_n)
    pack_transposed[dtype](
        job._shared().unsafe_offset(panel * B.panel_size(K)),
        job.weight.unsafe_offset(panel * B.tile_n * K),
        K,
        columns,
        ceildiv(columns, B.width),
        K,
    )


def _multiply_part[dtype: DType](data: Data, worker: Int):
    """Takes panels of columns, or slabs of rows, until none is left."""
    ref job = data.unsafe_bitcast[Forward[dtype]]()[]
    comptime B = Blocking[dtype]
    ref plan = job.plan
    var arena = Arena(job.workspace + plan.own + worker * plan.own_bytes)
    var product = buffer[B.accum](
        arena.take[B.accum]((plan.slab_rows + 1) * B.tile_n)
    )
    var own = buffer[B.operand](arena.next)
    while True:
        var task = Int(Atomic.fetch_add(Pointer(to=job.next_task), 1))
        if plan.few_rows:
            if task >= plan.panels:
                return
            job._multiply(job._shared(), 0, plan.M, task, product, own)
        else:
            if task >= plan.slabs.count:
                return
            var first = plan.slabs.first(task)
            var count = plan.slabs.first(task + 1) - first
            job._normalize(own, first, count)
            for panel in range(plan.panels):
                job._multiply(own, first, count, panel, product, None)
