"""Quantizes on Hopper with a scale for each 128 elements of a row, or for each 128 by 128 of a matrix.

    scale = max(max |x|, 1e-12) / largest;  q = round(x / scale)
"""

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp
from std.math import ceildiv
from std.memory import bitcast, stack_allocation
from std.utils import StaticTuple

from ..call import SCALE_BLOCK, Call
from ..device import Gpu
from ..pdl import pdl_attributes, pdl_trigger, pdl_wait
from ..rounding import widened
from ..rows.eight_bits import pack_eight_bits
from ..rows.scales import (
    divided,
    largest_of_block,
    magnitude_bits,
    scale_of,
)
from ..rows.types import E4M3, E5M2, eight_bit_type
from .maxima import THREADS
from .words import LOAD, at

# Threads that have a row of a block.
comptime _ACROSS = SCALE_BLOCK // LOAD
# Rows of a thread that are in flight together; of a square, two groups of four, whose bytes of a column are a word.
comptime _ROWS = 4
comptime _GROUPS = SCALE_BLOCK // (_ROWS * THREADS // _ACROSS)
# Words of a column of a square, and one more, so that columns are in different banks.
comptime _PITCH = SCALE_BLOCK // 4 + 1
comptime _Eight = SIMD[DType.bfloat16, LOAD]
comptime _Wide = SIMD[DType.float32, LOAD]


