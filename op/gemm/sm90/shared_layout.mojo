"""Addresses of what a block of the matrix kernel has in shared memory."""

from .config import (
    BOX_BYTES,
    CONSUMER_WARPS,
    H_BOX_BYTES,
    H_BOXES,
    Config,
)


@doc_hidden
@fieldwise_init
struct Shared[config: Config](TrivialRegisterPassable):
    """Addresses in a block's shared memory."""

    var base: UInt32
    """Its start, a multiple of 1024."""

    @always_inline
    def a_tile(self, slot: UInt32) -> UInt32:
        """Locates a tile of a."""
        return self.base + slot * UInt32(Self.config.a_bytes())

    @always_inline
    def b_tile(self, slot: UInt32) -> UInt32:
        """Locates a tile of b."""
        return (
            self.base
            + UInt32(Self.config.stages * Self.config.a_bytes())
            + slot * UInt32(Self.config.b_bytes())
        )

    @always_inline
    def box_in_slot(self, slot: UInt32, i: Int) -> UInt32:
        """Locates one of the boxes of a tile's rows that a slot holds."""
        if i == 0:
            return self.a_tile(slot)
        return self.b_tile(slot) + UInt32((i - 1) * Self.config.a_bytes())

    @always_inline
    def boxes(self, warp: UInt32) -> UInt32:
        """Locates the two output boxes of a consumer warp."""
        return self.b_tile(UInt32(Self.config.stages)) + warp * (2 * BOX_BYTES)

    @always_inline
    def first_sums(self) -> UInt32:
        """Locates the sums of the first of two matrices in turn."""
        return self.h_box(CONSUMER_WARPS)

    @always_inline
    def h_box(self, warp: UInt32) -> UInt32:
        """Locates the first box of h of a consumer warp."""
        comptime bytes = Self.config.h_boxes() // CONSUMER_WARPS * H_BOX_BYTES
        return self.boxes(CONSUMER_WARPS) + warp * UInt32(bytes)

    @always_inline
    def vectors(self, tile: UInt32 = 0) -> UInt32:
        """Locates the vectors of the epilogue of one of the tiles worked on; or
        sums of rows."""
        return (
            self.first_sums()
            + UInt32(Self.config.first_sums_bytes())
            + tile * UInt32(Self.config.vector_bytes())
        )

    @always_inline
    def full(self, slot: UInt32) -> UInt32:
        """Locates the barrier that completes when a slot is filled."""
        return self.vectors(UInt32(Self.config.tiles_at_once())) + slot * 8

    @always_inline
    def empty(self, slot: UInt32) -> UInt32:
        """Locates the barrier that completes when a slot is used up."""
        return self.full(UInt32(Self.config.stages)) + slot * 8

    @always_inline
    def vectors_full(self, tile: UInt32) -> UInt32:
        """Locates the barrier that completes when the vectors of one of the tiles
        worked on are there."""
        return self.empty(UInt32(Self.config.stages)) + tile * 16

    @always_inline
    def vectors_empty(self, tile: UInt32) -> UInt32:
        """Locates the barrier that completes when they are used up."""
        return self.vectors_full(tile) + 8

    @always_inline
    def h_full(self, warp: UInt32) -> UInt32:
        """Locates the barrier that completes when the first box of h of a consumer warp is there; those of its other
        boxes follow."""
        return self.vectors_full(
            UInt32(Self.config.tiles_at_once())
        ) + warp * UInt32(8 * H_BOXES)
