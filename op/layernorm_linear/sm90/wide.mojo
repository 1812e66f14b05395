"""From accumulators to y in float32, stored or added to what is there.

Each thread stores its own accumulators; four lanes fill a sector of memory.
"""

from std.utils import StaticTuple

from .epilogue import Sums

comptime _Pair = SIMD[DType.float32, 2]
# Pairs of one row that are loaded together before any is used.
comptime _BATCH = 8


@fieldwise_init
struct WideRows(TrivialRegisterPassable):
    """The places in y of one thread's sums in a warp's 16 rows."""

    var y: Pointer[Float32, MutUntrackedOrigin]
    """Y [m, n]."""
    var row: UInt32
    """First of the rows."""
    var column: UInt32
    """First of the columns."""
    var m: UInt32
    """Rows of y."""
    var n: UInt32
    """Columns of y, a multiple of 8."""
    var lane: UInt32
    """Lane of the thread."""

    @always_inline
    def _start(self, lower: Int) -> Pointer[Float32, MutUntrackedOrigin]:
        var row = self.row + (self.lane >> 2) + UInt32(8 * lower)
        return self.y.unsafe_offset(
            Int(row) * Int(self.n) + Int(self.column + (self.lane & 3) * 2)
        )

    @always_inline
    def _columns_left(self, lower: Int) -> Int32:
        var row = self.row + (self.lane >> 2) + UInt32(8 * lower)
        return Int32(self.n) - Int32(self.column) if row < self.m else Int32(0)

    @always_inline
    def load[lower: Int, batch: Int](self) -> SIMD[DType.float32, 2 * _BATCH]:
        """Loads what is there.

        Parameters:
            lower: Whether of the row 8 below.
            batch: First of the pairs.

        Returns:
            Neighbouring pairs of the thread.
        """
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
    def store[
        S: Sums, //, columns: Int, first: Int
    ](self, sums: S, accumulate: Bool):
        """Stores the sums of one 64-row slice, or adds them to what is there.

        Parameters:
            S: How the sums are kept.
            columns: Columns of the sums.
            first: The slice's first sum.

        Args:
            sums: The sums.
            accumulate: Whether to add.
        """
        comptime for lower in range(2):
            var start = self._start(lower)
            var left = self._columns_left(lower)
            comptime for batch in range(0, columns // 8, _BATCH):
                var old = SIMD[DType.float32, 2 * _BATCH](0)
                if accumulate:
                    old = self.load[lower, batch]()
                comptime for i in range(_BATCH):
                    comptime at = first + (batch + i) * 4 + 2 * lower
                    if Int32((batch + i) * 8) < left:
                        start.unsafe_offset((batch + i) * 8).unsafe_store[
                            width=2, alignment=8
                        ](
                            old.slice[2, offset=2 * i]()
                            + _Pair(sums.at[at](), sums.at[at + 1]())
                        )

    @always_inline
    def add_to[count: Int](self, mut sums: StaticTuple[Float32, count]):
        """Adds what is there to the sums of one 64-row slice.

        Parameters:
            count: How many a thread has.

        Args:
            sums: The sums.
        """
        comptime for lower in range(2):
            comptime for batch in range(0, count // 4, _BATCH):
                var old = self.load[lower, batch]()
                comptime for i in range(2 * _BATCH):
                    comptime at = (batch + i // 2) * 4 + 2 * lower + i % 2
                    sums[at] += old[i]
