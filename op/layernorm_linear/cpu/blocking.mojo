"""Chooses block sizes and number formats for the target at compile time."""

from std.sys import CompilationTarget, simd_width_of, size_of

comptime Buffer[dtype: DType] = Pointer[Scalar[dtype], MutUntrackedOrigin]
"""Points to elements of a tensor or of the workspace.

Parameters:
    dtype: The element type.
"""

comptime CACHE_LINE = 64
"""Alignment of every array in the workspace, in bytes."""


struct Blocking[dtype: DType]:
    """Describes how matrices of one element type are multiplied.

    A tile of the product, `tile_m` rows by `tile_n` columns, stays in vector
    registers while a block of `depth` products is added to it. The left
    operand is read element by element and broadcast; the right operand comes
    in panels of `tile_n` columns, packed in the order in which they are read.

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
        and simd_width_of[DType.float32]() == 16
    )
    """Whether bfloat16 products are summed in pairs by one instruction."""

    comptime operand = DType.bfloat16 if Self.has_dot else Self.accum
    """The type of both operands as packed."""

    comptime pair = 2 if Self.has_dot else 1
    """Consecutive products that one instruction adds to an accumulator."""

    comptime width = simd_width_of[Self.accum]()
    """Accumulators in a vector register."""

    comptime has_32_registers = (
        CompilationTarget.has_avx512f() or CompilationTarget.has_neon()
    )
    """Whether 24 accumulators leave registers for the operands."""

    comptime tile_m = 8 if Self.has_32_registers else 4
    """Rows of a register tile."""

    comptime tile_vectors = 3
    """Vector registers across a register tile."""

    comptime tile_n = Self.tile_vectors * Self.width
    """Columns of a register tile and of a packed panel."""

    comptime depth = 128 * Self.pair
    """Products added up in registers before the sum joins the total.

    Short blocks keep the rounding error of long sums small: it grows with the
    square root of the block's length. Results depend on it, so it must not
    depend on anything but the type and the target. A block of a panel leaves
    half of a 48 KiB first-level cache to the other operands.
    """

    comptime block_size = Self.depth * Self.tile_n
    """Elements of a packed block of a panel."""

    @staticmethod
    def row_stride[element: DType](columns: Int) -> Int:
        """Chooses the distance between rows of a matrix in the workspace.

        The extra cache line keeps rows of a power of two from sharing the
        same few cache sets.

        Parameters:
            element: Element type of the matrix.

        Args:
            columns: Number of elements in a row.

        Returns:
            The distance in elements, with room for whole vectors.
        """
        comptime line = CACHE_LINE // size_of[element]()
        return ceildiv(columns, line) * line + line


@fieldwise_init
struct Panels(TrivialRegisterPassable):
    """Divides columns into panels of nearly equal numbers of vectors."""

    var columns: Int
    """Number of columns."""
    var width: Int
    """Columns in a vector."""
    var count: Int
    """Number of panels."""
    var fewest: Int
    """Vectors across a narrow panel."""
    var wide: Int
    """Number of panels that are one vector wider; they come first."""

    @staticmethod
    def of[dtype: DType](columns: Int) -> Self:
        """Divides the columns of a right operand.

        Parameters:
            dtype: Element type of the tensors.

        Args:
            columns: Number of columns.

        Returns:
            The division.
        """
        comptime B = Blocking[dtype]
        var vectors = ceildiv(columns, B.width)
        var count = ceildiv(vectors, B.tile_vectors)
        var fewest = vectors // count
        return Self(columns, B.width, count, fewest, vectors - fewest * count)

    def vectors(self, panel: Int) -> Int:
        """Counts the vectors across a panel.

        Args:
            panel: Index of the panel.

        Returns:
            Their number.
        """
        return self.fewest + 1 if panel < self.wide else self.fewest

    def first(self, panel: Int) -> Int:
        """Finds where a panel begins.

        Args:
            panel: Index of the panel; the number of panels gives the end.

        Returns:
            Its first column.
        """
        var vectors = panel * self.fewest + min(panel, self.wide)
        return min(vectors * self.width, self.columns)


@always_inline
def ceildiv(a: Int, b: Int) -> Int:
    """Divides, rounding up.

    Args:
        a: Dividend.
        b: Divisor.

    Returns:
        The quotient.
    """
    return (a + b - 1) // b
