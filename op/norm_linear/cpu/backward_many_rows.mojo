"""Computes the gradients where rows are many and the products are what takes time.

- `G = dy^T @ x_hat` is divided into tiles of the weight, each of which one task
  sums over all rows and then turns into its part of the parameters' gradients;
- `h = dy @ weight` is divided into slabs of rows; while a slab's product is in
  cache it becomes dx.
"""

from std.math import align_up, ceildiv

from ...gemm.cpu.blocking import Blocking
from ...gemm.cpu.memory import Arena, Buffer, Matrix, buffer
from ...gemm.cpu.microkernel import multiply_block
from ...gemm.cpu.pack import pack_panels, pack_rows
from ...gemm.cpu.pack_left import pack_left_panels
from ...gemm.cpu.tiles import with_tiles
from ...norms.norm import Norm
from ...team import Data, Team
from .backward_plan import BackwardPlan, SUM_ROWS
from .input_gradient import finish_input_gradient
from .job import Job
from .normalize import NormalizeRows
from .parameter_gradients import CHUNK, finish_weight_rows, sum_dy, sum_partials
from .tile_room import TileRoom

comptime PANELS_AT_ONCE = 8
"""Panels of the weight that are packed together: a row's columns are adjacent."""

comptime _Job[dtype: DType] = Job[dtype, BackwardPlan[dtype]]


