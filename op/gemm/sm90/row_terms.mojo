"""Terms of rows: sums from which threads compute them, and terms that the epilogue loads."""

from std.utils import StaticTuple

from ..epilogue import Epilogue, RowTerms
from ..row_hook import Gathering, RowHook, RowSums
from .product import Product
from .wgmma import SLICE_BYTES


@doc_hidden
@fieldwise_init
struct Halves[S: RowSums, count: Int](Gathering):
    """What a thread gathers of 64 rows of a, or of twice as many."""

    var each: StaticTuple[Self.S, Self.count]
    """Of each 64."""

    @always_inline
    def __init__(out self):
        """Has gathered nothing."""
        self.each = StaticTuple[Self.S, Self.count](fill=Self.S())

    @always_inline
    def add[dtype: DType, first: Bool](mut self, tile: UInt32, thread: UInt32):
        """Adds one k block."""
        comptime for half in range(Self.count):
            var sums = self.each[half]
            sums.add[dtype, first](tile + UInt32(half * SLICE_BYTES), thread)
            self.each[half] = sums


@doc_hidden
@fieldwise_init
struct ThreadTerms[halves: Int](TrivialRegisterPassable):
    """Terms of the rows of a thread's sums, of each 64 rows."""

    var upper: StaticTuple[RowTerms[], Self.halves]
    """Of row lane / 4 of the warp's 16."""
    var lower: StaticTuple[RowTerms[], Self.halves]
    """Of the row 8 below."""

    @always_inline
    def __init__(out self):
        """Changes no sum."""
        self.upper = StaticTuple[RowTerms[], Self.halves](fill={1, 0})
        self.lower = self.upper

    @always_inline
    def load[
        E: Epilogue, H: RowHook, //
    ](mut self, product: Product[E, H], row: UInt32):
        """Loads them; `row` is the upper one."""
        comptime for half in range(Self.halves):
            self.upper[half] = _loaded(product, row + UInt32(64 * half))
            self.lower[half] = _loaded(product, row + UInt32(64 * half + 8))


@always_inline
def _loaded[
    E: Epilogue, H: RowHook
](product: Product[E, H], row: UInt32) -> RowTerms[]:
    if row < UInt32(product.m):
        return product.epilogue.row_terms(Int(row))
    return {0, 0}
