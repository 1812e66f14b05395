"""From sums that are the gradient of an activation to the gradient of its input h.

Each warp has its boxes of h, and as many for results.
"""

from std.memory import OpaquePointer
from std.utils import StaticTuple

from ..epilogue import Epilogue
from .barriers import warp_sync
from .config import H_BOXES, H_COLUMNS
from .h_rows import H_WIDTH, HRows
from .kept_maxima import KeptMaxima
from .parts import part_of
from .store import TileRows
from .sums import Sums
from .tma import store_commit, store_wait_read

comptime _ALL = H_COLUMNS // 2
"""Elements of a box that a lane has."""


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
    ](mut self, eight: SIMD[DType.float32, H_WIDTH], counts: Bool):
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
                    h_rows.result[first](), made.a.slice[H_WIDTH, offset=at]()
                )
            var dh = made.dh.slice[H_WIDTH, offset=at]()
            rows.put_sixteen[dtype, group](h_rows.result[first + before](), dh)
            var dup = made.dup.slice[H_WIDTH, offset=at]()
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
        # Not before results are stored: until then, loads from the boxes may be on their way.
        h_rows.release[half, box]()
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
