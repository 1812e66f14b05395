"""Stores c element by element, where its rows do not start at multiples of 16 bytes, which TMA requires."""

from std.sys import size_of

from .shared_memory import shared_element

# Rows of a box.
comptime _ROWS = 16


@always_inline
def swizzle[pitch: Int](row: UInt32) -> UInt32:
    """Returns how TMA permutes the chunks of a row of a box: chunk i is at place i ^ this.

    Parameters:
        pitch: Bytes of a row: 128, 64 or 32.

    Args:
        row: The row, or any number with the same lowest three bits.

    Returns:
        What their places, of 16 bytes each, are permuted by.
    """
    comptime rows = 128 // pitch
    return (row & 7) // UInt32(rows)


@doc_hidden
@fieldwise_init
struct Elements(TrivialRegisterPassable):
    """Where the elements of c are."""

    var c: Int64
    """Address of c [M, N]; not read where TMA stores."""
    var m: UInt32
    """Rows of c."""
    var n: UInt32
    """Columns of c."""

    @always_inline
    def store[
        dtype: DType, columns: Int
    ](self, box: UInt32, row: UInt32, column: UInt32, lane: UInt32):
        """Stores a box, whose lanes take neighboring elements of one row after another."""
        comptime size = size_of[dtype]()
        comptime pitch = columns * size
        var c = Pointer[Scalar[dtype], MutAnyOrigin](
            unsafe_from_address=Int(self.c)
        ).unsafe_offset(Int(row) * Int(self.n) + Int(column + lane))
        var rows = min(UInt32(_ROWS), self.m - row) if row < self.m else 0
        for i in range(rows):
            comptime for first in range(0, columns, 32):
                var at = (lane + UInt32(first)) * UInt32(size)
                var place = (
                    box
                    + i * UInt32(pitch)
                    + (((at >> 4) ^ swizzle[pitch](i)) << 4)
                    + (at & 15)
                )
                if column + lane + UInt32(first) < self.n:
                    c.unsafe_offset(first).unsafe_store(
                        shared_element[dtype](place)
                    )
            c = c.unsafe_offset(Int(self.n))
