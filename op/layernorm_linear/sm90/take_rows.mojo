"""The backward of LayerNorm by warps that have nothing to multiply.

    h = dz gamma;  dx = rstd (h - mean(h) - xhat mean(h xhat));  z = xhat gamma + beta, in place of dz
    dgamma = sum over rows dz xhat;  dbeta = sum over rows dz

The matrix kernel makes dz. Three warps of a block have no part in that, and take the rows of dz as soon as
they are in memory, most of them still in the L2 cache; the others join when they have no tile left. Rows go
in slices of 64, those that one warpgroup makes in a tile, and twice: first some units of work find the sums
of a few rows each, then some finish a few columns each. So sums over rows stay in the registers of a warp,
and whoever takes a unit, they are added in one order.

Units are handed out in the order of slices, but slices are finished some steps after they are summed, so
that nobody waits for sums. The units of the last slices are smaller: by then all warps want one. No warp
takes a unit before it is done with the one before, or others would wait for what nobody has begun.
"""

from std.math import ceildiv
from std.utils import StaticTuple
from max.gpu.primitives import warp

from ...rows.gpu_row import GlobalPointer
from .counters import await_counter, count, take_one
from .progress import SLICE_ROWS, SLICE_WARPS
from .row_pass import (
    WIDTH,
    Eight,
    RowPass,
    load_eight,
    store_eight,
    to_float32,
    value_at,
)

comptime _Four = SIMD[DType.float32, 4]
# Rows that are summed together, and how many times a large unit does that.
comptime _PAIR = 2
comptime _PAIRS = 4
# Loads of a row that are under way together, each of a whole warp.
comptime _LOADS = 4
comptime _LOAD_COLUMNS = 32 * WIDTH
# Columns that are finished together, by eight lanes in each of four rows, and
# how many times a large unit does that.
comptime _COLUMN_LANES = 8
comptime _COLUMNS = _COLUMN_LANES * WIDTH
comptime _ROW_LANES = 32 // _COLUMN_LANES
comptime _TIMES = 4
# Rows that a lane has under way together.
comptime _ROWS = 8
# Slices that are summed before the first of them is finished.
comptime _LAG = UInt32(32)


