"""A tensor of c's shape that each warp loads for itself: the input h of an activation, or what is added to c.

Each warp copies the boxes that it needs by TMA, the first ones while the tile is multiplied, the others while it
finishes those before.
"""

from std.memory import OpaquePointer

from .barriers import mbarrier_expect_bytes, mbarrier_wait, warp_sync
from .config import (
    BOX_BYTES,
    CONSUMER_WARPS,
    H_BOX_BYTES,
    H_BOXES,
    H_COLUMNS,
)
from .elements import swizzle
from .shared_memory import matrix_x4, unpack_pair
from .tma import load_tile

comptime H_WIDTH = 8
"""Elements of 16 columns that a lane has."""


@doc_hidden
struct HRows[columns: Int, parts: Int](TrivialRegisterPassable):
    """A warp's rows of h in the columns of a tile, as one of its lanes sees them: twice 16 rows, in boxes.

    Parameters:
        columns: Columns of the tile.
        parts: How many elements of h go with each of the activation: 2 for a gate.
    """

    comptime across = Self.columns // H_COLUMNS
    """Boxes of a part across the tile."""
    comptime count = 2 * Self.across * Self.parts
    """Boxes of a tile."""

    var boxes: UInt32
    """The first box in shared memory."""
    var full: UInt32
    """Its barrier."""
    var map: OpaquePointer[ImmUntrackedOrigin]
    """Tensor map of h."""
    var n: UInt32
    """Columns of a part."""
    var lane: UInt32
    """The lane."""
    var row: UInt32
    """First of the rows."""
    var column: UInt32
    """First of the columns."""
    var parity: UInt32
    """Of the next copies."""

    @always_inline
    def __init__(
        out self,
        boxes: UInt32,
        full: UInt32,
        map: OpaquePointer[ImmUntrackedOrigin],
        n: UInt32,
        lane: UInt32,
    ):
        """Copies nothing yet."""
        self.boxes = boxes
        self.full = full
        self.map = map
        self.n = n
        self.lane = lane
        self.row = 0
        self.column = 0
        self.parity = 0

    @always_inline
    def start(mut self, row: UInt32, column: UInt32):
        """Starts to copy the first boxes of a tile."""
        comptime assert Self.count % H_BOXES == 0
        self.row = row
        self.column = column
        comptime for i in range(H_BOXES):
            self._copy[i]()

    @always_inline
    def _copy[i: Int](self):
        """Starts to copy a box: those of a half, of some columns, of a part."""
        comptime half = i // (Self.across * Self.parts)
        comptime box = i // Self.parts % Self.across
        comptime part = i % Self.parts
        comptime slot = i % H_BOXES
        if self.lane == 0:
            var barrier = self.full + UInt32(8 * slot)
            mbarrier_expect_bytes(barrier, H_BOX_BYTES)
            load_tile(
                self.boxes + UInt32(slot * H_BOX_BYTES),
                self.map,
                barrier,
                Int32(self.column)
                + Int32(box * H_COLUMNS)
                + Int32(part) * Int32(self.n),
                Int32(self.row) + Int32(64 * half),
            )

    @always_inline
    def wait[half: Int, box: Int](self):
        """Waits for the boxes of all parts."""
        comptime for part in range(Self.parts):
            comptime i = Self._index[half, box, part]()
            mbarrier_wait(
                self.full + UInt32(8 * (i % H_BOXES)),
                self.parity ^ UInt32(i // H_BOXES & 1),
            )

    @staticmethod
    def _index[half: Int, box: Int, part: Int]() -> Int:
        return (half * Self.across + box) * Self.parts + part

    @always_inline
    def sixteen[
        dtype: DType, half: Int, box: Int, part: Int, group: Int
    ](self) -> SIMD[DType.float32, H_WIDTH]:
        """Returns what a lane has of 16 columns of a box, in the layout of its sums."""
        comptime slot = Self._index[half, box, part]() % H_BOXES
        comptime pitch = 2 * H_COLUMNS
        var chunk = (UInt32(group) + (self.lane >> 4)) ^ swizzle[pitch](
            self.lane
        )
        var words = matrix_x4(
            self.boxes
            + UInt32(slot * H_BOX_BYTES)
            + (self.lane & 15) * UInt32(pitch)
            + (chunk << 4)
        )
        # The upper and lower eight rows of one group of columns, then of the next.
        var own = SIMD[DType.float32, H_WIDTH]()
        comptime for j in range(4):
            own = own.insert[offset=2 * j](unpack_pair[dtype](words[j]))
        return own

    @always_inline
    def release[half: Int, box: Int](self):
        """Lets others take the places of the boxes of all parts, once all lanes have read them."""
        warp_sync()
        comptime for part in range(Self.parts):
            comptime next = Self._index[half, box, part]() + H_BOXES
            comptime if next < Self.count:
                self._copy[next]()

    @always_inline
    def result[i: Int](self) -> UInt32:
        """Locates the box of a tile's i-th result, in front of the boxes of h of all warps."""
        comptime assert H_BOXES * H_BOX_BYTES == 2 * BOX_BYTES
        comptime before = CONSUMER_WARPS * H_BOXES * H_BOX_BYTES
        return self.boxes - UInt32(before - i % H_BOXES * H_BOX_BYTES)

    @always_inline
    def next_tile(mut self):
        """Counts the copies of a tile."""
        comptime if Self.count // H_BOXES % 2 == 1:
            self.parity ^= 1
