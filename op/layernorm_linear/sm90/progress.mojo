"""What the warps that store tiles tell others of: which rows are in memory."""

from .counters import Counter, count
from .ptx import store_wait_all

comptime SLICE_ROWS = 64
"""Rows that share a counter: those of a warpgroup in a tile."""
comptime SLICE_WARPS = 4
"""How many count a slice, once for each tile column."""


struct Progress[enabled: Bool](TrivialRegisterPassable):
    """What a warp has stored and not yet told.

    Parameters:
        enabled: Whether anyone wants to know.
    """

    var counters: Counter
    """Counters of the slices."""
    var slice: Int32
    """Slice of the last tile; -1 if there is nothing to tell."""
    var tells: Bool
    """Whether this is the thread that stores for its warp."""

    @always_inline
    def __init__(out self, counters: Counter, lane: UInt32):
        """Has nothing to tell.

        Args:
            counters: Counters of the slices.
            lane: Lane of the thread.
        """
        self.counters = counters
        self.slice = -1
        self.tells = lane == 0

    @always_inline
    def stored(mut self, row: UInt32):
        """Notes that the stores of a tile have been started.

        Args:
            row: First row of the slice.
        """
        comptime if Self.enabled:
            self.slice = Int32(row) // SLICE_ROWS

    @always_inline
    def tell(mut self):
        """Tells of what has been noted, once it is in memory."""
        comptime if Self.enabled:
            if self.slice >= 0 and self.tells:
                store_wait_all()
                count(self.counters.unsafe_offset(Int(self.slice)), 1)
            self.slice = -1
