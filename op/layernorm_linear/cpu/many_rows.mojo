"""Computes the gradients where rows are many and the products are what takes time.

- `dy^T @ x_hat` is divided into tiles of the weight, each of which one task sums
  over all rows and then turns into its part of the parameters' gradients;
- `dy @ weight` is divided into slabs of rows; while a slab's product is in cache
  it becomes dx.
"""

from std.atomic import Atomic
from std.sys import size_of

from ...team import Data, Team
from .blocking import Blocking, Buffer
from .gradients import Gradients
from .input_gradient import finish_input_gradient
from .many_rows_plan import ManyRowsPlan
from .microkernel import multiply_block
from .pack import copy_rows, pack_panel
from .parameter_gradients import (
    CHUNK,
    SUM_ROWS,
    sum_columns,
    sum_partials,
)
from .parameters import Parameter
from .weight_tile import compute_weight_tile
from .workspace import Arena, buffer, ceildiv


struct ManyRows[dtype: DType](Movable):
    """One backward computation.

    Parameters:
        dtype: Element type of the tensors.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    var plan: ManyRowsPlan[Self.dtype]
    """How the work is divided."""
    var tensors: Gradients[Self.dtype]
    """The gradients and what they are made from."""
    var gamma: Buffer[Self.B.accum]
    """LayerNorm's weight `[K]` in the type of sums."""
    var beta: Buffer[Self.B.accum]
    """LayerNorm's bias `[K]` in the type of sums."""
    var workspace: Int
    """Address of the workspace, aligned."""
    var next_task: Int64
    """Counter from which workers take tasks."""

    def __init__(
        out self,
        var plan: ManyRowsPlan[Self.dtype],
        tensors: Gradients[Self.dtype],
        workspace: Int,
    ):
        """Collects the arguments; the gradients are those of the plan.

        Args:
            plan: How the work is divided.
            tensors: The gradients and what they are made from.
            workspace: Address of `plan.bytes` bytes, aligned.
        """
        self.tensors = tensors.copy()
        self.workspace = workspace
        self.gamma = tensors.ln_weight.as_accum[Self.dtype](
            workspace + plan.gamma, tensors.K, default=1
        )
        self.beta = tensors.ln_bias.as_accum[Self.dtype](
            workspace + plan.beta, tensors.K, default=0
        )
        self.next_task = 0
        self.plan = plan^

    def run(mut self, team: Team):
        """Computes the gradients.

        Args:
            team: The threads to use.
        """
        team.run(_prepare_part[Self.dtype], self.packs() + self.sums(), self)
        team.run(_multiply_part[Self.dtype], self.plan.workers, self)
        if self.plan.wanted.affine():
            team.run(_sum_part[Self.dtype], self.plan.workers, self)

    def packs(self) -> Int:
        """Counts the panels of the weight to pack.

        Returns:
            Their number.
        """
        return self.plan.panels if self.plan.wanted.dx else 0

    def sums(self) -> Int:
        """Counts the chunks of columns of dy to sum.

        Returns:
            Their number.
        """
        return ceildiv(self.tensors.N, CHUNK) if self.plan.tiles > 0 else 0

    def sum_chunk(self, chunk: Int):
        """Sums a chunk of the columns of dy.

        Args:
            chunk: Which one.
        """
        var N = self.tensors.N
        var first = chunk * CHUNK
        var dbias = self.tensors.dbias
        if dbias != 0:
            dbias += first * size_of[Self.dtype]()
        sum_columns[Self.dtype](
            buffer[DType.float64](
                self.workspace + self.plan.dbias
            ).unsafe_offset(first),
            dbias,
            self.tensors.dy.unsafe_offset(first),
            N,
            self.tensors.M,
            min(CHUNK, N - first),
        )

    def pack(self, panel: Int):
        """Packs a panel of the weight.

        Args:
            panel: Which one.
        """
        comptime B = Self.B
        var column = panel * B.tile_n
        var columns = min(B.tile_n, self.tensors.K - column)
        pack_panel[Self.dtype, width=B.width, ahead=8](
            self._packed(panel),
            self.tensors.weight.unsafe_offset(column),
            self.tensors.K,
            columns,
            ceildiv(columns, B.width),
            self.tensors.N,
        )

    def slab_task(self, task: Int, own: Int):
        """Computes a slab of dx.

        Args:
            task: Which one.
            own: Address of the worker's own part of the workspace.
        """
        comptime B = Self.B
        ref plan = self.plan
        var K = self.tensors.K
        var N = self.tensors.N
        var arena = Arena(own)
        var dy = buffer[B.operand](
            arena.take[B.operand](plan.slab_rows * B.row_stride(N))
        )
        var h = buffer[B.accum](arena.next)
        var h_stride = plan.panels * B.tile_n
        var first = plan.slabs.first(task)
        var count = plan.slabs.first(task + 1) - first
        copy_rows[Self.dtype](
            dy,
            B.row_stride(N),
            self.tensors.dy.unsafe_offset(first * N),
            N,
            count,
            N,
        )
        for panel in range(plan.panels):
            var column = panel * B.tile_n
            var vectors = ceildiv(min(B.tile_n, K - column), B.width)
            for n in range(0, N, B.depth):
                multiply_block[Self.dtype, a_is_panel=False](
                    h.unsafe_offset(column),
                    h_stride,
                    dy.unsafe_offset(n),
                    B.row_stride(N),
                    self._packed(panel).unsafe_offset(n * vectors * B.width),
                    count,
                    vectors,
                    ceildiv(min(B.depth, N - n), B.pair),
                    n > 0,
                    next_follows=True,
                )
        for i in range(count):
            var row = first + i
            finish_input_gradient[Self.dtype](
                buffer[Self.dtype](self.tensors.dx).unsafe_offset(row * K),
                h.unsafe_offset(i * h_stride),
                self.tensors.x.unsafe_offset(row * K),
                self.gamma,
                self.tensors.mean.unsafe_offset(row).unsafe_load(),
                self.tensors.rstd.unsafe_offset(row).unsafe_load(),
                K,
            )

    def sum(self, first: Int, last: Int):
        """Adds up the partial sums of some features of dgamma and dbeta.

        Args:
            first: The first of them.
            last: Their end.
        """
        ref plan = self.plan
        if plan.wanted.dln_weight:
            self._sum(self.tensors.dln_weight, plan.dgamma_partial, first, last)
        if plan.wanted.dln_bias:
            self._sum(self.tensors.dln_bias, plan.dbeta_partial, first, last)

    def _sum(self, target: Parameter, offset: Int, first: Int, last: Int):
        sum_partials[Self.dtype](
            target,
            buffer[Self.B.accum](self.workspace + offset),
            ceildiv(self.tensors.N, SUM_ROWS),
            self.tensors.K,
            first,
            last,
        )

    def _packed(self, panel: Int) -> Buffer[Self.B.operand]:
        return buffer[Self.B.operand](
            self.workspace + self.plan.packed_weight
        ).unsafe_offset(panel * Self.B.panel_size(self.tensors.N))