@always_inline
def take_rows[dtype: DType](its: RowPass, lane: UInt32):
    """Takes units until there are none left.

    Parameters:
        dtype: Type of dz, x, dx and z.

    Args:
        its: The tensors.
        lane: Lane of the thread.
    """
    var slices = ceildiv(UInt32(its.rows), UInt32(SLICE_ROWS))
    var large = UInt32(its.early) // SLICE_ROWS
    var blocks = ceildiv(UInt32(its.length), UInt32(_COLUMNS))
    comptime large_sums = UInt32(SLICE_ROWS // (_PAIR * _PAIRS))
    comptime small_sums = UInt32(SLICE_ROWS // _PAIR)
    var large_units = large_sums + ceildiv(blocks, UInt32(_TIMES))
    var small_units = small_sums + blocks
    var tiles = UInt32(SLICE_WARPS) * UInt32(its.tile_columns)
    while True:
        var ticket = UInt32(0)
        if lane == 0:
            ticket = take_one(its.ticket)
        ticket = warp.broadcast(ticket)
        var is_large = ticket < large * large_units
        var units = large_units if is_large else small_units
        var sums = large_sums if is_large else small_sums
        if not is_large:
            ticket -= large * large_units
        var step = ticket // units
        var unit = ticket % units
        if not is_large:
            step += large
        if step >= slices + _LAG:
            return
        if unit < sums:
            if step < slices:
                await_counter(its.stored.unsafe_offset(Int(step)), tiles)
                var rows = SLICE_ROWS // sums
                var first = step * SLICE_ROWS + unit * rows
                for row in range(first, first + rows, UInt32(_PAIR)):
                    _sum_rows[dtype](its, Int32(row), Int32(lane))
                if lane == 0:
                    count(its.summed.unsafe_offset(Int(step)), rows)
        elif step >= _LAG:
            var slice = Int(step - _LAG)
            await_counter(its.summed.unsafe_offset(slice), SLICE_ROWS)
            var times = UInt32(_TIMES if is_large else 1)
            var block = (unit - sums) * times
            for i in range(block, min(block + times, blocks)):
                var left = Int(i) * _COLUMNS
                if (slice + 1) * SLICE_ROWS <= Int(
                    its.rows
                ) and left + _COLUMNS <= Int(its.length):
                    _finish_columns[dtype, True](
                        its, slice, Int(slices), left, Int(lane)
                    )
                else:
                    _finish_columns[dtype, False](
                        its, slice, Int(slices), left, Int(lane)
                    )


@always_inline
def _sum_rows[dtype: DType](its: RowPass, first: Int32, lane: Int32):
    """Finds mean(h) and mean(h xhat) of some rows."""
    comptime Loads = StaticTuple[SIMD[dtype, WIDTH], _PAIR * _LOADS]
    var length = Int(its.length)
    var rows = StaticTuple[Int, _PAIR]()
    var mean = StaticTuple[Float32, _PAIR]()
    var rstd = StaticTuple[Float32, _PAIR]()
    comptime for r in range(_PAIR):
        rows[r] = Int(min(first + Int32(r), its.rows - 1))
        mean[r] = value_at(its.mean, rows[r])
        rstd[r] = value_at(its.rstd, rows[r])
    var along_one = StaticTuple[Eight, _PAIR](fill=0)
    var along_x = StaticTuple[Eight, _PAIR](fill=0)
    for base in range(0, length, _LOADS * _LOAD_COLUMNS):
        # No branch keeps the loads from being under way together: beyond the
        # end of a row, they are of its last elements.
        var dz = Loads()
        var x = Loads()
        var gamma = StaticTuple[Eight, _LOADS]()
        comptime for i in range(_LOADS):
            var column = min(
                base + i * _LOAD_COLUMNS + Int(lane) * WIDTH, length - WIDTH
            )
            comptime for r in range(_PAIR):
                var place = rows[r] * length + column
                dz[r * _LOADS + i] = load_eight[dtype](its.z, place)
                x[r * _LOADS + i] = load_eight[dtype](its.x, place)
            gamma[i] = load_eight[DType.float32](its.affine, column)
        comptime for i in range(_LOADS):
            var column = base + i * _LOAD_COLUMNS + Int(lane) * WIDTH
            var inside = gamma[i] if column < length else Eight(0)
            comptime for r in range(_PAIR):
                comptime at = r * _LOADS + i
                var h = to_float32(dz[at]) * inside
                var v = to_float32(x[at]) - mean[r]
                along_one[r] = along_one[r] + h
                along_x[r] = h.fma(v, along_x[r])
    comptime for r in range(_PAIR):
        var scale = 1 / Float32(length)
        var one = warp.sum(along_one[r].reduce_add()) * scale
        var xhat = warp.sum(along_x[r].reduce_add()) * rstd[r] * scale
        if lane == 0:
            GlobalPointer[DType.float32](
                unsafe_from_address=Int(its.factors)
            ).unsafe_offset(4 * rows[r]).unsafe_store[alignment=16](
                _Four(mean[r], rstd[r], one, xhat)
            )


@always_inline
def _finish_columns[
    dtype: DType, whole: Bool
](its: RowPass, slice: Int, slices: Int, left: Int, lane: Int):
    """Finishes some columns of a slice, and sums over its rows.

    Where they are a `whole` block of rows and columns, nothing is asked about
    its ends.
    """
    comptime together = _ROWS if whole else 1
    var length = Int(its.length)
    var own = left + lane % _COLUMN_LANES * WIDTH
    var column = own
    comptime if not whole:
        column = min(own, length - WIDTH)
    var gamma = load_eight[DType.float32](its.affine, column)
    var beta = load_eight[DType.float32](its.affine, length + column)
    var dgamma = Eight(0)
    var dbeta = Eight(0)
    var row = slice * SLICE_ROWS + lane // _COLUMN_LANES
    var last = min((slice + 1) * SLICE_ROWS, Int(its.rows)) - 1
    var stride = Int32(length * _ROW_LANES)
    for _ in range(SLICE_ROWS // (_ROW_LANES * together)):
        var dz = StaticTuple[SIMD[dtype, WIDTH], together]()
        var x = StaticTuple[SIMD[dtype, WIDTH], together]()
        var factors = StaticTuple[_Four, together]()
        var first = row * length + column
        comptime for r in range(together):
            var place = first + Int(stride * Int32(r))
            var its_row = row + r * _ROW_LANES
            comptime if not whole:
                its_row = min(its_row, last)
                place = its_row * length + column
            dz[r] = load_eight[dtype](its.z, place)
            x[r] = load_eight[dtype](its.x, place)
            factors[r] = (
                GlobalPointer[DType.float32](
                    unsafe_from_address=Int(its.factors)
                )
                .unsafe_offset(4 * its_row)
                .unsafe_load[width=4, alignment=16]()
            )
        comptime for r in range(together):
            var factor = factors[r]
            var g = to_float32(dz[r])
            var xhat = (to_float32(x[r]) - factor[0]) * factor[1]
            var rest = g * gamma - factor[2] - xhat * factor[3]
            var dx = (rest * factor[1]).cast[dtype]()
            var z = xhat.fma(gamma, beta).cast[dtype]()
            var place = first + Int(stride * Int32(r))
            comptime if whole:
                store_eight(its.dx, place, dx)
                store_eight(its.z, place, z)
            else:
                if row + r * _ROW_LANES <= last:
                    if own < length:
                        store_eight(its.dx, place, dx)
                        store_eight(its.z, place, z)
                else:
                    g = 0
            dgamma = g.fma(xhat, dgamma)
            dbeta += g
        row += together * _ROW_LANES
    comptime for lanes in [_COLUMN_LANES, 2 * _COLUMN_LANES]:
        dgamma += _across[lanes](dgamma)
        dbeta += _across[lanes](dbeta)
    if lane < _COLUMN_LANES and own < length:
        var place = slice * length + column
        store_eight(its.sums, place, dgamma)
        store_eight(its.sums, slices * length + place, dbeta)


@always_inline
def _across[lanes: Int](values: Eight) -> Eight:
    var others = Eight(0)
    comptime for i in range(WIDTH):
        others[i] = warp.shuffle_xor(values[i], UInt32(lanes))
    return others
