"""The end of a tile: from a warp's sums to y."""

from std.memory import OpaquePointer
from std.utils import StaticTuple

from .arguments import Arguments
from .config import Config, Shared
from .epilogue import WIDE, RowFactors, Sums, store_slice
from .wide import WideRows


@fieldwise_init
struct Finisher[dtype: DType, config: Config, mode: Int](
    TrivialRegisterPassable
):
    """What a warp needs to finish and store its rows of a tile.

    Parameters:
        dtype: Type of x, w and y.
        config: Compile-time choices.
        mode: Epilogue.
    """

    comptime Factors = StaticTuple[RowFactors, Self.config.slices]
    """Factors of one row in each slice."""

    var shared: Shared[Self.config]
    """Shared memory of the block."""
    var boxes: UInt32
    """Shared address of the warp's output boxes."""
    var lane: UInt32
    """Lane of the thread."""
    var y_map: OpaquePointer[ImmUntrackedOrigin]
    """Tensor map of y."""
    var arguments: Arguments
    """What goes with the matrices."""

    @always_inline
    def store[
        S: Sums, //, columns: Int
    ](
        self,
        sums: S,
        upper: Self.Factors,
        lower: Self.Factors,
        row: UInt32,
        column: UInt32,
    ):
        """Stores the warp's rows.

        Parameters:
            S: How the sums are kept.
            columns: Columns to store.

        Args:
            sums: The sums of those columns.
            upper: Factors of row lane / 4 of each slice.
            lower: Factors of row lane / 4 + 8 of each slice.
            row: First of the warp's rows.
            column: First of the columns.
        """
        comptime for slice in range(Self.config.slices):
            comptime first = slice * columns // 2
            var slice_row = row + UInt32(slice * 64)
            comptime if Self.mode == WIDE:
                self.wide(slice_row, column).store[columns, first](
                    sums, self.arguments.accumulate != 0
                )
            else:
                store_slice[Self.dtype, Self.mode, columns, first](
                    sums,
                    upper[slice],
                    lower[slice],
                    self.shared.vectors(),
                    self.boxes,
                    self.lane,
                    self.y_map,
                    Int32(column),
                    Int32(slice_row),
                )

    @always_inline
    def wide(self, row: UInt32, column: UInt32) -> WideRows:
        """Finds the warp's rows in float32.

        Args:
            row: First of the rows.
            column: First of the columns.

        Returns:
            The places of this thread's sums.
        """
        return WideRows(
            self.arguments.wide,
            row,
            column,
            UInt32(self.arguments.m),
            UInt32(self.arguments.n),
            self.lane,
        )

    @always_inline
    def store_row_sum(self, sum: Float32, row: UInt32):
        """Stores the sum of a row of x.

        Args:
            sum: The sum.
            row: The row.
        """
        if row >= UInt32(self.arguments.m):
            return
        comptime if Self.mode == WIDE:
            var at = Pointer[Float32, MutAnyOrigin](
                unsafe_from_address=Int(self.arguments.row_sums)
            ).unsafe_offset(Int(row))
            var total = sum
            if self.arguments.accumulate != 0:
                total += at.unsafe_load()
            at.unsafe_store(total)
        else:
            var total = sum
            comptime if Self.config.split:
                if self.arguments.follows != 0:
                    total += self.arguments.wide_row_sums.unsafe_offset(
                        Int(row)
                    ).unsafe_load()
            Pointer[Scalar[Self.dtype], MutAnyOrigin](
                unsafe_from_address=Int(self.arguments.row_sums)
            ).unsafe_offset(Int(row)).unsafe_store(total.cast[Self.dtype]())