def _prepare_part[dtype: DType](data: Data, index: Int):
    """Packs a panel of the weight, or sums a chunk of the columns of dy."""
    ref job = data.unsafe_bitcast[ManyRows[dtype]]()[]
    var packs = job.packs()
    if index < packs:
        job.pack(index)
    else:
        job.sum_chunk(index - packs)


def _multiply_part[dtype: DType](data: Data, worker: Int):
    """Takes tiles of the weight, then slabs of dx, until none is left.

    The large tasks come first, so that the small ones fill the gaps.
    """
    ref job = data.unsafe_bitcast[ManyRows[dtype]]()[]
    ref plan = job.plan
    var own = job.workspace + plan.own + worker * plan.own_bytes
    while True:
        var task = Int(Atomic.fetch_add(Pointer(to=job.next_task), 1))
        if task < plan.tiles:
            compute_weight_tile[dtype](
                plan,
                job.tensors,
                job.gamma,
                job.beta,
                job.workspace,
                task,
                own,
            )
        elif task < plan.tiles + plan.slab_tasks:
            job.slab_task(task - plan.tiles, own)
        else:
            return


def _sum_part[dtype: DType](data: Data, index: Int):
    """Adds up the partial sums of one worker's share of the features."""
    ref job = data.unsafe_bitcast[ManyRows[dtype]]()[]
    var share = ceildiv(job.tensors.K, job.plan.workers)
    job.sum(index * share, min(job.tensors.K, (index + 1) * share))
