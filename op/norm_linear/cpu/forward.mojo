"""Computes a norm followed by a Linear layer on the CPU.

Rows are normalized while they are copied into the form that the matrix product
reads, so the normalized rows never leave the cache. The number of rows decides
what threads share:

- a handful of rows: `forward_in_place.mojo`;
- few rows: the normalized rows are shared, and each task takes some columns of
  the output, packing its part of the weight just before use, block by block;
- many rows: the weight is packed once and shared, and each task takes a slab
  of rows, which it normalizes for itself.

Before a gate, panels of the weight's two halves alternate, and each task
computes the same columns of both.
"""

from std.math import align_up
from std.memory import stack_allocation
from std.sys import size_of

from ...call import CallPointer
from ...gemm.cpu.blocking import Blocking
from ...gemm.cpu.epilogue import AddBias, Output
from ...gemm.cpu.memory import Arena, CACHE_LINE, Matrix, buffer
from ...gemm.cpu.pack_transposed import pack_transposed
from ...gemm.cpu.product import (
    Packed,
    PackedOnUse,
    PanelSource,
    multiply_panel,
)
from ...norms.norm import Norm
from ...pages import prefer_large_pages
from ...team import Data, Team
from .activate import finish_columns
from .forward_in_place import run_in_place
from .forward_job import Forward, Room, normalize_into
from .forward_plan import ForwardPlan
from .forward_tiles import run_on_tiles
from .norms import with_norm
from .plan import STACK_BYTES


def forward[dtype: DType](call: CallPointer):
    """Computes y, and the rows' mean and rstd where their address is given.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        call: The tensors, and a workspace as `plan_forward` asked for it.
    """
    with_norm[dtype, forward_of](call)


def forward_of[dtype: DType, ThisNorm: Norm](call: CallPointer):
    """Does the same where the norm is known.

    Parameters:
        dtype: Element type of the tensors.
        ThisNorm: The norm.

    Args:
        call: The tensors, and a workspace as `plan_forward` asked for it.
    """
    var room = stack_allocation[STACK_BYTES, DType.uint8]()
    var plan = ForwardPlan[dtype](call[])
    var workspace = align_up(
        call[].workspace if call[].workspace != 0 else Int(room), CACHE_LINE
    )
    var output_bytes = call[].M * call[].N * size_of[dtype]()
    prefer_large_pages(call[].y, output_bytes)
    if call[].h != 0:
        prefer_large_pages(call[].h, output_bytes * plan.halves)
    prefer_large_pages(workspace, plan.bytes)
    var job = Forward[dtype](
        call, plan.copy(), workspace, plan.gamma, plan.beta
    )
    var team = Team(call[].context, plan.workers)
    if plan.in_place:
        run_in_place[dtype, ThisNorm](job, team)
        return
    comptime if Blocking[dtype].has_tiles:
        run_on_tiles[dtype, ThisNorm](job, team)
        return
    if plan.few_rows:
        team.run(_normalize_part[dtype, ThisNorm], _chunks(job), job)
    else:
        team.run(_pack_part[dtype], plan.panels * plan.halves, job)
    team.run(_multiply_part[dtype, ThisNorm], plan.workers, job)


def _chunks[dtype: DType](job: Forward[dtype]) -> Int:
    """Counts the parts that shared rows are normalized in."""
    return min(job.plan.workers * 4, job.call[].M)


def _shared[
    dtype: DType
](job: Forward[dtype]) -> Matrix[Blocking[dtype].operand]:
    """Finds the rows, or the panels, that all workers read."""
    comptime B = Blocking[dtype]
    var K = job.call[].K
    return {
        job.at[B.operand](job.plan.shared),
        B.row_stride(K) if job.plan.few_rows else B.panel_size(K),
    }


