"""The backward of a norm by warps that have nothing to multiply.

    g = dz gamma;  dx = rstd (g - mean(g) - xhat mean(g xhat)) + dsum;  z = xhat gamma + beta, in place of dz
    dgamma = sum over rows dz xhat;  dbeta = sum over rows dz

The matrix kernel computes dz. Three warps of a block take no part in that: they process the rows of dz as soon
as these are in memory, most of them still in the L2 cache; the others join when they have no tile left. Rows are
processed in slices of 64, the rows of one warpgroup in a tile, and twice: first units of work compute the sums of
a few rows each, then others finish a few columns each. Sums over rows thus stay in the registers of a warp, and
are added in the same order whichever warp takes a unit.

Units are scheduled in the order of slices, but slices are finished some steps after they are summed, so that no
warp waits for sums. The units of the last slices are smaller: by then all warps need one. A warp takes a unit only
after it has finished the previous one; otherwise others would wait for work that has not begun.
"""

from std.math import ceildiv
from std.utils import StaticTuple
from max.gpu.primitives import warp

from ...gemm.row_hook import NoSums, RowHook
from ...gemm.sm90.counters import (
    SLICE_ROWS,
    SLICE_WARPS,
    Counter,
    await_counter,
    count,
    take_one,
)
from ...norms.norm import Norm
from ...rows.gpu_elements import GlobalPointer, widen

# Elements of one load.
comptime _WIDTH = 8
comptime _Eight = SIMD[DType.float32, _WIDTH]
comptime _Four = SIMD[DType.float32, 4]
# Rows that are summed together, and how many times a large unit does that.
comptime _PAIR = 2
comptime _PAIRS = 4
# Loads of a row that are in flight together, each by a whole warp.
comptime _LOADS = 4
comptime _LOAD_COLUMNS = 32 * _WIDTH
# Columns that are finished together, by eight lanes in each of four rows, and
# how many times a large unit does that.
comptime _COLUMN_LANES = 8
comptime _COLUMNS = _COLUMN_LANES * _WIDTH
comptime _ROW_LANES = 32 // _COLUMN_LANES
comptime _TIMES = 4
# Rows that a lane has in flight together; half of them where it loads more of each.
comptime _ROWS = 8
# Slices that are summed before the first of them is finished.
comptime _LAG = UInt32(32)


