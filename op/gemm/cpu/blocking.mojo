"""How matrices are multiplied on the target: block sizes, number formats, slabs of rows."""

from std.math import align_up, ceildiv
from std.sys import CompilationTarget, simd_width_of, size_of

from .memory import CACHE_LINE

comptime SLAB_BYTES = 1 << 20
"""What the rows of a slab may take of the cache."""

comptime LEAST_SLAB_ROWS = 96
"""Rows of a slab, however long they are: as many share what is read of the weight."""

comptime MOST_SLAB_ROWS = 256
"""Rows of a slab, however short they are: more of them gain nothing."""


struct Blocking[dtype: DType]:
    """Describes how matrices of one element type are multiplied.

    A tile of the product, `tile_m` rows by `tile_n` columns, stays in vector
    registers while a block of `depth` products is added to it. The left
    operand is read element by element and broadcast; the right operand comes
    in panels of `tile_n` columns, packed in the order in which they are read.
    Another microkernel means other numbers here, which packing follows.

    Parameters:
        dtype: Element type of the tensors.
    """

    comptime accum = (
        DType.float64 if Self.dtype == DType.float64 else DType.float32
    )
    """The type of sums and statistics."""

    comptime has_dot = (
        Self.dtype == DType.bfloat16
        and CompilationTarget._has_feature["avx512bf16"]()
        and (
            CompilationTarget._has_feature["amx-bf16"]()
            or CompilationTarget._has_feature["sse4a"]()
        )
        and simd_width_of[DType.float32]() == 16
    )
    """Whether bfloat16 products are summed in pairs by one instruction.

    AMD's CPUs, which alone have SSE4a, do so at twice the rate of multiply-adds of float32, Intel's at half of it:
    there pairs serve only together with tiles.
    """

    comptime has_tiles = (
        Self.has_dot
        and CompilationTarget._has_feature["amx-tile"]()
        and CompilationTarget._has_feature["amx-bf16"]()
    )
    """Whether tile registers multiply blocks of bfloat16 (AMX)."""

    comptime operand = DType.bfloat16 if Self.has_dot else Self.accum
    """The type of both operands as packed."""

    comptime pair = 2 if Self.has_dot else 1
    """Consecutive products that are adjacent in a panel."""

    comptime step = 32 if Self.has_tiles else Self.pair
    """Products that one instruction adds to an accumulator; operands are zero up to a multiple."""

    comptime width = simd_width_of[Self.accum]()
    """Accumulators in a vector register."""

    comptime has_32_registers = (
        CompilationTarget.has_avx512f() or CompilationTarget.has_neon()
    )
    """Whether 24 accumulators leave registers for the operands."""

    comptime tile_m = (
        32 if Self.has_tiles else 8 if Self.has_32_registers else 4
    )
    """Rows of a register tile."""

    comptime tile_vectors = 2 if Self.has_tiles else 3
    """Vector registers across a register tile."""

    comptime tile_n = Self.tile_vectors * Self.width
    """Columns of a register tile and of a packed panel."""

    comptime depth = 512 if Self.has_dot else 128
    """Products added up in registers before the sum joins the total.

    Short blocks keep the rounding error of long sums small: it grows with the
    square root of the block's length. Results depend on it, so it must not
    depend on anything but the type and the target.
    """

    @staticmethod
    def row_stride(columns: Int) -> Int:
        """Chooses the distance between a left operand's rows in the workspace.

        The extra cache line keeps rows of a power of two from sharing the
        same few cache sets.

        Args:
            columns: Number of elements in a row.

        Returns:
            The distance in elements.
        """
        comptime line = CACHE_LINE // size_of[Self.operand]()
        return align_up(columns, line) + line

    @staticmethod
    def row_panel_size(depth: Int) -> Int:
        """Measures a panel of 16 rows that are packed as columns of tiles.

        Args:
            depth: Elements of a row.

        Returns:
            Elements of the panel.
        """
        return align_up(depth, Self.step) * 16

    @staticmethod
    def panels(columns: Int) -> Int:
        """Counts the packed panels that cover the columns.

        Args:
            columns: Columns of the right operand.

        Returns:
            Their number.
        """
        return ceildiv(columns, Self.tile_n)

    @staticmethod
    def panel_size(depth: Int) -> Int:
        """Measures a packed panel.

        Args:
            depth: Rows of the right operand.

        Returns:
            Elements of a panel, the last of which may be narrower.
        """
        return align_up(depth, Self.step) * Self.tile_n


struct Slabs(TrivialRegisterPassable):
    """Divides rows into slabs, so that workers get equal shares."""

    var M: Int
    """Rows."""
    var tile_m: Int
    """Rows of a register tile; slabs begin at multiples of it."""
    var count: Int
    """Number of slabs."""

    def __init__(out self, M: Int, tile_m: Int, workers: Int, row_bytes: Int):
        """Divides the rows.

        Args:
            M: Rows.
            tile_m: Rows of a register tile.
            workers: Threads that take slabs.
            row_bytes: What a row takes of a worker's memory.
        """
        self.M = M
        self.tile_m = tile_m
        var most = max(
            LEAST_SLAB_ROWS, min(MOST_SLAB_ROWS, SLAB_BYTES // row_bytes)
        )
        var slabs = align_up(ceildiv(M, most), workers)
        self.count = min(slabs, ceildiv(M, tile_m))

    def first(self, slab: Int) -> Int:
        """Finds where a slab begins.

        Args:
            slab: Index of the slab; the number of slabs gives the end.

        Returns:
            Its first row.
        """
        var tiles = ceildiv(self.M, self.tile_m)
        return min(self.M, tiles * slab // self.count * self.tile_m)

    def most_rows(self) -> Int:
        """Counts the rows of the largest slab.

        Returns:
            Their number.
        """
        return ceildiv(ceildiv(self.M, self.tile_m), self.count) * self.tile_m
