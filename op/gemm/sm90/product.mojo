"""The arguments of the kernels, except their three matrices."""

from std.utils import StaticTuple

from ...argument import KernelArgument
from ..epilogue import Epilogue
from ..row_hook import NoHook, RowHook
from .parts import MOST_PARTS, PartSizes


@fieldwise_init
struct Product[E: Epilogue, H: RowHook = NoHook](
    KernelArgument, TrivialRegisterPassable
):
    """Sizes of c = a @ b^T, and what goes with it.

    What is not needed is 0.

    Parameters:
        E: What becomes of the sums.
        H: What is done with the rows.
    """

    var m: Int32
    """Rows of a and c."""
    var n: Int32
    """Columns of c."""
    var k: Int32
    """Length of the sums."""
    var band: Int32
    """Rows of cluster tiles in a band of the walk; 0 to walk in runs."""
    var accumulate: Int32
    """Whether a c in float32 is added to."""
    var follows: Int32
    """Whether the grid before this one makes sums that are added to c; this one
    then overlaps with it. Only where blocks of a cluster split tiles."""
    var b_is_older: Int32
    """Whether the grid before this one writes nothing of b, and has waited for the grids before it;
    for few rows, b is then read while that one runs."""
    var a_is_new: Int32
    """Whether the grid before this one writes a, and not only the terms of its rows; those are otherwise all that is
    waited for."""
    var epilogue: Self.E
    """Finishes the sums."""
    var hook: Self.H
    """What is done with the rows."""
    var last_row: Int32
    """Where the last tile of rows starts at the latest."""
    var last_column: Int32
    """Where the last tile of columns starts at the latest."""
    var c: Int64
    """Address of c, where threads store it."""
    var float32: Int64
    """Address of c in float32 [M, N], or of what is added to c."""
    var row_sums: StaticTuple[Int64, MOST_PARTS]
    """Addresses of the sums of the rows of each a [M], in c's type; 0 if not wanted."""
    var float32_row_sums: Int64
    """Address of what is added to those [M], in float32."""
    var sizes: PartSizes
    """Columns, rows, or lengths of sums, of each part; not read where one matrix makes the product."""

    def __init__(
        out self, m: Int, n: Int, k: Int, epilogue: Self.E, hook: Self.H
    ):
        """Walks in runs, and adds to nothing.

        Args:
            m: Rows of a and c.
            n: Columns of c.
            k: Length of the sums.
            epilogue: Finishes the sums.
            hook: What is done with the rows.
        """
        self.m = Int32(m)
        self.n = Int32(n)
        self.k = Int32(k)
        self.band = 0
        self.accumulate = 0
        self.follows = 0
        self.b_is_older = 0
        self.a_is_new = 0
        self.epilogue = epilogue
        self.hook = hook
        self.last_row = Int32.MAX
        self.last_column = Int32.MAX
        self.c = 0
        self.float32 = 0
        self.row_sums = StaticTuple[Int64, MOST_PARTS](fill=0)
        self.float32_row_sums = 0
        self.sizes = PartSizes(fill=0)
