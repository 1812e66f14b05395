"""Asks for large pages where a kernel is about to write a large tensor for the first time.

Fresh memory costs a page fault for every 4 KiB written, more than the kernel itself where it is bound by
memory. Linux gives 2 MiB at once on request, and requests are for pages that the kernel will fill: none is
larger than what is used.
"""

from std.ffi import external_call
from std.sys import CompilationTarget

comptime _PAGE = 1 << 21
comptime _WORTH_A_CALL = 1 << 22
comptime _MADV_HUGEPAGE = 14


def prefer_large_pages(address: Int, bytes: Int):
    """Asks for large pages wherever whole ones fit in the given memory.

    It is advice: nothing depends on whether the system follows it.

    Args:
        address: Where the memory starts.
        bytes: Its size.
    """
    comptime if CompilationTarget.is_linux():
        if bytes < _WORTH_A_CALL:
            return
        var start = (address + _PAGE - 1) // _PAGE * _PAGE
        var end = (address + bytes) // _PAGE * _PAGE
        _ = external_call["madvise", Int32](start, end - start, _MADV_HUGEPAGE)
