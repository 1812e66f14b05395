"""Normalizes and rotates heads on a GPU, forward and backward: a few lanes a head, which stays in registers."""

from max.gpu import barrier, block_idx, grid_dim, thread_idx
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp
from std.math import ceildiv, rsqrt
from std.memory import stack_allocation
from std.sys import size_of
from std.utils import StaticTuple

from ..device import Gpu
from ..pdl import pdl_attributes, pdl_trigger, pdl_wait, prefetch
from ..rows.operands import accumulator
from .call import RotaryCall
from .pair import Pair, Places, angles_of, gamma_of, load

comptime THREADS = 256
"""Threads of a block."""
# Heads of a row that a group of lanes has together: they have one angle. A backward loads two tensors of them.
comptime _SHARE[backward: Bool] = 2 if backward else 4


@always_inline
def width_of[dtype: DType]() -> Int:
    """Returns the elements of a piece: those of one load. Longer ones would leave registers for few warps.

    Parameters:
        dtype: The type of x.

    Returns:
        How many.
    """
    return 2 if size_of[dtype]() > 4 else 4


def lanes_of[dtype: DType](D: Int) -> Int:
    """Returns the lanes of a head, a power of two: each has a pair of pieces, the last may have none.

    Parameters:
        dtype: The type of x.

    Args:
        D: Elements of a head, a multiple of two pieces.

    Returns:
        How many, which are those of one warp.
    """
    var lanes = 1
    while lanes * 2 * width_of[dtype]() < D:
        lanes *= 2
    return lanes


def launch_rotary[dtype: DType](gpu: Gpu, call: RotaryCall) raises:
    """Launches the forward, or the backward where dy is given.

    Parameters:
        dtype: The type of x, y and their gradients.

    Args:
        gpu: Where to run.
        call: The heads.

    Raises:
        If a head is too long for a warp, or a launch fails.
    """
    var lanes = lanes_of[dtype](call.D)
    if lanes > 32:
        raise Error(t"a head of {call.D} elements does not fit into a warp")
    if call.dy == 0:
        _launch[dtype, False](gpu, call, lanes)
    else:
        _launch[dtype, True](gpu, call, lanes)


def _launch[
    dtype: DType, backward: Bool
](gpu: Gpu, call: RotaryCall, lanes: Int) raises:
    comptime kernel = rotary_kernel[dtype, backward]
    var compiled = gpu.context.compile_function[kernel]()
    comptime share = _SHARE[backward]
    var groups = THREADS // lanes
    var blocks = ceildiv(_shares(call.M, call.heads, share), groups)
    if call.dgamma != 0:
        blocks = call.parts
    var seconds = ceildiv(_shares(call.M, call.second_heads, share), groups)
    var thirds = seconds if call.third_x != 0 else 0
    gpu.stream.enqueue_function(
        compiled,
        call,
        Int32(lanes),
        Int32(blocks),
        Int32(seconds),
        grid_dim=blocks + seconds + thirds,
        block_dim=THREADS,
        attributes=pdl_attributes(),
    )


@always_inline
def _shares(rows: Int, heads: Int, share: Int) -> Int:
    """Counts the times that a group of lanes has heads: `share` of one row together, or what is left of it."""
    return rows * ceildiv(heads, share)


@always_inline
def _sum_of_lanes[
    dtype: DType
](value: Scalar[dtype], lanes: Int) -> Scalar[dtype]:
    """Adds up over the lanes of a head, in a fixed order."""
    var sum = value
    var distance = lanes // 2
    while distance > 0:
        sum += warp.shuffle_xor(sum, UInt32(distance))
        distance //= 2
    return sum


def rotary_kernel[
    dtype: DType, backward: Bool
](given: RotaryCall, lanes: Int32, blocks: Int32, seconds: Int32):
    """Normalizes and rotates heads, or computes the gradient of that.

    Grid: (heads of all rows) / share / (THREADS / lanes) of x, then of the second tensor and of the third;
    where a gradient of gamma is wanted, parts of the heads. Block: THREADS threads, `lanes` of them for some heads of one row.

    Parameters:
        dtype: The type of x, y and their gradients.
        backward: Whether the gradient is computed.

    Args:
        given: The heads.
        lanes: Lanes of a head.
        blocks: How many blocks have heads of x.
        seconds: How many have heads of the second tensor.
    """
    var block = Int(block_idx.x)
    comptime if backward:
        pdl_wait()
        pdl_trigger()
        # No copy: it would take registers that two blocks at once have not.
        _compute[dtype, True](given, lanes, block)
    else:
        var call = given
        if block >= Int(blocks):
            block -= Int(blocks)
            if block < Int(seconds):
                call.turn_to_second()
            else:
                block -= Int(seconds)
                call.turn_to_third()
        _compute[dtype, False](call, lanes, block)


