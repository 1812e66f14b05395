"""What products of scaled operands are finished with: scales of rows and columns, a bias, a tensor added.

    c[m, n] = row_scale[m] column_scale[n] sum over k of a[m, k] b[n, k] + bias[n] + addend[m, n]

The tensor is added here, in float32, and not to the sums that tensor cores start with: of operands of 8 bits they
keep some 14 bits.
"""

from .epilogue import ColumnTerms, Epilogue, RowTerms, Vector


@fieldwise_init
struct Scaled[bias_dtype: DType, has_addend: Bool = False](Epilogue):
    """Row scale * column scale * sums + bias, if there is one, + a tensor.

    Two matrices may stand side by side for b, each with its scales and its bias.

    Parameters:
        bias_dtype: Type of the bias and of c.
        has_addend: Whether a tensor is added.
    """

    comptime name = StaticString(
        "scaled_add"
    ) if Self.has_addend else StaticString("scaled")
    """Tells kernels apart."""
    comptime vectors = 2
    """The columns' scales, then the bias."""
    comptime may_lack_vectors = True
    """The bias may be lacking."""
    comptime has_row_terms = True
    """The rows' scales."""

    var rows: Int32
    """Rows of c, M."""
    var columns: Int32
    """Columns of c, N; not read where nothing is added."""
    var row_scale: Int64
    """Address of the rows' scales [M], float32."""
    var column_scale: Int64
    """Address of the columns' scales [N], float32."""
    var bias: Int64
    """Address of the bias [N], 0 for none."""
    var second_scale: Int64
    """Address of the second matrix's scales [N]."""
    var second_bias: Int64
    """Address of its bias [N]; 0 only if the first has none either."""
    var tensor: Int64
    """Address of what is added [M, N]."""

    @doc_hidden
    @staticmethod
    def vector_type(i: Int) -> DType:
        return DType.float32 if i == 0 else Self.bias_dtype

    @doc_hidden
    @always_inline
    def vector_address[i: Int](self, part: Int, first: Int, column: Int) -> Int:
        comptime if i == 0:
            var scale = self.column_scale if part == 0 else self.second_scale
            return Int(
                Vector[DType.float32](
                    unsafe_from_address=Int(scale)
                ).unsafe_offset(column)
            )
        else:
            var bias = self.bias if part == 0 else self.second_bias
            return Int(
                Vector[Self.bias_dtype](
                    unsafe_from_address=Int(bias)
                ).unsafe_offset(column)
            )

    @doc_hidden
    @always_inline
    def row_terms(self, row: Int) -> RowTerms[]:
        return {
            Vector[DType.float32](unsafe_from_address=Int(self.row_scale))
            .unsafe_offset(row)
            .unsafe_load(),
            0,
        }

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
        var c = (sums * row_terms.scale).fma(column_terms[0], column_terms[1])
        comptime if Self.has_addend:
            if row < Int(self.rows) and column < Int(self.columns):
                c += (
                    Vector[Self.bias_dtype](
                        unsafe_from_address=Int(self.tensor)
                    )
                    .unsafe_offset(row * Int(self.columns) + column)
                    .unsafe_load[width=width]()
                    .cast[dtype]()
                )
        return c
