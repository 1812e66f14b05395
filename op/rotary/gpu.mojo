"""Normalizes and rotates heads on a GPU, forward and backward: a few lanes a head, which stays in registers."""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp
from std.math import ceildiv, rsqrt
from std.memory import stack_allocation
from std.sys import get_defined_int, size_of
from std.utils import StaticTuple

from ..device import Gpu
from ..pdl import pdl_attributes, pdl_trigger, pdl_wait, prefetch
from ..rows.columns import Total, Totals
from ..rows.launch_columns import launch_totals
from ..rows.operands import accumulator
from ..rows.types import FLOAT32, code_of
from . import dense
from .call import RotaryCall
from .pair import Pair, Places, angles_of, gamma_of, load

comptime THREADS = 256
"""Threads of a block."""
comptime FORWARD = 0
"""The forward into dense tensors."""
comptime INTO_CACHES = 1
"""The forward into caches."""
comptime BACKWARD = 2
"""The backward."""
# Heads of a row that a group of lanes has together: they have one angle. A backward through a norm loads two tensors of
# them.
comptime _SHARE[loads_both: Bool] = 2 if loads_both else 4
# Blocks that an SM has room for: enough loads in flight for the memory's speed. Wide elements take more registers, and
# so does a norm. Caches get few rows, which wait for nothing but their own loads.
comptime _BLOCKS[
    dtype: DType, way: Int, is_normalized: Bool
] = 1 if way == INTO_CACHES else (
    2 if size_of[dtype]() > 2 else (3 if is_normalized else 4)
)


@always_inline
def width_of[dtype: DType]() -> Int:
    """Returns the elements of a piece: those of one load. Longer ones would leave registers for few warps.

    Parameters:
        dtype: The type of x.

    Returns:
        How many.
    """
    return 2 if size_of[dtype]() > 4 else 4


def log_lanes_of[dtype: DType](D: Int) -> Int:
    """Returns the binary logarithm of the lanes of a head: each has a pair of pieces, the last may have none.

    Parameters:
        dtype: The type of x.

    Args:
        D: Elements of a head, a multiple of two pieces.

    Returns:
        It; all lanes of a head are in one warp.
    """
    var log = 0
    while (2 * width_of[dtype]()) << log < D:
        log += 1
    return log


def launch_rotary[dtype: DType](gpu: Gpu, call: RotaryCall) raises:
    """Launches the forward, or the backward where dy is given, and what adds up a gradient of gamma.

    Parameters:
        dtype: The type of x, y and their gradients.

    Args:
        gpu: Where to run.
        call: The heads.

    Raises:
        If a head is too long for a warp, there are too many heads, or a launch fails.
    """
    var log_lanes = log_lanes_of[dtype](call.D)
    if log_lanes > 5:
        raise Error(t"a head of {call.D} elements does not fit into a warp")
    var most = call.M * max(call.heads, call.second_heads)
    most = max(most, call.pitch, call.second_pitch, call.third_pitch)
    if most > 1 << 30:
        raise Error(
            t"{call.M} rows of {call.heads} heads with a pitch of {call.pitch}"
            t" elements are too many"
        )
    comptime for choice in range(4):
        comptime norm = choice & 1 != 0
        comptime interleaved = choice & 2 != 0
        if (call.is_normalized != 0) == norm and (
            call.is_interleaved != 0
        ) == interleaved:
            if call.dy != 0:
                comptime if VARIANT > 0:
                    _choose[dtype, True, norm, interleaved](
                        gpu, call, log_lanes
                    )
                else:
                    _launch[dtype, BACKWARD, norm, interleaved](
                        gpu, call, log_lanes
                    )
            elif call.slots != 0:
                _launch[dtype, INTO_CACHES, norm, interleaved](
                    gpu, call, log_lanes
                )
            else:
                comptime if VARIANT > 0:
                    _choose[dtype, False, norm, interleaved](
                        gpu, call, log_lanes
                    )
                else:
                    _launch[dtype, FORWARD, norm, interleaved](
                        gpu, call, log_lanes
                    )
    if call.gamma_sum != 0:
        _add_parts[dtype](gpu, call)


def _add_parts[dtype: DType](gpu: Gpu, call: RotaryCall) raises:
    """Adds up the parts of the gradient of gamma."""
    var totals = Totals()
    totals.add(
        Total(
            Int64(call.gamma_sum),
            Int64(call.dgamma),
            Int32(call.parts),
            Int32(call.D),
            1,
            FLOAT32 if call.gamma_is_float32 != 0 else code_of[dtype](),
        )
    )
    launch_totals[accumulator[dtype]()](gpu, totals)


