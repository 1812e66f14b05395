"""Finds the largest magnitudes of rows and columns of matrices, or of all, on Hopper; also of a gradient that it computes.

    dh from da and h, as `activate` has it; of a gate, that of either half

The bits of magnitudes have the order of the numbers, with NaN last, so that an atomic maximum in any order gives the same
result.
"""

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp
from std.math import align_up, ceildiv
from std.memory import stack_allocation
from std.utils import StaticTuple

from ..call import Call
from ..device import Gpu
from ..gemm.activation import GATED, Backward
from ..magnitudes import (
    MAGNITUDES,
    keep_largest,
    larger_half,
    larger_halves,
)
from ..pdl import pdl_attributes, pdl_trigger, pdl_wait
from .matrices import Matrices
from .words import (
    LOAD,
    Words,
    at,
    high_halves,
    load_words,
    low_halves,
    rounded_words,
)

comptime THREADS = 256
"""Threads of a block."""
comptime TILE_COLUMNS = 64
"""Columns of a block's tile, of which a thread has `LOAD` side by side."""
comptime ACROSS = TILE_COLUMNS // LOAD
"""Threads that have a row of the tile."""
comptime _DOWN = THREADS // ACROSS
# Rows of a thread that are in flight together; a gradient has two or three loads of each, and its numbers take registers.
comptime _LOADS = 4
comptime _GRADIENT_LOADS = 1
# Rows that a block goes over: fewer, at least those in flight together, where blocks would leave room on SMs.
comptime _ROWS = 512
comptime _FEWEST_ROWS = _LOADS * _DOWN
# Blocks that an SM has room for.
comptime _BLOCKS = 4


def run_maxima(gpu: Gpu, call: Call) raises:
    """Writes maxima of x, and x itself where it is the gradient dh before an activation.

    Args:
        gpu: Where to run.
        call: Its matrices x [M, K] in bfloat16, K a multiple of 8; one_scale, whether one maximum of all is wanted; z, not 0
            if those of rows are; the maxima, zeros: 4 bytes for each column, then 4 for each row if those are wanted; or
            4 for the one. With an activation, the only x is written: K columns of da [M, K] and h [M, K]. A gate has
            h [M, 2 K] and writes x [M, 2 K], with maxima of its own 2 K columns; or, of two parts, two matrices x [M, K]
            one behind the other, with maxima of their own, the second from a multiple of 16 bytes on.

    Raises:
        If there are too many matrices, or a launch fails.
    """
    if call.activation == 0:
        _launch[False, False](gpu, call)
    elif call.activation < GATED:
        _launch[True, False](gpu, call)
    else:
        _launch[True, True](gpu, call)


def _launch[differentiates: Bool, gates: Bool](gpu: Gpu, call: Call) raises:
    comptime kernel = maxima_kernel[differentiates, gates]
    var is_joint = gates and call.part_count != 2
    var own = call.K * (2 if is_joint else 1)
    # From one half of a gate to the other: in a row, or in memory of its own; and likewise for maxima.
    var half = call.K if is_joint else call.M * call.K
    var columns = call.K
    var rows = 0
    if not is_joint:
        columns = 1 if call.one_scale != 0 else call.K + (
            call.M if call.z != 0 else 0
        )
        columns = align_up(columns, 4)
        rows = columns
    elif call.one_scale != 0:
        columns = 0
    var rows_of_block = _ROWS
    var matrices = Matrices(call, rows_of_block)
    var across = ceildiv(matrices.across, TILE_COLUMNS)
    comptime if not differentiates:
        while (
            rows_of_block > _FEWEST_ROWS
            and 2 * across * matrices.down <= _BLOCKS * gpu.processors
        ):
            rows_of_block //= 2
            matrices = Matrices(call, rows_of_block)
    gpu.stream.enqueue_function(
        gpu.context.compile_function[kernel](),
        matrices,
        Int64(call.da),
        Int64(call.h),
        Int64(half),
        Int64(columns),
        Int64(rows),
        Int32(own),
        Int32(call.activation % GATED),
        Int32(call.one_scale),
        Int32(rows_of_block),
        grid_dim=(across, matrices.down),
        block_dim=THREADS,
        attributes=pdl_attributes(),
    )


