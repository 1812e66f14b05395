"""Where a thread works in a kernel of rows on a GPU: on which rows, on what of them, and in which shared memory."""

from max.gpu import (
    WARP_SIZE,
    block_dim,
    block_idx,
    grid_dim,
    lane_id,
    thread_idx,
    warp_id,
)
from max.gpu.memory import AddressSpace
from std.math import ceildiv
from std.memory import stack_allocation

from .program import RowProgram
from .shape import Shape
from .values import CAPACITY

comptime SharedPointer[dtype: DType] = Pointer[
    Scalar[dtype], MutUntrackedOrigin, address_space=AddressSpace.SHARED
]
"""Points to a block's shared memory.

Parameters:
    dtype: The type of its elements.
"""


struct Place(TrivialRegisterPassable):
    """Which rows a thread works on, and which of their elements. Rows of a group follow each other."""

    var index: Int
    """Its first row."""
    var end: Int
    """The end of its group's rows."""
    var row_step: Int
    """From a row to the thread's next one."""
    var group: Int
    """The group."""
    var start: Int32
    """The first element of its first load."""
    var step: Int32
    """From the first element of a load to that of the next."""

    @always_inline
    def __init__[shape: Shape](out self, rows: Int):
        """Asks the GPU which thread this is.

        Parameters:
            shape: Who works on a row.

        Args:
            rows: Rows of a group.
        """
        var lane = thread_idx.x
        var threads = block_dim.x
        self.index = block_idx.x
        self.row_step = grid_dim.x
        self.group = block_idx.y
        comptime if not shape.whole_block:
            lane = lane_id()
            threads = WARP_SIZE
            var warps = block_dim.x // WARP_SIZE
            self.index = block_idx.x * warps + warp_id()
            self.row_step = grid_dim.x * warps
        self.end = rows
        self.index += self.group * rows
        self.end += self.group * rows
        self.start = Int32(lane * shape.width)
        self.step = Int32(threads * shape.width)


@always_inline
def reduction_room[
    P: RowProgram, accum: DType, shape: Shape
]() -> SharedPointer[accum]:
    """Returns shared memory for a block's reductions: two halves of a double buffer, each a term of every stage for every
    warp.

    Parameters:
        P: The row program.
        accum: The type computed in.
        shape: Who works on a row.

    Returns:
        The room.
    """
    return stack_allocation[
        2 * P.stages * CAPACITY * ceildiv(shape.threads, WARP_SIZE),
        Scalar[accum],
        address_space=AddressSpace.SHARED,
    ]()
