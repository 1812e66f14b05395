"""The shape of a block's work, and where its pieces lie in shared memory."""

from .wgmma import K_BLOCK

comptime THREADS = 384
"""Threads of a block: one producer and two consumer warpgroups."""
comptime CONSUMERS = 2
"""Consumer warpgroups."""


@fieldwise_init
struct Config(Equatable, TrivialRegisterPassable):
    """Compile-time choices of the matrix kernel."""

    var slices: Int
    """64-row slices of one consumer warpgroup."""
    var columns: Int
    """Columns of a block's tile."""
    var stages: Int
    """Slots of the ring between producer and consumers."""
    var lead: Int
    """K blocks the first consumer runs ahead of the second, 0 for none."""
    var cluster: Int
    """Blocks of a cluster; they share one tile of the weight."""
    var bulk: Bool
    """Whether the copy engine stores y, or the threads do."""
    var gather: Bool
    """Whether the kernel takes the row statistics itself; k % 64 == 0 then."""

    @always_inline
    def rows(self) -> Int:
        """Counts the rows of a block's tile.

        Returns:
            The rows.
        """
        return CONSUMERS * self.slices * 64

    @always_inline
    def x_bytes(self) -> Int:
        """Counts the bytes of x in one stage.

        Returns:
            The bytes.
        """
        return self.rows() * K_BLOCK * 2

    @always_inline
    def w_bytes(self) -> Int:
        """Counts the bytes of the weight in one stage.

        Returns:
            The bytes.
        """
        return self.columns * K_BLOCK * 2

    @always_inline
    def registers(self) -> Int:
        """Counts the accumulators of a thread.

        Returns:
            The registers.
        """
        return self.slices * self.columns // 2

    @always_inline
    def w_offset(self) -> Int:
        """Locates the weight tiles.

        Returns:
            Bytes from the start of shared memory.
        """
        return self.stages * self.x_bytes()

    @always_inline
    def staging_offset(self) -> Int:
        """Locates the output boxes, two of 2048 bytes for each consumer warp.

        Returns:
            Bytes from the start of shared memory.
        """
        return self.w_offset() + self.stages * self.w_bytes()

    @always_inline
    def vectors_offset(self) -> Int:
        """Locates the column vectors of the epilogue.

        Returns:
            Bytes from the start of shared memory.
        """
        return self.staging_offset() + CONSUMERS * 4 * 2 * 2048

    @always_inline
    def barriers_offset(self) -> Int:
        """Locates the barriers: full and empty slots, full and empty vectors.

        Returns:
            Bytes from the start of shared memory.
        """
        return self.vectors_offset() + 2 * self.columns * 4

    @always_inline
    def shared_bytes(self) -> Int:
        """Counts the shared memory of a block.

        Returns:
            The bytes.
        """
        return self.barriers_offset() + (2 * self.stages + 2) * 8