def _multiply[
    dtype: DType, Source: PanelSource
](
    job: Forward[dtype],
    room: Room[dtype],
    rows: Matrix[Blocking[dtype].operand],
    first: Int,
    count: Int,
    panel: Int,
    weight: Source,
    gated: Source,
):
    """Computes rows of one panel of y; `gated` is the weight's second half."""
    comptime B = Blocking[dtype]
    ref call = job.call[]
    var column = panel * B.tile_n
    var columns = min(B.tile_n, call.N - column)
    var half = room.half(call, 0, column, columns, 0)
    if call.activation == 0:
        multiply_panel[dtype, a_is_panel=False](
            half.sums,
            rows,
            weight,
            count,
            columns,
            call.K,
            Optional(
                Output(
                    Matrix[dtype](call.y, call.N).part(first, column),
                    columns,
                    AddBias(half.bias),
                )
            ),
        )
        return
    multiply_panel[dtype, a_is_panel=False](
        half.sums, rows, weight, count, columns, call.K
    )
    var other = half
    if job.plan.halves > 1:
        other = room.half(call, 1, column, columns, 1)
        multiply_panel[dtype, a_is_panel=False](
            other.sums, rows, gated, count, columns, call.K
        )
    finish_columns(call, first, column, count, columns, half, other)


def _normalize_part[dtype: DType, ThisNorm: Norm](data: Data, index: Int):
    """Normalizes one chunk of the rows that all tasks share."""
    ref job = data.unsafe_bitcast[Forward[dtype]]()[]
    var chunks = _chunks(job)
    var first = job.call[].M * index // chunks
    var last = job.call[].M * (index + 1) // chunks
    normalize_into[dtype, ThisNorm](
        job, _shared(job).part(first, 0), first, last - first
    )


def _pack_part[dtype: DType](data: Data, panel: Int):
    """Packs one panel of the weight, or of one of its halves."""
    ref job = data.unsafe_bitcast[Forward[dtype]]()[]
    comptime B = Blocking[dtype]
    ref call = job.call[]
    var halves = job.plan.halves
    var first = panel // halves * B.tile_n
    pack_transposed[dtype](
        _shared(job).at(panel),
        Matrix[dtype](call.weight, call.K).part(
            panel % halves * call.N + first, 0
        ),
        min(B.tile_n, call.N - first),
        call.K,
    )


def _multiply_part[dtype: DType, ThisNorm: Norm](data: Data, worker: Int):
    """Takes panels of columns, or slabs of rows, until none is left."""
    ref job = data.unsafe_bitcast[Forward[dtype]]()[]
    comptime B = Blocking[dtype]
    ref plan = job.plan
    ref call = job.call[]
    var arena = Arena(job.workspace + plan.own + worker * plan.own_bytes)
    var room = Room[dtype](arena, plan)
    var rest = buffer[B.operand](arena.next)
    # Where there is no gate, what would be gated is the product itself.
    var gated = plan.halves - 1
    if plan.few_rows:
        var weight = Matrix[dtype](call.weight, call.K)
        var task_panels = max(1, plan.task_columns // B.tile_n)
        while True:
            var task = job.take() * task_panels
            if task >= plan.panels:
                return
            for panel in range(task, min(plan.panels, task + task_panels)):
                var first = panel * B.tile_n
                _multiply(
                    job,
                    room,
                    _shared(job),
                    0,
                    call.M,
                    panel,
                    PackedOnUse[dtype](rest, weight.part(first, 0)),
                    PackedOnUse[dtype](
                        rest, weight.part(gated * call.N + first, 0)
                    ),
                )
    var rows = Matrix(rest, B.row_stride(call.K))
    while True:
        var slab = job.take()
        if slab >= plan.slabs.count:
            return
        var first = plan.slabs.first(slab)
        var count = plan.slabs.first(slab + 1) - first
        normalize_into[dtype, ThisNorm](job, rows, first, count)
        for panel in range(plan.panels):
            var place = panel * plan.halves
            _multiply(
                job,
                room,
                rows,
                first,
                count,
                panel,
                Packed[dtype, True](_shared(job).at(place)),
                Packed[dtype, True](_shared(job).at(place + gated)),
            )
