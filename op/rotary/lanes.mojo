"""How the lanes of a GPU have heads: each has a pair of pieces of a head, and adds up with the others of its group."""

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp
from std.memory import stack_allocation
from std.sys import size_of
from std.utils import StaticTuple

from .pair import Pair, Places

comptime THREADS = 256
"""Threads of a block."""


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


struct Lane(TrivialRegisterPassable):
    """Which lane a thread is."""

    var index: Int
    """Of those of a head."""
    var group: Int32
    """Which group of lanes of the block, each of which has heads of its own."""
    var groups: Int32
    """How many there are."""

    @always_inline
    def __init__(out self, log_lanes: Int32):
        """Finds the thread's own.

        Args:
            log_lanes: The binary logarithm of the lanes of a head.
        """
        var thread = Int32(thread_idx.x)
        self.index = Int(thread & ((Int32(1) << log_lanes) - 1))
        self.group = thread >> log_lanes
        self.groups = Int32(THREADS) >> log_lanes


@always_inline
def add_over_lanes[
    dtype: DType, //, count: Int, log: Int = -1
](mut sums: StaticTuple[Scalar[dtype], count], log_lanes: Int32):
    """Adds up over the lanes of each head, in a fixed order; the heads' shuffles are in flight together.

    Parameters:
        dtype: The type of the sums.
        count: How many heads a group has together.
        log: The binary logarithm of the lanes, where it is known.

    Args:
        sums: What a lane has of each head; then all of it.
        log_lanes: The binary logarithm of the lanes.
    """
    comptime if log >= 0:
        comptime for level in range(log):
            comptime for i in range(count):
                sums[i] += warp.shuffle_xor(
                    sums[i], UInt32(1 << (log - 1 - level))
                )
    else:
        for level in range(Int(log_lanes)):
            var distance = UInt32(1) << UInt32(Int(log_lanes) - 1 - level)
            comptime for i in range(count):
                sums[i] += warp.shuffle_xor(sums[i], distance)


@always_inline
def store_sums[
    accum: DType, width: Int
](
    sums: Pair[accum, width],
    D: Int,
    places: Places,
    has_pair: Bool,
    lane: Lane,
    dgamma: Int,
):
    """Adds up what a block's groups have summed, in order, and stores it as the block's part.

    Parameters:
        accum: The type of sums.
        width: Elements of a piece.

    Args:
        sums: Those of this lane.
        D: Elements of a head.
        places: Where the lane's pieces are in it.
        has_pair: Whether the lane has any.
        lane: Which it is.
        dgamma: Address of the parts [blocks, D].
    """
    comptime Shared = AddressSpace.SHARED
    # A group has as much room as its lanes have elements, and the lanes of a block are its threads.
    var room = stack_allocation[
        THREADS * 2 * width, Scalar[accum], address_space=Shared
    ]()
    if has_pair:
        var own = room.unsafe_offset(Int(lane.group) * D)
        comptime for i in range(width):
            own.unsafe_offset(places.a + i).unsafe_store(sums.a[i])
            own.unsafe_offset(places.b + i).unsafe_store(sums.b[i])
    barrier()
    for i in range(Int(thread_idx.x), D, THREADS):
        var sum = Scalar[accum](0)
        for j in range(Int(lane.groups)):
            sum += room.unsafe_offset(j * D + i).unsafe_load()
        Pointer[Scalar[accum], MutAnyOrigin](
            unsafe_from_address=dgamma
        ).unsafe_offset(Int(block_idx.x) * D + i).unsafe_store(sum)
