"""Computes LayerNorm followed by a Linear layer on the CPU.

A group of rows is normalized into memory that stays in cache and that all
threads share. Each task then packs one panel of the weight, block by block, and
multiplies the group's rows by every block while it is in the nearest cache.
"""

from std.atomic import Atomic
from std.sys import size_of

from ...team import Data, Team
from .blocking import Blocking, Buffer, CACHE_LINE, Panels, ceildiv
from .microkernel import Output, multiply_block
from .pack import load_first, pack_transposed
from .parameters import Parameter
from .prefetch import Upcoming
from .statistics import normalize_row, row_statistics
from .workspace import Arena, RowGroups, buffer, useful_threads


struct ForwardPlan[dtype: DType](Copyable, Movable):
    """Divides a forward computation into tasks and lays out its workspace.

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
    var panels: Panels
    """Panels of outputs."""
    var groups: RowGroups
    """Groups of rows, and their tasks."""
    var gamma: Int
    """Offset of LayerNorm's weight in the type of sums."""
    var beta: Int
    """Offset of LayerNorm's bias in the type of sums."""
    var normalized: Int
    """Offset of a group's normalized rows."""
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
        comptime row_stride = B.row_stride[B.operand]
        self.M = M
        self.K = K
        self.N = N
        self.workers = useful_threads(M * K * N, threads)
        self.panels = Panels.of[Self.dtype](N)
        self.groups = RowGroups(
            M,
            row_stride(K) * size_of[B.operand](),
            self.panels.count,
            B.tile_m,
            self.workers,
        )
        var arena = Arena(0)
        self.gamma = arena.take[B.accum](K)
        self.beta = arena.take[B.accum](K)
        self.normalized = arena.take[B.operand](
            self.groups.rows * row_stride(K)
        )
        self.own = arena.next
        _ = Own[Self.dtype](arena, self.groups.block_rows)
        self.own_bytes = arena.next - self.own
        self.bytes = self.own + self.own_bytes * self.workers + CACHE_LINE


