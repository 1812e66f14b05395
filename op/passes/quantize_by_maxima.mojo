"""Quantizes a matrix on Hopper by the largest magnitudes of rows and columns, or of all: as it lies, transposed, or both.

    scale = max(max |x|, 1e-12) / largest;  q = round(x / scale)
"""

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.memory import AddressSpace
from std.math import ceildiv
from std.memory import bitcast, stack_allocation
from std.utils import StaticTuple

from ..call import Call
from ..device import Gpu
from ..pdl import pdl_attributes, pdl_trigger, pdl_wait
from ..rounding import widened
from ..rows.eight_bits import largest, pack_eight_bits
from ..rows.scales import divided, scale_of
from ..rows.types import E4M3, E5M2, eight_bit_type
from .maxima import ACROSS, LOAD, THREADS, TILE_COLUMNS, at

comptime TILE_ROWS = 128
"""Rows of a block's tile, of which a thread has four: with a column each a word of 8 bits."""
# Words of a row of the transposed tile, and one more, so that columns are in different banks.
comptime _PITCH = TILE_ROWS // 4 + 1
comptime _LEAST = Float64(1e-12)


def run_quantize_by_maxima(gpu: Gpu, call: Call) raises:
    """Writes x in 8 bits, to z with its layout and transposed to zt, as far as these are given.

    Args:
        gpu: Where to run.
        call: The matrix x [M, K] in bfloat16, K a multiple of 8; z [M, K] and z_scale [M], for rows; zt [K, pitch], the pitch
            at least M and a multiple of 16, zeros from M on, and zt_scale [K], for columns; or all with the one scale; the
            workspace, as `run_maxima` leaves it.

    Raises:
        If a launch fails.
    """
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
    comptime Eight = SIMD[DType.float32, LOAD]
    pdl_wait()
    pdl_trigger()
    var thread = Int(thread_idx.x)
    var across = thread % ACROSS
    var down = thread // ACROSS
    var column = Int(block_idx.x) * TILE_COLUMNS + across * LOAD
    var row = Int(block_idx.y) * TILE_ROWS + 4 * down
    var is_here = column < Int(k)
    # All loads are in flight before the first is used.
    var rows = StaticTuple[SIMD[DType.bfloat16, LOAD], 4](
        fill=SIMD[DType.bfloat16, LOAD](0)
    )
    comptime for i in range(4):
        if is_here and row + i < Int(m):
            rows[i] = at[DType.bfloat16](
                x, (row + i) * Int(k) + column
            ).unsafe_load[width=LOAD, alignment=16]()
    # Those of columns, or the one scale.
    var scale = Eight(1)
    # 1 / scale, or for one scale of all what numbers are multiplied by.
    var inverse = Eight(1)
    if one_scale != 0:
        var most = bitcast[DType.float32](
            at[DType.uint32](maxima, 0).unsafe_load() << 16
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
        var bits = at[DType.uint32](maxima, column).unsafe_load[
            width=LOAD, alignment=16
        ]()
        comptime for i in range(LOAD):
            scale[i] = scale_of[eight_bits](
                bitcast[DType.float32](bits[i] << 16), power_of_two != 0
            )
        inverse = 1 / scale
    if zt != 0 and is_here and block_idx.y == 0 and down == 0:
        at[DType.float32](zt_scales, column).unsafe_store[alignment=16](scale)
    var fours = StaticTuple[Eight, 4](fill=Eight(0))
    comptime for i in range(4):
        var wide = rebind[Eight](widened[DType.float32](rows[i]))
        if one_scale == 0 or power_of_two != 0:
            fours[i] = divided[width=LOAD](wide, scale, inverse)
        else:
            fours[i] = wide * inverse
        if z != 0 and is_here and row + i < Int(m):
            var own = scale[0]
            var quotients = fours[i]
            if one_scale == 0:
                var bits = at[DType.uint32](
                    maxima, Int(k) + row + i
                ).unsafe_load()
                own = scale_of[eight_bits](
                    bitcast[DType.float32](bits << 16), power_of_two != 0
                )
                quotients = divided[width=LOAD](
                    wide, Eight(own), Eight(1 / own)
                )
            if column == 0:
                at[DType.float32](z_scales, row + i).unsafe_store(own)
            var words = SIMD[DType.uint32, 2](
                pack_eight_bits[eight_bits](quotients.slice[4]()),
                pack_eight_bits[eight_bits](quotients.slice[4, offset=4]()),
            )
            at[DType.uint32](
                z, ((row + i) * Int(k) + column) // 4
            ).unsafe_store[alignment=8](words)
    if zt == 0:
        return
    var room = stack_allocation[
        TILE_COLUMNS * _PITCH, UInt32, address_space=AddressSpace.SHARED
    ]()
    comptime for j in range(LOAD):
        # What a padded row of scales of NaN or infinity would make of zeros is not stored.
        var four = SIMD[DType.float32, 4](
            fours[0][j], fours[1][j], fours[2][j], fours[3][j]
        )
        comptime for i in range(4):
            if row + i >= Int(m):
                four[i] = 0
        room.unsafe_offset((across * LOAD + j) * _PITCH + down).unsafe_store(
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
            at[DType.uint32](
                zt, (own * Int(pitch) + start) // 4 + 4 * part
            ).unsafe_store[alignment=16](four)
