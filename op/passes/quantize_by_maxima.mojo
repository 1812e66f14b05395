"""Quantizes a matrix on Hopper by the largest magnitudes of rows and columns, or of all: as it lies, transposed, or both.

    scale = max(max |x|, 1e-12) / largest;  q = round(x / scale)

A first kernel computes all maxima, a second one reads the matrix again and writes 8 bits, both times. The bits of magnitudes have
the order of the numbers, with NaN last, so that an atomic maximum in any order gives the same result.
"""

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp
from std.math import ceildiv
from std.memory import bitcast, stack_allocation
from std.sys import inlined_assembly
from std.utils import StaticTuple

from ..call import Call
from ..device import Gpu
from ..pdl import pdl_attributes, pdl_trigger, pdl_wait
from ..rounding import widened
from ..rows.eight_bits import largest, pack_eight_bits
from ..rows.programs.quantize import divided, scale_of
from ..rows.types import E4M3, E5M2, eight_bit_type

comptime THREADS = 256
"""Threads of a block."""
comptime TILE_COLUMNS = 64
"""Columns of a block's tile, of which a thread has `_LOAD` side by side."""
comptime TILE_ROWS = 128
"""Rows of a block's tile, of which a thread has four: with a column each a word of 8 bits."""
comptime _LOAD = 8
comptime _ACROSS = TILE_COLUMNS // _LOAD
comptime _DOWN = THREADS // _ACROSS
# Rows that a block of the first kernel goes over.
comptime _ROWS_OF_MAXIMA = 512
# Loads of a thread that are in flight together.
comptime _LOADS = 4
# Words of a row of the transposed tile, and one more, so that columns are in different banks.
comptime _PITCH = TILE_ROWS // 4 + 1
comptime _LEAST = Float64(1e-12)
comptime _Bits = SIMD[DType.uint16, _LOAD]


def run_quantize_by_maxima(gpu: Gpu, call: Call) raises:
    """Writes x in 8 bits, to z with its layout and transposed to zt, as far as these are given.

    Args:
        gpu: Where to run.
        call: The matrix x [M, K] in bfloat16, K a multiple of 8; z [M, K] and z_scale [M], for rows; zt [K, pitch], the pitch
            at least M and a multiple of 16, zeros from M on, and zt_scale [K], for columns; or all with the one scale; the
            workspace, zeros: 4 bytes for each column, then 4 for each row if there is a z; or 4 for the one scale.

    Raises:
        If a launch fails.
    """
    comptime maxima = maxima_kernel
    gpu.stream.enqueue_function(
        gpu.context.compile_function[maxima](),
        Int64(call.x),
        Int64(call.workspace),
        Int32(call.M),
        Int32(call.K),
        Int32(call.one_scale),
        Int32(call.z != 0),
        grid_dim=(
            ceildiv(call.K, TILE_COLUMNS),
            ceildiv(call.M, _ROWS_OF_MAXIMA),
        ),
        block_dim=THREADS,
        attributes=pdl_attributes(),
    )
    comptime for kind in [E4M3, E5M2]:
        if call.eight_bits == Int(kind):
            comptime kernel = quantize_kernel[eight_bit_type(kind)]
            gpu.stream.enqueue_function(
                gpu.context.compile_function[kernel](),
                Int64(call.x),
                Int64(call.workspace),
                Int64(call.z),
                Int64(call.zt),
                Int64(call.z_scale),
                Int64(call.zt_scale),
                Int32(call.M),
                Int32(call.K),
                Int32(call.pitch),
                Int32(call.one_scale),
                Int32(call.power_of_two),
                grid_dim=(
                    ceildiv(call.K, TILE_COLUMNS),
                    ceildiv(max(call.M, call.pitch), TILE_ROWS),
                ),
                block_dim=THREADS,
                attributes=pdl_attributes(),
            )


@always_inline
def _at[
    dtype: DType
](address: Int64, index: Int) -> Pointer[
    Scalar[dtype], MutAnyOrigin, address_space=AddressSpace.GLOBAL
]:
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


