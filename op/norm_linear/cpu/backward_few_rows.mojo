"""Computes the gradients where rows are few and the weight is what takes time.

The weight is read once, for h = dy @ weight, and its gradient is written once:

- `h` is divided into tiles of columns. A task takes its tile of the weight from
  top to bottom, a block of rows at a time, and makes its part of the gradients of
  gamma and beta from the finished columns;
- `dW = dy^T @ z` is divided into tiles that go from registers to memory.

Blocks are copied into the cache, unless rows are so few that reading and writing in
the order of the memory is faster (`few_rows_gradients.mojo`).

Rows of h become rows of dx when all columns are there.
"""

from std.atomic import Atomic
from std.math import ceildiv

from ...gemm.cpu.blocking import Blocking
from ...gemm.cpu.epilogue import NoEpilogue, Output
from ...gemm.cpu.few_rows_gradients import (
    is_served,
    multiply_by_rows,
    store_outer_products,
)
from ...gemm.cpu.memory import Buffer, Matrix, buffer
from ...gemm.cpu.microkernel import multiply_block
from ...gemm.cpu.pack import pack_panel, pack_panels, pack_rows
from ...gemm.cpu.pack_left import pack_left_panels
from ...gemm.cpu.product import Packed, multiply_panel
from ...gemm.cpu.tiles import with_tiles
from ...norms.norm import Norm
from ...team import Data, Team
from .backward_plan import COUNTER, BackwardPlan
from .input_gradient import finish_input_gradient
from .job import Job
from .normalize import NormalizeRows
from .parameter_gradients import CHUNK, sum_dy, sum_over_rows

comptime _Job[dtype: DType] = Job[dtype, BackwardPlan[dtype]]


def run_few_rows[
    dtype: DType, ThisNorm: Norm
](mut job: _Job[dtype], team: Team):
    """Computes the gradients.

    Parameters:
        dtype: Element type of the tensors.
        ThisNorm: The norm.

    Args:
        job: The call.
        team: The threads to use.
    """
    ref plan = job.plan
    var panels = plan.panels if plan.weight_tasks > 0 else 0
    var chunks = ceildiv(job.call[].N, CHUNK)
    team.run(_prepare_part[dtype, ThisNorm], chunks + panels, job)
    if plan.input_tasks + plan.weight_tasks > 0:
        for worker in range(plan.workers):
            _taken(job).unsafe_offset(worker * COUNTER).unsafe_store(0)
        team.run(
            with_tiles[dtype, _multiply_part[dtype, ThisNorm]],
            plan.workers,
            job,
        )
    if job.call[].dx != 0:
        team.run(_finish_part[dtype, ThisNorm], _row_chunks(job), job)


def _row_chunks[dtype: DType](job: _Job[dtype]) -> Int:
    """Counts the parts that rows are finished in."""
    return min(job.plan.workers * 4, job.call[].M)


def _h[dtype: DType](job: _Job[dtype]) -> Matrix[Blocking[dtype].accum]:
    comptime B = Blocking[dtype]
    return {job.at[B.accum](job.plan.h), job.plan.panels * B.tile_n}


def _prepare_part[dtype: DType, ThisNorm: Norm](data: Data, index: Int):
    """Prepares a chunk of dy, or a panel of z."""
    ref job = data.unsafe_bitcast[_Job[dtype]]()[]
    var chunks = ceildiv(job.call[].N, CHUNK)
    if index < chunks:
        _prepare_dy(job, index * CHUNK)
    else:
        _prepare_z[dtype, ThisNorm](job, index - chunks)


def _prepare_dy[dtype: DType](job: _Job[dtype], first: Int):
    """Brings a chunk of dy's columns into the forms of an operand, and sums them."""
    comptime B = Blocking[dtype]
    ref call = job.call[]
    ref plan = job.plan
    var count = min(CHUNK, call.N - first)
    var dy = Matrix[dtype](call.dy, call.N)
    if plan.input_tasks > 0:
        pack_rows[dtype](
            Matrix(job.at[B.operand](plan.dy), B.row_stride(call.N)).part(
                0, first
            ),
            dy.part(0, first),
            0,
            call.M,
            count,
        )
    if plan.weight_tasks > 0:
        pack_left_panels[dtype](
            Matrix(job.at[B.operand](plan.dy_panels), plan.dy_stride).part(
                first // B.tile_m, 0
            ),
            dy,
            0,
            first,
            call.M,
            count,
        )
    if call.dbias != 0:
        sum_dy(job, first)


def _prepare_z[dtype: DType, ThisNorm: Norm](job: _Job[dtype], panel: Int):
    """Packs a panel of z."""
    comptime B = Blocking[dtype]
    ref call = job.call[]
    var column = panel * B.tile_n
    pack_panel[dtype](
        job.at[B.operand](job.plan.z).unsafe_offset(
            panel * B.panel_size(call.M)
        ),
        Matrix[dtype](call.x, call.K),
        0,
        column,
        call.M,
        min(B.tile_n, call.K - column),
        NormalizeRows[dtype, ThisNorm, is_saved=True, is_affine=True](
            job.call, job.gamma, job.beta, job.shifts
        ),
    )