def run_many_rows[
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
    ref call = job.call[]
    ref plan = job.plan
    var sums = ceildiv(call.N, CHUNK) if plan.weight_tasks > 0 else 0
    var parts = _packs(job) + sums
    if plan.packs_once:
        parts += ceildiv(call.M, plan.block_rows) * (
            ceildiv(call.N, CHUNK) + ceildiv(call.K, CHUNK)
        )
    team.run(_prepare_part[dtype, ThisNorm], parts, job)
    team.run(
        with_tiles[dtype, _multiply_part[dtype, ThisNorm]], plan.workers, job
    )
    if call.dgamma != 0 or call.dbeta != 0:
        team.run(_sum_part[dtype], plan.workers, job)


def _packs[dtype: DType](job: _Job[dtype]) -> Int:
    """Counts the parts in which the weight is packed: blocks of its rows, some panels across."""
    if job.plan.input_tasks == 0:
        return 0
    return ceildiv(job.call[].N, Blocking[dtype].depth) * ceildiv(
        job.plan.panels, PANELS_AT_ONCE
    )


def _block_steps[dtype: DType](job: _Job[dtype], n: Int) -> Int:
    """Counts the steps of a packed block that begins at a row of the weight."""
    comptime B = Blocking[dtype]
    return align_up(min(B.depth, job.call[].N - n), B.step)


def _weight_block[
    dtype: DType
](job: _Job[dtype], n: Int, panel: Int) -> Buffer[Blocking[dtype].operand]:
    """Locates a panel of a packed block, whose panels are contiguous, in the order of use."""
    comptime B = Blocking[dtype]
    return job.at[B.operand](job.plan.packed_weight).unsafe_offset(
        (n * job.plan.panels + _block_steps(job, n) * panel) * B.tile_n
    )


def _pack_weight[dtype: DType](job: _Job[dtype], index: Int):
    """Packs some panels of a block of the weight."""
    comptime B = Blocking[dtype]
    ref call = job.call[]
    var across = ceildiv(job.plan.panels, PANELS_AT_ONCE)
    var n = index // across * B.depth
    var panel = index % across * PANELS_AT_ONCE
    var column = panel * B.tile_n
    pack_panels[dtype, width=B.width, vectors=B.tile_vectors](
        _weight_block(job, n, panel),
        _block_steps(job, n) * B.tile_n,
        Matrix[dtype](call.weight, call.K),
        n,
        column,
        min(B.depth, call.N - n),
        min(PANELS_AT_ONCE * B.tile_n, call.K - column),
    )


def _prepare_part[dtype: DType, ThisNorm: Norm](data: Data, index: Int):
    """Packs a part of the weight, sums a chunk of the columns of dy, or packs a chunk of dy or x_hat."""
    ref job = data.unsafe_bitcast[_Job[dtype]]()[]
    comptime B = Blocking[dtype]
    ref call = job.call[]
    var packs = _packs(job)
    if index < packs:
        _pack_weight(job, index)
        return
    var left = index - packs
    var across = ceildiv(call.N, CHUNK)
    if job.plan.weight_tasks > 0:
        if left < across:
            sum_dy(job, left * CHUNK)
            return
        left -= across
    var blocks = ceildiv(call.M, job.plan.block_rows)
    if left < across * blocks:
        _pack_dy(job, left // across, left % across * CHUNK)
    else:
        left -= across * blocks
        across = ceildiv(call.K, CHUNK)
        _pack_x_hat[dtype, ThisNorm](job, left // across, left % across * CHUNK)


def _dy_block[
    dtype: DType
](job: _Job[dtype], block: Int, n: Int) -> Matrix[Blocking[dtype].operand]:
    """Finds the panels of a packed block of dy."""
    comptime B = Blocking[dtype]
    ref plan = job.plan
    return Matrix(
        job.at[B.operand](plan.dy_panels).unsafe_offset(block * plan.dy_block),
        plan.block_rows * B.tile_m,
    ).part(n // B.tile_m, 0)


def _x_hat_block[
    dtype: DType
](job: _Job[dtype], block: Int, k: Int) -> Buffer[Blocking[dtype].operand]:
    """Finds the panels of a packed block of x_hat."""
    ref plan = job.plan
    return job.at[Blocking[dtype].operand](plan.z).unsafe_offset(
        block * plan.x_block + k * plan.block_rows
    )


def _pack_dy[dtype: DType](job: _Job[dtype], block: Int, n: Int):
    """Packs a chunk of the columns of a block of dy."""
    ref call = job.call[]
    var first = block * job.plan.block_rows
    pack_left_panels[dtype](
        _dy_block(job, block, n),
        Matrix[dtype](call.dy, call.N),
        first,
        n,
        min(job.plan.block_rows, call.M - first),
        min(CHUNK, call.N - n),
    )


def _pack_x_hat[
    dtype: DType, ThisNorm: Norm
](job: _Job[dtype], block: Int, k: Int):
    """Packs a chunk of the columns of a block of x_hat."""
    var first = block * job.plan.block_rows
    _pack_x_hat_to[dtype, ThisNorm](
        job,
        _x_hat_block(job, block, k),
        first,
        k,
        min(job.plan.block_rows, job.call[].M - first),
        min(CHUNK, job.call[].K - k),
    )


def _pack_x_hat_to[
    dtype: DType, ThisNorm: Norm
](
    job: _Job[dtype],
    panels: Buffer[Blocking[dtype].operand],
    m: Int,
    k: Int,
    rows: Int,
    columns: Int,
):
    comptime B = Blocking[dtype]
    ref call = job.call[]
    pack_panels[dtype, width=B.width, vectors=B.tile_vectors](
        panels,
        job.plan.block_rows * B.tile_n,
        Matrix[dtype](call.x, call.K),
        m,
        k,
        rows,
        columns,
        NormalizeRows[dtype, ThisNorm, is_saved=True, is_affine=False](
            job.call, job.gamma, job.beta, job.shifts
        ),
    )


def _multiply_part[dtype: DType, ThisNorm: Norm](data: Data, worker: Int):
    """Takes tiles of the weight, then slabs of dx, until none is left.

    The large tasks come first, so that the small ones fill the gaps.
    """
    ref job = data.unsafe_bitcast[_Job[dtype]]()[]
    ref plan = job.plan
    var own = job.workspace + plan.own + worker * plan.own_bytes
    while True:
        var task = job.take()
        if task < plan.weight_tasks:
            _weight_task[dtype, ThisNorm](job, task, own)
        elif task < plan.weight_tasks + plan.input_tasks:
            _slab_task[dtype, ThisNorm](job, task - plan.weight_tasks, own)
        else:
            return


def _weight_task[
    dtype: DType, ThisNorm: Norm
](job: _Job[dtype], task: Int, own: Int):
    """Computes a tile of G, and its part of the parameters' gradients."""
    comptime B = Blocking[dtype]
    ref call = job.call[]
    ref plan = job.plan
    var arena = Arena(own)
    var room = TileRoom[dtype](
        arena,
        plan.tile_rows,
        plan.tile_panels,
        plan.block_rows,
        plan.packs_once,
    )
    # Neighbors share columns of x_hat.
    var tiles_down = ceildiv(call.N, plan.tile_rows)
    var n = task % tiles_down * plan.tile_rows
    var k = task // tiles_down * plan.tile_panels * B.tile_n
    var rows = min(plan.tile_rows, call.N - n)
    var columns = min(plan.tile_panels * B.tile_n, call.K - k)
    if call.dweight != 0 or call.dgamma != 0:
        for m in range(0, call.M, plan.block_rows):
            _add_product[dtype, ThisNorm](job, room, m, n, k, rows, columns)
    var product = Matrix[B.accum](room.product, room.product_stride)
    for first in range(0, rows, SUM_ROWS):
        finish_weight_rows(
            job,
            product.part(first, 0),
            n + first,
            k,
            min(SUM_ROWS, rows - first),
            columns,
        )


def _add_product[
    dtype: DType, ThisNorm: Norm
](
    job: _Job[dtype],
    room: TileRoom[dtype],
    m: Int,
    n: Int,
    k: Int,
    rows: Int,
    columns: Int,
):
    """Adds what a block of rows of dy and x contributes to a tile."""
    comptime B = Blocking[dtype]
    ref call = job.call[]
    var block_rows = job.plan.block_rows
    var depth = min(block_rows, call.M - m)
    var dy = Matrix[B.operand](room.dy, room.dy_stride)
    var x_hat = buffer[B.operand](room.x_hat)
    if job.plan.packs_once:
        dy = _dy_block(job, m // block_rows, n)
        x_hat = _x_hat_block(job, m // block_rows, k)
    else:
        pack_left_panels[dtype](
            dy, Matrix[dtype](call.dy, call.N), m, n, depth, rows
        )
        _pack_x_hat_to[dtype, ThisNorm](job, x_hat, m, k, depth, columns)
    for column in range(0, columns, B.tile_n):
        multiply_block[dtype, a_is_panel=True](
            Matrix[B.accum](room.product, room.product_stride).part(0, column),
            dy,
            x_hat.unsafe_offset(column * block_rows),
            rows,
            min(B.tile_n, columns - column),
            depth,
            m > 0,
        )


def _slab_task[
    dtype: DType, ThisNorm: Norm
](job: _Job[dtype], slab: Int, own: Int):
    """Computes a slab of h, and turns it into dx."""
    comptime B = Blocking[dtype]
    ref call = job.call[]
    ref plan = job.plan
    var arena = Arena(own)
    var room = Matrix[B.operand](
        arena.take[B.operand](plan.slab_rows * B.row_stride(B.depth)),
        B.row_stride(B.depth),
    )
    var h = Matrix[B.accum](arena.next, plan.panels * B.tile_n)
    var first = plan.slabs.first(slab)
    var count = plan.slabs.first(slab + 1) - first
    var rows = Matrix[dtype](call.dy, call.N).part(first, 0)
    for n in range(0, call.N, B.depth):
        var steps = min(B.depth, call.N - n)
        var dy = room
        if B.has_tiles and call.N % B.step == 0:
            # Rows as they are make tiles.
            dy = Matrix[B.operand](Int(rows.at(0, n)), call.N)
        else:
            pack_rows[dtype](room, rows.part(0, n), 0, count, steps)
        for panel in range(plan.panels):
            var column = panel * B.tile_n
            multiply_block[dtype, a_is_panel=False](
                h.part(0, column),
                dy,
                _weight_block(job, n, panel),
                count,
                min(B.tile_n, call.K - column),
                steps,
                n > 0,
                next_follows=True,
            )
    for i in range(count):
        finish_input_gradient[dtype, ThisNorm](
            job.call, first + i, h.at(i), job.gamma, job.shifts
        )


def _sum_part[dtype: DType](data: Data, index: Int):
    """Adds up the partial sums of one worker's share of the features."""
    ref job = data.unsafe_bitcast[_Job[dtype]]()[]
    var K = job.call[].K
    var share = ceildiv(K, job.plan.workers)
    sum_partials(job, index * share, min(K, (index + 1) * share))
