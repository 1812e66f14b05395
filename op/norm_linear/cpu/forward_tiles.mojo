"""Computes a forward on tile registers.

- Few rows: y^T = W z^T. Rows of the weight are tiles in place, so that nothing of it is
  copied; the normalized rows are packed as columns, and shared. A task takes some rows of the weight.
- Many rows: y = z W^T. The weight is packed as columns and shared. A task takes a slab of rows, which it
  normalizes for itself, and multiplies 32 of them, which stay in the first cache, by as many columns as
  stay in the second. Meanwhile the previous sums become y: bias, activation and gate.
"""

from std.math import ceildiv
from std.sys import size_of

from ...gemm.cpu.interleave import Interleaved, Fetch, Nothing
from ...gemm.cpu.blocking import Blocking
from ...gemm.cpu.memory import Arena, Matrix
from ...gemm.cpu.pack_transposed import pack_transposed
from ...gemm.cpu.tile_product import (
    STREAM_COLUMNS,
    Tiles,
    add_products,
)
from ...gemm.cpu.tiles import TILES_ROWS, TILE_ROWS, with_tiles
from ...norms.norm import Norm
from ...team import Data, Team
from .activate import FinishRows, finish_columns
from .forward_job import Forward, Room, normalize_into
from .tile_columns import TileColumns

comptime COPIED_FROM = 96
"""From this many rows on a block of the weight is copied, as it meets each 32 of them."""


def run_on_tiles[
    dtype: DType, ThisNorm: Norm
](mut job: Forward[dtype], team: Team):
    """Computes a forward.

    Parameters:
        dtype: Element type of the tensors.
        ThisNorm: The norm.

    Args:
        job: The call.
        team: The threads to use.
    """
    ref plan = job.plan
    if plan.few_rows:
        # Of a single panel no team is made.
        var packers = min(plan.workers, ceildiv(job.call[].M, TILE_ROWS))
        team.run(_pack_rows_part[dtype, ThisNorm], packers, job)
        job.next_task = 0
        team.run(with_tiles[dtype, _columns_part[dtype]], plan.workers, job)
    else:
        team.run(_pack_weight_part[dtype], plan.panels * plan.halves, job)
        team.run(
            with_tiles[dtype, _slab_part[dtype, ThisNorm]], plan.workers, job
        )


def _room[
    dtype: DType
](job: Forward[dtype], worker: Int, mut arena: Arena) -> Room[dtype]:
    arena = Arena(job.workspace + job.plan.own + worker * job.plan.own_bytes)
    return Room[dtype](arena, job.plan)


def _own[
    dtype: DType
](job: Forward[dtype], mut arena: Arena) -> TileColumns[dtype]:
    ref plan = job.plan
    return TileColumns[dtype](arena, job.call[], plan.sums_at_once)


def _pack_rows_part[dtype: DType, ThisNorm: Norm](data: Data, worker: Int):
    """Normalizes 16 rows at a time, and packs them as columns."""
    ref job = data.unsafe_bitcast[Forward[dtype]]()[]
    comptime B = Blocking[dtype]
    ref call = job.call[]
    var arena = Arena(0)
    _ = _room(job, worker, arena)
    var own = _own(job, arena)
    var rows = Matrix[B.operand](own.rows, B.row_stride(call.K))
    while True:
        var panel = job.take()
        var first = panel * TILE_ROWS
        if first >= call.M:
            return
        var count = min(TILE_ROWS, call.M - first)
        normalize_into[dtype, ThisNorm](job, rows, first, count)
        pack_transposed[dtype](
            job.at[B.operand](job.plan.shared).unsafe_offset(
                panel * B.row_panel_size(call.K)
            ),
            rebind[Matrix[dtype]](rows),
            count,
            call.K,
        )


