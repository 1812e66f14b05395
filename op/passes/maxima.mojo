"""Finds the largest magnitudes of rows and columns of a matrix, or of all, on Hopper; also of a gradient that it computes.

    dh from da and h, as `activate` has it; of a gate, that of either half

The bits of magnitudes have the order of the numbers, with NaN last, so that an atomic maximum in any order gives the same
result.
"""

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp
from std.math import align_up, ceildiv
from std.memory import bitcast, stack_allocation
from std.sys import inlined_assembly
from std.utils import StaticTuple

from ..call import Call
from ..device import Gpu
from ..gemm.activation import GATED, Backward
from ..pdl import pdl_attributes, pdl_trigger, pdl_wait
from ..rounding import widened

comptime THREADS = 256
"""Threads of a block."""
comptime TILE_COLUMNS = 64
"""Columns of a block's tile, of which a thread has `LOAD` side by side."""
comptime LOAD = 8
"""Elements that a thread loads together."""
comptime ACROSS = TILE_COLUMNS // LOAD
"""Threads that have a row of the tile."""
comptime _DOWN = THREADS // ACROSS
# Rows that a block goes over.
comptime _ROWS = 512
# Rows of a thread that are in flight together; a gradient has two or three loads of each, and its numbers take registers.
comptime _LOADS = 4
comptime _GRADIENT_LOADS = 2
comptime _Bits = SIMD[DType.uint16, LOAD]


