"""The boxes of shared memory from which warps store a tile by TMA."""


from ..epilogue import Epilogue
from .barriers import warp_sync
from .config import BOX_BYTES, H_COLUMNS, Config
from .eight_bits import result_type
from .tma import store_wait_read
from .wgmma import row_elements


def stored_type[E: Epilogue, dtype: DType]() -> DType:
    """Returns the type in which c is stored.

    Parameters:
        E: What becomes of the sums.
        dtype: Type of the left operand.

    Returns:
        That of the product; for 8 bits a byte, as TMA knows them.
    """
    return DType.uint8 if E.quantizes else result_type[dtype]()


def box_columns[dtype: DType](columns: Int) -> Int:
    """Chooses the boxes that a row of a tile is stored in.

    Parameters:
        dtype: Type of the elements.

    Args:
        columns: Columns of the tile, a multiple of 16.

    Returns:
        The columns of a box: the most that TMA swizzles and the tile is a multiple of.
    """
    var most = row_elements[dtype]()
    while columns % most != 0:
        most //= 2
    return most


def box_of[E: Epilogue, dtype: DType](config: Config) -> Int:
    """Chooses the boxes that a row of a tile of a product is stored in.

    Parameters:
        E: What becomes of the sums.
        dtype: Type of c.

    Args:
        config: Compile-time choices of the matrix kernel.

    Returns:
        The columns of a box.
    """
    if config.loads_h:
        return H_COLUMNS
    # An activation has a box's numbers in registers in addition to the sums of a tile.
    var has_few_registers = E.activates and config.columns > 128
    if config.split:
        return box_columns[dtype](config.columns // config.cluster)
    if E.is_gate or has_few_registers:
        return box_columns[dtype](config.columns // 2)
    return box_columns[dtype](config.columns)


@doc_hidden
@fieldwise_init
struct Boxes[bytes: Int](TrivialRegisterPassable):
    """The boxes in shared memory that a warp cycles through, as many as there is
    room for."""

    comptime _count = 2 * BOX_BYTES // Self.bytes

    var next: UInt32
    """The next one."""
    var other: UInt32
    """Of two, the other one; of more, the first one."""

    @always_inline
    def __init__(out self, first: UInt32):
        """Starts with the first place."""
        comptime two = Self._count == 2
        self = Self(first, first + UInt32(Self.bytes) if two else first)

    @always_inline
    def take[by_all: Bool = False](mut self, lane: UInt32) -> UInt32:
        """Takes the next place, once the last store from it has read it. Only lane 0 stores, and has to wait; where all
        lanes do, no branch separates what they compute before from what they compute after."""
        if by_all or lane == 0:
            store_wait_read[Self._count - 1]()
        warp_sync()
        var place = self.next
        comptime if Self._count == 2:
            swap(self.next, self.other)
        else:
            self.next += UInt32(Self.bytes)
            if self.next == self.other + 2 * BOX_BYTES:
                self.next = self.other
        return place
