"""Counters in global memory, by which blocks of a grid tell each other how far they are."""

from std.sys import inlined_assembly

comptime Counter = Pointer[UInt32, MutUntrackedOrigin]
"""Points to a counter in global memory."""


@always_inline
def await_counter(counter: Counter, least: UInt32):
    """Waits until a counter has come far enough.

    What was written before it came so far is seen from then on.

    Args:
        counter: The counter.
        least: How far.
    """
    while (
        inlined_assembly[
            "ld.acquire.gpu.global.u32 $0, [$1];",
            UInt32,
            constraints="=r,l,~{memory}",
        ](counter)
        < least
    ):
        # Acquiring empties the first cache: not over and over.
        while (
            inlined_assembly[
                "ld.relaxed.gpu.global.u32 $0, [$1];",
                UInt32,
                constraints="=r,l,~{memory}",
            ](counter)
            < least
        ):
            inlined_assembly["nanosleep.u32 300;", NoneType, constraints=""]()


@always_inline
def count(counter: Counter, number: UInt32):
    """Adds to a counter, after all that this thread has written.

    Args:
        counter: The counter.
        number: What to add.
    """
    inlined_assembly[
        "red.release.gpu.global.add.u32 [$0], $1;",
        NoneType,
        constraints="l,r,~{memory}",
    ](counter, number)


@always_inline
def take_one(counter: Counter) -> UInt32:
    """Adds one to a counter.

    Args:
        counter: The counter.

    Returns:
        What it was before.
    """
    return inlined_assembly[
        "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;",
        UInt32,
        constraints="=r,l,~{memory}",
    ](counter)
