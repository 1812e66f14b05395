"""Asks for a weight's numbers ahead of their use, where few rows are multiplied by them in place."""

from std.sys import size_of

from .blocking import Blocking
from .memory import CACHE_LINE, Matrix, prefetch_for_read
from .pack_transposed import load_square

comptime _NEXT_BYTES = 3 << 16
"""As many of the next rows, and the ones before, stay in the second cache."""


struct Fetch[dtype: DType, can_follow: Bool](TrivialRegisterPassable):
    """How the rows of a weight that make a vector of sums are asked for: each along itself, or before, while the
    rows in front of them are multiplied. Those are asked for in the order of memory, which is faster.

    Parameters:
        dtype: Element type of the weight.
        can_follow: Whether rows may be asked for before.
    """

    var in_order: Bool
    """Whether rows are asked for before, if there are others in front of them."""
    var along: Bool
    """Whether these rows were not."""
    var next: Bool
    """Whether to ask for the next rows."""
    var jump: Int
    """Elements between these rows and the next."""
    var depth: Int
    """Elements of a row."""

    def __init__(out self, stride: Int, depth: Int, is_first: Bool, next: Int):
        """Decides how.

        Args:
            stride: Distance between rows.
            depth: Elements of a row.
            is_first: Whether no rows were multiplied just before.
            next: How many rows behind these those are that are multiplied next; 0 without any.
        """
        comptime rows = Blocking[Self.dtype].width
        self.in_order = (
            Self.can_follow
            and rows * stride * size_of[Self.dtype]() <= _NEXT_BYTES
        )
        self.along = is_first or not self.in_order
        self.next = next != 0 and self.in_order
        self.jump = (next if next else rows) * stride
        self.depth = depth

    @always_inline
    def square[
        far: Int
    ](
        self, weight: Matrix[Self.dtype], k: Int, columns: Int, count: Int
    ) -> Array[
        SIMD[Blocking[Self.dtype].accum, Blocking[Self.dtype].width],
        Blocking[Self.dtype].width,
    ]:
        """Loads a square, and asks for others.

        Parameters:
            far: How many elements ahead to ask for of the same rows.

        Args:
            weight: The rows.
            k: Where the square begins in each of them.
            columns: How many rows there are.
            count: Elements of each row to load.

        Returns:
            The registers.
        """
        comptime B = Blocking[Self.dtype]
        # Behind the end of these rows come the next.
        var next = far
        if k + far >= self.depth:
            next += self.jump - weight.stride
        var rows = weight.part(0, k)
        comptime if not Self.can_follow:
            return load_square(rows, columns, count, next)
        else:
            if self.along:
                comptime for i in range(B.width):
                    prefetch_for_read(rows.at(i, next))
            if self.next:
                comptime line = CACHE_LINE // size_of[Self.dtype]()
                var at = weight.start.unsafe_offset(self.jump + k * B.width)
                comptime for i in range(B.width * B.pair * B.width // line):
                    prefetch_for_read(at.unsafe_offset(i * line))
            return load_square[fetches=False](rows, columns, count, 0)
