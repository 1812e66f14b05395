"""The shape of a block's work, and where its pieces lie in shared memory."""

from .wgmma import ROW_BYTES

comptime THREADS = 384
"""Threads of a block: one producer and two consumer warpgroups."""
comptime CONSUMERS = 2
"""Consumer warpgroups."""
comptime CONSUMER_WARPS = 4 * CONSUMERS
"""Warps that multiply and store."""
comptime BOX_BYTES = 16 * ROW_BYTES
"""Bytes of an output box: 16 swizzled rows."""


@fieldwise_init
struct Config(Equatable, TrivialRegisterPassable):
    """Compile-time choices of the matrix kernel."""

    var slices: Int
    """64-row slices of one consumer warpgroup."""
    var columns: Int
    """Columns of a block's tile."""
    var stages: Int
    """Slots of the ring between producer and consumers."""
    var cluster: Int
    """Blocks of a cluster."""
    var gather: Bool
    """Whether the kernel takes sums over the rows of x on the way."""
    var x_transposed: Bool
    """Whether x is stored as [k, m]."""
    var w_transposed: Bool
    """Whether w is stored as [k, n]."""
    var split: Bool
    """Whether the blocks of a cluster share the k blocks of one tile, and a
    cluster has one tile; otherwise they share a tile of the weight."""
    var passes: Bool
    """Whether warps that have nothing to multiply take the rows of y through
    the backward of LayerNorm."""

    def name(self) -> String:
        """Names the choices that tell kernels apart.

        Returns:
            Layout of x and w, rows and columns of a tile, what is gathered,
            into how many parts tiles are split, and what becomes of y.
        """
        return String(
            "t" if self.x_transposed else "n",
            "n" if self.w_transposed else "t",
            "_",
            self.rows(),
            "x",
            self.columns,
            "_sums" if self.gather else "",
            String("_split", self.cluster) if self.split else String(),
            "_passes" if self.passes else "",
        )

    @always_inline
    def rows(self) -> Int:
        """Counts the rows of a block's tile.

        Returns:
            The rows.
        """
        return CONSUMERS * self.slices * 64

    @always_inline
    def sharers(self) -> Int:
        """Counts the blocks that share a tile of the weight.

        Returns:
            The blocks.
        """
        return 1 if self.split else self.cluster

    @always_inline
    def cluster_rows(self) -> Int:
        """Counts the rows of a cluster's tile.

        Returns:
            The rows.
        """
        return self.sharers() * self.rows()

    @always_inline
    def x_bytes(self) -> Int:
        """Counts the bytes of x in one stage.

        Returns:
            The bytes.
        """
        return self.rows() * ROW_BYTES

    @always_inline
    def w_bytes(self) -> Int:
        """Counts the bytes of the weight in one stage.

        Returns:
            The bytes.
        """
        return self.columns * ROW_BYTES

    @always_inline
    def vector_bytes(self) -> Int:
        """Counts the bytes of the vectors of the epilogue.

        Returns:
            The bytes: two values for each column, or one for each row and warp.
        """
        return max(2 * self.columns, 4 * self.rows()) * 4

    @always_inline
    def shared_bytes(self) -> Int:
        """Counts the shared memory of a block.

        Returns:
            The bytes.
        """
        return (
            self.stages * (self.x_bytes() + self.w_bytes())
            + CONSUMER_WARPS * 2 * BOX_BYTES
            + self.vector_bytes()
            + (2 * self.stages + 2) * 8
        )


@fieldwise_init
struct Shared[config: Config](TrivialRegisterPassable):
    """Addresses in a block's shared memory.

    Parameters:
        config: Compile-time choices.
    """

    var base: UInt32
    """Its start, a multiple of 1024."""

    @always_inline
    def x_tile(self, slot: UInt32) -> UInt32:
        """Locates a tile of x.

        Args:
            slot: Slot of the ring.

        Returns:
            Its address.
        """
        return self.base + slot * UInt32(Self.config.x_bytes())

    @always_inline
    def w_tile(self, slot: UInt32) -> UInt32:
        """Locates a tile of the weight.

        Args:
            slot: Slot of the ring.

        Returns:
            Its address.
        """
        return (
            self.base
            + UInt32(Self.config.stages * Self.config.x_bytes())
            + slot * UInt32(Self.config.w_bytes())
        )

    @always_inline
    def boxes(self, warp: UInt32) -> UInt32:
        """Locates the two output boxes of a consumer warp.

        Args:
            warp: The warp, counted from the first consumer.

        Returns:
            The address of the first; the second follows.
        """
        return self.w_tile(UInt32(Self.config.stages)) + warp * (2 * BOX_BYTES)

    @always_inline
    def vectors(self) -> UInt32:
        """Locates the vectors of the epilogue: c, then s; or sums of rows.

        Returns:
            Their address.
        """
        return self.boxes(CONSUMER_WARPS)

    @always_inline
    def full(self, slot: UInt32) -> UInt32:
        """Locates the barrier that completes when a slot is filled.

        Args:
            slot: Slot of the ring.

        Returns:
            Its address.
        """
        return self.vectors() + UInt32(Self.config.vector_bytes()) + slot * 8

    @always_inline
    def empty(self, slot: UInt32) -> UInt32:
        """Locates the barrier that completes when a slot is used up.

        Args:
            slot: Slot of the ring.

        Returns:
            Its address.
        """
        return self.full(UInt32(Self.config.stages)) + slot * 8

    @always_inline
    def vectors_full(self) -> UInt32:
        """Locates the barrier that completes when the vectors are there.

        Returns:
            Its address.
        """
        return self.empty(UInt32(Self.config.stages))

    @always_inline
    def vectors_empty(self) -> UInt32:
        """Locates the barrier that completes when the vectors are used up.

        Returns:
            Its address.
        """
        return self.vectors_full() + 8


@fieldwise_init
struct Ring(TrivialRegisterPassable):
    """A place in the ring: which slot, and the parity of its current round."""

    var slot: UInt32
    """The slot."""
    var parity: UInt32
    """Parity of completed rounds."""

    @always_inline
    def advance[stages: Int](mut self):
        """Moves to the next slot.

        Parameters:
            stages: Slots of the ring.
        """
        self.slot += 1
        if self.slot == UInt32(stages):
            self.slot = 0
            self.parity ^= 1
