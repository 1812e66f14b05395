"""The epilogues: nothing, a bias, the scale and correction of a folded weight, an activation or a gate."""

from .activation import ANY, activate
from .epilogue import ColumnTerms, Epilogue, RowTerms, Vector


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
    """Sums + bias, if there is one.

    Parameters:
        bias_dtype: Type of the bias.
    """

    comptime name = StaticString("bias")
    """Tells kernels apart."""
    comptime vectors = 1
    """The bias."""
    comptime vector_dtype = Self.bias_dtype
    """Its type."""
    comptime may_lack_vectors = True
    """It may."""

    var bias: Int64
    """Address of the bias [N], 0 for none."""

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
struct BiasOfParts[bias_dtype: DType](Epilogue):
    """Sums + the bias of each of three matrices that stand side by side, if they have one.

    Parameters:
        bias_dtype: Type of the biases.
    """

    comptime name = StaticString("biases")
    """Tells kernels apart."""
    comptime vectors = 1
    """The biases."""
    comptime vector_dtype = Self.bias_dtype
    """Their type."""
    comptime may_lack_vectors = True
    """It may, all three."""

    var first: Int64
    """Address of the first bias, 0 where there is none at all."""
    var second: Int64
    """Address of the second."""
    var third: Int64
    """Address of the third."""

    @doc_hidden
    @always_inline
    def vector_of_part[
        i: Int
    ](self, part: Int, first: Int) -> Vector[Self.bias_dtype]:
        var own = self.first
        if part == 1:
            own = self.second
        elif part == 2:
            own = self.third
        return {unsafe_from_address = Int(own)}

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


struct Activated[E: Epilogue, gates: Bool, may_keep: Bool = False](Epilogue):
    """What another epilogue finishes, activated.

    Parameters:
        E: The other.
        gates: Whether half of it gates the rest.
        may_keep: Whether the largest magnitudes may be kept.
    """

    comptime name = StaticString("gate") if Self.gates else StaticString(
        "activate"
    )
    """Tells kernels apart."""
    comptime vectors = Self.E.vectors
    """The other's."""
    comptime vector_dtype = Self.E.vector_dtype
    """Their type."""
    comptime may_lack_vectors = Self.E.may_lack_vectors
    """As the other."""
    comptime has_row_terms = Self.E.has_row_terms
    """The other's."""
    comptime activates = True
    """It does."""
    comptime is_gate = Self.gates
    """Whether half gates the rest."""
    comptime keeps_maxima = Self.may_keep
    """As asked for."""

    var before: Self.E
    """The other."""
    var pre_activation: Int64
    """Address of h [M, N], 0 if it is not wanted; [M, 2N] before a gate."""
    var kind: Int32
    """Which activation."""
    var kept: Int64
    """Address of the largest magnitudes, 0 if they are not wanted."""
    var keeps_one: Int32
    """Whether that is one of all."""

    def __init__(
        out self,
        before: Self.E,
        pre_activation: Int64,
        kind: Int32,
        kept: Int64 = 0,
        keeps_one: Bool = False,
    ):
        """Makes it of the other.

        Args:
            before: The other.
            pre_activation: Address of h, or 0.
            kind: Which activation.
            kept: Address of the largest magnitudes, or 0.
            keeps_one: Whether that is one of all.
        """
        self.before = before
        self.pre_activation = pre_activation
        self.kind = kind
        self.kept = kept
        self.keeps_one = Int32(keeps_one)

    @doc_hidden
    @always_inline
    def maxima(self) -> Int64:
        return self.kept

    @doc_hidden
    @always_inline
    def has_one_maximum(self) -> Bool:
        return self.keeps_one != 0

    @doc_hidden
    @always_inline
    def h(self) -> Int:
        return Int(self.pre_activation)

    @doc_hidden
    @always_inline
    def activated[
        width: Int, among: Int = ANY
    ](
        self, h: SIMD[DType.float32, width], other: SIMD[DType.float32, width]
    ) -> SIMD[DType.float32, width]:
        var a = activate[narrow=True, among=among](self.kind, h)
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
    def vector_of_part[
        i: Int
    ](self, part: Int, first: Int) -> Vector[Self.vector_dtype]:
        return self.before.vector_of_part[i](part, first)

    @doc_hidden
    @staticmethod
    def vector_type(i: Int) -> DType:
        return Self.E.vector_type(i)

    @doc_hidden
    @always_inline
    def vector_address[
        i: Int
    ](self, part: Int, first: Int, column: Int, row: Int) -> Int:
        return self.before.vector_address[i](part, first, column, row)

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
