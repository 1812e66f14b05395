"""Computes the gradients where rows are few and the weight is what takes time.

The weight is read once, for h = dy @ weight, and its gradient is written once:

- `h` is divided into tiles of columns. A task takes its tile of the weight from
  top to bottom, copying a block of rows at a time into the cache, and makes its
  part of the LayerNorm parameters' gradients of the finished columns;
- `dW = dy^T @ z`, z being the LayerNorm's output, is divided into blocks that go
  from registers to memory.

Rows of h become rows of dx when all columns are there.
"""

from std.atomic import Atomic
from std.sys import size_of

from ...team import Data, Team
from .blocking import Blocking, Buffer
from .few_rows_plan import FewRowsPlan, OUTPUTS
from .gradients import Gradients
from .input_gradient import finish_input_gradient, store_affine_gradients
from .microkernel import Output, multiply_block
from .pack import copy_rows, pack_panel, pack_panels
from .parameter_gradients import CHUNK, sum_columns
from .workspace import buffer, ceildiv


struct FewRows[dtype: DType](Movable):
    """One backward computation.

    Parameters:
        dtype: Element type of the tensors.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    var plan: FewRowsPlan[Self.dtype]
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
        var plan: FewRowsPlan[Self.dtype],
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
        var no_bias = self.at[Self.B.accum](self.plan.no_bias)
        for j in range(Self.B.tile_n):
            no_bias.unsafe_offset(j).unsafe_store(0)

    def run(mut self, team: Team):
        """Computes the gradients.

        Args:
            team: The threads to use.
        """
        var panels = self.plan.panels if self.plan.wanted.dweight else 0
        var chunks = ceildiv(self.tensors.N, CHUNK)
        team.run(_prepare_part[Self.dtype], chunks + panels, self)
        if self.plan.h_tasks + self.plan.weight_tasks > 0:
            team.run(_multiply_part[Self.dtype], self.plan.workers, self)
        if self.plan.wanted.dx:
            team.run(_finish_part[Self.dtype], self.row_chunks(), self)

    def at[type: DType](self, offset: Int) -> Buffer[type]:
        """Returns an array of the workspace.

        Parameters:
            type: Type of its elements.

        Args:
            offset: Where it begins.

        Returns:
            Its first element.
        """
        return buffer[type](self.workspace + offset)

    def row_chunks(self) -> Int:
        """Counts the parts that rows are finished in.

        Returns:
            Their number.
        """
        return min(self.plan.workers * 4, self.tensors.M)

    def prepare_dy(self, first: Int, count: Int):
        """Brings columns of dy into the forms of an operand, and sums them.

        Args:
            first: The first of the columns.
            count: Their number.
        """
        comptime B = Self.B
        ref plan = self.plan
        var M = self.tensors.M
        var N = self.tensors.N
        var dy = self.tensors.dy.unsafe_offset(first)
        if plan.has_h:
            copy_rows[Self.dtype](
                self.at[B.operand](plan.dy).unsafe_offset(first),
                B.row_stride(N),
                dy,
                N,
                M,
                count,
            )
        if plan.wanted.dweight:
            pack_panels[Self.dtype, width=B.tile_m, vectors=1](
                self.at[B.operand](plan.dy_panels).unsafe_offset(
                    first // B.tile_m * plan.dy_stride
                ),
                plan.dy_stride,
                dy,
                N,
                count,
                M,
            )
        if plan.wanted.dbias:
            sum_columns[Self.dtype](
                self.at[DType.float64](plan.dbias).unsafe_offset(first),
                self.tensors.dbias + first * size_of[Self.dtype](),
                dy,
                N,
                M,
                count,
            )

    def prepare_z(self, panel: Int):
        """Packs a panel of the LayerNorm's output.

        Args:
            panel: Which one.
        """
        comptime B = Self.B
        var column = panel * B.tile_n
        var columns = min(B.tile_n, self.tensors.K - column)
        pack_panel[Self.dtype, width=B.width, normalize=True](
            self.at[B.operand](self.plan.z).unsafe_offset(
                panel * B.panel_size(self.tensors.M)
            ),
            self.tensors.x.unsafe_offset(column),
            self.tensors.K,
            columns,
            ceildiv(columns, B.width),
            self.tensors.M,
            self.tensors.mean,
            self.tensors.rstd,
            self.gamma.unsafe_offset(column),
            self.beta.unsafe_offset(column),
        )

    def h_task(self, tile: Int, own: Int):
        """Computes a tile of `dy @ weight`, and what it says of gamma and beta.

        Args:
            tile: Which one.
            own: Address of the worker's own part of the workspace.
        """
        comptime B = Self.B
        ref plan = self.plan
        var K = self.tensors.K
        var N = self.tensors.N
        var first = tile * plan.tile_panels
        var last = min(plan.panels, first + plan.tile_panels)
        var h = self.at[B.accum](plan.h)
        var h_stride = plan.panels * B.tile_n
        for n in range(0, N, B.depth):
            var depth = min(B.depth, N - n)
            var column = first * B.tile_n
            pack_panels[Self.dtype, width=B.width, vectors=B.tile_vectors](
                buffer[B.operand](own),
                B.panel_size(B.depth),
                self.tensors.weight.unsafe_offset(n * K + column),
                K,
                min(K, last * B.tile_n) - column,
                depth,
            )
            for panel in range(first, last):
                var columns = min(B.tile_n, K - panel * B.tile_n)
                multiply_block[Self.dtype, a_is_panel=False](
                    h.unsafe_offset(panel * B.tile_n),
                    h_stride,
                    self.at[B.operand](plan.dy).unsafe_offset(n),
                    B.row_stride(N),
                    buffer[B.operand](own).unsafe_offset(
                        (panel - first) * B.panel_size(B.depth)
                    ),
                    self.tensors.M,
                    ceildiv(columns, B.width),
                    ceildiv(depth, B.pair),
                    n > 0,
                )
        if plan.wanted.affine():
            store_affine_gradients[Self.dtype](
                self.tensors, h, h_stride, first * B.tile_n, last * B.tile_n
            )

    def weight_task(self, task: Int, own: Int):
        """Computes a block of dW.

        Args:
            task: Which one.
            own: Address of the worker's own part of the workspace.
        """
        comptime B = Self.B
        ref plan = self.plan
        var M = self.tensors.M
        var K = self.tensors.K
        var n = task // plan.tiles * OUTPUTS
        var first = task % plan.tiles * plan.tile_panels
        var dy = self.at[B.operand](plan.dy_panels).unsafe_offset(
            n // B.tile_m * plan.dy_stride
        )
        for panel in range(first, min(plan.panels, first + plan.tile_panels)):
            var column = panel * B.tile_n
            var columns = min(B.tile_n, K - column)
            var vectors = ceildiv(columns, B.width)
            var z = self.at[B.operand](plan.z).unsafe_offset(
                panel * B.panel_size(M)
            )
            for m in range(0, M, B.depth):
                var depth = min(B.depth, M - m)
                var output: Optional[Output[Self.dtype]] = None
                if m + depth == M:
                    output = Output[Self.dtype](
                        buffer[Self.dtype](self.tensors.dweight).unsafe_offset(
                            n * K + column
                        ),
                        K,
                        columns,
                        self.at[B.accum](plan.no_bias),
                    )
                multiply_block[Self.dtype, a_is_panel=True](
                    buffer[B.accum](own),
                    B.tile_n,
                    dy.unsafe_offset(m * B.tile_m),
                    plan.dy_stride,
                    z.unsafe_offset(m * vectors * B.width),
                    min(OUTPUTS, self.tensors.N - n),
                    vectors,
                    ceildiv(depth, B.pair),
                    m > 0,
                    output,
                )

    def finish(self, first: Int, last: Int):
        """Turns rows of `dy @ weight` into rows of dx.

        Args:
            first: The first row.
            last: Their end.
        """
        var K = self.tensors.K
        for row in range(first, last):
            finish_input_gradient[Self.dtype](
                buffer[Self.dtype](self.tensors.dx).unsafe_offset(row * K),
                self.at[Self.B.accum](self.plan.h).unsafe_offset(
                    row * self.plan.panels * Self.B.tile_n
                ),
                self.tensors.x.unsafe_offset(row * K),
                self.gamma,
                self.tensors.mean.unsafe_offset(row).unsafe_load(),
                self.tensors.rstd.unsafe_offset(row).unsafe_load(),
                K,
            )


def _prepare_part[dtype: DType](data: Data, index: Int):
    """Prepares a chunk of dy, or a panel of z."""
    ref job = data.unsafe_bitcast[FewRows[dtype]]()[]
    var N = job.tensors.N
    var chunks = ceildiv(N, CHUNK)
    if index < chunks:
        var first = index * CHUNK
        job.prepare_dy(first, min(CHUNK, N - first))
    else:
        job.prepare_z(index - chunks)


def _multiply_part[dtype: DType](data: Data, worker: Int):
    """Takes tiles of h, then blocks of dW, until none is left.

    The large tasks come first, so that the small ones fill the gaps.
    """
    ref job = data.unsafe_bitcast[FewRows[dtype]]()[]
    ref plan = job.plan
    var own = job.workspace + plan.own + worker * plan.own_bytes
    while True:
        var task = Int(Atomic.fetch_add(Pointer(to=job.next_task), 1))
        if task < plan.h_tasks:
            job.h_task(task, own)
        elif task < plan.h_tasks + plan.weight_tasks:
            job.weight_task(task - plan.h_tasks, own)
        else:
            return


def _finish_part[dtype: DType](data: Data, index: Int):
    """Turns a chunk of the rows of h into dx."""
    ref job = data.unsafe_bitcast[FewRows[dtype]]()[]
    var chunks = job.row_chunks()
    var M = job.tensors.M
    job.finish(M * index // chunks, M * (index + 1) // chunks)
