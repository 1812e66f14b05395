"""The shape of a block's work, and the sizes of its parts of shared memory."""

from .parts import (
    HALVES,
    IN_TURN,
    MOST_PARTS,
    ONE_SUM,
    SIDE_BY_SIDE,
    STACKED,
    STACKED_COLUMNS,
    STACKED_ROWS,
    WHOLE,
)
from .wgmma import ROW_BYTES

comptime THREADS = 384
"""Threads of a block: one producer and two consumer warpgroups."""
comptime CONSUMERS = 2
"""Consumer warpgroups."""
comptime TILE_ROWS = 64 * CONSUMERS
"""Rows of a block's tile."""
comptime ROW_ALIGNMENT = 16
"""TMA stores rows that start at multiples of this many bytes."""
comptime CONSUMER_WARPS = 4 * CONSUMERS
"""Warps that multiply and store."""
comptime BOX_BYTES = 16 * ROW_BYTES
"""Bytes of the largest output box: 16 swizzled rows."""
comptime H_COLUMNS = 32
"""Columns of a box of h that a warp loads, or of a gradient that it stores, of 16 bits each."""
comptime H_BOXES = 4
"""Boxes of h that a warp has room for."""
comptime H_BOX_BYTES = 16 * 2 * H_COLUMNS
"""Bytes of one."""
comptime SLICE_COLUMNS = 64
"""Columns of a slice of a transposed b, of 16 bits each."""

# Most shared memory that a block can have, and what its barriers take of it at most.
comptime _SHARED_BYTES = 227 * 1024
comptime _BARRIER_BYTES = 256


