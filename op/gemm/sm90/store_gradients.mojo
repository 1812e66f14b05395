"""From sums that are the gradient of an activation to the gradient of its input h.

Each warp has its boxes of h, and as many for results.
"""

from std.memory import OpaquePointer

from ..epilogue import Epilogue
from .barriers import warp_sync
from .config import H_BOXES, H_COLUMNS
from .h_rows import H_WIDTH, HRows
from .parts import part_of
from .store import TileRows
from .sums import Sums
from .tma import store_commit, store_wait_read


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
    h_rows: HRows[tile_columns, parts],
    c_maps: OpaquePointer[ImmUntrackedOrigin],
):
    """Makes and stores the gradients of the rows, and the activation if it is wanted."""
    comptime assert width == H_COLUMNS
    comptime across = tile_columns // H_COLUMNS
    # The activation, then the gradients.
    comptime outputs = 1 + parts
    comptime assert 2 * across * outputs % H_BOXES == 0
    var n = h_rows.n
    comptime for box in range(across):
        comptime first = (half * across + box) * outputs
        var column = rows.column + UInt32(box * H_COLUMNS)
        # Of the boxes before, those that are not used again may still be read. Each has a group of stores.
        if rows.lane == 0:
            store_wait_read[H_BOXES - outputs]()
        warp_sync()
        h_rows.wait[half, box]()
        comptime for group in range(0, H_COLUMNS // 8, 2):
            comptime at = (box * H_COLUMNS + group * 8) // 2
            var da = SIMD[DType.float32, H_WIDTH]()
            comptime for i in range(H_WIDTH):
                da[i] = sums.at[at + i]()
            var h = h_rows.sixteen[dtype, half, box, 0, group]()
            var up = h
            comptime if parts == 2:
                up = h_rows.sixteen[dtype, half, box, 1, group]()
            var made = rows.epilogue.differentiated[H_WIDTH](da, h, up)
            rows.put_sixteen[dtype, group](h_rows.result[first](), made.a)
            rows.put_sixteen[dtype, group](h_rows.result[first + 1](), made.dh)
            comptime if parts == 2:
                rows.put_sixteen[dtype, group](
                    h_rows.result[first + 2](), made.dup
                )
        h_rows.release[half, box]()
        if rows.epilogue.a() != 0:
            rows.send[dtype](
                part_of(c_maps, 1), h_rows.result[first](), Int32(column)
            )
        elif rows.lane == 0:
            store_commit()
        # After the last of a gate's columns, its gradients would be in the other half: they go beyond that.
        var to = column
        comptime if parts == 2:
            to += n if column >= n else 0
        rows.send[dtype](c_maps, h_rows.result[first + 1](), Int32(to))
        comptime if parts == 2:
            rows.send[dtype](
                c_maps, h_rows.result[first + 2](), Int32(column + n)
            )