def _columns_part[dtype: DType](data: Data, worker: Int):
    """Takes columns of y, some rows of the weight, until none is left.

    Where z does not stay in the second cache, a block of its columns does, and meets all the rows of the
    weight that the task has before the next block comes.
    """
    ref job = data.unsafe_bitcast[Forward[dtype]]()[]
    comptime B = Blocking[dtype]
    ref call = job.call[]
    ref plan = job.plan
    var arena = Arena(0)
    var room = _room(job, worker, arena)
    var own = _own(job, arena)
    var halves = plan.halves
    var at_once = plan.sums_at_once // halves * TILES_ROWS
    var depth = call.K if at_once == TILES_ROWS else B.depth
    while True:
        var begin = job.take() * plan.task_columns
        if begin >= call.N:
            return
        var end = min(call.N, begin + plan.task_columns)
        for first in range(begin, end, at_once):
            var last = min(end, first + at_once)
            for k in range(0, call.K, depth):
                for column in range(first, last, TILES_ROWS):
                    for which in range(halves):
                        _multiply_weight(
                            job,
                            own,
                            (column - first) // TILES_ROWS * halves + which,
                            which * call.N + column,
                            min(TILES_ROWS, last - column),
                            end - column - TILES_ROWS,
                            k,
                            min(call.K, k + depth),
                        )
            for column in range(first, last, TILES_ROWS):
                var columns = min(TILES_ROWS, last - column)
                var place = (column - first) // TILES_ROWS * halves
                var half = room.half(call, 0, column, columns, 0)
                own.transpose_sums(place, half.sums, call.M)
                var other = half
                if halves > 1:
                    other = room.half(call, 1, column, columns, 1)
                    own.transpose_sums(place + 1, other.sums, call.M)
                finish_columns(call, 0, column, call.M, columns, half, other)


