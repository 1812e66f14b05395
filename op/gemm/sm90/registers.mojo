"""How many registers the threads of a warpgroup have, which it may change."""

from std.sys import inlined_assembly


@doc_hidden
@always_inline
def registers_raise[count: Int]():
    """Raises the registers of each thread of this warpgroup."""
    inlined_assembly[
        "setmaxnreg.inc.sync.aligned.u32 $0;",
        NoneType,
        constraints="n,~{memory}",
    ](Int32(count))


@doc_hidden
@always_inline
def registers_lower[count: Int]():
    """Lowers the registers of each thread of this warpgroup."""
    inlined_assembly[
        "setmaxnreg.dec.sync.aligned.u32 $0;",
        NoneType,
        constraints="n,~{memory}",
    ](Int32(count))
