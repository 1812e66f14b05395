"""Normalizes and rotates heads on a GPU as a cache of keys and values gets them: few rows, which wait for their own loads."""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx
from std.math import rsqrt
from std.sys import size_of
from std.utils import StaticTuple

from ..pdl import pdl_trigger, pdl_wait, prefetch
from ..rows.operands import accumulator
from .call import RotaryCall
from .factors import angles_of, gamma_of
from .lanes import THREADS, Lane, add_over_lanes, width_of
from .pair import Pair, Places, load

comptime CACHE_SHARE = 4
"""Heads of a row that a group of lanes has together: they have one angle."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(1),
)
def caches_kernel[
    dtype: DType, is_normalized: Bool, is_interleaved: Bool
](given: RotaryCall, log_lanes: Int32, blocks: Int32, seconds: Int32):
    """Normalizes and rotates heads; stores those of x, and those of two other tensors in caches.

    Grid: (heads of all rows) / CACHE_SHARE / (THREADS / lanes) of x, then of the second tensor and of the third.
    Block: THREADS threads, a power of two for some heads of one row.

    Parameters:
        dtype: The type of x and y.
        is_normalized: Whether heads are, but for the third tensor's.
        is_interleaved: Whether an element is rotated with its neighbor.

    Args:
        given: The heads.
        log_lanes: The binary logarithm of the lanes of a head.
        blocks: How many blocks have heads of x.
        seconds: How many have heads of the second tensor.
    """
    var block = Int32(block_idx.x)
    var call = given
    if block >= blocks:
        block -= blocks
        if block < seconds:
            call.turn_to_second()
        else:
            block -= seconds
            call.turn_to_third()
    _compute[dtype, is_normalized, is_interleaved](call, log_lanes, block)


@always_inline
def _compute[
    dtype: DType, is_normalized: Bool, is_interleaved: Bool
](call: RotaryCall, log_lanes: Int32, block: Int32):
    """Computes what one block of those of a tensor does. Counts have 32 bits, in which a GPU divides faster."""
    comptime accum = accumulator[dtype]()
    comptime width = width_of[dtype]()
    comptime bytes = width * size_of[dtype]()
    comptime Raw = Pair[dtype, width]
    var lane = Lane(log_lanes)
    var all_heads = UInt32(call.heads)
    # The products of numbers of 32 bits are one instruction each.
    var D = Int(Int32(call.D))
    var pitch = Int(Int32(call.pitch))
    var places = Places(lane.index, width, Int(Int32(call.rotary)))
    var has_pair = lane.index * 2 * width < D
    var shares_of_row = (all_heads + UInt32(CACHE_SHARE - 1)) // UInt32(
        CACHE_SHARE
    )
    var shares = Int32(UInt32(call.M) * shares_of_row)
    # A block has one share for each group of its lanes.
    var first = block * lane.groups
    var last = min(first + lane.groups, shares)
    # What locates it is computed while the kernel before ends.
    var row = UInt32(first + lane.group) // shares_of_row
    var angles = _start_of_angles(call, row)
    if has_pair:
        _prefetch[dtype](call, Int(row), angles, places)
    pdl_wait()
    pdl_trigger()
    var g = Pair[accum, width](1, 1)
    comptime if is_normalized:
        if has_pair and call.is_normalized != 0:
            g = gamma_of[dtype, accum, width, bytes](call, places)
    # At most once: without a loop, the compiled kernel is longer.
    for begin in range(first, last, lane.groups):
        var its_share = begin + lane.group
        # All lanes of a warp take part in its sums.
        var is_here = has_pair and its_share < last
        var head = (UInt32(its_share) - row * shares_of_row) * UInt32(
            CACHE_SHARE
        )
        var heads = 0
        if is_here:
            heads = Int(min(all_heads - head, UInt32(CACHE_SHARE)))
        var source = Int(row) * pitch + Int(head) * D
        var start = Int(row * all_heads + head) * D
        var step = D
        if is_here:
            start = call.start_of_y(Int(row), Int(head))
            step = call.step_of_y()
        # The `if` of each head is a block of instructions: its loads are in flight together.
        var xs = StaticTuple[Raw, CACHE_SHARE](fill=Raw(0, 0))
        comptime for i in range(CACHE_SHARE):
            if i < heads:
                xs[i] = load[dtype, dtype, width, bytes](
                    call.x, source + i * D, places
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
        var rstds = StaticTuple[Scalar[accum], CACHE_SHARE](fill=1)
        comptime if is_normalized:
            comptime for i in range(CACHE_SHARE):
                var v = xs[i].widened[accum]()
                rstds[i] = (v * v).sum()
            add_over_lanes(rstds, log_lanes)
            comptime for i in range(CACHE_SHARE):
                rstds[i] = rsqrt(
                    rstds[i] / Scalar[accum](D) + call.eps.cast[accum]()
                )
                # The third tensor is not.
                if call.is_normalized == 0:
                    rstds[i] = 1
        comptime for i in range(CACHE_SHARE):
            var z = xs[i].widened[accum]()
            comptime if is_normalized:
                z = z * rstds[i] * g
            if places.is_rotated:
                z = z * c + z.turned[is_interleaved]() * s
            if i < heads:
                z.store[dtype, bytes](call.y, start + i * step, places)


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
