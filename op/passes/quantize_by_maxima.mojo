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
from .maxima import LOAD, at

comptime TILE_ROWS = 128
"""Rows of a block's tile, of which a thread has four: with a column each a word of 8 bits."""
comptime _TILE_COLUMNS = 64
# Four threads store a row of the transposed tile.
comptime _THREADS = 4 * _TILE_COLUMNS
# A warp has eight threads across, and four down.
comptime _ACROSS = 8
comptime _HALVES = _TILE_COLUMNS // (_ACROSS * LOAD)
# Words of a row of the transposed tile.
comptime _PITCH = TILE_ROWS // 4
comptime _LEAST = Float64(1e-12)
comptime _Eight = SIMD[DType.float32, LOAD]


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
                    ceildiv(call.K, _TILE_COLUMNS),
                    ceildiv(max(call.M, call.pitch), TILE_ROWS),
                ),
                block_dim=_THREADS,
                attributes=pdl_attributes(),
            )


@always_inline
def _magnitude(maxima: Int64, index: Int) -> Float32:
    return bitcast[DType.float32](
        at[DType.uint32](maxima, index).unsafe_load() << 16
    )


@always_inline
def _scale_and_inverse[
    eight_bits: DType
](most: Float32, is_rounded: Bool, is_torchao: Bool) -> SIMD[DType.float32, 2]:
    """Returns the scale of a largest magnitude, and what numbers are multiplied by, 1 / scale."""
    if is_torchao:
        # As it rounds with one scale for all: by the reciprocal scale, computed in float64.
        var wide = most.cast[DType.float64]()
        var bounded = _LEAST if wide < _LEAST else wide
        var inverse = (
            largest[eight_bits]().cast[DType.float64]() / bounded
        ).cast[DType.float32]()
        return {1 / inverse, inverse}
    var scale = scale_of[eight_bits](most, is_rounded)
    return {scale, 1 / scale}


@always_inline
def _group(column: Int, group: Int) -> Int:
    """Returns where a row of the transposed tile has a group of four words.

    The order makes the threads of a warp find different banks, when they store words and when they load groups.
    """
    return group ^ (((column // LOAD) ^ column & 1) & 7)


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

    Grid: (k / 64, rows / TILE_ROWS). Block: 256 threads; a thread has 8 columns of four rows.

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
    pdl_wait()
    pdl_trigger()
    var thread = Int(thread_idx.x)
    var warp_here = thread // 32
    var first_column = Int(block_idx.x) * _TILE_COLUMNS
    var first_row = Int(block_idx.y) * TILE_ROWS
    var own = (warp_here % _HALVES * _ACROSS + thread % _ACROSS) * LOAD
    var down = warp_here // _HALVES * 4 + thread % 32 // _ACROSS
    var column = first_column + own
    var row = first_row + 4 * down
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
    # Divisions take longer than all else does to a number: one thread for each scale, first those of columns.
    var of_columns = stack_allocation[
        2 * _TILE_COLUMNS, Float32, address_space=AddressSpace.SHARED
    ]()
    var of_rows = stack_allocation[
        2 * TILE_ROWS, Float32, address_space=AddressSpace.SHARED
    ]()
    comptime assert _TILE_COLUMNS + TILE_ROWS <= _THREADS
    var is_one = one_scale != 0
    var is_torchao = is_one and power_of_two == 0
    if thread < _TILE_COLUMNS:
        var c = first_column + thread
        if zt != 0 and c < Int(k):
            var pair = _scale_and_inverse[eight_bits](
                _magnitude(maxima, 0 if is_one else c),
                power_of_two != 0,
                is_torchao,
            )
            of_columns.unsafe_offset(thread).unsafe_store(pair[0])
            of_columns.unsafe_offset(_TILE_COLUMNS + thread).unsafe_store(
                pair[1]
            )
            if block_idx.y == 0:
                at[DType.float32](zt_scales, c).unsafe_store(pair[0])
    elif thread < _TILE_COLUMNS + TILE_ROWS:
        var r = thread - _TILE_COLUMNS
        var its_row = first_row + r
        if z != 0 and its_row < Int(m):
            var pair = _scale_and_inverse[eight_bits](
                _magnitude(maxima, 0 if is_one else Int(k) + its_row),
                power_of_two != 0,
                is_torchao,
            )
            of_rows.unsafe_offset(2 * r).unsafe_store[alignment=8](pair)
            if block_idx.x == 0:
                at[DType.float32](z_scales, its_row).unsafe_store(pair[0])
    barrier()
    if z != 0 and is_here:
        comptime for i in range(4):
            if row + i < Int(m):
                var pair = of_rows.unsafe_offset(
                    2 * (4 * down + i)
                ).unsafe_load[width=2, alignment=8]()
                var q = _quotients[LOAD](
                    rebind[_Eight](widened[DType.float32](rows[i])),
                    _Eight(pair[0]),
                    _Eight(pair[1]),
                    is_torchao,
                )
                at[DType.uint32](
                    z, ((row + i) * Int(k) + column) // 4
                ).unsafe_store[alignment=8](
                    SIMD[DType.uint32, 2](
                        pack_eight_bits[eight_bits](q.slice[4]()),
                        pack_eight_bits[eight_bits](q.slice[4, offset=4]()),
                    )
                )
    if zt == 0:
        return
    var room = stack_allocation[
        _TILE_COLUMNS * _PITCH,
        UInt32,
        address_space=AddressSpace.SHARED,
        alignment=16,
    ]()
    # What a padded row of scales of NaN or infinity would make of zeros is not stored.
    var kept = UInt32(0)
    comptime for i in range(4):
        if row + i < Int(m):
            kept |= UInt32(0xFF << (8 * i))
    var scales = of_columns.unsafe_offset(own).unsafe_load[
        width=LOAD, alignment=16
    ]()
    var inverses = of_columns.unsafe_offset(_TILE_COLUMNS + own).unsafe_load[
        width=LOAD, alignment=16
    ]()
    comptime for j in range(LOAD):
        comptime Four = SIMD[DType.float32, 4]
        var four = rebind[Four](
            widened[DType.float32](
                SIMD[DType.bfloat16, 4](
                    rows[0][j], rows[1][j], rows[2][j], rows[3][j]
                )
            )
        )
        var q = _quotients[4](
            four, Four(scales[j]), Four(inverses[j]), is_torchao
        )
        var place = _group(own + j, down // 4) * 4 + down % 4
        room.unsafe_offset((own + j) * _PITCH + place).unsafe_store(
            pack_eight_bits[eight_bits](q) & kept
        )
    barrier()
    var its_column = thread // 4
    if first_column + its_column >= Int(k):
        return
    comptime groups = TILE_ROWS // 16 // 4
    comptime for part in range(groups):
        var group = thread % 4 * groups + part
        var start = first_row + 16 * group
        if start < Int(pitch):
            var four = room.unsafe_offset(
                its_column * _PITCH + _group(its_column, group) * 4
            ).unsafe_load[width=4, alignment=16]()
            at[DType.uint32](
                zt, ((first_column + its_column) * Int(pitch) + start) // 4
            ).unsafe_store[alignment=16](four)


@always_inline
def _quotients[
    width: Int
](
    z: SIMD[DType.float32, width],
    scale: SIMD[DType.float32, width],
    inverse: SIMD[DType.float32, width],
    is_torchao: Bool,
) -> SIMD[DType.float32, width]:
    if is_torchao:
        return z * inverse
    return divided(z, scale, inverse)