def run_maxima(gpu: Gpu, call: Call) raises:
    """Writes maxima of x, and x itself where it is the gradient dh before an activation.

    Args:
        gpu: Where to run.
        call: The matrix x [M, K] in bfloat16, K a multiple of 8; one_scale, whether one maximum of all is wanted; z, not 0
            if those of rows are; the workspace, zeros: 4 bytes for each column, then 4 for each row if those are wanted; or
            4 for the one. With an activation, x is written: K columns of da [M, K] and h [M, K]. A gate has h [M, 2 K] and
            writes x [M, 2 K], with maxima of its own 2 K columns; or, of two parts, two matrices x [M, K] one behind the
            other, with maxima of their own, the second from a multiple of 16 bytes on.

    Raises:
        If a launch fails.
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
    gpu.stream.enqueue_function(
        gpu.context.compile_function[kernel](),
        Int64(call.x),
        Int64(call.da),
        Int64(call.h),
        Int64(call.workspace),
        Int64(half),
        Int64(columns),
        Int64(rows),
        Int32(call.M),
        Int32(call.K),
        Int32(own),
        Int32(call.activation % GATED),
        Int32(call.one_scale),
        Int32(call.z != 0),
        grid_dim=(ceildiv(call.K, TILE_COLUMNS), ceildiv(call.M, _ROWS)),
        block_dim=THREADS,
        attributes=pdl_attributes(),
    )


@always_inline
def at[
    dtype: DType
](address: Int64, index: Int) -> Pointer[
    Scalar[dtype], MutAnyOrigin, address_space=AddressSpace.GLOBAL
]:
    """Returns the place of an element in global memory.

    Parameters:
        dtype: The type.

    Args:
        address: Where the first one is.
        index: Which one.

    Returns:
        The place.
    """
    return Pointer[
        Scalar[dtype], MutAnyOrigin, address_space=AddressSpace.GLOBAL
    ](unsafe_from_address=Int(address)).unsafe_offset(index)


@always_inline
def _keep_largest(address: Int64, index: Int, bits: UInt32):
    """Writes a maximum in place."""
    inlined_assembly[
        "red.relaxed.gpu.global.max.u32 [$0], $1;",
        NoneType,
        constraints="l,r,~{memory}",
    ](UInt64(address + Int64(4 * index)), bits)


@always_inline
def _eight(address: Int64, index: Int) -> _Bits:
    return at[DType.uint16](address, index).unsafe_load[
        width=LOAD, alignment=16
    ]()


@always_inline
def _wide(bits: _Bits) -> SIMD[DType.float32, LOAD]:
    return rebind[SIMD[DType.float32, LOAD]](
        widened[DType.float32](bitcast[DType.bfloat16, LOAD](bits))
    )


@always_inline
def _rounded(values: SIMD[DType.float32, LOAD]) -> _Bits:
    return bitcast[DType.uint16, LOAD](values.cast[DType.bfloat16]())


@always_inline
def _gradient[
    gates: Bool
](kind: Int32, da: _Bits, h: _Bits, up: _Bits) -> StaticTuple[_Bits, 2]:
    """Returns dh; of a gate those of the gate and of what it gates."""
    comptime Both = Backward[DType.float32, LOAD, True]
    comptime if gates:
        var gate = Both(kind, _wide(h), _wide(da) * _wide(up))
        return StaticTuple[_Bits, 2](
            _rounded(gate.dh), _rounded(_wide(da) * gate.a)
        )
    else:
        return StaticTuple[_Bits, 2](
            _rounded(Both(kind, _wide(h), _wide(da)).dh), _Bits(0)
        )


def maxima_kernel[
    differentiates: Bool, gates: Bool
](
    x: Int64,
    da: Int64,
    h: Int64,
    maxima: Int64,
    half: Int64,
    columns_of_half: Int64,
    rows_of_half: Int64,
    m: Int32,
    k: Int32,
    own: Int32,
    kind: Int32,
    one_scale: Int32,
    of_rows: Int32,
):
    """Finds the bits of the largest magnitudes, those of bfloat16.

    Grid: (k / TILE_COLUMNS, m / 512). Block: THREADS threads, 8 across the tile's columns.

    Parameters:
        differentiates: Whether x is computed first, from da and h.
        gates: Whether half of h gates the rest.

    Args:
        x: Address of the matrix [m, own].
        da: Address of the gradient after the activation [m, k].
        h: Address of what the activation is of [m, k], for a gate [m, 2 k].
        maxima: Address of the maxima, which are at least zero: of columns [own], and then of rows [m]; or one.
        half: Elements from one half of a gate's x to the other.
        columns_of_half: Maxima of columns from one half to the other.
        rows_of_half: Likewise those of rows.
        m: Rows.
        k: Columns of da, or of x.
        own: Elements of a row of x.
        kind: The activation.
        one_scale: Whether there is one maximum of all.
        of_rows: Whether those of rows are wanted as well.
    """
    comptime halves = 2 if gates else 1
    comptime loads = _GRADIENT_LOADS if differentiates else _LOADS
    pdl_wait()
    pdl_trigger()
    var thread = Int(thread_idx.x)
    var column = Int(block_idx.x) * TILE_COLUMNS + thread % ACROSS * LOAD
    var most = StaticTuple[_Bits, halves](fill=_Bits(0))
    var first = Int(block_idx.y) * _ROWS
    # All threads take each step: those of a row compare what they have.
    for start in range(first, min(first + _ROWS, Int(m)), loads * _DOWN):
        var row = start + thread // ACROSS
        # Zeros where there is nothing are no more than any magnitude.
        var values = StaticTuple[StaticTuple[_Bits, 2], loads](
            fill=StaticTuple[_Bits, 2](fill=_Bits(0))
        )
        var hs = StaticTuple[_Bits, loads](fill=_Bits(0))
        comptime for i in range(loads):
            if column < Int(k) and row + i * _DOWN < Int(m):
                var there = row + i * _DOWN
                comptime if differentiates:
                    values[i][0] = _eight(da, there * Int(k) + column)
                    hs[i] = _eight(h, there * halves * Int(k) + column)
                    comptime if gates:
                        values[i][1] = _eight(
                            h, (2 * there + 1) * Int(k) + column
                        )
                else:
                    values[i][0] = _eight(x, there * Int(k) + column)
        comptime if differentiates:
            comptime for i in range(loads):
                values[i] = _gradient[gates](
                    kind, values[i][0], hs[i], values[i][1]
                )
                if column < Int(k) and row + i * _DOWN < Int(m):
                    comptime for part in range(halves):
                        var place = (row + i * _DOWN) * Int(own) + column
                        at[DType.uint16](
                            x, place + part * Int(half)
                        ).unsafe_store[alignment=16](values[i][part])
        comptime for i in range(loads):
            comptime for part in range(halves):
                values[i][part] &= _Bits(0x7FFF)
                most[part] = max(most[part], values[i][part])
        if one_scale == 0 and of_rows != 0:
            comptime for i in range(loads):
                comptime for part in range(halves):
                    var bits = UInt32(values[i][part].reduce_max())
                    comptime for distance in [1, 2, 4]:
                        bits = max(
                            bits, warp.shuffle_xor(bits, UInt32(distance))
                        )
                    if thread % ACROSS == 0 and row + i * _DOWN < Int(m):
                        var place = Int(own) + row + i * _DOWN
                        _keep_largest(
                            maxima, place + part * Int(rows_of_half), bits
                        )
    comptime for part in range(halves):
        _keep_columns(
            most[part],
            maxima + Int64(4 * part) * columns_of_half,
            Int(k),
            one_scale != 0,
        )


@always_inline
def _keep_columns(given: _Bits, maxima: Int64, k: Int, one_scale: Bool):
    """Compares what all threads have of columns, and keeps the maxima, or that of all."""
    var most = given
    var thread = Int(thread_idx.x)
    # Over the four rows of a warp, then over the warps.
    comptime for distance in [ACROSS, 2 * ACROSS]:
        comptime for i in range(LOAD):
            var other = warp.shuffle_xor(UInt32(most[i]), UInt32(distance))
            most[i] = max(most[i], other.cast[DType.uint16]())
    var room = stack_allocation[
        THREADS // 32 * TILE_COLUMNS,
        UInt32,
        address_space=AddressSpace.SHARED,
    ]()
    # Of the columns before.
    barrier()
    if thread % 32 < ACROSS:
        comptime for i in range(LOAD):
            room.unsafe_offset(
                thread // 32 * TILE_COLUMNS + thread % 32 * LOAD + i
            ).unsafe_store(UInt32(most[i]))
    barrier()
    if thread >= TILE_COLUMNS:
        return
    var bits = UInt32(0)
    comptime for i in range(THREADS // 32):
        bits = max(
            bits, room.unsafe_offset(i * TILE_COLUMNS + thread).unsafe_load()
        )
    if not one_scale:
        var own = Int(block_idx.x) * TILE_COLUMNS + thread
        if own < k:
            _keep_largest(maxima, own, bits)
        return
    comptime for i in range(5):
        bits = max(bits, warp.shuffle_xor(bits, UInt32(1 << i)))
    if thread % 32 == 0:
        _keep_largest(maxima, 0, bits)