comptime VARIANT = get_defined_int["rotary_variant", 0]()
"""Which experiment is compiled: 0 for none."""
# 1: any D; 2: also D known; 3: and the next share loaded ahead; 4: 16-byte loads, ahead in a backward with a norm; 5: the
# same, ahead everywhere; 6: two heads in a forward; 7: eight heads in a forward, 16-byte loads in a backward with a norm,
# not ahead; 8: like 2, with more blocks.


def _choose[
    dtype: DType, backward: Bool, norm: Bool, interleaved: Bool
](gpu: Gpu, call: RotaryCall, log_lanes: Int) raises:
    comptime own = width_of[dtype]()
    comptime sums_gamma = backward and norm
    comptime is_wide = (
        VARIANT == 4 or VARIANT == 5 or (VARIANT == 7 and sums_gamma)
    ) and size_of[dtype]() == 2
    comptime is_ahead = VARIANT == 3 or VARIANT == 5 or (
        VARIANT == 4 and sums_gamma
    )
    comptime wide = 2 * own if is_wide else own
    var is_fixed = (
        call.rotary == call.D
        and call.cos != 0
        and call.angles_are_float32 == Int(dtype == DType.float32)
    )
    comptime if VARIANT > 1 and not interleaved:
        comptime for D in [64, 128]:
            if is_fixed and call.D == D:
                comptime share = 2 if sums_gamma or is_wide or VARIANT == 6 else (
                    8 if VARIANT == 7 and not backward else 4
                )
                comptime blocks = (
                    (
                        4 if sums_gamma and not is_ahead else 3
                    ) if sums_gamma else 5
                ) if is_wide else (
                    2 if VARIANT == 7
                    and not backward else (3 if norm else 4)
                    + Int(VARIANT == 8 and not sums_gamma)
                    + Int(VARIANT == 6 and not sums_gamma)
                )
                comptime way = dense.Way(
                    is_backward=backward,
                    is_normalized=norm,
                    is_interleaved=interleaved,
                    D=D,
                    width=wide,
                    sums=own,
                    share=share,
                    threads=THREADS // 2 if is_wide else THREADS,
                    blocks=4 if is_wide and norm and not backward else blocks,
                    turns=4 if is_ahead else 1,
                    is_ahead=is_ahead,
                )
                comptime lanes = D // (2 * wide)
                comptime log = 4 if lanes == 16 else (3 if lanes == 8 else 2)
                dense.launch[dtype, way](gpu, call, log)
                return
    comptime way = dense.Way(
        is_backward=backward,
        is_normalized=norm,
        is_interleaved=interleaved,
        D=0,
        width=own,
        sums=own,
        share=2 if backward and norm else 4,
        threads=THREADS,
        blocks=_BLOCKS[dtype, FORWARD, norm],
        turns=1,
        is_ahead=False,
    )
    dense.launch[dtype, way](gpu, call, log_lanes)


def _launch[
    dtype: DType, way: Int, is_normalized: Bool, is_interleaved: Bool
](gpu: Gpu, call: RotaryCall, log_lanes: Int) raises:
    comptime kernel = rotary_kernel[dtype, way, is_normalized, is_interleaved]
    var compiled = gpu.context.compile_function[kernel]()
    comptime share = _SHARE[way == BACKWARD and is_normalized]
    var groups = THREADS >> log_lanes
    var blocks = ceildiv(call.M * ceildiv(call.heads, share), groups)
    if call.dgamma != 0:
        blocks = call.parts
    var seconds = ceildiv(call.M * ceildiv(call.second_heads, share), groups)
    var thirds = seconds if call.third_x != 0 else 0
    gpu.stream.enqueue_function(
        compiled,
        call,
        Int32(log_lanes),
        Int32(blocks),
        Int32(seconds),
        grid_dim=blocks + seconds + thirds,
        block_dim=THREADS,
        attributes=pdl_attributes(),
    )