def _multiply_weight[
    dtype: DType
](
    job: Forward[dtype],
    own: TileColumns[dtype],
    place: Int,
    n: Int,
    outputs: Int,
    left: Int,
    begin: Int,
    end: Int,
):
    """Multiplies some columns of up to 32 rows of the weight by all rows; `left` more follow."""
    comptime B = Blocking[dtype]
    ref call = job.call[]
    var weight = Matrix[dtype](call.weight, call.K).part(n, 0)
    var row_bytes = call.K * size_of[dtype]()
    var fetch = Fetch(
        Int(weight.at(outputs, begin)),
        min(TILES_ROWS, left),
        (end - begin) * size_of[dtype](),
        row_bytes,
        ceildiv(call.M, TILES_ROWS) * max(1, (end - begin) // B.step),
    )
    var nothing = Nothing()
    var panel_bytes = B.row_panel_size(call.K) * 2
    var shared = job.workspace + job.plan.shared
    var whole = end // B.step * B.step
    for k in range(begin, whole, B.depth):
        var steps = min(B.depth, whole - k) // B.step
        var rows = Tiles.of_rows(Int(weight.at(0, k)), row_bytes)
        if call.M >= COPIED_FROM:
            own.copy_block(weight.part(0, k), outputs, steps)
            rows = Tiles.of_left_panel(own.weight)
        for m in range(0, call.M, TILES_ROWS):
            var columns = Tiles.of_row_panels(
                shared + m // TILE_ROWS * panel_bytes, panel_bytes
            ).after(k // B.step)
            add_products[stream=STREAM_COLUMNS](
                own.sums_of(place, m),
                rows,
                columns,
                outputs,
                call.M - m,
                steps,
                k > 0,
                fetch,
            )
    if whole < end:
        own.copy_rest(weight, outputs, whole, end)
        for m in range(0, call.M, TILES_ROWS):
            add_products[stream=STREAM_COLUMNS](
                own.sums_of(place, m),
                Tiles.of_rows(own.rest, B.step * 2),
                Tiles.of_row_panels(
                    shared + m // TILE_ROWS * panel_bytes, panel_bytes
                ).after(whole // B.step),
                outputs,
                call.M - m,
                1,
                whole > 0,
                nothing,
            )


def _pack_weight_part[dtype: DType](data: Data, panel: Int):
    """Packs one panel of the weight, or of one of its halves, after the other half's."""
    ref job = data.unsafe_bitcast[Forward[dtype]]()[]
    comptime B = Blocking[dtype]
    ref call = job.call[]
    var panels = job.plan.panels
    var first = panel % panels * B.tile_n
    pack_transposed[dtype](
        job.at[B.operand](job.plan.shared).unsafe_offset(
            panel * B.panel_size(call.K)
        ),
        Matrix[dtype](call.weight, call.K).part(
            panel // panels * call.N + first, 0
        ),
        min(B.tile_n, call.N - first),
        call.K,
    )


def _slab_part[dtype: DType, ThisNorm: Norm](data: Data, worker: Int):
    """Takes slabs of rows until none is left."""
    ref job = data.unsafe_bitcast[Forward[dtype]]()[]
    comptime B = Blocking[dtype]
    ref call = job.call[]
    ref plan = job.plan
    var arena = Arena(0)
    var room = _room(job, worker, arena)
    var rows = Matrix[B.operand](arena.next, B.row_stride(call.K))
    var halves = plan.halves
    # While some rows of y are made those of the next are computed, in the other
    # half of the room; so is the bias of the next columns.
    var turn = 0
    var bias_turn = 0
    var half = room.half(call, 0, 0, 0, 0)
    var other = half
    var waiting = FinishRows[dtype](call, 0, 0, 0, 0, half, other, 0)
    while True:
        var slab = job.take()
        if slab >= plan.slabs.count:
            break
        var first = plan.slabs.first(slab)
        var count = plan.slabs.first(slab + 1) - first
        normalize_into[dtype, ThisNorm](job, rows, first, count)
        for column in range(0, call.N, plan.width):
            var columns = min(plan.width, call.N - column)
            bias_turn = 1 - bias_turn
            half = room.half(call, 0, column, columns, bias_turn * halves)
            other = half
            if halves > 1:
                other = room.half(call, 1, column, columns, bias_turn * 2 + 1)
            for row in range(0, count, TILES_ROWS):
                var some = min(TILES_ROWS, count - row)
                turn = 1 - turn
                half.sums = room.sums_of(turn * halves)
                other.sums = room.sums_of(turn * halves + halves - 1)
                for which in range(halves):
                    _multiply_rows(
                        job,
                        other.sums if which > 0 else half.sums,
                        rows.part(row, 0),
                        which,
                        column,
                        some,
                        columns,
                        waiting,
                    )
                waiting.finish()
                waiting = FinishRows[dtype](
                    call,
                    first + row,
                    column,
                    some,
                    columns,
                    half,
                    other,
                    ceildiv(TILES_ROWS * B.step, call.K * halves),
                )
    waiting.finish()


def _multiply_rows[
    dtype: DType, Work: Interleaved
](
    job: Forward[dtype],
    sums: Matrix[Blocking[dtype].accum],
    rows: Matrix[Blocking[dtype].operand],
    which: Int,
    column: Int,
    count: Int,
    columns: Int,
    mut meanwhile: Work,
):
    """Multiplies up to 32 rows by some columns of a half."""
    comptime B = Blocking[dtype]
    ref call = job.call[]
    var size = B.panel_size(call.K)
    var first = which * job.plan.panels + column // B.tile_n
    for k in range(0, call.K, B.depth):
        var steps = ceildiv(min(B.depth, call.K - k), B.step)
        for c in range(0, columns, B.tile_n):
            var left = min(B.tile_n, columns - c)
            var tiles = ceildiv(left, TILE_ROWS)
            var panel = job.at[B.operand](job.plan.shared).unsafe_offset(
                (first + c // B.tile_n) * size
            )
            add_products[stream=STREAM_COLUMNS](
                rebind[Matrix[DType.float32]](sums).part(0, c),
                Tiles.of_rows(Int(rows.at(0, k)), rows.stride * 2),
                Tiles.of_panel(Int(panel), tiles).after(k // B.step),
                count,
                left,
                steps,
                k > 0,
                meanwhile,
            )