@fieldwise_init
struct RowPass[N: Norm, adds: Bool](RowHook):
    """Turns the rows of dz into dx and z; tensors by address, all of them dense.

    Parameters:
        N: The norm.
        adds: Whether a gradient is added to the norm's.
    """

    comptime name = StaticString("_passes_on_and_adds") if Self.adds else (
        StaticString("_passes_on")
    )
    """Tells kernels apart."""
    comptime passes_on = True
    """It takes finished rows."""
    comptime Sums = NoSums
    """None."""

    var rows: Int32
    """M."""
    var length: Int32
    """K, a multiple of 8."""
    var early: Int32
    """Rows that are finished before the last tiles, a multiple of 64."""
    var tile_columns: Int32
    """Tiles that a row of dz comes from."""
    var z: Int64
    """The normalized rows [M, K], to write in place of their gradient dz."""
    var x: Int64
    """The input [M, K]."""
    var affine: Int64
    """Gamma, then beta [2, K] in float32."""
    var mean: Int64
    """The row means [M], if the norm has them."""
    var rstd: Int64
    """The reciprocal standard deviations [M]."""
    var dx: Int64
    """The gradient of x [M, K], to write."""
    var dsum: Int64
    """What is added to that [M, K]; not read if nothing is."""
    var stored: Counter
    """For each slice of 64 rows, what has been stored of it; zero at first, as
    are the other counters."""
    var summed: Counter
    """For each slice, the number of rows whose sums are complete."""
    var ticket: Counter
    """How many units have been taken."""
    var factors: Int64
    """Scratch memory [M, 4] in float32."""
    var sums: Int64
    """Partial sums over rows [2, parts, K] in float32, to write: for dgamma,
    then for dbeta."""

    @doc_hidden
    @always_inline
    def counters(self) -> Int:
        return Int(self.stored)

    @doc_hidden
    @always_inline
    def take_on[dtype: DType](self, lane: UInt32):
        var slices = ceildiv(UInt32(self.rows), UInt32(SLICE_ROWS))
        var large = UInt32(self.early) // SLICE_ROWS
        var blocks = ceildiv(UInt32(self.length), UInt32(_COLUMNS))
        comptime large_sums = UInt32(SLICE_ROWS // (_PAIR * _PAIRS))
        comptime small_sums = UInt32(SLICE_ROWS // _PAIR)
        var large_units = large_sums + ceildiv(blocks, UInt32(_TIMES))
        var small_units = small_sums + blocks
        var tiles = UInt32(SLICE_WARPS) * UInt32(self.tile_columns)
        while True:
            var ticket = UInt32(0)
            if lane == 0:
                ticket = take_one(self.ticket)
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
                    await_counter(self.stored.unsafe_offset(Int(step)), tiles)
                    var rows = SLICE_ROWS // sums
                    var first = step * SLICE_ROWS + unit * rows
                    for row in range(first, first + rows, UInt32(_PAIR)):
                        _sum_rows[dtype](self, Int32(row), Int32(lane))
                    if lane == 0:
                        count(self.summed.unsafe_offset(Int(step)), rows)
            elif step >= _LAG:
                var slice = Int(step - _LAG)
                await_counter(self.summed.unsafe_offset(slice), SLICE_ROWS)
                var times = UInt32(_TIMES if is_large else 1)
                var block = (unit - sums) * times
                for i in range(block, min(block + times, blocks)):
                    var left = Int(i) * _COLUMNS
                    if (slice + 1) * SLICE_ROWS <= Int(
                        self.rows
                    ) and left + _COLUMNS <= Int(self.length):
                        _finish_columns[dtype, whole=True](
                            self, slice, Int(slices), left, Int(lane)
                        )
                    else:
                        _finish_columns[dtype, whole=False](
                            self, slice, Int(slices), left, Int(lane)
                        )


@always_inline
def _sum_rows[
    N: Norm, adds: Bool, //, dtype: DType
](its: RowPass[N, adds], first: Int32, lane: Int32):
    """Finds mean(g) and mean(g xhat) of some rows."""
    comptime Loads = StaticTuple[SIMD[dtype, _WIDTH], _PAIR * _LOADS]
    var length = Int(its.length)
    var rows = StaticTuple[Int, _PAIR]()
    var mean = StaticTuple[Float32, _PAIR](fill=0)
    var rstd = StaticTuple[Float32, _PAIR]()
    comptime for r in range(_PAIR):
        rows[r] = Int(min(first + Int32(r), its.rows - 1))
        comptime if N.has_mean:
            mean[r] = _value_at(its.mean, rows[r])
        rstd[r] = _value_at(its.rstd, rows[r])
    var along_one = StaticTuple[_Eight, _PAIR](fill=0)
    var along_x = StaticTuple[_Eight, _PAIR](fill=0)
    for base in range(0, length, _LOADS * _LOAD_COLUMNS):
        # No branch keeps the loads from being in flight together: past the
        # end of a row, they read its last elements.
        var dz = Loads()
        var x = Loads()
        var gamma = StaticTuple[_Eight, _LOADS]()
        comptime for i in range(_LOADS):
            var column = min(
                base + i * _LOAD_COLUMNS + Int(lane) * _WIDTH, length - _WIDTH
            )
            comptime for r in range(_PAIR):
                var place = rows[r] * length + column
                dz[r * _LOADS + i] = _load_eight[dtype](its.z, place)
                x[r * _LOADS + i] = _load_eight[dtype](its.x, place)
            gamma[i] = _load_eight[DType.float32](its.affine, column)
        comptime for i in range(_LOADS):
            var column = base + i * _LOAD_COLUMNS + Int(lane) * _WIDTH
            var inside = gamma[i] if column < length else _Eight(0)
            comptime for r in range(_PAIR):
                comptime at = r * _LOADS + i
                var g = _to_float32(dz[at]) * inside
                var v = N.distance[_WIDTH](_to_float32(x[at]), mean[r])
                comptime if N.has_mean:
                    along_one[r] = along_one[r] + g
                along_x[r] = g.fma(v, along_x[r])
    comptime for r in range(_PAIR):
        var scale = 1 / Float32(length)
        var one = Float32(0)
        comptime if N.has_mean:
            one = warp.sum(along_one[r].reduce_add()) * scale
        var xhat = warp.sum(along_x[r].reduce_add()) * rstd[r] * scale
        if lane == 0:
            GlobalPointer[DType.float32](
                unsafe_from_address=Int(its.factors)
            ).unsafe_offset(4 * rows[r]).unsafe_store[alignment=16](
                _Four(mean[r], rstd[r], one, xhat)
            )


@always_inline
def _finish_columns[
    N: Norm, adds: Bool, //, dtype: DType, whole: Bool
](its: RowPass[N, adds], slice: Int, slices: Int, left: Int, lane: Int):
    """Finishes some columns of a slice, and sums over its rows.

    A `whole` block of rows and columns needs no checks of its bounds.
    """
    comptime together = (_ROWS // 2 if adds else _ROWS) if whole else 1
    var length = Int(its.length)
    var own = left + lane % _COLUMN_LANES * _WIDTH
    var column = own
    comptime if not whole:
        column = min(own, length - _WIDTH)
    var gamma = _load_eight[DType.float32](its.affine, column)
    var beta = _load_eight[DType.float32](its.affine, length + column)
    var dgamma = _Eight(0)
    var dbeta = _Eight(0)
    var row = slice * SLICE_ROWS + lane // _COLUMN_LANES
    var last = min((slice + 1) * SLICE_ROWS, Int(its.rows)) - 1
    var stride = Int32(length * _ROW_LANES)
    for _ in range(SLICE_ROWS // (_ROW_LANES * together)):
        var dz = StaticTuple[SIMD[dtype, _WIDTH], together]()
        var x = StaticTuple[SIMD[dtype, _WIDTH], together]()
        var dsum = StaticTuple[SIMD[dtype, _WIDTH], together]()
        var factors = StaticTuple[_Four, together]()
        var first = row * length + column
        comptime for r in range(together):
            var place = first + Int(stride * Int32(r))
            var its_row = row + r * _ROW_LANES
            comptime if not whole:
                its_row = min(its_row, last)
                place = its_row * length + column
            dz[r] = _load_eight[dtype](its.z, place)
            x[r] = _load_eight[dtype](its.x, place)
            comptime if adds:
                dsum[r] = _load_eight[dtype](its.dsum, place)
            factors[r] = (
                GlobalPointer[DType.float32](
                    unsafe_from_address=Int(its.factors)
                )
                .unsafe_offset(4 * its_row)
                .unsafe_load[width=4, alignment=16]()
            )
        comptime for r in range(together):
            var factor = factors[r]
            var g = _to_float32(dz[r])
            var xhat = N.xhat[dtype=DType.float32, width=_WIDTH](
                _to_float32(x[r]), factor[0], factor[1]
            )
            var dx = N.dx[dtype=DType.float32, width=_WIDTH](
                g * gamma, xhat, factor[1], factor[2], factor[3]
            )
            comptime if adds:
                dx += _to_float32(dsum[r])
            var z = xhat.fma(gamma, beta).cast[dtype]()
            var place = first + Int(stride * Int32(r))
            comptime if whole:
                _store_eight(its.dx, place, dx.cast[dtype]())
                _store_eight(its.z, place, z)
            else:
                if row + r * _ROW_LANES <= last:
                    if own < length:
                        _store_eight(its.dx, place, dx.cast[dtype]())
                        _store_eight(its.z, place, z)
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
        _store_eight(its.sums, place, dgamma)
        _store_eight(its.sums, slices * length + place, dbeta)


@always_inline
def _across[lanes: Int](values: _Eight) -> _Eight:
    var others = _Eight(0)
    comptime for i in range(_WIDTH):
        others[i] = warp.shuffle_xor(values[i], UInt32(lanes))
    return others


@always_inline
def _value_at(address: Int64, index: Int) -> Float32:
    return (
        GlobalPointer[DType.float32](unsafe_from_address=Int(address))
        .unsafe_offset(index)
        .unsafe_load()
    )


@always_inline
def _load_eight[
    dtype: DType
](address: Int64, index: Int) -> SIMD[dtype, _WIDTH]:
    return (
        GlobalPointer[dtype](unsafe_from_address=Int(address))
        .unsafe_offset(index)
        .unsafe_load[width=_WIDTH, alignment=16]()
    )


@always_inline
def _store_eight[
    dtype: DType, //
](address: Int64, index: Int, values: SIMD[dtype, _WIDTH]):
    GlobalPointer[dtype](unsafe_from_address=Int(address)).unsafe_offset(
        index
    ).unsafe_store[alignment=16](values)


@always_inline
def _to_float32[dtype: DType, //](values: SIMD[dtype, _WIDTH]) -> _Eight:
    return widen[dtype=dtype, width=_WIDTH, accum=DType.float32](values)