@fieldwise_init
struct Config(Equatable, TrivialRegisterPassable):
    """Compile-time choices of the matrix kernel."""

    var columns: Int
    """Columns of a block's tile."""
    var stages: Int
    """Slots of the ring between producer and consumers."""
    var cluster: Int
    """Blocks of a cluster."""
    var a_transposed: Bool
    """Whether a is stored as [K, M]."""
    var b_transposed: Bool
    """Whether b is stored as [K, N]."""
    var sums_rows: Bool
    """Whether the rows of a transposed a are summed as well."""
    var split: Bool
    """Whether the blocks of a cluster share the k blocks of one tile, and a
    cluster has one tile; otherwise they share a tile of b."""
    var adds: Bool
    """Whether c is float32 where operands are narrower, and may be accumulated."""
    var ping_pong: Bool
    """Whether consumers alternate: each has whole tiles, and one stores while the
    other multiplies. Otherwise they share each tile."""
    var parts: Int
    """How several matrices make the product: `WHOLE`, `SIDE_BY_SIDE`, `ONE_SUM`, `HALVES`, `IN_TURN` or
    `STACKED`."""
    var any_columns: Bool
    """Whether c has any number of columns, so that threads store it; otherwise
    its rows start at multiples of 16 bytes, and TMA does."""
    var loads_h: Bool
    """Whether warps load boxes of a tensor of c's shape: the input h of an activation, or what is added last."""
    var promotes: Bool
    """Whether sums of operands of 8 bits are added up in float32, as tensor cores keep some 14 bits of theirs."""

    @staticmethod
    def of(
        columns: Int,
        *,
        a_transposed: Bool = False,
        b_transposed: Bool = False,
        sums_rows: Bool = False,
        split: Bool = False,
        cluster: Int = 2,
        adds: Bool = False,
        ping_pong: Bool = False,
        parts: Int = WHOLE,
        any_columns: Bool = False,
        loads_h: Bool = False,
        promotes: Bool = False,
    ) -> Self:
        """Fills the shared memory for tiles of a width.

        A narrower tile reads more for each product, but fills the device where
        there are few tiles; the narrowest serves few rows, where b is streamed
        once and no block shares it.

        Args:
            columns: Columns of a tile, a multiple of 16: up to 256, or up to 192 where
                consumers alternate.
            a_transposed: Whether a is stored as [K, M].
            b_transposed: Whether b is stored as [K, N].
            sums_rows: Whether the rows of a are summed.
            split: Whether a cluster shares a tile.
            cluster: Blocks of the cluster that does.
            adds: Whether c is float32 where operands are narrower.
            ping_pong: Whether consumers alternate.
            parts: How several matrices make the product.
            any_columns: Whether c has any number of columns.
            loads_h: Whether warps load boxes of h, or of what is added.
            promotes: Whether sums of operands of 8 bits are added up in float32; only where consumers share a
                tile, of up to 208 columns.

        Returns:
            The choices.
        """
        var choices = Self(
            columns=columns,
            stages=0,
            cluster=cluster if split else 2 if columns > 64 else 1,
            a_transposed=a_transposed,
            b_transposed=b_transposed,
            sums_rows=sums_rows,
            split=split,
            adds=adds,
            ping_pong=ping_pong,
            parts=parts,
            any_columns=any_columns,
            loads_h=loads_h,
            promotes=promotes,
        )
        choices.stages = (
            _SHARED_BYTES - _BARRIER_BYTES - choices.shared_bytes()
        ) // (choices.a_bytes() + choices.b_bytes())
        return choices

    def name(self) -> String:
        """Names the choices that tell kernels apart.

        Returns:
            Layout of a and b, rows and columns of a tile, whether rows of a are
            summed, whether tiles are split, whether c is added to, whether
            consumers alternate, how several matrices make the product, whether c has any number of columns, and
            whether sums are added up in float32.
        """
        return String(
            "t" if self.a_transposed else "n",
            "n" if self.b_transposed else "t",
            "_",
            TILE_ROWS,
            "x",
            self.columns,
            "_sums" if self.sums_rows else "",
            String("_split", self.cluster) if self.split else "",
            "_adds" if self.adds else "",
            "_ping_pong" if self.ping_pong else "",
            "_side_by_side" if self.parts == SIDE_BY_SIDE else "",
            "_one_sum" if self.parts == ONE_SUM else "",
            "_halves" if self.parts == HALVES else "",
            "_in_turn" if self.parts == IN_TURN else "",
            "_stacked" if self.parts == STACKED else "",
            "_any" if self.any_columns else "",
            "_promoted" if self.promotes else "",
        )

    @always_inline
    def a_count(self) -> Int:
        """Counts the matrices that may stand for a.

        Returns:
            Their tensor maps.
        """
        return (
            MOST_PARTS if self.parts == ONE_SUM
            or (self.parts == STACKED and self.a_transposed) else 1
        )

    @always_inline
    def b_count(self) -> Int:
        """Counts the matrices that may stand for b.

        Returns:
            Their tensor maps.
        """
        return 1 if self.parts in (WHOLE, STACKED) else MOST_PARTS

    @always_inline
    def c_count(self) -> Int:
        """Counts the matrices that may stand for c.

        Returns:
            Their tensor maps.
        """
        return MOST_PARTS if self.parts in (SIDE_BY_SIDE, STACKED) else 1

    @always_inline
    def stacked_rows(self) -> Int:
        """Counts the rows of which each of several c starts with a multiple, where they are stacked.

        Returns:
            The rows.
        """
        return STACKED_COLUMNS if self.a_transposed else STACKED_ROWS

    @always_inline
    def turns(self) -> Int:
        """Counts the times that a tile's rows of a are multiplied.

        Returns:
            The matrices that a tile has the sums of.
        """
        return 2 if self.parts == IN_TURN else 1

    @always_inline
    def halves(self) -> Int:
        """Counts the times 64 rows of a tile that one consumer has.

        Returns:
            The halves.
        """
        return 2 if self.ping_pong else 1

    @always_inline
    def consumers_of_tile(self) -> Int:
        """Counts the consumers that share a tile.

        Returns:
            The consumers.
        """
        return 1 if self.ping_pong else CONSUMERS

    @always_inline
    def tiles_at_once(self) -> Int:
        """Counts the tiles that a block works on.

        Returns:
            The tiles.
        """
        return CONSUMERS if self.ping_pong else 1

    @always_inline
    def sharers(self) -> Int:
        """Counts the blocks that share a tile of b.

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
        return self.sharers() * TILE_ROWS

    @always_inline
    def a_bytes(self) -> Int:
        """Counts the bytes of a in one stage.

        Returns:
            The bytes.
        """
        return TILE_ROWS * ROW_BYTES

    @always_inline
    def b_bytes(self) -> Int:
        """Counts the bytes of b in one stage.

        Returns:
            The bytes: those of whole slices where b is transposed.
        """
        if self.b_transposed:
            return self.b_slices() * SLICE_COLUMNS * ROW_BYTES
        return self.columns * ROW_BYTES

    @always_inline
    def b_slices(self) -> Int:
        """Counts the slices of a tile of a transposed b.

        Returns:
            The slices; of the last one, the tile may need only a part.
        """
        return (self.columns + SLICE_COLUMNS - 1) // SLICE_COLUMNS

    @always_inline
    def shares_slices(self) -> Bool:
        """Tells how blocks share a tile of a transposed b.

        Returns:
            Whether each fetches its rows of every slice, since slices cannot be
            divided among them.
        """
        return self.b_slices() * SLICE_COLUMNS != self.columns or (
            self.b_slices() % self.sharers() != 0
        )

    @always_inline
    def b_box_rows(self) -> Int:
        """Counts the stored rows of b that are copied together.

        Returns:
            The rows: of k where b is transposed.
        """
        if not self.b_transposed:
            return self.columns // self.sharers()
        return 64 // self.sharers() if self.shares_slices() else 64

    @always_inline
    def boxes_of_slot(self) -> Int:
        """Counts the boxes of a tile's rows, of 128 bytes each, that a slot holds.

        Returns:
            The boxes: one in the place of a, the others in that of b.
        """
        return 1 + self.b_bytes() // self.a_bytes()

    @always_inline
    def addend_slots(self) -> Int:
        """Counts the slots for what is added to a tile of c, in 16 bits.

        Returns:
            The slots.
        """
        var boxes = (2 * self.columns + ROW_BYTES - 1) // ROW_BYTES
        return (boxes + self.boxes_of_slot() - 1) // self.boxes_of_slot()

    @always_inline
    def vector_bytes(self) -> Int:
        """Counts the bytes of the vectors of the epilogue of one tile.

        Returns:
            The bytes: two values for each column, or one for each row and warp; where h is loaded, four bytes for each
            column.
        """
        if self.loads_h:
            return self.columns * 4
        if self.ping_pong:
            return 2 * self.columns * 4
        return max(2 * self.columns, 4 * TILE_ROWS) * 4

    @always_inline
    def first_sums_bytes(self) -> Int:
        """Counts the bytes of the sums that a tile has of the first of two matrices in turn.

        Returns:
            The bytes, in float32.
        """
        return TILE_ROWS * self.columns * 4 if self.parts == IN_TURN else 0

    @always_inline
    def h_boxes(self) -> Int:
        """Counts the boxes of h that the warps of a block have room for.

        Returns:
            The boxes.
        """
        return CONSUMER_WARPS * H_BOXES if self.loads_h else 0

    @always_inline
    def shared_bytes(self) -> Int:
        """Counts the shared memory of a block.

        Returns:
            The bytes.
        """
        return (
            self.stages * (self.a_bytes() + self.b_bytes())
            + CONSUMER_WARPS * 2 * BOX_BYTES
            + self.h_boxes() * (H_BOX_BYTES + 8)
            + self.first_sums_bytes()
            + self.tiles_at_once() * self.vector_bytes()
            + (2 * self.stages + 2 * self.tiles_at_once()) * 8
        )
