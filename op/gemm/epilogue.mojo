"""What becomes of a product's sums before they are rounded, once for every architecture.

    c[m, n] = round(finish(sum over k of a[m, k] b[n, k]))

An epilogue says which vectors along n it needs and whether it has terms of each row m. A kernel fetches both as
suits it (to registers, or to shared memory while it multiplies) and hands them over with some sums of one row.
An operand of the shape of c, as a residual, is read by the epilogue itself, by (m, n).
"""

from std.utils import StaticTuple


@fieldwise_init
struct RowTerms[dtype: DType = DType.float32](TrivialRegisterPassable):
    """What scales a row of sums, and how much of the column's correction it takes off before.

    Parameters:
        dtype: Type of the sums.
    """

    var scale: Scalar[Self.dtype]
    """Factor of the row."""
    var offset: Scalar[Self.dtype]
    """Factor of the column's correction."""


comptime ColumnTerms[dtype: DType, width: Int, vectors: Int] = StaticTuple[
    SIMD[dtype, width], max(vectors, 1)
]
"""Elements of an epilogue's vectors, for some neighboring columns.

Parameters:
    dtype: Type of the sums.
    width: How many columns.
    vectors: How many vectors; there is room for one where there is none.
"""


comptime Vector[dtype: DType] = Pointer[Scalar[dtype], MutUntrackedOrigin]
"""Points to what an epilogue reads along the rows or the columns.

Parameters:
    dtype: Type of the elements.
"""


trait Epilogue(TrivialRegisterPassable):
    """Finishes sums of products; part of what a kernel gets by value."""

    comptime name: StaticString
    """Tells kernels apart."""
    comptime vectors: Int = 0
    """How many vectors along the columns it needs."""
    comptime vector_dtype: DType = DType.float32
    """Their type."""
    comptime has_row_terms: Bool = False
    """Whether it needs terms of each row."""

    def vector[i: Int](self) -> Vector[Self.vector_dtype]:
        """Locates a vector.

        Parameters:
            i: Which one.

        Returns:
            Its first element, at a multiple of 16 bytes.
        """
        var none = 0
        return {unsafe_from_address = none}

    @always_inline
    def row_terms(self, row: Int) -> RowTerms[]:
        """Loads the terms of a row, where no hook finds them on the way.

        Args:
            row: The row.

        Returns:
            Its terms.
        """
        return {1, 0}

    def finish[
        dtype: DType, width: Int
    ](
        self,
        sums: SIMD[dtype, width],
        row_terms: RowTerms[dtype],
        column_terms: ColumnTerms[dtype, width, Self.vectors],
        row: Int,
        column: Int,
    ) -> SIMD[dtype, width]:
        """Finishes sums of one row.

        Parameters:
            dtype: Type of the sums.
            width: How many neighboring columns.

        Args:
            sums: The sums.
            row_terms: Terms of the row.
            column_terms: Elements of the vectors.
            row: The row.
            column: The first of the columns.

        Returns:
            The elements of c, still to be rounded.
        """
        ...


@fieldwise_init
struct Plain(Epilogue):
    """The sums as they are."""

    comptime name = StaticString("plain")
    """Tells kernels apart."""
    comptime vectors = 0
    """None."""

    @doc_hidden
    @always_inline
    def finish[
        dtype: DType, width: Int
    ](
        self,
        sums: SIMD[dtype, width],
        row_terms: RowTerms[dtype],
        column_terms: ColumnTerms[dtype, width, Self.vectors],
        row: Int,
        column: Int,
    ) -> SIMD[dtype, width]:
        return sums


@fieldwise_init
struct Bias[bias_dtype: DType](Epilogue):
    """Sums + bias.

    Parameters:
        bias_dtype: Type of the bias.
    """

    comptime name = StaticString("bias")
    """Tells kernels apart."""
    comptime vectors = 1
    """The bias."""
    comptime vector_dtype = Self.bias_dtype
    """Its type."""

    var bias: Int64
    """Address of the bias [N]."""

    @doc_hidden
    @always_inline
    def vector[i: Int](self) -> Vector[Self.bias_dtype]:
        return {unsafe_from_address = Int(self.bias)}

    @doc_hidden
    @always_inline
    def finish[
        dtype: DType, width: Int
    ](
        self,
        sums: SIMD[dtype, width],
        row_terms: RowTerms[dtype],
        column_terms: ColumnTerms[dtype, width, Self.vectors],
        row: Int,
        column: Int,
    ) -> SIMD[dtype, width]:
        return sums + column_terms[0]


@fieldwise_init
struct ScaleAndCorrect[corrects: Bool = True](Epilogue):
    """Row scale * (sums - row offset * column correction) + column constant.

    Parameters:
        corrects: Whether there is an offset and a correction.
    """

    comptime name = StaticString(
        "scale_and_correct"
    ) if Self.corrects else StaticString("scale")
    """Tells kernels apart."""
    comptime vectors = 2 if Self.corrects else 1
    """The constants, then the corrections."""
    comptime has_row_terms = True
    """Scale and offset."""

    var scales: Vector[DType.float32]
    """Scales of the rows [M]."""
    var offsets: Vector[DType.float32]
    """Offsets of the rows [M]."""
    var constants: Vector[DType.float32]
    """Constants of the columns [N]."""
    var corrections: Vector[DType.float32]
    """Corrections of the columns [N]."""

    @doc_hidden
    @always_inline
    def vector[i: Int](self) -> Vector[DType.float32]:
        comptime if i == 0:
            return self.constants
        else:
            return self.corrections

    @doc_hidden
    @always_inline
    def row_terms(self, row: Int) -> RowTerms[]:
        var terms = RowTerms[](self.scales.unsafe_offset(row).unsafe_load(), 0)
        comptime if Self.corrects:
            terms.offset = self.offsets.unsafe_offset(row).unsafe_load()
        return terms

    @doc_hidden
    @always_inline
    def finish[
        dtype: DType, width: Int
    ](
        self,
        sums: SIMD[dtype, width],
        row_terms: RowTerms[dtype],
        column_terms: ColumnTerms[dtype, width, Self.vectors],
        row: Int,
        column: Int,
    ) -> SIMD[dtype, width]:
        comptime Some = SIMD[dtype, width]
        var corrected = sums
        comptime if Self.corrects:
            corrected = column_terms[1].fma(Some(-row_terms.offset), sums)
        return corrected.fma(Some(row_terms.scale), column_terms[0])