def maxima_kernel(
    x: Int64,
    maxima: Int64,
    m: Int32,
    k: Int32,
    one_scale: Int32,
    of_rows: Int32,
):
    """Finds the bits of the largest magnitudes, those of bfloat16.

    Grid: (k / TILE_COLUMNS, m / 512). Block: THREADS threads, 8 across the tile's columns.

    Args:
        x: Address of the matrix [m, k].
        maxima: Address of the maxima, which are at least zero: of columns [k], and then of rows [m]; or one.
        m: Rows.
        k: Columns.
        one_scale: Whether there is one of all.
        of_rows: Whether those of rows are wanted as well.
    """
    pdl_wait()
    pdl_trigger()
    var thread = Int(thread_idx.x)
    var column = Int(block_idx.x) * TILE_COLUMNS + thread % _ACROSS * _LOAD
    var most = _Bits(0)
    var first = Int(block_idx.y) * _ROWS_OF_MAXIMA
    # All threads take each step: those of a row compare what they have.
    for start in range(
        first, min(first + _ROWS_OF_MAXIMA, Int(m)), _LOADS * _DOWN
    ):
        var row = start + thread // _ACROSS
        # Zeros where there is nothing are no more than any magnitude.
        var loads = StaticTuple[_Bits, _LOADS](fill=_Bits(0))
        comptime for i in range(_LOADS):
            if column < Int(k) and row + i * _DOWN < Int(m):
                loads[i] = _at[DType.uint16](
                    x, (row + i * _DOWN) * Int(k) + column
                ).unsafe_load[width=_LOAD, alignment=16]() & _Bits(0x7FFF)
        comptime for i in range(_LOADS):
            most = max(most, loads[i])
        if one_scale == 0 and of_rows != 0:
            comptime for i in range(_LOADS):
                var own = UInt32(loads[i].reduce_max())
                comptime for distance in [1, 2, 4]:
                    own = max(own, warp.shuffle_xor(own, UInt32(distance)))
                if thread % _ACROSS == 0 and row + i * _DOWN < Int(m):
                    _keep_largest(maxima, Int(k) + row + i * _DOWN, own)
    # Over the four rows of a warp, then over the warps.
    comptime for distance in [_ACROSS, 2 * _ACROSS]:
        comptime for i in range(_LOAD):
            var other = warp.shuffle_xor(UInt32(most[i]), UInt32(distance))
            most[i] = max(most[i], other.cast[DType.uint16]())
    var room = stack_allocation[
        THREADS // 32 * TILE_COLUMNS,
        UInt32,
        address_space=AddressSpace.SHARED,
    ]()
    if thread % 32 < _ACROSS:
        comptime for i in range(_LOAD):
            room.unsafe_offset(
                thread // 32 * TILE_COLUMNS + thread % 32 * _LOAD + i
            ).unsafe_store(UInt32(most[i]))
    barrier()
    if thread >= TILE_COLUMNS:
        return
    var bits = UInt32(0)
    comptime for i in range(THREADS // 32):
        bits = max(
            bits, room.unsafe_offset(i * TILE_COLUMNS + thread).unsafe_load()
        )
    if one_scale == 0:
        var own = Int(block_idx.x) * TILE_COLUMNS + thread
        if own < Int(k):
            _keep_largest(maxima, own, bits)
        return
    comptime for i in range(5):
        bits = max(bits, warp.shuffle_xor(bits, UInt32(1 << i)))
    if thread % 32 == 0:
        _keep_largest(maxima, 0, bits)


def quantize_kernel[
    eight_bits: DType
](
    x: Int64,
    maxima: Int64,
    z: Int64,
    zt: Int64,
    z_scales: Int64,
    zt_scales: Int64,
    m: Int32,
    k: Int32,
    pitch: Int32,
    one_scale: Int32,
    power_of_two: Int32,
):
    """Writes a matrix in 8 bits, as it lies and transposed, and the scales of both.

    Grid: (k / TILE_COLUMNS, rows / TILE_ROWS). Block: THREADS threads, 8 across the tile's columns.

    Parameters:
        eight_bits: The type, float8_e4m3fn or float8_e5m2.

    Args:
        x: Address of the matrix [m, k] in bfloat16.
        maxima: Address of the results of `maxima_kernel`.
        z: Address of the result [m, k], or 0.
        zt: Address of the transposed result [k, pitch], or 0.
        z_scales: Address of the scales of z [m].
        zt_scales: Address of those of zt [k].
        m: Rows.
        k: Columns, a multiple of 8.
        pitch: Bytes of a row of zt, a multiple of 16; zeros from m on.
        one_scale: Whether all scales are one.
        power_of_two: Whether scales are rounded up to powers of two.
    """
    comptime Eight = SIMD[DType.float32, _LOAD]
    pdl_wait()
    pdl_trigger()
    var thread = Int(thread_idx.x)
    var across = thread % _ACROSS
    var down = thread // _ACROSS
    var column = Int(block_idx.x) * TILE_COLUMNS + across * _LOAD
    var row = Int(block_idx.y) * TILE_ROWS + 4 * down
    var is_here = column < Int(k)
    # All loads are in flight before the first is used.
    var rows = StaticTuple[SIMD[DType.bfloat16, _LOAD], 4](
        fill=SIMD[DType.bfloat16, _LOAD](0)
    )
    comptime for i in range(4):
        if is_here and row + i < Int(m):
            rows[i] = _at[DType.bfloat16](
                x, (row + i) * Int(k) + column
            ).unsafe_load[width=_LOAD, alignment=16]()
    # Those of columns, or the one scale.
    var scale = Eight(1)
    # 1 / scale, or for one scale of all what numbers are multiplied by.
    var inverse = Eight(1)
    if one_scale != 0:
        var most = bitcast[DType.float32](
            _at[DType.uint32](maxima, 0).unsafe_load() << 16
        )
        scale = Eight(scale_of[eight_bits](most, True))
        inverse = 1 / scale
        if power_of_two == 0:
            # As torchao rounds: by the reciprocal scale, computed in float64.
            var wide = most.cast[DType.float64]()
            var bounded = _LEAST if wide < _LEAST else wide
            inverse = Eight(
                (largest[eight_bits]().cast[DType.float64]() / bounded).cast[
                    DType.float32
                ]()
            )
            scale = 1 / inverse
    elif is_here and zt != 0:
        var bits = _at[DType.uint32](maxima, column).unsafe_load[
            width=_LOAD, alignment=16
        ]()
        comptime for i in range(_LOAD):
            scale[i] = scale_of[eight_bits](
                bitcast[DType.float32](bits[i] << 16), power_of_two != 0
            )
        inverse = 1 / scale
    if zt != 0 and is_here and block_idx.y == 0 and down == 0:
        _at[DType.float32](zt_scales, column).unsafe_store[alignment=16](scale)
    var fours = StaticTuple[Eight, 4](fill=Eight(0))
    comptime for i in range(4):
        var wide = rebind[Eight](widened[DType.float32](rows[i]))
        if one_scale == 0 or power_of_two != 0:
            fours[i] = divided[width=_LOAD](wide, scale, inverse)
        else:
            fours[i] = wide * inverse
        if z != 0 and is_here and row + i < Int(m):
            var own = scale[0]
            var quotients = fours[i]
            if one_scale == 0:
                var bits = _at[DType.uint32](
                    maxima, Int(k) + row + i
                ).unsafe_load()
                own = scale_of[eight_bits](
                    bitcast[DType.float32](bits << 16), power_of_two != 0
                )
                quotients = divided[width=_LOAD](
                    wide, Eight(own), Eight(1 / own)
                )
            if column == 0:
                _at[DType.float32](z_scales, row + i).unsafe_store(own)
            var words = SIMD[DType.uint32, 2](
                pack_eight_bits[eight_bits](quotients.slice[4]()),
                pack_eight_bits[eight_bits](quotients.slice[4, offset=4]()),
            )
            _at[DType.uint32](
                z, ((row + i) * Int(k) + column) // 4
            ).unsafe_store[alignment=8](words)
    if zt == 0:
        return
    var room = stack_allocation[
        TILE_COLUMNS * _PITCH, UInt32, address_space=AddressSpace.SHARED
    ]()
    comptime for j in range(_LOAD):
        # What a padded row of scales of NaN or infinity would make of zeros is not stored.
        var four = SIMD[DType.float32, 4](
            fours[0][j], fours[1][j], fours[2][j], fours[3][j]
        )
        comptime for i in range(4):
            if row + i >= Int(m):
                four[i] = 0
        room.unsafe_offset((across * _LOAD + j) * _PITCH + down).unsafe_store(
            pack_eight_bits[eight_bits](four)
        )
    barrier()
    # Four threads have a row of the transposed tile.
    comptime words = TILE_ROWS // 16
    var own = Int(block_idx.x) * TILE_COLUMNS + thread // 4
    var start = Int(block_idx.y) * TILE_ROWS + thread % 4 * 4 * words
    if own >= Int(k):
        return
    comptime for part in range(words // 4):
        if start + 16 * part < Int(pitch):
            var four = SIMD[DType.uint32, 4](0)
            comptime for i in range(4):
                four[i] = room.unsafe_offset(
                    thread // 4 * _PITCH + thread % 4 * words + 4 * part + i
                ).unsafe_load()
            _at[DType.uint32](
                zt, (own * Int(pitch) + start) // 4 + 4 * part
            ).unsafe_store[alignment=16](four)