@always_inline
def _add_over_lanes[
    dtype: DType, //, count: Int
](mut sums: StaticTuple[Scalar[dtype], count], log_lanes: Int32):
    """Adds up over the lanes of each head, in a fixed order; the heads' shuffles are in flight together."""
    for level in range(Int(log_lanes)):
        var distance = UInt32(1) << UInt32(Int(log_lanes) - 1 - level)
        comptime for i in range(count):
            sums[i] += warp.shuffle_xor(sums[i], distance)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(_BLOCKS[dtype, way, is_normalized]),
)
def rotary_kernel[
    dtype: DType, way: Int, is_normalized: Bool, is_interleaved: Bool
](given: RotaryCall, log_lanes: Int32, blocks: Int32, seconds: Int32):
    """Normalizes and rotates heads, or computes the gradient of that.

    Grid: (heads of all rows) / share / (THREADS / lanes) of x, then of the second tensor and of the third;
    where a gradient of gamma is wanted, parts of the heads. Block: THREADS threads, a power of two for some heads of one row.

    Parameters:
        dtype: The type of x, y and their gradients.
        way: FORWARD, INTO_CACHES or BACKWARD.
        is_normalized: Whether heads are, but for the third tensor's.
        is_interleaved: Whether an element is rotated with its neighbor.

    Args:
        given: The heads.
        log_lanes: The binary logarithm of the lanes of a head.
        blocks: How many blocks have heads of x.
        seconds: How many have heads of the second tensor.
    """
    var block = Int32(block_idx.x)
    comptime if way == BACKWARD:
        pdl_wait()
        pdl_trigger()
        # No copy: it would take registers that blocks have not.
        _compute[dtype, way, is_normalized, is_interleaved](
            given, log_lanes, block
        )
    else:
        var call = given
        if block >= blocks:
            block -= blocks
            if way == FORWARD or block < seconds:
                call.turn_to_second()
            else:
                block -= seconds
                call.turn_to_third()
        _compute[dtype, way, is_normalized, is_interleaved](
            call, log_lanes, block
        )


@always_inline
def _compute[
    dtype: DType, way: Int, is_normalized: Bool, is_interleaved: Bool
](call: RotaryCall, log_lanes: Int32, block: Int32):
    """Computes what one block of those of a tensor does. Counts have 32 bits, in which a GPU divides faster."""
    comptime accum = accumulator[dtype]()
    comptime backward = way == BACKWARD
    comptime into_caches = way == INTO_CACHES
    comptime width = width_of[dtype]()
    comptime bytes = width * size_of[dtype]()
    comptime share = _SHARE[backward and is_normalized]
    comptime Raw = Pair[dtype, width]
    var output = call.dx if backward else call.y
    var lanes = Int32(1) << log_lanes
    var lane = Int32(thread_idx.x) & (lanes - 1)
    var group = Int32(thread_idx.x) >> log_lanes
    var groups = Int32(THREADS) >> log_lanes
    var all_heads = UInt32(call.heads)
    # The products of numbers of 32 bits are one instruction each.
    var D = Int(Int32(call.D))
    var pitch = Int(Int32(call.pitch))
    var places = Places(Int(lane), width, Int(Int32(call.rotary)))
    var has_pair = Int(lane) * 2 * width < D
    var sums = Pair[accum, width](0, 0)
    var shares_of_row = (all_heads + UInt32(share - 1)) // UInt32(share)
    var shares = Int32(UInt32(call.M) * shares_of_row)
    # A block has one share for each group of its lanes; or those of its part, where it adds up over them.
    var size = groups
    comptime if backward:
        if call.dgamma != 0:
            size = Int32(ceildiv(UInt32(shares), UInt32(grid_dim.x)))
    var first = block * size
    var last = min(first + size, shares)
    # A block of a forward has one share for each group: what locates it is computed while the kernel before ends.
    var own_row = UInt32(first + group) // shares_of_row
    var own_angles = _start_of_angles(call, own_row)
    comptime if into_caches:
        if has_pair:
            _prefetch[dtype](call, Int(own_row), own_angles, places)
    comptime if not backward:
        pdl_wait()
        pdl_trigger()
    var g = Pair[accum, width](1, 1)
    comptime if is_normalized:
        if has_pair and (not into_caches or call.is_normalized != 0):
            g = gamma_of[dtype, accum, width, bytes](call, places)
    for begin in range(first, last, groups):
        var its_share = begin + group
        # All lanes of a warp take part in its sums.
        var is_here = has_pair and its_share < last
        var row = own_row
        var angles = own_angles
        comptime if backward:
            row = UInt32(its_share) // shares_of_row
            angles = _start_of_angles(call, row)
        var head = (UInt32(its_share) - row * shares_of_row) * UInt32(share)
        var heads = 0
        if is_here:
            heads = Int(min(all_heads - head, UInt32(share)))
        var source = Int(row) * pitch + Int(head) * D
        var start = Int(row * all_heads + head) * D
        var step = D
        comptime if into_caches:
            if is_here:
                start = call.start_of_y(Int(row), Int(head))
                step = call.step_of_y()
        # All loads are in flight before the first is used.
        var xs = StaticTuple[Raw, share](fill=Raw(0, 0))
        var dys = StaticTuple[Raw, share](fill=Raw(0, 0))
        comptime for i in range(share):
            if i < heads:
                comptime if is_normalized or not backward:
                    xs[i] = load[dtype, dtype, width, bytes](
                        call.x, source + i * D, places
                    )
                comptime if backward:
                    dys[i] = load[dtype, dtype, width, bytes](
                        call.dy, start + i * D, places
                    )
        var c = Pair[accum, width](1, 1)
        var s = Pair[accum, width](0, 0)
        if is_here and places.is_rotated:
            c = angles_of[dtype, accum, width, bytes](
                call, call.cos, angles, places
            )
            s = angles_of[dtype, accum, width, bytes](
                call, call.sin, angles, places
            )
        var rstds = StaticTuple[Scalar[accum], share](fill=1)
        comptime if is_normalized:
            comptime for i in range(share):
                var v = xs[i].widened[accum]()
                rstds[i] = (v * v).sum()
            _add_over_lanes(rstds, log_lanes)
            comptime for i in range(share):
                rstds[i] = rsqrt(
                    rstds[i] / Scalar[accum](D) + call.eps.cast[accum]()
                )
                comptime if into_caches:
                    # The third tensor is not.
                    if call.is_normalized == 0:
                        rstds[i] = 1
        comptime if not backward:
            comptime for i in range(share):
                var z = xs[i].widened[accum]()
                comptime if is_normalized:
                    z = z * rstds[i] * g
                if places.is_rotated:
                    z = z * c + z.turned[is_interleaved]() * s
                if i < heads:
                    z.store[dtype, bytes](output, start + i * step, places)
        else:
            var zs = StaticTuple[Pair[accum, width], share](
                fill=Pair[accum, width](0, 0)
            )
            var means = StaticTuple[Scalar[accum], share](fill=0)
            comptime for i in range(share):
                var z = dys[i].widened[accum]()
                if places.is_rotated:
                    z = z * c - (z * s).turned[is_interleaved]()
                comptime if is_normalized:
                    var n = xs[i].widened[accum]() * rstds[i]
                    # Without an eps, a head that is not there has no rstd.
                    if i < heads:
                        sums = sums + z * n
                    z = z * g
                    means[i] = (z * n).sum()
                zs[i] = z
            comptime if is_normalized:
                _add_over_lanes(means, log_lanes)
                comptime for i in range(share):
                    var n = xs[i].widened[accum]() * rstds[i]
                    var mean = means[i] / Scalar[accum](D)
                    zs[i] = (zs[i] - n * mean) * rstds[i]
            comptime for i in range(share):
                if i < heads:
                    zs[i].store[dtype, bytes](output, start + i * step, places)
    comptime if backward and is_normalized:
        if call.dgamma != 0:
            _store_sums[accum, width](
                sums,
                D,
                places,
                has_pair,
                Int(group),
                Int(groups),
                call.dgamma,
            )


