"""Grouped products, in one launch: which of several matrices a tile or a k block belongs to.

Side by side, c_i = a @ b_i^T: tile columns run through one b and its c after another. In one sum,
c = sum over i of a_i @ b_i^T: k blocks run through one a and its b after another. In halves,
c = act(a @ b_0^T) (a @ b_1^T): each tile has the same columns of both. In turn, the same: each tile has the sums of b_0,
then those of b_1, with as many columns of c as there are in either. Each matrix has its own tensor map,
so that none is copied to be concatenated, and starts with a new tile, or a new k block.

Stacked, rows run through one c after another, each of which starts with a new step of rows: of one a, whose rows are
those of one c after another; or of several a that are stored with K first, whose columns are rows of c.
"""

from std.memory import OpaquePointer
from std.utils import StaticTuple

comptime MAP_BYTES = 128
"""Bytes of a tensor map."""
comptime MOST_PARTS = 3
"""Most matrices in one launch: those of q, k and v."""

comptime WHOLE = 0
"""One matrix."""
comptime SIDE_BY_SIDE = 1
"""Several b and c, whose columns run on."""
comptime ONE_SUM = 2
"""Several a and b, whose sums run on."""
comptime HALVES = 3
"""Two b for one c: half of a tile's columns are of gates, the others of what these gate."""

comptime IN_TURN = 4
"""Two b for one c: a tile is multiplied by those columns of one, and then of the other."""

comptime STACKED = 5
"""Several c, whose rows run on, of one a, or of several with K first."""
comptime STACKED_ROWS = 16
"""Rows of a step where there is one a: those of a warp."""
comptime STACKED_COLUMNS = 64
"""Rows of a step where there are several with K first: the columns of a box."""

comptime PartSizes = StaticTuple[Int32, MOST_PARTS]
"""Columns of each c, or its rows, or lengths of each sum; 0 where there are fewer."""


@fieldwise_init
struct Matrices(TrivialRegisterPassable):
    """Matrices that stand for one operand, one after another."""

    var addresses: StaticTuple[Int, MOST_PARTS]
    """Their addresses."""
    var pitch: Int
    """Elements from one row of each to its next; 0 for as many as a row has."""

    def __init__(out self, only: Int):
        """Has one.

        Args:
            only: Its address.
        """
        self.addresses = StaticTuple[Int, MOST_PARTS](fill=only)
        self.pitch = 0


@fieldwise_init
struct Parts(TrivialRegisterPassable):
    """Where the second part and the third begin, in tiles or in k blocks."""

    var second: UInt32
    """The second's first one."""
    var third: UInt32
    """The third's."""

    @always_inline
    def __init__(out self, sizes: PartSizes, step: Int):
        """Counts what each part takes.

        Args:
            sizes: Of each part.
            step: Columns of a tile, or of a k block.
        """
        self.second = (UInt32(sizes[0]) + UInt32(step - 1)) // UInt32(step)
        self.third = self.second + (
            UInt32(sizes[1]) + UInt32(step - 1)
        ) // UInt32(step)

    @always_inline
    def find(self, index: UInt32) -> Tuple[UInt32, UInt32]:
        """Finds a tile or a k block.

        Args:
            index: Its place among all.

        Returns:
            Its part, and its place there.
        """
        if index >= self.third:
            return UInt32(2), index - self.third
        if index >= self.second:
            return UInt32(1), index - self.second
        return UInt32(0), index


@always_inline
def part_of(
    maps: OpaquePointer[ImmUntrackedOrigin], part: UInt32
) -> OpaquePointer[ImmUntrackedOrigin]:
    """Locates one of an operand's tensor maps.

    Args:
        maps: The first of them.
        part: Which one.

    Returns:
        That one.
    """
    return (
        maps.unsafe_bitcast[UInt8]()
        .unsafe_offset(Int(part) * MAP_BYTES)
        .unsafe_bitcast[NoneType]()
    )


@always_inline
def size_of_part(sizes: PartSizes, part: UInt32) -> Int32:
    """Looks up a size without an index, for which a thread would keep them in memory.

    Args:
        sizes: Of each part.
        part: Which one.

    Returns:
        Its size.
    """
    var size = sizes[0]
    comptime for i in range(1, MOST_PARTS):
        if part == UInt32(i):
            size = sizes[i]
    return size


@always_inline
def stacked_at[
    step: Int
](sizes: PartSizes, row: UInt32) -> Tuple[UInt32, UInt32]:
    """Finds the c that a row is of.

    Parameters:
        step: Each c starts at a multiple of these rows.

    Args:
        sizes: Rows of each.
        row: Its place among the rows of all.

    Returns:
        Which c, and its place there: past the last c's rows, still in that one, whose tensor map has no such rows.
    """
    var part = UInt32(0)
    var first = UInt32(0)
    var end = UInt32(0)
    comptime for i in range(1, MOST_PARTS):
        end += (
            (UInt32(sizes[i - 1]) + UInt32(step - 1))
            // UInt32(step)
            * UInt32(step)
        )
        if sizes[i] > 0 and row >= end:
            part = UInt32(i)
            first = end
    return part, row - first


def steps_of(sizes: PartSizes, step: Int) -> Int:
    """Counts the tiles, or k blocks, of all parts.

    Args:
        sizes: Of each part.
        step: Columns of a tile, or of a k block.

    Returns:
        How many there are.
    """
    var count = 0
    comptime for i in range(MOST_PARTS):
        count += (Int(sizes[i]) + step - 1) // step
    return count


@always_inline
def first_of(sizes: PartSizes, part: Int) -> Int:
    """Counts what the parts before one have.

    Args:
        sizes: Of each part.
        part: Which one.

    Returns:
        Their columns.
    """
    var first = 0
    comptime for i in range(MOST_PARTS - 1):
        first += Int(sizes[i]) if i < part else 0
    return first
