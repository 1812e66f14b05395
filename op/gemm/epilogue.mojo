"""What becomes of a product's sums before they are rounded, once for every architecture.

    c[m, n] = round(finish(sum over k of a[m, k] b[n, k]))

An epilogue says which vectors along n it needs and whether it has terms of each row m. A kernel fetches both as
suits it (to registers, or to shared memory while it multiplies) and hands them over with some sums of one row.
An operand of the shape of c, as a residual, it only locates: kernels add it to the sums.
"""

from std.utils import StaticTuple

from .activation import activate


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
    comptime activates: Bool = False
    """Whether finished sums, as `h`, become something else before they are c."""
    comptime adds: Bool = False
    """Whether kernels add a tensor of the shape and the type of c to the sums, before these are finished."""
    comptime is_gate: Bool = False
    """Whether c has half of the columns of h: of 16 columns of b, the first eight gate the others."""

    @always_inline
    def addend(self) -> Int:
        """Locates what is added.

        Returns:
            Its address.
        """
        return 0

    @always_inline
    def h(self) -> Int:
        """Locates where h is stored beside c.

        Returns:
            Its address, 0 if it is not. Before a gate, its left half takes the gates.
        """
        return 0

    @always_inline
    def activated[
        width: Int
    ](
        self, h: SIMD[DType.float32, width], other: SIMD[DType.float32, width]
    ) -> SIMD[DType.float32, width]:
        """Makes c of h.

        Parameters:
            width: How many elements.

        Args:
            h: Finished sums; before a gate, the gates.
            other: What those gate; not used otherwise.

        Returns:
            The elements of c, still to be rounded.
        """
        return h

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


@fieldwise_init
struct Activated[E: Epilogue, gates: Bool](Epilogue):
    """What another epilogue finishes, activated.

    Parameters:
        E: The other.
        gates: Whether half of it gates the rest.
    """

    comptime name = StaticString("gate") if Self.gates else StaticString(
        "activate"
    )
    """Tells kernels apart."""
    comptime vectors = Self.E.vectors
    """The other's."""
    comptime vector_dtype = Self.E.vector_dtype
    """Their type."""
    comptime has_row_terms = Self.E.has_row_terms
    """The other's."""
    comptime activates = True
    """It does."""
    comptime is_gate = Self.gates
    """Whether half gates the rest."""

    var before: Self.E
    """The other."""
    var pre_activation: Int64
    """Address of h [M, N], 0 if nobody asks for it; [M, 2N] before a gate."""
    var kind: Int32
    """Which activation."""

    @doc_hidden
    @always_inline
    def h(self) -> Int:
        return Int(self.pre_activation)

    @doc_hidden
    @always_inline
    def activated[
        width: Int
    ](
        self, h: SIMD[DType.float32, width], other: SIMD[DType.float32, width]
    ) -> SIMD[DType.float32, width]:
        var a = activate[narrow=True](self.kind, h)
        comptime if Self.gates:
            return a * other
        else:
            return a

    @doc_hidden
    @always_inline
    def vector[i: Int](self) -> Vector[Self.vector_dtype]:
        return self.before.vector[i]()

    @doc_hidden
    @always_inline
    def row_terms(self, row: Int) -> RowTerms[]:
        return self.before.row_terms(row)

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
        return self.before.finish(sums, row_terms, column_terms, row, column)


@fieldwise_init
struct Added[E: Epilogue](Epilogue):
    """What another epilogue finishes, plus a tensor.

    Parameters:
        E: The other, which adds what is the same in each row.
    """

    comptime name = StaticString("add_bias") if Self.E.vectors > 0 else (
        StaticString("add")
    )
    """Tells kernels apart."""
    comptime vectors = Self.E.vectors
    """The other's."""
    comptime vector_dtype = Self.E.vector_dtype
    """Their type."""
    comptime adds = True
    """It does."""

    var before: Self.E
    """The other."""
    var tensor: Int64
    """Address of what is added [M, N]."""

    @doc_hidden
    @always_inline
    def addend(self) -> Int:
        return Int(self.tensor)

    @doc_hidden
    @always_inline
    def vector[i: Int](self) -> Vector[Self.vector_dtype]:
        return self.before.vector[i]()

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
        return self.before.finish(sums, row_terms, column_terms, row, column)
