"""Counters in global memory, by which blocks of a grid synchronize."""

from std.sys import inlined_assembly

from .tma import store_wait_all

comptime Counter = Pointer[UInt32, MutUntrackedOrigin]
"""Points to a counter in global memory."""
comptime SLICE_ROWS = 64
"""Rows that share a counter: those of a warpgroup in a tile."""
comptime SLICE_WARPS = 4
"""Warps that count a slice, each once for every tile column."""


@doc_hidden
@always_inline
def await_counter(counter: Counter, least: UInt32):
    """Waits until a counter has reached a number.

    What was written before that is visible from then on.
    """
    while (
        inlined_assembly[
            "ld.acquire.gpu.global.u32 $0, [$1];",
            UInt32,
            constraints="=r,l,~{memory}",
        ](counter)
        < least
    ):
        # Each acquire empties the L1 cache, so polling does without.
        while (
            inlined_assembly[
                "ld.relaxed.gpu.global.u32 $0, [$1];",
                UInt32,
                constraints="=r,l,~{memory}",
            ](counter)
            < least
        ):
            inlined_assembly["nanosleep.u32 300;", NoneType, constraints=""]()


@doc_hidden
@always_inline
def count(counter: Counter, number: UInt32):
    """Adds to a counter, after all that this thread has written."""
    inlined_assembly[
        "red.release.gpu.global.add.u32 [$0], $1;",
        NoneType,
        constraints="l,r,~{memory}",
    ](counter, number)


@doc_hidden
@always_inline
def take_one(counter: Counter) -> UInt32:
    """Adds one to a counter."""
    return inlined_assembly[
        "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;",
        UInt32,
        constraints="=r,l,~{memory}",
    ](counter)


@doc_hidden
struct Progress[enabled: Bool](TrivialRegisterPassable):
    """What a warp has stored and not yet reported."""

    var counters: Counter
    """Counters of the slices."""
    var slice: Int32
    """Slice of the last tile; -1 if there is nothing to report."""
    var tells: Bool
    """Whether this is the thread that stores for its warp."""

    @always_inline
    def __init__(out self, counters: Counter, lane: UInt32):
        """Has nothing to report."""
        self.counters = counters
        self.slice = -1
        self.tells = lane == 0

    @always_inline
    def stored(mut self, row: UInt32):
        """Notes that the stores of a tile have been started."""
        comptime if Self.enabled:
            self.slice = Int32(row) // SLICE_ROWS

    @always_inline
    def tell(mut self):
        """Reports what has been noted, once it is in memory."""
        comptime if Self.enabled:
            if self.slice >= 0 and self.tells:
                store_wait_all()
                count(self.counters.unsafe_offset(Int(self.slice)), 1)
            self.slice = -1