@always_inline
def _start_of_angles(call: RotaryCall, row: UInt32) -> Int:
    """Locates the cosines and the sines of a row."""
    if call.positions == 0:
        return 0
    return Int(row % UInt32(call.positions)) * Int(Int32(call.angles))


@always_inline
def _prefetch[
    dtype: DType
](call: RotaryCall, row: Int, angles: Int, places: Places):
    """Has what a head's pair needs other than x fetched while the kernel before ends."""
    if places.is_rotated:
        var size = (
            size_of[DType.float32]() if call.angles_are_float32
            != 0 else size_of[dtype]()
        )
        var first = angles + places.a
        prefetch(call.cos + first * size)
        prefetch(call.sin + first * size)
    if call.gamma != 0:
        prefetch(call.gamma + places.a * size_of[dtype]())
    if call.slots != 0:
        prefetch(call.slots + row % call.tokens * size_of[DType.int64]())


@always_inline
def _store_sums[
    accum: DType, width: Int
](
    sums: Pair[accum, width],
    d: Int,
    places: Places,
    has_pair: Bool,
    group: Int,
    groups: Int,
    dgamma: Int,
):
    """Adds up what a block's groups have summed, in order, and stores it as the block's part."""
    comptime Shared = AddressSpace.SHARED
    # A group has as much room as its lanes have elements, and the lanes of a block are its threads.
    var room = stack_allocation[
        THREADS * 2 * width, Scalar[accum], address_space=Shared
    ]()
    if has_pair:
        var own = room.unsafe_offset(group * d)
        comptime for i in range(width):
            own.unsafe_offset(places.a + i).unsafe_store(sums.a[i])
            own.unsafe_offset(places.b + i).unsafe_store(sums.b[i])
    barrier()
    for i in range(Int(thread_idx.x), d, THREADS):
        var sum = Scalar[accum](0)
        for j in range(groups):
            sum += room.unsafe_offset(j * d + i).unsafe_load()
        Pointer[Scalar[accum], MutAnyOrigin](
            unsafe_from_address=dgamma
        ).unsafe_offset(Int(block_idx.x) * d + i).unsafe_store(sum)
