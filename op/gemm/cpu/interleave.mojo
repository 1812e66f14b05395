"""Work that is interleaved with a product on tiles, a little in each step, so that memory accesses overlap with it."""

from std.math import ceildiv

from .memory import CACHE_LINE, buffer, prefetch_for_read


trait Interleaved(TrivialRegisterPassable):
    """Has work for every step of a product."""

    def step(mut self):
        """Does a step's share."""
        ...


@fieldwise_init
struct Nothing(Interleaved):
    """Has none."""

    @always_inline
    def step(mut self):
        """Does nothing."""
        pass


struct Fetch(Interleaved):
    """Brings rows into the second cache, which the processor's prefetcher does not do for this many."""

    var next: Int
    """Address of the next line."""
    var row_end: Int
    """The end of its row."""
    var row_bytes: Int
    """Bytes of a row."""
    var skip: Int
    """Bytes from the end of a row to the next."""
    var rows: Int
    """Rows that are left."""
    var lines: Int
    """Lines to fetch in a step."""

    def __init__(
        out self,
        address: Int,
        rows: Int,
        row_bytes: Int,
        stride: Int,
        steps: Int,
    ):
        """Divides rows among steps.

        Args:
            address: Where the first one begins.
            rows: Their number; none below 1.
            row_bytes: Bytes of a row.
            stride: Bytes from row to row.
            steps: Steps that there will be, at least 1.
        """
        self.next = address
        self.row_end = address + row_bytes
        self.row_bytes = row_bytes
        self.skip = stride - row_bytes
        self.rows = rows
        self.lines = ceildiv(
            max(rows, 0) * ceildiv(row_bytes, CACHE_LINE), steps
        )

    @always_inline
    def step(mut self):
        """Starts to fetch some lines."""
        for _ in range(self.lines):
            if self.rows <= 0:
                return
            prefetch_for_read(buffer[DType.uint8](self.next))
            self.next += CACHE_LINE
            if self.next >= self.row_end:
                self.next = self.row_end + self.skip
                self.row_end = self.next + self.row_bytes
                self.rows -= 1
