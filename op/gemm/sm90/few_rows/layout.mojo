"""The shape of a block's work for few rows, and addresses in its shared memory."""

from ..tiling import VERY_FEW_ROWS
from ..wgmma import ROW_BYTES

comptime FEW_THREADS = 160
"""Threads of a block: a warpgroup that multiplies, a warp that copies."""
comptime FEW_CLUSTER = 2
"""Blocks of a cluster, which share the columns of K."""
comptime FEW_OUTPUTS = 64
"""Columns of c that a cluster computes."""
comptime GATE_ROWS = FEW_OUTPUTS // 2
"""Rows of each of a gate's two matrices among the columns of a cluster, which two warps have."""
comptime B_BYTES = FEW_OUTPUTS * ROW_BYTES
"""Bytes of b in one slot of the ring."""
# Dynamic shared memory of a block that has an SM to itself, and of one that shares it.
comptime _ALONE_BYTES = 227 * 1024
comptime _SHARED_BYTES = 113 * 1024


def blocks_per_processor(rows: Int) -> Int:
    """Counts the blocks that fit an SM.

    Args:
        rows: Rows of a that the kernel is compiled for.

    Returns:
        The blocks.
    """
    return 2 if rows <= VERY_FEW_ROWS else 1


def is_persistent(rows: Int, gathers: Bool) -> Bool:
    """Tells whether a cluster computes several tiles. More rows leave no registers for that, and
    gathered sums take the shared memory of the next tile's.

    Args:
        rows: Rows of a that the kernel is compiled for.
        gathers: Whether a hook gathers sums of them.

    Returns:
        Whether it does; otherwise it computes one.
    """
    return rows <= VERY_FEW_ROWS and not gathers


def slots(rows: Int, gathers: Bool) -> Int:
    """Counts the slots of the ring: as many as fit.

    Args:
        rows: Rows of a that the kernel is compiled for.
        gathers: Whether a hook gathers sums of them.

    Returns:
        The slots.
    """
    var bytes = (
        _SHARED_BYTES if blocks_per_processor(rows) == 2 else _ALONE_BYTES
    )
    return (bytes - _sums_bytes(rows, gathers)) // _slot_bytes(rows)


def few_rows_shared_bytes(rows: Int, gathers: Bool) -> Int:
    """Counts the shared memory of a block.

    Args:
        rows: Rows of a that the kernel is compiled for.
        gathers: Whether a hook gathers sums of them.

    Returns:
        The bytes.
    """
    return slots(rows, gathers) * _slot_bytes(rows) + _sums_bytes(rows, gathers)


def _slot_bytes(rows: Int) -> Int:
    return B_BYTES + rows * ROW_BYTES + 2 * 8


def _sums_bytes(rows: Int, gathers: Bool) -> Int:
    """Counts what the blocks of a cluster exchange: sums of a tile, and those of the next tile or of rows."""
    var bytes = FEW_OUTPUTS * rows * 4
    if is_persistent(rows, gathers):
        return 2 * bytes
    return bytes + (2 * 2 * rows * 4 if gathers else 0)


@doc_hidden
@fieldwise_init
struct FewRowsShared[rows: Int, gathers: Bool](TrivialRegisterPassable):
    """Addresses in a block's shared memory."""

    comptime a_bytes = Self.rows * ROW_BYTES
    """Bytes of a in one slot."""
    comptime slots = slots(Self.rows, Self.gathers)
    """Slots of the ring."""

    var base: UInt32
    """Its start, a multiple of 1024."""

    @always_inline
    def b_tile(self, slot: UInt32) -> UInt32:
        """Locates a tile of b."""
        return self.base + slot * B_BYTES

    @always_inline
    def a_tile(self, slot: UInt32) -> UInt32:
        """Locates a tile of a."""
        return (
            self.base
            + UInt32(Self.slots * B_BYTES)
            + slot * UInt32(Self.a_bytes)
        )

    @always_inline
    def partial_sums(self, parity: UInt32) -> UInt32:
        """Locates the other block's sums of a tile: parity 0 or 1, if a cluster computes several."""
        return self.a_tile(UInt32(Self.slots)) + parity * UInt32(
            FEW_OUTPUTS * Self.rows * 4
        )

    @always_inline
    def row_sums(self) -> UInt32:
        """Locates what the blocks have gathered of the rows of a: a pair for each row, of one block after the other."""
        return self.partial_sums(1)

    @always_inline
    def full(self, slot: UInt32) -> UInt32:
        """Locates the barrier that completes when a slot is filled."""
        return (
            self.partial_sums(0)
            + UInt32(_sums_bytes(Self.rows, Self.gathers))
            + slot * 8
        )

    @always_inline
    def empty(self, slot: UInt32) -> UInt32:
        """Locates the barrier that completes when a slot is used up."""
        return self.full(UInt32(Self.slots)) + slot * 8
