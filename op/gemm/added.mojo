"""The epilogue that adds a tensor of the shape of c, such as a residual: to the sums, or to what becomes of them.

Sums in float32 may start with it. Those of operands of 8 bits may not: tensor cores keep only some 14 bits of sums that
they start with, and the scales come after them. There it is added in float32 to what is finished, and both are rounded
together.
"""

from .epilogue import ColumnTerms, Epilogue, RowTerms, Vector


@fieldwise_init
struct Added[E: Epilogue, last: Bool = False](Epilogue):
    """What another epilogue finishes, plus a tensor.

    Parameters:
        E: The other; if the tensor is added first, what that adds is the same in each row.
        last: Whether the tensor is added to what is finished; otherwise sums start with it.
    """

    comptime name = StaticString("add") if Self.adds else StaticString(
        "block_scaled_add"
    ) if Self.E.scales_blocks else StaticString("scaled_add")
    """Tells kernels apart."""
    comptime vectors = Self.E.vectors
    """The other's."""
    comptime vector_dtype = Self.E.vector_dtype
    """Their type."""
    comptime may_lack_vectors = Self.E.may_lack_vectors
    """As the other."""
    comptime has_row_terms = Self.E.has_row_terms
    """The other's."""
    comptime scales_blocks = Self.E.scales_blocks
    """As the other."""
    comptime adds = not Self.last
    """Whether sums start with it."""
    comptime adds_last = Self.last
    """Whether it comes last."""

    var before: Self.E
    """The other."""
    var tensor: Int64
    """Address of what is added [M, N]; a multiple of 16, as its rows are."""

    @doc_hidden
    @always_inline
    def addend(self) -> Int:
        return Int(self.tensor)

    @doc_hidden
    @always_inline
    def vector[i: Int](self) -> Vector[Self.vector_dtype]:
        return self.before.vector[i]()

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
    def row_block_scale(self, row: Int, block: Int, blocks: Int) -> Float32:
        return self.before.row_block_scale(row, block, blocks)

    @doc_hidden
    @always_inline
    def column_block_scale[
        second: Bool = False
    ](self, column: Int, block: Int, blocks: Int) -> Float32:
        return self.before.column_block_scale[second](column, block, blocks)

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
