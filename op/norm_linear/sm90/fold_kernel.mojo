"""The kernel that folds a norm into a weight, and reads each of its rows once.

A group of whole warps processes a few rows together. Each thread holds the same columns of all of them in registers,
and those of gamma and beta, which are thus read once for several rows; all loads are in flight together. Rows that
are too long for the registers of a block are processed in parts: forward for the sums, and backward for the fold, so
that the part that was read last is not read again.
"""

from std.memory import stack_allocation
from std.utils import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_dim,
    block_idx,
    thread_idx,
)
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp

from ...norms.norm import Norm
from ...pdl import pdl_trigger, pdl_wait
from ...rows.gpu_elements import widen

comptime WIDTH = 8
"""Elements of a load."""
comptime LOADS = 2
"""Loads that a thread holds of a row."""
comptime _Floats = SIMD[DType.float32, WIDTH]
comptime _Shared = Pointer[
    Float32, MutUntrackedOrigin, address_space=AddressSpace.SHARED
]


@fieldwise_init
struct FoldShape(TrivialRegisterPassable):
    """Who folds, at compile time."""

    var rows: Int
    """Rows that a group takes together: a divisor of 8."""
    var threads: Int
    """The most threads of a block."""
    var blocks: Int
    """How many such blocks must fit into the registers of an SM."""


@fieldwise_init
struct _Part[dtype: DType, norm_dtype: DType, rows: Int](
    TrivialRegisterPassable
):
    """What a thread holds of some rows, and of gamma and beta."""

    var weights: StaticTuple[SIMD[Self.dtype, WIDTH], Self.rows * LOADS]
    var gamma: StaticTuple[SIMD[Self.norm_dtype, WIDTH], LOADS]
    var beta: StaticTuple[SIMD[Self.norm_dtype, WIDTH], LOADS]

    @always_inline
    def __init__(
        out self,
        weight: Pointer[Scalar[Self.dtype], MutAnyOrigin],
        gamma: Pointer[Scalar[Self.norm_dtype], MutAnyOrigin],
        beta: Pointer[Scalar[Self.norm_dtype], MutAnyOrigin],
        column: Int32,
        step: Int32,
        k: Int32,
        has_gamma: Int32,
        has_beta: Int32,
    ):
        """Starts all loads; columns beyond the last one are zeros."""
        self.weights = {fill = SIMD[Self.dtype, WIDTH](0)}
        self.gamma = {fill = SIMD[Self.norm_dtype, WIDTH](0)}
        self.beta = {fill = SIMD[Self.norm_dtype, WIDTH](0)}
        comptime for i in range(LOADS):
            var at = column + Int32(i) * step
            if at < k:
                comptime for r in range(Self.rows):
                    self.weights[r * LOADS + i] = _load(
                        weight, Int(at) + r * Int(k)
                    )
                if has_gamma != 0:
                    self.gamma[i] = _load(gamma, Int(at))
                if has_beta != 0:
                    self.beta[i] = _load(beta, Int(at))

    @always_inline
    def scale(self, i: Int, has_gamma: Int32, offset: Float32) -> _Floats:
        """Returns what a load's columns are multiplied by."""
        var own = _wide(self.gamma[i]) + offset
        return own if has_gamma != 0 else _Floats(1)


@always_inline
def _load[
    dtype: DType
](start: Pointer[Scalar[dtype], MutAnyOrigin], index: Int) -> SIMD[
    dtype, WIDTH
]:
    return start.unsafe_offset(index).unsafe_load[width=WIDTH, alignment=16]()