@always_inline
def _gradient[
    gates: Bool
](kind: Int32, da: Words, h: Words, up: Words) -> StaticTuple[Words, 2]:
    """Returns dh; of a gate those of the gate and of what it gates."""
    comptime Both = Backward[DType.float32, 4, True]
    var low_da = low_halves(da)
    var high_da = high_halves(da)
    comptime if gates:
        var low = Both(kind, low_halves(h), low_da * low_halves(up))
        var high = Both(kind, high_halves(h), high_da * high_halves(up))
        return StaticTuple[Words, 2](
            rounded_words(low.dh, high.dh),
            rounded_words(low_da * low.a, high_da * high.a),
        )
    else:
        var low = Both(kind, low_halves(h), low_da)
        var high = Both(kind, high_halves(h), high_da)
        return StaticTuple[Words, 2](rounded_words(low.dh, high.dh), Words(0))


def maxima_kernel[
    differentiates: Bool, gates: Bool
](
    matrices: Matrices,
    da: Int64,
    h: Int64,
    half: Int64,
    columns_of_half: Int64,
    rows_of_half: Int64,
    width: Int32,
    kind: Int32,
    one_scale: Int32,
    rows: Int32,
):
    """Finds the bits of the largest magnitudes, those of bfloat16.

    Grid: (columns / TILE_COLUMNS, rows of all matrices / rows). Block: THREADS threads, 8 across the tile's columns.

    Parameters:
        differentiates: Whether the only x is computed first, from da and h.
        gates: Whether half of h gates the rest.

    Args:
        matrices: The matrices, with maxima that are at least zero: of columns [k], and then of rows [m] if there is a z;
            or one. Of an x that is computed, m and k are those of da.
        da: Address of the gradient after the activation [m, k].
        h: Address of what the activation is of [m, k], for a gate [m, 2 k].
        half: Elements from one half of a gate's x to the other.
        columns_of_half: Maxima of columns from one half to the other.
        rows_of_half: Likewise those of rows.
        width: Elements of a row of an x that is computed.
        kind: The activation.
        one_scale: Whether there is one maximum of all.
        rows: Rows that a block goes over.
    """
    comptime halves = 2 if gates else 1
    comptime loads = _GRADIENT_LOADS if differentiates else _LOADS
    pdl_wait()
    pdl_trigger()
    var matrix = matrices.pieces[0]
    comptime if not differentiates:
        matrix = matrices.of_block(block_idx.y)
    var x = matrix.x
    var m = matrix.m
    var k = matrix.k
    var to_rows = width if differentiates else matrix.to_rows
    # Another matrix is wider.
    if Int(block_idx.x) * TILE_COLUMNS >= Int(k):
        return
    var top = (Int(block_idx.y) - Int(matrix.first)) * Int(rows)
    var thread = Int(thread_idx.x)
    var column = Int(block_idx.x) * TILE_COLUMNS + thread % ACROSS * LOAD
    var most = StaticTuple[Words, halves](fill=Words(0))
    var first = top + thread // ACROSS
    var last = min(top + Int(rows), Int(m))
    var next = _Loaded[differentiates, gates, loads](
        x, da, h, first, column, last, Int(k)
    )
    # All threads take each step: those of a row compare what they have.
    for start in range(top, last, loads * _DOWN):
        var row = start + thread // ACROSS
        var loaded = next
        # The next rows are on their way while these are computed.
        next = _Loaded[differentiates, gates, loads](
            x, da, h, row + loads * _DOWN, column, last, Int(k)
        )
        comptime for i in range(loads):
            var is_here = column < Int(k) and row + i * _DOWN < Int(m)
            var values = StaticTuple[Words, 2](loaded.values[i], Words(0))
            comptime if differentiates:
                values = _gradient[gates](
                    kind, loaded.values[i], loaded.h[i], loaded.up[i]
                )
                if is_here:
                    comptime for part in range(halves):
                        var place = (row + i * _DOWN) * Int(width) + column
                        at[DType.uint32](
                            x, (place + part * Int(half)) // 2
                        ).unsafe_store[alignment=16](values[part])
            comptime for part in range(halves):
                values[part] &= Words(MAGNITUDES)
                comptime for j in range(LOAD // 2):
                    most[part][j] = larger_halves(
                        most[part][j], values[part][j]
                    )
            if one_scale == 0 and matrix.z != 0:
                # That of one half in the lower bits, of the other in the upper ones.
                var bits = UInt32(0)
                comptime for part in range(halves):
                    var four = values[part]
                    bits |= larger_half(
                        larger_halves(
                            larger_halves(four[0], four[1]),
                            larger_halves(four[2], four[3]),
                        )
                    ) << UInt32(16 * part)
                comptime for distance in [1, 2, 4]:
                    bits = larger_halves(
                        bits, warp.shuffle_xor(bits, UInt32(distance))
                    )
                if thread % ACROSS == 0 and row + i * _DOWN < Int(m):
                    var place = Int(to_rows) + row + i * _DOWN
                    comptime for part in range(halves):
                        keep_largest(
                            matrix.maxima,
                            place + part * Int(rows_of_half),
                            bits >> UInt32(16 * part) & 0xFFFF,
                        )
    comptime for part in range(halves):
        _keep_columns(
            most[part],
            matrix.maxima + Int64(4 * part) * columns_of_half,
            Int(k),
            one_scale != 0,
        )


struct _Loaded[differentiates: Bool, gates: Bool, loads: Int](
    TrivialRegisterPassable
):
    """What a thread has loaded of some rows: zeros where there is nothing, which are no more than any magnitude."""

    var values: StaticTuple[Words, Self.loads]
    var h: StaticTuple[Words, Self.loads]
    var up: StaticTuple[Words, Self.loads]

    @always_inline
    def __init__(
        out self,
        x: Int64,
        da: Int64,
        h: Int64,
        row: Int,
        column: Int,
        rows: Int,
        k: Int,
    ):
        comptime halves = 2 if Self.gates else 1
        self.values = {fill = Words(0)}
        self.h = {fill = Words(0)}
        self.up = {fill = Words(0)}
        comptime for i in range(Self.loads):
            var there = row + i * _DOWN
            if column < k and there < rows:
                comptime if Self.differentiates:
                    self.values[i] = load_words(da, there * k + column)
                    self.h[i] = load_words(h, there * halves * k + column)
                    comptime if Self.gates:
                        self.up[i] = load_words(h, (2 * there + 1) * k + column)
                else:
                    self.values[i] = load_words(x, there * k + column)


@always_inline
def _keep_columns(given: Words, maxima: Int64, k: Int, one_scale: Bool):
    """Compares what all threads have of columns, and keeps the maxima, or that of all."""
    var most = given
    var thread = Int(thread_idx.x)
    comptime words = TILE_COLUMNS // 2
    comptime own = LOAD // 2
    # Over the four rows of a warp, then over the warps.
    comptime for distance in [ACROSS, 2 * ACROSS]:
        comptime for i in range(own):
            most[i] = larger_halves(
                most[i], warp.shuffle_xor(most[i], UInt32(distance))
            )
    var room = stack_allocation[
        THREADS // 32 * words,
        UInt32,
        address_space=AddressSpace.SHARED,
        alignment=16,
    ]()
    # Of the columns before.
    barrier()
    if thread % 32 < ACROSS:
        room.unsafe_offset(
            thread // 32 * words + thread % 32 * own
        ).unsafe_store[alignment=16](most)
    barrier()
    if thread >= words:
        return
    var pair = UInt32(0)
    comptime for i in range(THREADS // 32):
        pair = larger_halves(
            pair, room.unsafe_offset(i * words + thread).unsafe_load()
        )
    if not one_scale:
        var column = Int(block_idx.x) * TILE_COLUMNS + 2 * thread
        if column < k:
            keep_largest(maxima, column, pair & 0xFFFF)
            keep_largest(maxima, column + 1, pair >> 16)
        return
    var bits = larger_half(pair)
    comptime for i in range(5):
        bits = max(bits, warp.shuffle_xor(bits, UInt32(1 << i)))
    if thread == 0:
        keep_largest(maxima, 0, bits)
