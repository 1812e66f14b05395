"""The epilogue that multiplies by a gate and adds a residual: what ends a layer of adaLN-Zero.

    c[m, n] = residual[m, n] + gate[group of m, n] (sum over k of a[m, k] b[n, k] + bias[n])

All in float32, rounded once. The rows of a tile have one gate.
"""

from .epilogue import ColumnTerms, Epilogue, RowTerms, Vector


@fieldwise_init
struct GatedAdd[c_dtype: DType](Epilogue):
    """Residual + gate * (sums + bias).

    Parameters:
        c_dtype: Type of all.
    """

    comptime name = StaticString("gated_add")
    """Tells kernels apart."""
    comptime vectors = 2
    """The gate, then the bias."""
    comptime vector_dtype = Self.c_dtype
    """Their type."""
    comptime may_lack_vectors = True
    """The bias may be lacking."""
    comptime adds_last = True
    """The residual."""

    var residual: Int64
    """Address of the residual [M, N]."""
    var gate: Int64
    """Address of the gates [groups, N], each of whose rows starts at a multiple of 16 bytes."""
    var bias: Int64
    """Address of the bias [N], 0 for none."""
    var pitch: Int64
    """Elements from one gate to the next."""
    var rows: Int32
    """Rows of a group: all, or a multiple of those of a tile."""

    @doc_hidden
    @always_inline
    def addend(self) -> Int:
        return Int(self.residual)

    @doc_hidden
    @always_inline
    def vector_address[
        i: Int
    ](self, part: Int, first: Int, column: Int, row: Int) -> Int:
        var start = self.bias
        comptime if i == 0:
            start = self.gate
        var vector = Vector[Self.c_dtype](unsafe_from_address=Int(start))
        comptime if i == 0:
            var group = Int32(row) // self.rows
            vector = vector.unsafe_offset(Int(group) * Int(self.pitch))
        return Int(vector.unsafe_offset(column))

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
        return column_terms[0] * (sums + column_terms[1])
