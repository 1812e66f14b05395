"""What is added last to c, where there are few rows: it is loaded before the products, which hide how long that takes."""

from std.utils import StaticTuple

from ...epilogue import Epilogue
from ...row_hook import RowHook
from ..product import Product


@doc_hidden
@fieldwise_init
struct FewRowsAddend[dtype: DType, rows: Int](TrivialRegisterPassable):
    """What a thread adds to its elements of a tile, as it is in memory."""

    var values: StaticTuple[Scalar[Self.dtype], Self.rows // 2]
    """In the order of the thread's sums: for each eight rows two of the upper column, then two of the lower one."""

    @always_inline
    def __init__(out self):
        """Adds nothing."""
        self.values = StaticTuple[Scalar[Self.dtype], Self.rows // 2](fill=0)

    @always_inline
    def load[
        E: Epilogue, H: RowHook, //
    ](mut self, product: Product[E, H], output: UInt32, lane: UInt32):
        """Loads them; `output` is the upper column, the lower one is eight further. Of rows and columns that do not
        exist, those of the last ones are loaded, and not stored."""
        var tensor = Pointer[Scalar[Self.dtype], MutUntrackedOrigin](
            unsafe_from_address=product.epilogue.addend()
        )
        comptime for i in range(Self.rows // 2):
            comptime row = i // 4 * 8 + i % 2
            var its_row = min(Int32(row) + Int32(lane & 3) * 2, product.m - 1)
            var column = min(
                Int32(output) + Int32(i // 2 % 2 * 8), product.n - 1
            )
            self.values[i] = tensor.unsafe_offset(
                Int(its_row) * Int(product.n) + Int(column)
            ).unsafe_load()
