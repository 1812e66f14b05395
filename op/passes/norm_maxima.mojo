"""Finds the largest magnitudes of rows and columns of normalized rows, or of all, on Hopper; also the statistics of the norm.

    z = round((x - mean) rstd (gamma + offset) + beta)

Z is not written: `quantize_by_maxima` computes it again from the statistics.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_dim,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp
from std.math import ceildiv
from std.memory import stack_allocation
from std.sys import llvm_intrinsic
from std.utils import StaticTuple

from ..call import Call
from ..device import Gpu
from ..gemm.sm90.barriers import named_barrier_sync
from ..norms.layer_norm import LayerNorm
from ..norms.norm import Norm
from ..norms.rms_norm import RmsNorm
from ..magnitudes import MAGNITUDES, keep_largest, larger_half, larger_halves
from ..pdl import pdl_attributes, pdl_trigger, pdl_wait
from .normalized import normalized_pair, widened_pair
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

comptime _THREADS = 512
comptime _WARPS = _THREADS // 32
# Loads of a row that a thread has, and elements from one to the next.
comptime _TILE = 4
comptime _STEP = 32 * LOAD
# Elements of a row that a warp has.
comptime _WARP_COLUMNS = _TILE * _STEP
comptime LONGEST_NORMALIZED = _WARPS * _WARP_COLUMNS
"""The most elements of a row."""
# Two numbers in bfloat16 each: what stands for a gamma that is not there, and for a beta.
comptime _ONES = Words(0x3F803F80)
comptime _NOTHING = Words(0x80008000)

comptime _Row = StaticTuple[Words, _TILE]
comptime _Sums = SIMD[DType.float32, 2]


def run_norm_maxima(gpu: Gpu, call: Call) raises:
    """Writes mean and rstd of x, and maxima of the normalized rows.

    Args:
        gpu: Where to run.
        call: The matrix x [M, K] in bfloat16, K a multiple of 8 and at most `LONGEST_NORMALIZED`; the norm with its gamma and
            beta in bfloat16; rstd, and of a LayerNorm mean; one_scale, z and the workspace as for `run_maxima`.

    Raises:
        If a launch fails.
    """
    if call.K > LONGEST_NORMALIZED:
        raise Error(t"rows of {call.K} elements are too long for registers")
    if call.normalization == 0:
        _launch[LayerNorm, True](gpu, call)
    elif call.beta != 0:
        _launch[RmsNorm, True](gpu, call)
    else:
        _launch[RmsNorm, False](gpu, call)


def _launch[N: Norm, has_beta: Bool](gpu: Gpu, call: Call) raises:
    comptime kernel = norm_maxima_kernel[N, has_beta]
    var warps = ceildiv(call.K, _WARP_COLUMNS)
    var rows = _WARPS // warps
    gpu.stream.enqueue_function(
        gpu.context.compile_function[kernel](),
        Int64(call.x),
        Int64(call.gamma),
        Int64(call.beta),
        Int64(call.mean),
        Int64(call.rstd),
        Int64(call.workspace),
        call.weight_offset.cast[DType.float32]() if call.gamma
        != 0 else Float32(0),
        call.eps.cast[DType.float32](),
        Int32(call.M),
        Int32(call.K),
        Int32(warps),
        Int32(call.one_scale),
        Int32(call.z != 0),
        grid_dim=min(gpu.processors, ceildiv(call.M, rows)),
        block_dim=rows * warps * 32,
        attributes=pdl_attributes(),
    )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(_THREADS)),
    `nvvm.minctasm`=SIMDLength(1),
)
def norm_maxima_kernel[
    N: Norm, has_beta: Bool
](
    x: Int64,
    gamma: Int64,
    beta: Int64,
    means: Int64,
    rstds: Int64,
    maxima: Int64,
    offset: Float32,
    eps: Float32,
    m: Int32,
    k: Int32,
    warps: Int32,
    one_scale: Int32,
    of_rows: Int32,
):
    """Finds the statistics of rows, and the bits of the largest magnitudes once they are normalized, those of bfloat16.

    Grid: as many blocks as run at one time. Block: whole groups of warps; each group has a row at a time.

    Parameters:
        N: The norm.
        has_beta: Whether there may be a beta.

    Args:
        x: Address of the matrix [m, k] in bfloat16.
        gamma: Address of the factors [k], or 0.
        beta: Address of what is added [k], or 0.
        means: Address of the means [m], if rows are centered.
        rstds: Address of what rows are multiplied by [m].
        maxima: Address of the maxima, which are at least zero: of columns [k], and then of rows [m]; or one.
        offset: Added to gamma.
        eps: Added to the variance.
        m: Rows.
        k: Columns, a multiple of 8.
        warps: Warps of a group.
        one_scale: Whether there is one maximum of all.
        of_rows: Whether those of rows are wanted as well.
    """
    pdl_wait()
    pdl_trigger()
    var warp_here = Int32(thread_idx.x) // 32
    var lane = Int32(thread_idx.x) % 32
    var group = warp_here // warps
    var rows = Int32(block_dim.x) // (32 * warps)
    var own = warp_here - group * warps
    # Each warp has neighboring columns, a thread every 32nd load of them.
    var column = own * _WARP_COLUMNS + lane * LOAD
    var left = k - column
    var team = _Team(group, warps, own, lane)
    var gammas = _Row(fill=_ONES)
    if gamma != 0:
        gammas = _load(gamma + Int64(2 * column), left)
    var from_beta = beta + Int64(2 * column)
    var from_x = x + Int64(2 * column)
    var most = _Row(fill=Words(0))
    var row = Int32(block_idx.x) * rows + group
    var rows_of_step = Int32(grid_dim.x) * rows
    var next = _Row(fill=Words(0))
    if row < m:
        next = _load(from_x + Int64(2 * Int(row) * Int(k)), left)
    # All threads of a group have the same rows.
    while row < m:
        var here = next
        # The next row is on its way while this one is computed.
        if row + rows_of_step < m:
            next = _load(
                from_x + Int64(2 * Int(row + rows_of_step) * Int(k)), left
            )
        var mean = Float32(0)
        var inverse_k = 1 / Float32(k)
        comptime if N.has_mean:
            mean = team.totals[True, False](_sums[False](here, 0, left))[0]
            mean *= inverse_k
        # About this mean, whose rounding is the mean of what is left.
        var sums = team.totals[N.has_mean, True](
            _sums[N.has_mean](here, mean, left)
        )
        var rstd = N.rstd(sums[0], sums[1], inverse_k, eps)
        comptime if N.has_mean:
            mean += sums[0] * inverse_k
        if column == 0:
            comptime if N.has_mean:
                at[DType.float32](means, Int(row)).unsafe_store(mean)
            at[DType.float32](rstds, Int(row)).unsafe_store(rstd)
        var largest = Words(0)
        comptime for i in range(_TILE):
            if Int32(i * _STEP) < left:
                var words = used_from_here(here[i])
                # In the loop: widened before it, they would take twice the registers.
                var gamma_here = used_from_here(gammas[i])
                var beta_here = _NOTHING
                comptime if has_beta:
                    # From a cache: registers hold no more of each row.
                    if beta != 0:
                        beta_here = load_words(from_beta, i * _STEP)
                comptime for j in range(LOAD // 2):
                    var z = (
                        normalized_pair[N](
                            words[j],
                            mean,
                            rstd,
                            widened_pair(gamma_here[j]) + offset,
                            widened_pair(beta_here[j]),
                        )
                        & MAGNITUDES
                    )
                    most[i][j] = larger_halves(most[i][j], z)
                    largest[j] = larger_halves(largest[j], z)
        if one_scale == 0 and of_rows != 0:
            var bits = _largest_of_warp(_larger_half_of(largest))
            if lane == 0:
                keep_largest(maxima, Int(k) + Int(row), bits)
        row += rows_of_step
    if one_scale != 0:
        var largest = Words(0)
        comptime for i in range(_TILE):
            comptime for j in range(LOAD // 2):
                largest[j] = larger_halves(largest[j], most[i][j])
        var bits = _largest_of_warp(_larger_half_of(largest))
        if lane == 0:
            keep_largest(maxima, 0, bits)
    else:
        _keep_columns(
            most,
            maxima,
            column,
            k,
            group * warps * _WARP_COLUMNS,
            warps * _WARP_COLUMNS,
            rows,
        )


@always_inline
def _load(address: Int64, left: Int32) -> _Row:
    """Loads a thread's share of a row that has so many elements from there on, zeros beyond its end."""
    var row = _Row(fill=Words(0))
    comptime for i in range(_TILE):
        if Int32(i * _STEP) < left:
            row[i] = load_words(address, i * _STEP)
    return row