@always_inline
def _wide[dtype: DType, //](values: SIMD[dtype, WIDTH]) -> _Floats:
    return widen[dtype=dtype, width=WIDTH, accum=DType.float32](values)


@always_inline
def _sum(values: _Floats, start: Float32) -> Float32:
    """Adds one after the other: sums of several rows are in flight together."""
    var sum = start
    comptime for i in range(WIDTH):
        sum += values[i]
    return sum


@always_inline
def _dot(a: _Floats, b: _Floats, start: Float32) -> Float32:
    var sum = start
    comptime for i in range(WIDTH):
        sum = a[i].fma(b[i], sum)
    return sum


@always_inline
def _across_lanes[
    count: Int, distance: Int
](values: SIMD[DType.float32, count], lane: UInt32) -> Float32:
    """Adds up what the lanes of a warp have: lane / (32 / count) says which sum is left in a lane."""
    comptime if distance == 0:
        return values[0]
    elif count == 1:
        return _across_lanes[1, distance // 2](
            values[0] + warp.shuffle_xor(values[0], UInt32(distance)), lane
        )
    else:
        # Each half of the lanes goes on with half of the sums.
        comptime half = count // 2
        var kept = SIMD[DType.float32, half]()
        comptime for i in range(half):
            var upper = lane & UInt32(distance) != 0
            var own = values[half + i] if upper else values[i]
            var other = values[i] if upper else values[half + i]
            kept[i] = own + warp.shuffle_xor(other, UInt32(distance))
        return _across_lanes[half, distance // 2](kept, lane)


@always_inline
def _across_group[
    count: Int, //
](
    values: SIMD[DType.float32, count],
    shared: _Shared,
    lane: UInt32,
    first_warp: Int,
    warps: Int,
) -> Float32:
    """Adds up what the threads of a group have, in the same order every time; the whole block takes part."""
    comptime lanes = 32 // count
    var index = Int(lane) // lanes
    var sum = _across_lanes[count, 16](values, lane)
    if Int(lane) % lanes == 0:
        var own = (first_warp + Int(thread_idx.x) // 32) * count + index
        shared.unsafe_offset(own).unsafe_store(sum)
    barrier()
    var total = Float32(0)
    for i in range(Int(lane) % lanes, warps, lanes):
        total += shared.unsafe_offset(
            (first_warp + i) * count + index
        ).unsafe_load()
    return _across_lanes[1, lanes // 2](total, lane)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(shape.threads)),
    `nvvm.minctasm`=SIMDLength(shape.blocks),
)
@__name(t"fused_norm_fold_{dtype}_{norm_dtype}_{shape.threads}")
def fold_kernel[
    dtype: DType, norm_dtype: DType, N: Norm, shape: FoldShape
](
    folded: Pointer[Scalar[dtype], MutAnyOrigin],
    s: Pointer[Float32, MutAnyOrigin],
    c: Pointer[Float32, MutAnyOrigin],
    weight: Pointer[Scalar[dtype], MutAnyOrigin],
    gamma: Pointer[Scalar[norm_dtype], MutAnyOrigin],
    beta: Pointer[Scalar[norm_dtype], MutAnyOrigin],
    bias: Pointer[Scalar[dtype], MutAnyOrigin],
    up: Pointer[Scalar[dtype], MutAnyOrigin],
    up_bias: Pointer[Scalar[dtype], MutAnyOrigin],
    gates: Int32,
    n: Int32,
    k: Int32,
    has_gamma: Int32,
    has_beta: Int32,
    has_bias: Int32,
    offset: Float32,
):
    """Folds a few rows of the weight for each group of threads.

    Grid: rows / (groups of a block * shape.rows). Block: (threads of a group, whole warps; groups), at most
    shape.threads threads.

    Pointers are mutable because parameters may still be being written when this kernel starts; loads may not bypass
    the coherent path.

    Parameters:
        dtype: Type of the weight and the bias.
        norm_dtype: Type of gamma and beta.
        N: The norm.
        shape: Who folds.

    Args:
        folded: Receives the folded weight [N, K].
        s: Receives the row sums of the folded weight [N].
        c: Receives the constants of the columns of y [N].
        weight: The weight [N, K]; each row starts at a multiple of 16 bytes.
        gamma: Scale of the normalized features [K].
        beta: Shift of the normalized features [K].
        bias: Bias of the linear layer [N].
        up: The weight that the first one gates, in the same layout, if it is a gate.
        up_bias: Bias of that.
        gates: Whether it is one: eight rows of the weight and eight of the other then alternate.
        n: Rows of the folded weight, at least shape.rows; a multiple of 8 before a gate.
        k: Columns of the weight, a multiple of 8; 0 if only the constants are wanted, and nothing is centered.
        has_gamma: Whether there is a gamma; ones stand for none.
        has_beta: Whether there is a beta.
        has_bias: Whether there is a bias.
        offset: Added to gamma, if there is one.
    """
    comptime rows = shape.rows
    comptime warps_of_block = shape.threads // 32
    pdl_wait()
    pdl_trigger()
    var shared = stack_allocation[
        warps_of_block * 3 * rows,
        Float32,
        address_space=AddressSpace.SHARED,
        alignment=16,
    ]()
    var lane = UInt32(thread_idx.x) % 32
    var group = Int32(block_dim.x)
    var in_group = Int32(thread_idx.x)
    var warps = Int(group) // 32
    var first_warp = Int(thread_idx.y) * warps
    var first = Int32(rows) * (
        Int32(block_idx.x) * Int32(block_dim.y) + Int32(thread_idx.y)
    )
    # A group that has no rows folds the last ones without storing them; one that has some of them, together with
    # the group before, which stores the same.
    var is_real = first < n
    first = min(first, n - Int32(rows))
    var source = Int(first)
    var its_weight = weight
    var its_bias = bias
    if gates != 0:
        source = Int(first // 16 * 8 + first % 8)
        if first % 16 >= 8:
            its_weight = up
            its_bias = up_bias
    var rows_of_weight = its_weight.unsafe_offset(source * Int(k))
    var folded_rows = folded.unsafe_offset(Int(first) * Int(k))
    var step = group * WIDTH

    var column = in_group * WIDTH
    comptime Part = _Part[dtype, norm_dtype, rows]
    var part = Part(
        rows_of_weight, gamma, beta, column, step, k, has_gamma, has_beta
    )
    var centers = SIMD[DType.float32, rows](0)
    var constants = Float32(0)
    if N.has_mean or has_beta != 0:
        # What the center is of, then what the constants are.
        var sums = SIMD[DType.float32, 2 * rows](0)
        while True:
            comptime for i in range(LOADS):
                var scale = part.scale(i, has_gamma, offset)
                var shift = _wide(part.beta[i])
                comptime for r in range(rows):
                    var own = _wide(part.weights[r * LOADS + i])
                    comptime if N.has_mean:
                        sums[r] = _dot(own, scale, sums[r])
                    sums[rows + r] = _dot(own, shift, sums[rows + r])
            if column - in_group * WIDTH + LOADS * step >= k:
                break
            column += LOADS * step
            part = Part(
                rows_of_weight,
                gamma,
                beta,
                column,
                step,
                k,
                has_gamma,
                has_beta,
            )
        constants = _across_group(sums, shared, lane, first_warp, warps)
        comptime if N.has_mean:
            comptime for r in range(rows):
                centers[r] = warp.shuffle_idx(
                    constants, UInt32(r * 32 // (2 * rows))
                ) / Float32(k)
    else:
        column += (max(k, 1) - 1) // (LOADS * step) * (LOADS * step)
        if column >= LOADS * step:
            part = Part(
                rows_of_weight,
                gamma,
                beta,
                column,
                step,
                k,
                has_gamma,
                has_beta,
            )

    var totals = SIMD[DType.float32, rows](0)
    while True:
        comptime for i in range(LOADS):
            var at = column + Int32(i) * step
            if at < k:
                var scale = part.scale(i, has_gamma, offset)
                comptime for r in range(rows):
                    var rounded = N.fold[WIDTH](
                        _wide(part.weights[r * LOADS + i]),
                        scale,
                        centers[r],
                    ).cast[dtype]()
                    if is_real:
                        folded_rows.unsafe_offset(
                            Int(at) + r * Int(k)
                        ).unsafe_store[alignment=16](rounded)
                    totals[r] = _sum(_wide(rounded), totals[r])
        column -= LOADS * step
        if column < 0:
            break
        part = Part(
            rows_of_weight, gamma, beta, column, step, k, has_gamma, has_beta
        )
    var total = _across_group(
        totals,
        shared.unsafe_offset(warps_of_block * 2 * rows),
        lane,
        first_warp,
        warps,
    )
    # Of the row that a lane stores.
    var own = lane % UInt32(rows)
    total = warp.shuffle_idx(total, own * UInt32(32 // rows))
    var constant = warp.shuffle_idx(
        constants, (UInt32(rows) + own) * UInt32(32 // (2 * rows))
    )
    if in_group < Int32(rows) and is_real:
        if has_beta == 0:
            constant = 0
        if has_bias != 0:
            constant += (
                its_bias.unsafe_offset(source + Int(own))
                .unsafe_load()
                .cast[DType.float32]()
            )
        s.unsafe_offset(Int(first) + Int(own)).unsafe_store(total)
        c.unsafe_offset(Int(first) + Int(own)).unsafe_store(constant)