def run_quantize_vectors(gpu: Gpu, call: Call) raises:
    """Writes x in 8 bits as z, with a scale for each 128 elements of a row.

    Args:
        gpu: Where to run.
        call: The matrix x [M, K] in bfloat16, K a multiple of 8; z [M, K], and z_scale [M, ceil(K / 128)].

    Raises:
        If a launch fails.
    """
    comptime for kind in [E4M3, E5M2]:
        if call.eight_bits == Int(kind):
            comptime kernel = vectors_kernel[eight_bit_type(kind)]
            gpu.stream.enqueue_function(
                gpu.context.compile_function[kernel](),
                Int64(call.x),
                Int64(call.z),
                Int64(call.z_scale),
                Int32(call.M),
                Int32(call.K),
                Int32(call.power_of_two),
                grid_dim=(
                    ceildiv(call.M, _ROWS * THREADS // _ACROSS),
                    ceildiv(call.K, SCALE_BLOCK),
                ),
                block_dim=THREADS,
                attributes=pdl_attributes(),
            )


def run_quantize_squares(gpu: Gpu, call: Call) raises:
    """Writes x in e4m3, to z with its layout and transposed to zt, as far as these are given.

    Args:
        gpu: Where to run.
        call: The matrix x [M, K] in bfloat16, K a multiple of 8; z [M, K] and z_scale [ceil(M / 128), ceil(K / 128)]; zt [K,
            pitch], the pitch at least M and a multiple of 16, zeros from M on, and zt_scale [ceil(K / 128), ceil(M / 128)].

    Raises:
        If a launch fails.
    """
    comptime kernel = squares_kernel
    gpu.stream.enqueue_function(
        gpu.context.compile_function[kernel](),
        Int64(call.x),
        Int64(call.z),
        Int64(call.zt),
        Int64(call.z_scale),
        Int64(call.zt_scale),
        Int32(call.M),
        Int32(call.K),
        Int32(call.pitch),
        Int32(call.power_of_two),
        grid_dim=(ceildiv(call.K, SCALE_BLOCK), ceildiv(call.M, SCALE_BLOCK)),
        block_dim=THREADS,
        attributes=pdl_attributes(),
    )


@always_inline
def _quantized[
    eight_bits: DType
](wide: _Wide, scale: Float32) -> SIMD[DType.uint32, 2]:
    var quotients = divided[width=LOAD](wide, _Wide(scale), _Wide(1 / scale))
    return {
        pack_eight_bits[eight_bits](quotients.slice[4]()),
        pack_eight_bits[eight_bits](quotients.slice[4, offset=4]()),
    }


@always_inline
def _wide(eight: _Eight) -> _Wide:
    return rebind[_Wide](widened[DType.float32](eight))


def vectors_kernel[
    eight_bits: DType
](
    x: Int64,
    z: Int64,
    z_scales: Int64,
    m: Int32,
    k: Int32,
    power_of_two: Int32,
):
    """Quantizes the blocks of rows.

    Grid: (m / 64, k / SCALE_BLOCK). Block: THREADS threads, 16 across a block of a row.

    Parameters:
        eight_bits: The type, float8_e4m3fn or float8_e5m2.

    Args:
        x: Address of the matrix [m, k] in bfloat16.
        z: Address of the result [m, k].
        z_scales: Address of its scales [m, ceil(k / SCALE_BLOCK)].
        m: Rows.
        k: Columns, a multiple of 8.
        power_of_two: Whether scales are rounded up to powers of two.
    """
    pdl_wait()
    pdl_trigger()
    comptime down = THREADS // _ACROSS
    var thread = Int(thread_idx.x)
    var row = Int(block_idx.x) * _ROWS * down + thread // _ACROSS
    var column = Int(block_idx.y) * SCALE_BLOCK + thread % _ACROSS * LOAD
    var blocks = (Int(k) + SCALE_BLOCK - 1) // SCALE_BLOCK
    # All loads are in flight before the first is used.
    var rows = StaticTuple[_Eight, _ROWS](fill=_Eight(0))
    comptime for i in range(_ROWS):
        if column < Int(k) and row + i * down < Int(m):
            rows[i] = at[DType.bfloat16](
                x, (row + i * down) * Int(k) + column
            ).unsafe_load[width=LOAD, alignment=16]()
    comptime for i in range(_ROWS):
        var there = row + i * down
        var wide = _wide(rows[i])
        var most = largest_of_block(magnitude_bits(wide))
        var scale = scale_of[eight_bits](
            bitcast[DType.float32](most), power_of_two != 0
        )
        if column < Int(k) and there < Int(m):
            at[DType.uint32](z, (there * Int(k) + column) // 4).unsafe_store[
                alignment=8
            ](_quantized[eight_bits](wide, scale))
            if thread % _ACROSS == 0:
                at[DType.float32](
                    z_scales, there * blocks + Int(block_idx.y)
                ).unsafe_store(scale)


def squares_kernel(
    x: Int64,
    z: Int64,
    zt: Int64,
    z_scales: Int64,
    zt_scales: Int64,
    m: Int32,
    k: Int32,
    pitch: Int32,
    power_of_two: Int32,
):
    """Quantizes the squares of a matrix to e4m3, as it lies and transposed.

    Grid: (k / SCALE_BLOCK, m / SCALE_BLOCK). Block: THREADS threads, 16 across a square's columns.

    Args:
        x: Address of the matrix [m, k] in bfloat16.
        z: Address of the result [m, k], or 0.
        zt: Address of the transposed result [k, pitch], or 0.
        z_scales: Address of the scales of z [ceil(m / SCALE_BLOCK), ceil(k / SCALE_BLOCK)].
        zt_scales: Address of the same transposed.
        m: Rows.
        k: Columns, a multiple of 8.
        pitch: Bytes of a row of zt, a multiple of 16; zeros from m on.
        power_of_two: Whether scales are rounded up to powers of two.
    """
    comptime kind = DType.float8_e4m3fn
    pdl_wait()
    pdl_trigger()
    var thread = Int(thread_idx.x)
    var across = thread % _ACROSS
    var column = Int(block_idx.x) * SCALE_BLOCK + across * LOAD
    # The first row of a thread's first four, in words of four rows.
    var word = thread // _ACROSS
    comptime words_of_group = THREADS // _ACROSS
    var first = Int(block_idx.y) * SCALE_BLOCK
    var rows = StaticTuple[_Eight, _GROUPS * _ROWS](fill=_Eight(0))
    comptime for i in range(_GROUPS * _ROWS):
        var row = (
            first + (word + i // _ROWS * words_of_group) * _ROWS + i % _ROWS
        )
        if column < Int(k) and row < Int(m):
            rows[i] = at[DType.bfloat16](x, row * Int(k) + column).unsafe_load[
                width=LOAD, alignment=16
            ]()
    var most = UInt32(0)
    comptime for i in range(_GROUPS * _ROWS):
        most = max(most, magnitude_bits(_wide(rows[i])))
    most = max(most, warp.shuffle_xor(most, UInt32(16)))
    most = largest_of_block(most)
    var maxima = stack_allocation[
        THREADS // 32, UInt32, address_space=AddressSpace.SHARED
    ]()
    if thread % 32 == 0:
        maxima.unsafe_offset(thread // 32).unsafe_store(most)
    barrier()
    comptime for i in range(THREADS // 32):
        most = max(most, maxima.unsafe_offset(i).unsafe_load())
    var scale = scale_of[kind](bitcast[DType.float32](most), power_of_two != 0)
    if thread == 0:
        var across_k = (Int(k) + SCALE_BLOCK - 1) // SCALE_BLOCK
        var down_m = (Int(m) + SCALE_BLOCK - 1) // SCALE_BLOCK
        if z != 0:
            at[DType.float32](
                z_scales, Int(block_idx.y) * across_k + Int(block_idx.x)
            ).unsafe_store(scale)
        if zt != 0:
            at[DType.float32](
                zt_scales, Int(block_idx.x) * down_m + Int(block_idx.y)
            ).unsafe_store(scale)
    if z != 0:
        comptime for i in range(_GROUPS * _ROWS):
            var row = (
                first + (word + i // _ROWS * words_of_group) * _ROWS + i % _ROWS
            )
            if column < Int(k) and row < Int(m):
                at[DType.uint32](z, (row * Int(k) + column) // 4).unsafe_store[
                    alignment=8
                ](_quantized[kind](_wide(rows[i]), scale))
    if zt == 0:
        return
    var room = stack_allocation[
        SCALE_BLOCK * _PITCH, UInt32, address_space=AddressSpace.SHARED
    ]()
    comptime for group in range(_GROUPS):
        var fours = StaticTuple[_Wide, _ROWS](fill=_Wide(0))
        comptime for i in range(_ROWS):
            fours[i] = divided[width=LOAD](
                _wide(rows[group * _ROWS + i]), _Wide(scale), _Wide(1 / scale)
            )
        var own = word + group * words_of_group
        comptime for j in range(LOAD):
            var four = SIMD[DType.float32, 4](
                fours[0][j], fours[1][j], fours[2][j], fours[3][j]
            )
            # What a scale of NaN or infinity would make of zeros is not stored.
            comptime for i in range(4):
                if first + own * _ROWS + i >= Int(m):
                    four[i] = 0
            room.unsafe_offset((across * LOAD + j) * _PITCH + own).unsafe_store(
                pack_eight_bits[kind](four)
            )
    barrier()
    # Two threads have a row of the transposed square.
    comptime words = SCALE_BLOCK // 8
    var own = Int(block_idx.x) * SCALE_BLOCK + thread // 2
    if own >= Int(k):
        return
    comptime for part in range(words // 4):
        var place = thread % 2 * words + 4 * part
        if first + 4 * place < Int(pitch):
            var four = SIMD[DType.uint32, 4](0)
            comptime for i in range(4):
                four[i] = room.unsafe_offset(
                    thread // 2 * _PITCH + place + i
                ).unsafe_load()
            at[DType.uint32](
                zt, (own * Int(pitch) + first) // 4 + place
            ).unsafe_store[alignment=16](four)