@always_inline
def _sums[has_mean: Bool](row: _Row, mean: Float32, left: Int32) -> _Sums:
    """Returns the sums of a thread's numbers less a mean, and of their squares."""
    var sums = Four(0)
    var squares = Four(0)
    comptime for i in range(_TILE):
        # Zeros beyond the end of the row are not so once the mean is taken off.
        if not has_mean or Int32(i * _STEP) < left:
            var words = used_from_here(row[i])
            comptime for is_high in [False, True]:
                var v = high_halves(words) if is_high else low_halves(words)
                comptime if has_mean:
                    v -= mean
                sums += v
                squares = v.fma(v, squares)
    return {sums.reduce_add(), squares.reduce_add()}


@always_inline
def _larger_half_of(words: Words) -> UInt32:
    return larger_half(
        larger_halves(
            larger_halves(words[0], words[1]), larger_halves(words[2], words[3])
        )
    )


@always_inline
def _largest_of_warp(bits: UInt32) -> UInt32:
    # An intrinsic: the compiler knows that all lanes have to arrive at one and the same instruction.
    return llvm_intrinsic["llvm.nvvm.redux.sync.umax", UInt32](
        bits, UInt32(0xFFFFFFFF)
    )


struct _Team(TrivialRegisterPassable):
    """The warps that have a row, and where they exchange sums."""

    var group: Int32
    var warps: Int32
    var own: Int32
    var lane: Int32
    var room: Pointer[
        Float32, MutUntrackedOrigin, address_space=AddressSpace.SHARED
    ]
    var half: Int32

    @always_inline
    def __init__(out self, group: Int32, warps: Int32, own: Int32, lane: Int32):
        self.group = group
        self.warps = warps
        self.own = own
        self.lane = lane
        self.room = stack_allocation[
            4 * _WARPS,
            Float32,
            address_space=AddressSpace.SHARED,
            alignment=8,
        ]()
        self.half = 0

    @always_inline
    def totals[
        of_numbers: Bool, of_squares: Bool
    ](mut self, given: _Sums) -> _Sums:
        """Adds up what all threads of the row have, as far as it is wanted; they get the same bits."""
        var sums = given
        comptime for distance in [16, 8, 4, 2, 1]:
            sums += _exchanged[of_numbers, of_squares](sums, distance)
        if self.warps == 1:
            return sums
        # Two halves, so that one barrier is enough.
        var first = self.room.unsafe_offset(
            Int(self.half + 2 * self.group * self.warps)
        )
        self.half = 2 * _WARPS - self.half
        if self.lane == 0:
            first.unsafe_offset(Int(2 * self.own)).unsafe_store[alignment=8](
                sums
            )
        named_barrier_sync(1 + self.group, 32 * self.warps)
        sums = 0
        if self.lane % _WARPS < self.warps:
            sums = first.unsafe_offset(
                Int(2 * (self.lane % _WARPS))
            ).unsafe_load[width=2, alignment=8]()
        comptime for distance in [8, 4, 2, 1]:
            sums += _exchanged[of_numbers, of_squares](sums, distance)
        return sums


