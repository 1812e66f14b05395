"""From sums that are the gradient of an activation to the gradient of its input h.

Each warp copies the boxes of h that it needs by TMA, the first ones while the tile is multiplied, the others while it
computes those before.
"""

from std.memory import OpaquePointer
from std.utils import StaticTuple

from ..epilogue import Epilogue
from .barriers import mbarrier_expect_bytes, mbarrier_wait, warp_sync
from .config import (
    BOX_BYTES,
    CONSUMER_WARPS,
    H_BOX_BYTES,
    H_BOXES,
    H_COLUMNS,
)
from .elements import swizzle
from .kept_maxima import KeptMaxima
from .parts import part_of
from .shared_memory import matrix_x4, unpack_pair
from .store import TileRows
from .sums import Sums
from .tma import load_tile, store_commit, store_wait_read

comptime _ALL = H_COLUMNS // 2
"""Elements of a box that a lane has."""
comptime _WIDTH = 8
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
    ](self) -> SIMD[DType.float32, _WIDTH]:
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
        var own = SIMD[DType.float32, _WIDTH]()
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


@doc_hidden
struct GradientMaxima[parts: Int, groups: Int](TrivialRegisterPassable):
    """The largest magnitudes of the gradients of a warp's 16 rows.

    Parameters:
        parts: How many gradients.
        groups: Groups of eight columns of a box.
    """

    var of_parts: StaticTuple[KeptMaxima, Self.parts]
    """Those of each."""
    var words: StaticTuple[UInt32, Self.parts * Self.groups]
    """What a lane has seen in the columns of a box."""

    @always_inline
    def __init__[
        E: Epilogue, width: Int, any: Bool, //
    ](out self, rows: TileRows[E, width, any], n: UInt32):
        """Has seen nothing. Gradients of a gate are halves of one matrix, or two matrices."""
        var epilogue = rows.epilogue
        var first = epilogue.maxima()
        var second = epilogue.second_maxima()
        var bytes = 4 * Int64(n)
        var rows_after = first + (
            bytes if second != 0 else bytes * Int64(Self.parts)
        )
        var of_first = KeptMaxima(
            first,
            rows_after,
            epilogue.has_one_maximum(),
            rows.elements.m,
            n,
            rows.row,
            rows.lane,
        )
        self.of_parts = StaticTuple[KeptMaxima, Self.parts](fill=of_first)
        comptime if Self.parts == 2:
            if second != 0:
                self.of_parts[1].of_columns = second
                self.of_parts[1].of_rows = second + bytes
            elif not epilogue.has_one_maximum():
                self.of_parts[1].of_columns = first + bytes
        self.words = {fill = 0}

    @always_inline
    def compare[
        part: Int, group: Int
    ](mut self, eight: SIMD[DType.float32, _WIDTH], counts: Bool):
        """Compares 16 columns of a part."""
        var own = self.of_parts[part]
        comptime for i in range(2):
            self.words[part * Self.groups + group + i] = own.compare(
                eight.slice[4, offset=4 * i](), counts
            )
        self.of_parts[part] = own

    @always_inline
    def keep_columns(self, column: UInt32):
        """Keeps the maxima of a box's columns."""
        comptime for part in range(Self.parts):
            var words = StaticTuple[UInt32, Self.groups](fill=0)
            comptime for i in range(Self.groups):
                words[i] = self.words[part * Self.groups + i]
            self.of_parts[part].keep_columns(words, column)

    @always_inline
    def keep_rows(self):
        """Keeps the maxima of rows, or of all."""
        comptime for part in range(Self.parts):
            self.of_parts[part].keep_rows()


@doc_hidden
@always_inline
def store_gradients[
    S: Sums,
    E: Epilogue,
    width: Int,
    any: Bool,
    tile_columns: Int,
    parts: Int,
    //,
    dtype: DType,
    half: Int,
](
    rows: TileRows[E, width, any],
    sums: S,
    vectors: UInt32,
    h_rows: HRows[tile_columns, parts],
    c_maps: OpaquePointer[ImmUntrackedOrigin],
):
    """Makes and stores the gradients of the rows, and the activation if it is wanted; and keeps their maxima where the
    epilogue wants them."""
    comptime assert width == H_COLUMNS
    comptime across = tile_columns // H_COLUMNS
    # The activation, if it may be stored, then the gradients.
    comptime before = 1 if E.may_store_a else 0
    comptime outputs = before + parts
    comptime assert 2 * across * outputs % H_BOXES == 0
    var n = h_rows.n
    var kept = GradientMaxima[parts, H_COLUMNS // 8](rows, n)
    comptime for box in range(across):
        comptime first = (half * across + box) * outputs
        var column = rows.column + UInt32(box * H_COLUMNS)
        h_rows.wait[half, box]()
        var da = SIMD[DType.float32, _ALL]()
        var h = SIMD[DType.float32, _ALL]()
        var up = SIMD[DType.float32, _ALL]()
        # All of a box in one call, so that its functions overlap.
        comptime for group in range(0, H_COLUMNS // 8, 2):
            comptime own_column = box * H_COLUMNS + group * 8
            comptime at = group * 4
            var some = rows.finish[tile_columns, own_column](
                sums, vectors
            ).join(rows.finish[tile_columns, own_column + 8](sums, vectors))
            da = da.insert[offset=at](some)
            h = h.insert[offset=at](
                h_rows.sixteen[dtype, half, box, 0, group]()
            )
            comptime if parts == 2:
                up = up.insert[offset=at](
                    h_rows.sixteen[dtype, half, box, 1, group]()
                )
        h_rows.release[half, box]()
        comptime if parts == 1:
            up = h
        var made = rows.epilogue.differentiated[_ALL](da, h, up)
        # Of the boxes before, those that are not used again may still be read. Each has a group of stores.
        if rows.lane == 0:
            store_wait_read[H_BOXES - outputs]()
        warp_sync()
        comptime for group in range(0, H_COLUMNS // 8, 2):
            comptime at = group * 4
            comptime if E.may_store_a:
                rows.put_sixteen[dtype, group](
                    h_rows.result[first](), made.a.slice[_WIDTH, offset=at]()
                )
            var dh = made.dh.slice[_WIDTH, offset=at]()
            rows.put_sixteen[dtype, group](h_rows.result[first + before](), dh)
            var dup = made.dup.slice[_WIDTH, offset=at]()
            comptime if parts == 2:
                rows.put_sixteen[dtype, group](
                    h_rows.result[first + before + 1](), dup
                )
            comptime if E.keeps_maxima:
                # In columns past the last one, h is what a gate multiplies.
                var counts = column + UInt32(group * 8) < n
                kept.compare[0, group](dh, counts)
                comptime if parts == 2:
                    kept.compare[1, group](dup, counts)
        comptime if E.keeps_maxima:
            kept.keep_columns(column)
        comptime if E.may_store_a:
            if rows.epilogue.a() != 0:
                rows.send[dtype](
                    part_of(c_maps, 1), h_rows.result[first](), Int32(column)
                )
            elif rows.lane == 0:
                store_commit()
        rows.send[dtype](c_maps, h_rows.result[first + before](), Int32(column))
        comptime if parts == 2:
            rows.send[dtype](
                part_of(c_maps, 2),
                h_rows.result[first + before + 1](),
                Int32(column),
            )
    comptime if E.keeps_maxima:
        kept.keep_rows()
