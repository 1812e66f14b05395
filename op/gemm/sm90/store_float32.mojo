"""From sums to c in float32, stored or added to what is there.

Each thread stores its own sums; four lanes fill a sector of memory.
"""

from std.utils import StaticTuple

from .sums import Sums

comptime _Pair = SIMD[DType.float32, 2]
# Pairs of one row that are loaded together before any is used.
comptime _BATCH = 8


@doc_hidden
@fieldwise_init
struct Float32Rows(TrivialRegisterPassable):
    """The places in c of one thread's sums in a warp's 16 rows."""

    var c: Pointer[Float32, MutUntrackedOrigin]
    """C [M, N]."""
    var row: UInt32
    """First of the rows."""
    var column: UInt32
    """First of the columns."""
    var m: UInt32
    """Rows of c."""
    var n: UInt32
    """Columns of c, a multiple of 8."""
    var lane: UInt32
    """Lane of the thread."""

    @always_inline
    def _start(self, lower: Int) -> Pointer[Float32, MutUntrackedOrigin]:
        var row = self.row + (self.lane >> 2) + UInt32(8 * lower)
        return self.c.unsafe_offset(
            Int(row) * Int(self.n) + Int(self.column + (self.lane & 3) * 2)
        )

    @always_inline
    def _columns_left(self, lower: Int) -> Int32:
        var row = self.row + (self.lane >> 2) + UInt32(8 * lower)
        return Int32(self.n) - Int32(self.column) if row < self.m else Int32(0)

    @always_inline
    def load[lower: Int, batch: Int](self) -> SIMD[DType.float32, 2 * _BATCH]:
        """Loads what is there."""
        var start = self._start(lower)
        var left = self._columns_left(lower)
        var old = SIMD[DType.float32, 2 * _BATCH](0)
        comptime for i in range(_BATCH):
            comptime at = (batch + i) * 8
            if Int32(at) < left:
                var pair = start.unsafe_offset(at).unsafe_load[
                    width=2, alignment=8
                ]()
                old = old.insert[offset=2 * i](pair)
        return old

    @always_inline
    def store[S: Sums, //, columns: Int](self, sums: S, accumulate: Bool):
        """Stores the sums, or adds them to what is there."""
        comptime for lower in range(2):
            var start = self._start(lower)
            var left = self._columns_left(lower)
            comptime for batch in range(0, columns // 8, _BATCH):
                var old = SIMD[DType.float32, 2 * _BATCH](0)
                if accumulate:
                    old = self.load[lower, batch]()
                comptime for i in range(_BATCH):
                    comptime at = (batch + i) * 4 + 2 * lower
                    if Int32((batch + i) * 8) < left:
                        start.unsafe_offset((batch + i) * 8).unsafe_store[
                            width=2, alignment=8
                        ](
                            old.slice[2, offset=2 * i]()
                            + _Pair(sums.at[at](), sums.at[at + 1]())
                        )

    @always_inline
    def add_to[count: Int](self, mut sums: StaticTuple[Float32, count]):
        """Adds what is there to the sums."""
        comptime for lower in range(2):
            comptime for batch in range(0, count // 4, _BATCH):
                var old = self.load[lower, batch]()
                comptime for i in range(2 * _BATCH):
                    comptime at = (batch + i // 2) * 4 + 2 * lower + i % 2
                    sums[at] += old[i]
