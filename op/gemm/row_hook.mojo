"""Row hooks: work on rows in a product's kernel.

A hook may gather sums of each row of a and compute from them the terms that the epilogue needs. Warps with nothing to
multiply may process the finished rows of c.
"""

from .epilogue import RowTerms

comptime Part = SIMD[DType.float32, 2]
"""What is known of a row, or of a part of it, once its sums are complete."""


trait Gathering(TrivialRegisterPassable):
    """What a thread gathers of the tiles of a while they are multiplied."""

    def add[dtype: DType, first: Bool](mut self, tile: UInt32, thread: UInt32):
        """Adds one k block.

        Parameters:
            dtype: Type of a.
            first: Whether this is the rows' first block.

        Args:
            tile: Where a kernel has 64 rows of the block.
            thread: Which of the threads that share them.
        """
        ...


trait RowSums(Gathering):
    """Sums of each row of a, as two neighboring threads share it."""

    def __init__(out self):
        """Starts with nothing."""
        ...

    def part(self, count: Float32) -> Part:
        """Adds up what both threads have.

        Args:
            count: Elements of the row, or of the part of it that was seen.

        Returns:
            What is known of it, the same in both threads.
        """
        ...


trait RowHook(TrivialRegisterPassable):
    """Work on rows in a kernel, which takes it by value."""

    comptime name: StaticString = ""
    """Tells kernels apart."""
    comptime gathers: Bool = False
    """Whether the hook computes the epilogue's terms, from the rows of a."""
    comptime passes_on: Bool = False
    """Whether the hook processes the finished rows of c."""
    comptime Sums: RowSums
    """What a thread gathers."""

    @always_inline
    def join(self, first: Part, second: Part, counts: Part) -> Part:
        """Joins what is known of two parts of a row.

        Args:
            first: Of one part.
            second: Of the other.
            counts: Elements of each.

        Returns:
            What is known of both.
        """
        return first

    @always_inline
    def terms(self, part: Part, count: Float32) -> RowTerms[]:
        """Finds the terms of a row.

        Args:
            part: What is known of it.
            count: Its elements.

        Returns:
            What the epilogue needs.
        """
        return {1, 0}

    @always_inline
    def keep(self, row: Int, terms: RowTerms[]):
        """Stores the terms of a row for those who come later.

        Args:
            row: The row.
            terms: Its terms.
        """
        pass

    @always_inline
    def counters(self) -> Int:
        """Locates what counts the tiles of c that are in memory.

        Returns:
            The address of a counter for each 64 rows.
        """
        return 0

    @always_inline
    def take_on[dtype: DType](self, lane: UInt32):
        """Takes finished rows further until there are none left.

        Parameters:
            dtype: Type of c.

        Args:
            lane: Lane of the thread in its warp.
        """
        pass


struct NoSums(RowSums):
    """Gathers nothing of rows."""

    @doc_hidden
    @always_inline
    def __init__(out self):
        pass

    @doc_hidden
    @always_inline
    def add[dtype: DType, first: Bool](mut self, tile: UInt32, thread: UInt32):
        pass

    @doc_hidden
    @always_inline
    def part(self, count: Float32) -> Part:
        return 0


@fieldwise_init
struct NoHook(RowHook):
    """Leaves rows alone."""

    comptime Sums = NoSums
    """None."""
