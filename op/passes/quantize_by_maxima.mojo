"""Quantizes matrices on Hopper by the largest magnitudes of rows and columns, or of all: as each lies, transposed, or both.

    scale = max(max |x|, 1e-12) / largest;  q = round(x / scale)

A single matrix may be a norm of the one that is read.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    thread_idx,
)
from max.gpu.memory import AddressSpace
from std.math import ceildiv
from std.memory import bitcast, stack_allocation
from std.utils import StaticTuple

from ..call import Call
from ..device import Gpu
from ..norms.layer_norm import LayerNorm
from ..norms.no_norm import NoNorm
from ..norms.norm import Norm
from ..norms.rms_norm import RmsNorm
from ..pdl import pdl_attributes, pdl_trigger, pdl_wait
from ..rows.eight_bits import largest, pack_eight_bits
from ..rows.scales import divided, scale_of
from ..rows.types import E4M3, E5M2, eight_bit_type
from .matrices import Matrices
from .normalized import normalized_pair
from .words import (
    LOAD,
    Four,
    Words,
    at,
    high_halves,
    load_words,
    low_halves,
    used_from_here,
)

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
# Blocks that an SM has room for, which bounds the registers of a thread.
comptime _BLOCKS = 3
# Tiles of a block: the second one is loaded while the first one is computed. More of them gained nothing on an H200, where
# fewer blocks share the SMs less evenly.
comptime _MOST_TILES = 2
# Waves of blocks that are left even so.
comptime _WAVES = 2
comptime _LEAST = Float64(1e-12)


def run_quantize_by_maxima(gpu: Gpu, call: Call) raises:
    """Writes each x in 8 bits, to z with its layout and transposed to zt, as far as these are given.

    Args:
        gpu: Where to run.
        call: Its matrices x [M, K] in bfloat16, K a multiple of 8; z [M, K] and z_scale [M], for rows; zt [K, pitch], the
            pitch at least M and a multiple of 16, zeros from M on, and zt_scale [K], for columns; or all with the one
            scale; the maxima, as `run_maxima` leaves them. With rstd, one matrix, and the workspace as `run_norm_maxima`
            leaves it: what is written are the rows in e4m3 once they are normalized.

    Raises:
        If there are too many matrices, or a launch fails.
    """
    if call.rstd == 0:
        comptime for kind in [E4M3, E5M2]:
            if call.eight_bits == Int(kind):
                _choose[eight_bit_type(kind), NoNorm](gpu, call)
    elif call.eight_bits != Int(E4M3):
        raise Error("normalized rows are quantized to e4m3")
    elif call.normalization == 0:
        _choose[eight_bit_type(E4M3), LayerNorm](gpu, call)
    else:
        _choose[eight_bit_type(E4M3), RmsNorm](gpu, call)


def _choose[eight_bits: DType, N: Norm](gpu: Gpu, call: Call) raises:
    if call.one_scale != 0 and call.power_of_two == 0:
        _launch[eight_bits, True, N](gpu, call)
    else:
        _launch[eight_bits, False, N](gpu, call)


def _launch[
    eight_bits: DType, multiplies: Bool, N: Norm
](gpu: Gpu, call: Call) raises:
    var matrices = Matrices(call, TILE_ROWS)
    var across = ceildiv(matrices.across, _TILE_COLUMNS)
    var tiles = min(
        max(across * matrices.down // (_WAVES * _BLOCKS * gpu.processors), 1),
        _MOST_TILES,
    )
    if tiles > 1:
        matrices = Matrices(call, tiles * TILE_ROWS)
    gpu.stream.enqueue_function(
        gpu.context.compile_function[
            quantize_kernel[eight_bits, multiplies, N]
        ](),
        matrices,
        Int32(call.one_scale),
        Int32(call.power_of_two),
        Int32(tiles),
        Int64(call.mean),
        Int64(call.rstd),
        Int64(call.gamma),
        Int64(call.beta),
        call.weight_offset.cast[DType.float32](),
        grid_dim=(across, matrices.down),
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
    eight_bits: DType, multiplies: Bool
](most: Float32, is_rounded: Bool) -> SIMD[DType.float32, 2]:
    """Returns the scale of a largest magnitude, and what numbers are multiplied by, 1 / scale."""
    comptime if multiplies:
        # As it rounds with one scale for all: by the reciprocal scale, computed in float64.
        var wide = most.cast[DType.float64]()
        var bounded = _LEAST if wide < _LEAST else wide
        var inverse = (
            largest[eight_bits]().cast[DType.float64]() / bounded
        ).cast[DType.float32]()
        return {1 / inverse, inverse}
    else:
        var scale = scale_of[eight_bits](most, is_rounded)
        return {scale, 1 / scale}


@always_inline
def _group(column: Int, group: Int) -> Int:
    """Returns where a row of the transposed tile has a group of four words.

    The order makes the threads of a warp find different banks, when they store words and when they load groups.
    """
    return group ^ (((column // LOAD) ^ column & 1) & 7)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(_THREADS)),
    `nvvm.minctasm`=SIMDLength(_BLOCKS),
)
def quantize_kernel[
    eight_bits: DType, multiplies: Bool, N: Norm
](
    matrices: Matrices,
    one_scale: Int32,
    power_of_two: Int32,
    tiles: Int32,
    means: Int64,
    rstds: Int64,
    gamma: Int64,
    beta: Int64,
    offset: Float32,
):
    """Writes matrices in 8 bits, as they lie and transposed, and the scales of both.

    Grid: (columns / 64, rows / TILE_ROWS / tiles of all matrices). Block: 256 threads; a thread has 8 columns of four rows.

    Parameters:
        eight_bits: The type, float8_e4m3fn or float8_e5m2.
        multiplies: Whether numbers are multiplied by 1 / scale, as torchao does with one scale for all; otherwise they have the
            bits of a division.
        N: The norm of x that is quantized.

    Args:
        matrices: The matrices, with maxima that are results of `maxima_kernel` or `norm_maxima_kernel`.
        one_scale: Whether all scales are one.
        power_of_two: Whether scales are rounded up to powers of two.
        tiles: How many tiles a block has, one below the other.
        means: Address of the means of rows [m], for a norm that has them.
        rstds: Address of what rows are multiplied by [m], for a norm.
        gamma: Address of factors [k] in bfloat16, or 0.
        beta: Address of what is added [k] in bfloat16, or 0.
        offset: Added to gamma, if there is one.
    """
    pdl_wait()
    pdl_trigger()
    var matrix = matrices.pieces[0]
    comptime if not N.has_rstd:
        matrix = matrices.of_block(block_idx.y)
    var maxima = matrix.maxima
    var z = matrix.z
    var zt = matrix.zt
    var m = matrix.m
    var k = matrix.k
    var whole = Int(matrix.whole)
    var to_rows = Int(matrix.to_rows)
    var pitch = matrix.pitch
    var first_column = Int(block_idx.x) * _TILE_COLUMNS
    # Another matrix is wider.
    if first_column >= Int(k):
        return
    var thread = Int(thread_idx.x)
    var warp_here = thread // 32
    var own = (warp_here % _HALVES * _ACROSS + thread % _ACROSS) * LOAD
    var down = warp_here // _HALVES * 4 + thread % 32 // _ACROSS
    var column = first_column + own
    var is_here = column < Int(k)
    var is_one = multiplies or one_scale != 0
    comptime assert _TILE_COLUMNS + TILE_ROWS <= _THREADS
    # Divisions take longer than all else does to a number: one thread for each scale, first those of columns.
    var r = thread - _TILE_COLUMNS
    var has_row = z != 0 and r >= 0 and r < TILE_ROWS
    var first_row = (
        (Int(block_idx.y) - Int(matrix.first)) * Int(tiles) * TILE_ROWS
    )
    var end = min(first_row + Int(tiles) * TILE_ROWS, max(Int(m), Int(pitch)))
    # Places of a thread in the first tile, and how many rows there are from there on.
    var row = first_row + 4 * down
    var left = Int32(Int(m) - row) if is_here else Int32(0)
    var from_x = matrix.x + Int64(2 * (row * Int(k) + column))
    var to_z = z + Int64(row * whole + column)
    var its_column = thread // 4
    comptime groups = TILE_ROWS // 16 // 4
    var its_place = first_row + 16 * groups * (thread % 4)
    var to_zt = zt + Int64((first_column + its_column) * Int(pitch) + its_place)
    # Bytes of its row of the transposed result from there on.
    var width = Int32(Int(pitch) - its_place)
    if first_column + its_column >= Int(k) or zt == 0:
        width = 0
    var next = _rows(from_x, Int(k), left)
    var its_maximum = _maximum_of_row(
        maxima, first_row + r, Int(m), to_rows, has_row, is_one
    )
    var of_columns = stack_allocation[
        2 * _TILE_COLUMNS, Float32, address_space=AddressSpace.SHARED
    ]()
    var of_rows = stack_allocation[
        2 * TILE_ROWS, Float32, address_space=AddressSpace.SHARED
    ]()
    var room = stack_allocation[
        _TILE_COLUMNS * _PITCH,
        UInt32,
        address_space=AddressSpace.SHARED,
        alignment=16,
    ]()
    # Rstd of the rows of all tiles, one row for each thread; then the means, if there are any.
    var statistics = stack_allocation[
        _THREADS * (2 if N.has_mean else 1),
        Float32,
        address_space=AddressSpace.SHARED,
        alignment=16,
    ]()
    comptime assert _MOST_TILES * TILE_ROWS <= _THREADS
    comptime if N.has_rstd:
        if first_row + thread < min(end, Int(m)):
            statistics.unsafe_offset(thread).unsafe_store(
                at[DType.float32](rstds, first_row + thread).unsafe_load()
            )
            comptime if N.has_mean:
                statistics.unsafe_offset(_THREADS + thread).unsafe_store(
                    at[DType.float32](means, first_row + thread).unsafe_load()
                )
    # Of two columns, gamma of both and then beta of both.
    var features = stack_allocation[
        2 * _TILE_COLUMNS,
        Float32,
        address_space=AddressSpace.SHARED,
        alignment=16,
    ]()
    if thread < _TILE_COLUMNS:
        var c = first_column + thread
        comptime if N.has_rstd:
            # A -0 changes nothing, not even the sign of a zero.
            var pair = SIMD[DType.float32, 2](1, -0.0)
            if gamma != 0 and c < Int(k):
                pair[0] = offset + (
                    at[DType.bfloat16](gamma, c)
                    .unsafe_load()
                    .cast[DType.float32]()
                )
            if beta != 0 and c < Int(k):
                pair[1] = (
                    at[DType.bfloat16](beta, c)
                    .unsafe_load()
                    .cast[DType.float32]()
                )
            var place = features.unsafe_offset(thread // 2 * 4 + thread % 2)
            place.unsafe_store(pair[0])
            place.unsafe_offset(2).unsafe_store(pair[1])
        if zt != 0 and c < Int(k):
            var pair = _scale_and_inverse[eight_bits, multiplies](
                _magnitude(maxima, 0 if is_one else c), power_of_two != 0
            )
            of_columns.unsafe_offset(thread).unsafe_store(pair[0])
            of_columns.unsafe_offset(_TILE_COLUMNS + thread).unsafe_store(
                pair[1]
            )
            if first_row == 0:
                at[DType.float32](matrix.zt_scale, c).unsafe_store(pair[0])
    for start in range(first_row, end, TILE_ROWS):
        var rows = next
        if has_row and start + r < Int(m):
            var pair = _scale_and_inverse[eight_bits, multiplies](
                its_maximum, power_of_two != 0
            )
            of_rows.unsafe_offset(2 * r).unsafe_store[alignment=8](pair)
            if block_idx.x == 0:
                at[DType.float32](matrix.z_scale, start + r).unsafe_store(
                    pair[0]
                )
        barrier()
        comptime if N.has_rstd:
            var its_rows = statistics.unsafe_offset(
                start - first_row + 4 * down
            )
            var rstd = its_rows.unsafe_load[width=4, alignment=16]()
            var mean = Four(0)
            comptime if N.has_mean:
                mean = its_rows.unsafe_offset(_THREADS).unsafe_load[
                    width=4, alignment=16
                ]()
            comptime for j in range(LOAD // 2):
                var of_pair = features.unsafe_offset(
                    2 * own + 4 * j
                ).unsafe_load[width=4, alignment=16]()
                comptime for i in range(4):
                    rows[i][j] = normalized_pair[N](
                        rows[i][j],
                        mean[i],
                        rstd[i],
                        {of_pair[0], of_pair[1]},
                        {of_pair[2], of_pair[3]},
                    )
        # The next tile is on its way while this one is computed.
        from_x += Int64(2 * TILE_ROWS * Int(k))
        if start + TILE_ROWS < end:
            next = _rows(from_x, Int(k), left - TILE_ROWS)
            its_maximum = _maximum_of_row(
                maxima,
                start + TILE_ROWS + r,
                Int(m),
                to_rows,
                has_row,
                is_one,
            )
        rows = _used_from_here(rows)
        if z != 0:
            comptime for i in range(4):
                if Int32(i) < left:
                    var pair = of_rows.unsafe_offset(
                        2 * (4 * down + i)
                    ).unsafe_load[width=2, alignment=8]()
                    # The first numbers of pairs, then the second ones.
                    var low = _quotients[multiplies](
                        low_halves(rows[i]), Four(pair[0]), Four(pair[1])
                    )
                    var high = _quotients[multiplies](
                        high_halves(rows[i]), Four(pair[0]), Four(pair[1])
                    )
                    at[DType.uint32](to_z + Int64(i * whole), 0).unsafe_store[
                        alignment=8
                    ](
                        SIMD[DType.uint32, 2](
                            pack_eight_bits[eight_bits](
                                Four(low[0], high[0], low[1], high[1])
                            ),
                            pack_eight_bits[eight_bits](
                                Four(low[2], high[2], low[3], high[3])
                            ),
                        )
                    )
        if zt != 0:
            rows = _used_from_here(rows)
            # What a padded row of scales of NaN or infinity would make of zeros is not stored.
            var kept = UInt32(0)
            comptime for i in range(4):
                if Int32(i) < left:
                    kept |= UInt32(0xFF << (8 * i))
            var scales = of_columns.unsafe_offset(own).unsafe_load[
                width=LOAD, alignment=16
            ]()
            var inverses = of_columns.unsafe_offset(
                _TILE_COLUMNS + own
            ).unsafe_load[width=LOAD, alignment=16]()
            comptime for j in range(LOAD):
                var words = Words(
                    rows[0][j // 2],
                    rows[1][j // 2],
                    rows[2][j // 2],
                    rows[3][j // 2],
                )
                var q = _quotients[multiplies](
                    high_halves(words) if j % 2 == 1 else low_halves(words),
                    Four(scales[j]),
                    Four(inverses[j]),
                )
                var place = _group(own + j, down // 4) * 4 + down % 4
                room.unsafe_offset((own + j) * _PITCH + place).unsafe_store(
                    pack_eight_bits[eight_bits](q) & kept
                )
        barrier()
        comptime for part in range(groups):
            if Int32(16 * part) < width:
                var group = thread % 4 * groups + part
                var four = room.unsafe_offset(
                    its_column * _PITCH + _group(its_column, group) * 4
                ).unsafe_load[width=4, alignment=16]()
                at[DType.uint32](to_zt + Int64(16 * part), 0).unsafe_store[
                    alignment=16
                ](four)
        left -= TILE_ROWS
        width -= TILE_ROWS
        to_z += Int64(TILE_ROWS * whole)
        to_zt += Int64(TILE_ROWS)


@always_inline
def _rows(address: Int64, k: Int, left: Int32) -> StaticTuple[Words, 4]:
    """Loads 8 columns of four rows, zeros where there are none."""
    var rows = StaticTuple[Words, 4](fill=Words(0))
    comptime for i in range(4):
        if Int32(i) < left:
            rows[i] = load_words(address, i * k)
    return rows


@always_inline
def _maximum_of_row(
    maxima: Int64, row: Int, m: Int, to_rows: Int, has_row: Bool, is_one: Bool
) -> Float32:
    if has_row and row < m:
        return _magnitude(maxima, 0 if is_one else to_rows + row)
    return 0


@always_inline
def _used_from_here(rows: StaticTuple[Words, 4]) -> StaticTuple[Words, 4]:
    """Returns the same words.

    Without it, the compiler widens numbers for both results before it reads maxima: no block waits for its loads and for those
    of maxima at the same time.
    """
    var same = rows
    comptime for i in range(4):
        same[i] = used_from_here(rows[i])
    return same


@always_inline
def _quotients[multiplies: Bool](z: Four, scale: Four, inverse: Four) -> Four:
    comptime if multiplies:
        return z * inverse
    else:
        return divided[width=4](z, scale, inverse)