@always_inline
def _compute[
    dtype: DType, backward: Bool
](call: RotaryCall, lanes: Int32, block: Int):
    """Computes what one block of those of a tensor does."""
    comptime accum = accumulator[dtype]()
    comptime width = width_of[dtype]()
    comptime bytes = width * size_of[dtype]()
    comptime share = _SHARE[backward]
    comptime Raw = Pair[dtype, width]
    var output = call.dx if backward else call.y
    var lane = Int(thread_idx.x) % Int(lanes)
    var group = Int(thread_idx.x) // Int(lanes)
    var groups = THREADS // Int(lanes)
    var places = Places(lane, width, call.rotary)
    var has_pair = lane * 2 * width < call.D
    var sums = Pair[accum, width](0, 0)
    var shares_of_row = ceildiv(call.heads, share)
    var shares = _shares(call.M, call.heads, share)
    # A block has one share for each group of its lanes; or those of its part, where it adds up over them.
    var size = groups
    if call.dgamma != 0:
        size = ceildiv(shares, Int(grid_dim.x))
    var first = block * size
    var last = min(first + size, shares)
    # A block of a forward has one share for each group: what locates it is computed while the kernel before ends.
    var own_share = first + group
    var own_row = own_share // shares_of_row
    var own_head = (own_share - own_row * shares_of_row) * share
    comptime if not backward:
        if has_pair:
            _prefetch[dtype](call, own_row, places)
        pdl_wait()
        pdl_trigger()
    var g = Pair[accum, width](1, 1)
    if has_pair and call.is_normalized != 0:
        g = gamma_of[dtype, accum, width, bytes](call, places)
    for begin in range(first, last, groups):
        var its_share = begin + group
        # All lanes of a warp take part in its sums.
        var is_here = has_pair and its_share < last
        var row = own_row
        var head = own_head
        comptime if backward:
            row = its_share // shares_of_row
            head = (its_share - row * shares_of_row) * share
        var heads = min(call.heads - head, share) if is_here else 0
        var start = (row * call.heads + head) * call.D
        var step = call.D
        comptime if not backward:
            if is_here:
                start = call.start_of_y(row, head)
                step = call.step_of_y()
        # All loads are in flight before the first is used.
        var xs = StaticTuple[Raw, share](fill=Raw(0, 0))
        var dys = StaticTuple[Raw, share](fill=Raw(0, 0))
        comptime for i in range(share):
            if i < heads:
                if not backward or call.is_normalized != 0:
                    xs[i] = load[dtype, dtype, width, bytes](
                        call.x, row * call.pitch + (head + i) * call.D, places
                    )
                comptime if backward:
                    dys[i] = load[dtype, dtype, width, bytes](
                        call.dy, start + i * call.D, places
                    )
        var c = Pair[accum, width](1, 1)
        var s = Pair[accum, width](0, 0)
        if is_here and places.is_rotated:
            c = angles_of[dtype, accum, width, bytes](
                call, call.cos, row, places
            )
            s = angles_of[dtype, accum, width, bytes](
                call, call.sin, row, places
            )
        comptime for i in range(share):
            var v = xs[i].widened[accum]()
            var rstd = Scalar[accum](1)
            if call.is_normalized != 0:
                var squares = _sum_of_lanes((v * v).sum(), Int(lanes))
                rstd = rsqrt(
                    squares / Scalar[accum](call.D) + call.eps.cast[accum]()
                )
            var z: Pair[accum, width]
            comptime if not backward:
                z = v * rstd * g
                if places.is_rotated:
                    z = z * c + z.turned(call.is_interleaved != 0) * s
            else:
                z = dys[i].widened[accum]()
                if places.is_rotated:
                    z = z * c - (z * s).turned(call.is_interleaved != 0)
                if call.is_normalized != 0:
                    var n = v * rstd
                    # Without an eps, a head that is not there has no rstd.
                    if i < heads:
                        sums = sums + z * n
                    z = z * g
                    var mean = _sum_of_lanes((z * n).sum(), Int(lanes))
                    mean /= Scalar[accum](call.D)
                    z = (z - n * mean) * rstd
            if i < heads:
                z.store[dtype, bytes](output, start + i * step, places)
    comptime if backward:
        if call.dgamma != 0:
            _store_sums[accum, width](
                sums, call.D, places, has_pair, group, groups, call.dgamma
            )


@always_inline
def _prefetch[dtype: DType](call: RotaryCall, row: Int, places: Places):
    """Has what a head's pair needs other than x fetched while the kernel before ends."""
    if places.is_rotated:
        var size = (
            size_of[DType.float32]() if call.angles_are_float32
            != 0 else size_of[dtype]()
        )
        var first = row % call.positions * call.angles + places.a
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
