"""A thread's workspace for y^T = W z^T on tile registers."""

from std.math import ceildiv

from ...call import Call
from ...gemm.cpu.blocking import Blocking
from ...gemm.cpu.memory import Arena, Matrix, buffer, load_first
from ...gemm.cpu.pack_transposed import transpose
from ...gemm.cpu.tiles import TILES_ROWS, TILE_ROWS


struct TileColumns[dtype: DType](TrivialRegisterPassable):
    """Arrays of a worker.

    Parameters:
        dtype: Element type of the tensors.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    var rows: Int
    """Address of 16 normalized rows."""
    var sums: Int
    """Address of the sums of some rows of y^T, 32 after 32, in blocks of 32 columns."""
    var stride: Int
    """Bytes from 32 rows of sums to the next."""
    var weight: Int
    """Address of 32 rows of the weight, a block of their columns."""
    var rest: Int
    """Address of what 32 rows of the weight have beyond the last whole step."""

    def __init__(out self, mut arena: Arena, call: Call, count: Int):
        """Reserves the arrays.

        Args:
            arena: Where from.
            call: The sizes.
            count: How many times 32 rows of y^T are summed at once.
        """
        comptime B = Self.B
        self.rows = arena.take[B.operand](TILE_ROWS * B.row_stride(call.K))
        var sums = ceildiv(call.M, TILES_ROWS) * TILES_ROWS * TILES_ROWS
        self.stride = sums * 4
        self.sums = arena.take[DType.float32](count * sums)
        self.weight = arena.take[B.operand](TILES_ROWS * B.depth)
        self.rest = arena.take[B.operand](TILES_ROWS * B.step)

    @staticmethod
    def reserve(mut arena: Arena, call: Call, count: Int):
        """Takes as much as it needs.

        Args:
            arena: Where from.
            call: The sizes.
            count: How many times 32 rows of y^T are summed at once.
        """
        _ = Self(arena, call, count)

    def sums_of(self, place: Int, m: Int) -> Matrix[DType.float32]:
        """Finds a block of sums.

        Args:
            place: Which 32 rows of y^T.
            m: Its first row of y, a multiple of 32.

        Returns:
            The block.
        """
        return {
            self.sums + place * self.stride + m * TILES_ROWS * 4,
            TILES_ROWS,
        }

    def copy_block(self, weight: Matrix[Self.dtype], rows: Int, steps: Int):
        """Copies a block of some rows of the weight, tile after tile.

        In place, rows may share the same few cache sets, so that they would not stay in the first
        cache while all rows of z meet them.

        Args:
            weight: The block.
            rows: How many, at most 32.
            steps: Its columns, in steps.
        """
        comptime B = Self.B
        for row in range(rows):
            var source = weight.at(row)
            var target = buffer[Self.dtype](self.weight).unsafe_offset(
                row * B.step
            )
            for step in range(steps):
                target.unsafe_offset(step * TILES_ROWS * B.step).unsafe_store(
                    source.unsafe_offset(step * B.step).unsafe_load[
                        width=B.step
                    ]()
                )

    def copy_rest(
        self, weight: Matrix[Self.dtype], rows: Int, first: Int, end: Int
    ):
        """Copies the last columns of some rows of the weight, and zeros after them.

        Args:
            weight: The rows.
            rows: How many, at most 32.
            first: The first column.
            end: The end of the columns.
        """
        comptime B = Self.B
        for row in range(rows):
            buffer[B.operand](self.rest).unsafe_offset(
                row * B.step
            ).unsafe_store(
                load_first[B.step](weight.at(row, first), end - first).cast[
                    B.operand
                ]()
            )

    def transpose_sums(
        self, place: Int, target: Matrix[Self.B.accum], rows: Int
    ):
        """Brings the sums into rows of y.

        Args:
            place: Which 32 rows of y^T.
            target: Sums of 32 columns.
            rows: Rows of y.
        """
        for m in range(0, rows, TILE_ROWS):
            var source = self.sums_of(place, m // TILES_ROWS * TILES_ROWS)
            comptime for half in range(2):
                var square = Array[SIMD[DType.float32, TILE_ROWS], TILE_ROWS](
                    uninitialized=True
                )
                comptime for i in range(TILE_ROWS):
                    square[i] = source.at(
                        half * TILE_ROWS + i, m % TILES_ROWS
                    ).unsafe_load[width=TILE_ROWS]()
                transpose[dtype=DType.float32, width=TILE_ROWS](square)
                comptime for i in range(TILE_ROWS):
                    if m + i < rows:
                        target.at(m + i, half * TILE_ROWS).unsafe_store(
                            square[i].cast[Self.B.accum]()
                        )
