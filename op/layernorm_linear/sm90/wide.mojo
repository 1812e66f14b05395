"""From accumulators to y in float32, stored or added to what is there.

Each thread stores its own accumulators; four lanes fill a sector of memory.
"""

from .epilogue import Sums

comptime _Pair = SIMD[DType.float32, 2]
# Pairs of one row that are loaded together before any is stored.
comptime _BATCH = 8


@always_inline
def store_wide[
    S: Sums, //, columns: Int, first: Int
](
    sums: S,
    y: Pointer[Float32, MutUntrackedOrigin],
    accumulate: Bool,
    row: UInt32,
    column: UInt32,
    m: UInt32,
    n: UInt32,
    lane: UInt32,
):
    """Stores this warp's 16 rows of one 64-row slice.

    Parameters:
        S: How the sums are kept.
        columns: Columns of the tile.
        first: The slice's first sum.

    Args:
        sums: The tile's sums.
        y: Receives y [m, n].
        accumulate: Whether to add to what is there.
        row: First of the 16 rows.
        column: First column of the tile.
        m: Rows of y.
        n: Columns of y, a multiple of 8.
        lane: Lane of the thread.
    """
    comptime for lower in range(2):
        var its_row = row + (lane >> 2) + UInt32(8 * lower)
        var start = y.unsafe_offset(
            Int(its_row) * Int(n) + Int(column + (lane & 3) * 2)
        )
        var left = Int32(n) - Int32(column) if its_row < m else Int32(0)
        comptime for batch in range(0, columns // 8, _BATCH):
            var old = SIMD[DType.float32, 2 * _BATCH](0)
            if accumulate:
                comptime for i in range(_BATCH):
                    if Int32((batch + i) * 8) < left:
                        var pair = start.unsafe_offset(
                            (batch + i) * 8
                        ).unsafe_load[width=2, alignment=8]()
                        old = old.insert[offset=2 * i](pair)
            comptime for i in range(_BATCH):
                comptime at = first + (batch + i) * 4 + 2 * lower
                if Int32((batch + i) * 8) < left:
                    start.unsafe_offset((batch + i) * 8).unsafe_store[
                        width=2, alignment=8
                    ](
                        old.slice[2, offset=2 * i]()
                        + _Pair(
                            sums.at[at](),
                            sums.at[at + 1](),
                        )
                    )