def _multiply_part[dtype: DType, ThisNorm: Norm](data: Data, worker: Int):
    """Takes tiles of h, then tiles of dW, until none is left.

    The large tasks come first, so that the small ones fill the gaps. Tiles of dW are those of this worker before those of
    others: memory that the last call used is in the cache of the core that wrote it, and far from the next one.
    """
    ref job = data.unsafe_bitcast[_Job[dtype]]()[]
    ref plan = job.plan
    var own = job.workspace + plan.own + worker * plan.own_bytes
    while True:
        var task = job.take()
        if task >= plan.input_tasks:
            break
        _h_task[dtype, ThisNorm](job, task, own)
    for i in range(plan.workers):
        var owner = (worker + i) % plan.workers
        var first = plan.weight_tasks * owner // plan.workers
        var last = plan.weight_tasks * (owner + 1) // plan.workers
        while True:
            var task = first + Int(
                Atomic.fetch_add(_taken(job).unsafe_offset(owner * COUNTER), 1)
            )
            if task >= last:
                break
            _weight_task(job, task, own)


def _taken[dtype: DType](job: _Job[dtype]) -> Buffer[DType.int64]:
    return job.at[DType.int64](job.plan.counters)


def _h_task[
    dtype: DType, ThisNorm: Norm
](job: _Job[dtype], tile: Int, own: Int):
    """Computes a tile of `dy @ weight`, and what it says of gamma and beta."""
    comptime B = Blocking[dtype]
    ref call = job.call[]
    ref plan = job.plan
    var panels = buffer[B.operand](own)
    var panel_stride = B.panel_size(B.depth)
    var dy = Matrix(job.at[B.operand](plan.dy), B.row_stride(call.N))
    var h = _h(job)
    var first = tile * plan.tile_panels * B.tile_n
    var last = min(call.K, first + plan.tile_panels * B.tile_n)
    for n in range(0, call.N, B.depth):
        var depth = min(B.depth, call.N - n)
        if is_served[dtype](call.M):
            _add_block(job, tile, own, n, depth)
            continue
        pack_panels[dtype, width=B.width, vectors=B.tile_vectors](
            panels,
            panel_stride,
            Matrix[dtype](call.weight, call.K),
            n,
            first,
            depth,
            last - first,
        )
        for column in range(first, last, B.tile_n):
            multiply_block[dtype, a_is_panel=False](
                h.part(0, column),
                dy.part(0, n),
                panels.unsafe_offset(
                    (column - first) // B.tile_n * panel_stride
                ),
                call.M,
                min(B.tile_n, call.K - column),
                depth,
                n > 0,
            )
    if call.dgamma != 0 or call.dbeta != 0:
        sum_over_rows[dtype, ThisNorm](job.call, h, first, last, job.shifts)


def _add_block[
    dtype: DType
](job: _Job[dtype], tile: Int, own: Int, n: Int, depth: Int):
    """Adds a block of `dy @ weight` to a tile, from a row of the weight on."""
    comptime B = Blocking[dtype]
    ref call = job.call[]
    ref plan = job.plan
    var first = tile * plan.tile_panels * B.tile_n
    var columns = min(plan.tile_panels * B.tile_n, call.K - first)
    var h = _h(job).part(0, first)
    var sums = Matrix[B.accum](own, plan.tile_panels * B.tile_n)
    multiply_by_rows[dtype](
        sums if n > 0 else h,
        Matrix(job.at[B.operand](plan.dy), B.row_stride(call.N)).part(0, n),
        Matrix[dtype](call.weight, call.K).part(n, first),
        call.M,
        columns,
        depth,
    )
    if n == 0:
        return
    for row in range(call.M):
        for k in range(0, columns, B.width):
            var total = h.at(row, k)
            total.unsafe_store(
                sums.at(row, k).unsafe_load[width=B.width]()
                + total.unsafe_load[width=B.width]()
            )


def _weight_task[dtype: DType](job: _Job[dtype], task: Int, own: Int):
    """Computes a tile of dW."""
    comptime B = Blocking[dtype]
    ref call = job.call[]
    ref plan = job.plan
    var n = task // plan.tiles_across * plan.tile_rows
    var first = task % plan.tiles_across * plan.tile_panels
    var dy = Matrix(job.at[B.operand](plan.dy_panels), plan.dy_stride)
    if is_served[dtype](call.M):
        store_outer_products[dtype](
            Matrix[dtype](call.dweight, call.K).part(n, first * B.tile_n),
            dy.part(n // B.tile_m, 0),
            job.at[B.operand](plan.z).unsafe_offset(
                first * B.panel_size(call.M)
            ),
            min(plan.tile_rows, call.N - n),
            min(plan.tile_panels * B.tile_n, call.K - first * B.tile_n),
            call.M,
        )
        return
    for panel in range(first, min(plan.panels, first + plan.tile_panels)):
        var column = panel * B.tile_n
        var columns = min(B.tile_n, call.K - column)
        multiply_panel[dtype, a_is_panel=True](
            Matrix[B.accum](own, B.tile_n),
            dy.part(n // B.tile_m, 0),
            Packed[dtype, False](
                job.at[B.operand](plan.z).unsafe_offset(
                    panel * B.panel_size(call.M)
                )
            ),
            min(plan.tile_rows, call.N - n),
            columns,
            call.M,
            Optional(
                Output(
                    Matrix[dtype](call.dweight, call.K).part(n, column),
                    columns,
                    NoEpilogue(),
                )
            ),
        )


def _finish_part[dtype: DType, ThisNorm: Norm](data: Data, index: Int):
    """Turns a chunk of the rows of h into dx."""
    ref job = data.unsafe_bitcast[_Job[dtype]]()[]
    ref call = job.call[]
    var chunks = _row_chunks(job)
    for row in range(call.M * index // chunks, call.M * (index + 1) // chunks):
        finish_input_gradient[dtype, ThisNorm](
            job.call, row, _h(job).at(row), job.gamma, job.shifts
        )