struct Own[dtype: DType](TrivialRegisterPassable):
    """Lays out what each worker has for itself.

    Parameters:
        dtype: Element type of the tensors.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    var bias: Int
    """Address of the bias of a panel."""
    var block: Int
    """Address of a packed block of a panel."""
    var product: Int
    """Address of sums that are not complete."""

    def __init__(out self, mut arena: Arena, rows: Int):
        """Reserves the arrays.

        Args:
            arena: Where from.
            rows: Rows of a task.
        """
        comptime B = Self.B
        self.bias = arena.take[B.accum](B.tile_n)
        self.block = arena.take[B.operand](B.block_size)
        self.product = arena.take[B.accum](rows * B.tile_n)


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
    var group: Int
    """Index of the group that is being computed."""
    var next_task: Int64
    """Counter from which workers take the group's tasks."""

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
        self.group = 0
        self.next_task = 0
        self.plan = plan^

    def run(mut self, gomp_parallel: Int):
        """Computes the output.

        Args:
            gomp_parallel: Address of `GOMP_parallel` in PyTorch's libgomp; 0
                selects Mojo's pool.
        """
        var team = Team(gomp_parallel, self.plan.workers)
        for group in range(self.plan.groups.count):
            self.group = group
            self.next_task = 0
            team.run(_normalize_part[Self.dtype], self._chunks(), self)
            team.run(_multiply_part[Self.dtype], self.plan.workers, self)

    def _chunks(self) -> Int:
        """Returns how many parts a group's rows are normalized in."""
        var rows = self.plan.groups.rows_of(self.group)
        return 1 if self.plan.workers == 1 else ceildiv(rows, 8)

    def _normalize(self, first: Int, last: Int):
        """Normalizes rows of the group and stores their statistics."""
        comptime B = Self.B
        var K = self.plan.K
        var stride = B.row_stride[B.operand](K)
        var normalized = buffer[B.operand](
            self.workspace + self.plan.normalized
        )
        for i in range(first, last):
            var row = self.group * self.plan.groups.rows + i
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
                normalized.unsafe_offset(i * stride),
                x_row,
                self.gamma,
                self.beta,
                K,
                statistics,
            )

    def _multiply(
        self, panel: Int, first: Int, count: Int, own: Own[Self.dtype]
    ):
        """Computes some of the group's rows of one panel of the output."""
        comptime B = Self.B
        var K = self.plan.K
        var stride = B.row_stride[B.operand](K)
        var rows = buffer[B.operand](
            self.workspace + self.plan.normalized
        ).unsafe_offset(first * stride)
        var block = buffer[B.operand](own.block)
        var column = self.plan.panels.first(panel)
        var columns = self.plan.panels.first(panel + 1) - column
        var vectors = self.plan.panels.vectors(panel)
        self._load_bias(buffer[B.accum](own.bias), column, vectors)
        for k in range(0, K, B.depth):
            var depth = min(B.depth, K - k)
            pack_transposed[Self.dtype](
                block,
                self.weight.unsafe_offset(column * K + k),
                K,
                columns,
                vectors,
                depth,
            )
            var output = Output[Self.dtype].none()
            if k + depth == K:
                var row = self.group * self.plan.groups.rows + first
                output = Output[Self.dtype](
                    self.y.unsafe_offset(row * self.plan.N + column),
                    self.plan.N,
                    columns,
                    buffer[B.accum](own.bias),
                )
            multiply_block[Self.dtype, a_is_panel=False](
                buffer[B.accum](own.product),
                B.tile_n,
                rows.unsafe_offset(k),
                stride,
                block,
                count,
                vectors,
                ceildiv(depth, B.pair),
                k > 0,
                self._upcoming(panel, k + depth),
                output,
            )

    def _upcoming(self, panel: Int, k: Int) -> Upcoming:
        """Returns the block of the weight that the worker will pack next."""
        comptime B = Self.B
        var K = self.plan.K
        if k == K:
            # Workers take panels in turns.
            var next_panel = panel + self.plan.workers
            if next_panel >= self.plan.panels.count:
                return Upcoming.none()
            return self._upcoming(next_panel, 0)
        var column = self.plan.panels.first(panel)
        return Upcoming.block(
            self.weight.unsafe_offset(column * K + k),
            K,
            self.plan.panels.first(panel + 1) - column,
            min(B.depth, K - k),
        )

    def _load_bias(
        self, target: Buffer[Self.B.accum], column: Int, vectors: Int
    ):
        """Copies the bias of a panel's columns in the type of sums."""
        comptime B = Self.B
        for j in range(0, vectors * B.width, B.width):
            var values = SIMD[B.accum, B.width](0)
            if self.bias:
                values = load_first[B.width](
                    self.bias.value().unsafe_offset(column + j),
                    self.plan.N - column - j,
                ).cast[B.accum]()
            target.unsafe_offset(j).unsafe_store(values)


def _normalize_part[dtype: DType](data: Data, index: Int):
    """Normalizes one chunk of the group's rows."""
    ref job = data.unsafe_bitcast[Forward[dtype]]()[]
    var rows = job.plan.groups.rows_of(job.group)
    var chunks = job._chunks()
    job._normalize(rows * index // chunks, rows * (index + 1) // chunks)


def _multiply_part[dtype: DType](data: Data, worker: Int):
    """Takes tasks of the group until none is left."""
    ref job = data.unsafe_bitcast[Forward[dtype]]()[]
    ref groups = job.plan.groups
    var arena = Arena(
        job.workspace + job.plan.own + worker * job.plan.own_bytes
    )
    var own = Own[dtype](arena, groups.block_rows)
    while True:
        var task = Int(Atomic.fetch_add(Pointer(to=job.next_task), 1))
        if task >= groups.tasks:
            return
        var block = task % groups.blocks
        var count = groups.rows_of_block(job.group, block)
        if count > 0:
            job._multiply(
                task // groups.blocks, block * groups.block_rows, count, own
            )