@always_inline
def _exchanged[
    of_numbers: Bool, of_squares: Bool
](sums: _Sums, distance: Int) -> _Sums:
    var others = _Sums(0)
    comptime if of_numbers:
        others[0] = warp.shuffle_xor(sums[0], UInt32(distance))
    comptime if of_squares:
        others[1] = warp.shuffle_xor(sums[1], UInt32(distance))
    return others


@always_inline
def _keep_columns(
    most: _Row,
    maxima: Int64,
    column: Int32,
    k: Int32,
    first: Int32,
    columns: Int32,
    rows: Int32,
):
    """Compares what all groups of a block have of columns, and keeps the maxima."""
    # Half a word for each column of every group; those of this group from `first` on.
    var room = stack_allocation[
        LONGEST_NORMALIZED // 2,
        UInt32,
        address_space=AddressSpace.SHARED,
        alignment=16,
    ]()
    comptime for i in range(_TILE):
        room.unsafe_offset(
            Int(first + column) // 2 + i * _STEP // 2
        ).unsafe_store[alignment=16](most[i])
    barrier()
    # Blocks begin with different columns: maxima of the same ones wait for each other.
    var count = ceildiv(k, Int32(block_dim.x))
    for part in range(count):
        var which = (part + Int32(block_idx.x)) % count
        var here = which * Int32(block_dim.x) + Int32(thread_idx.x)
        if here < k:
            var pair = UInt32(0)
            for other in range(rows):
                pair = larger_halves(
                    pair,
                    room.unsafe_offset(
                        Int(other * columns + here) // 2
                    ).unsafe_load(),
                )
            var bits = pair >> 16 if here % 2 == 1 else pair & 0xFFFF
            keep_largest(maxima, Int(here), bits)
