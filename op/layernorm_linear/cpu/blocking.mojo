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
        return (columns + line - 1) // line * line + line

    @staticmethod
    def panels(columns: Int) -> Int:
        """Counts the packed panels that cover the columns.

        Args:
            columns: Columns of the right operand.

        Returns:
            Their number.
        """
        return (columns + Self.tile_n - 1) // Self.tile_n

    @staticmethod
    def panel_size(depth: Int) -> Int:
        """Measures a packed panel.

        Args:
            depth: Rows of the right operand.

        Returns:
            Elements of a panel, the last of which may be narrower.
        """
        return (depth + Self.pair - 1) // Self.pair * Self.pair * Self.tile_n
