"""What is done beside a product on tiles, a little in each of its steps: memory works while tiles do."""

from std.math import align_up, ceildiv

from .memory import (
    Buffer,
    CACHE_LINE,
    Matrix,
    buffer,
    prefetch_for_read,
    store_first,
)

comptime _WIDTH = 32


trait Beside(TrivialRegisterPassable):
    """Has work for every step of a product."""

    def step(mut self):
        """Does a step's share."""
        ...


@fieldwise_init
struct Nothing(Beside):
    """Has none."""

    @always_inline
    def step(mut self):
        """Does nothing."""
        pass


struct Fetch(Beside):
    """Brings memory into the second cache, which the processor does not do by itself for so many rows."""

    var next: Int
    """Address of the next line."""
    var end: Int
    """The end of the memory."""
    var bytes: Int
    """Bytes to fetch in a step."""

    def __init__(out self, address: Int, bytes: Int, steps: Int):
        """Divides memory among steps.

        Args:
            address: Where it begins.
            bytes: Its size; none below 1.
            steps: Steps that there will be, at least 1.
        """
        self.next = address
        self.end = address + bytes
        self.bytes = align_up(ceildiv(max(bytes, 0), steps), CACHE_LINE)

    @always_inline
    def step(mut self):
        """Starts to fetch some lines."""
        var end = min(self.next + self.bytes, self.end)
        while self.next < end:
            prefetch_for_read(buffer[DType.uint8](self.next))
            self.next += CACHE_LINE


struct StoreRows[dtype: DType](Beside):
    """Adds a bias to complete sums and stores them, row after row.

    Parameters:
        dtype: Element type of the output.
    """

    var sums: Matrix[DType.float32]
    """The sums, in whole pieces of 32 columns."""
    var bias: Buffer[DType.float32]
    """A number for each column."""
    var output: Matrix[Self.dtype]
    """Where they go."""
    var rows: Int
    """Rows of sums."""
    var columns: Int
    """Their columns."""
    var pieces: Int
    """Pieces to store in a step."""
    var row: Int
    """The next row."""
    var column: Int
    """Its next column."""

    def __init__(
        out self,
        sums: Matrix[DType.float32],
        bias: Buffer[DType.float32],
        output: Matrix[Self.dtype],
        rows: Int,
        columns: Int,
        pieces: Int,
    ):
        """Begins with the first row.

        Args:
            sums: The sums, in whole pieces of 32 columns.
            bias: A number for each column.
            output: Where they go.
            rows: Rows of sums; 0 for nothing to do.
            columns: Their columns.
            pieces: Pieces of 32 columns to store in a step.
        """
        self.sums = sums
        self.bias = bias
        self.output = output
        self.rows = rows
        self.columns = columns
        self.pieces = pieces
        self.row = 0
        self.column = 0

    @always_inline
    def step(mut self):
        """Stores some pieces."""
        for _ in range(self.pieces):
            if self.row >= self.rows:
                return
            self._store()

    def finish(mut self):
        """Stores all that is left."""
        while self.row < self.rows:
            self._store()

    @always_inline
    def _store(mut self):
        var sums = (
            self.sums.at(self.row, self.column).unsafe_load[width=_WIDTH]()
            + self.bias.unsafe_offset(self.column).unsafe_load[width=_WIDTH]()
        )
        store_first[width=_WIDTH](
            self.output.at(self.row, self.column),
            sums.cast[Self.dtype](),
            self.columns - self.column,
        )
        self.column += _WIDTH
        if self.column >= self.columns:
            self.column = 0
            self.row += 1
