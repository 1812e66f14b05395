"""The epilogue of scaled operands: scales of rows and columns, and a bias.

    c[m, n] = row_scale[m] column_scale[n] sum over k of a[m, k] b[n, k] + bias[n]

`Added` adds a residual to that.
"""

from .epilogue import ColumnTerms, Epilogue, RowTerms, Vector


@fieldwise_init
struct Scaled[bias_dtype: DType](Epilogue):
    """Row scale * column scale * sums + bias, if there is one.

    Up to three matrices may stand side by side for b, each with its scales and its bias.

    Parameters:
        bias_dtype: Type of the bias and of c.
    """

    comptime name = StaticString("scaled")
    """Tells kernels apart."""
    comptime vectors = 2
    """The columns' scales, then the bias."""
    comptime may_lack_vectors = True
    """The bias may be lacking."""
    comptime has_row_terms = True
    """The rows' scales."""

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
    var third_scale: Int64
    """Address of the third matrix's scales [N]."""
    var third_bias: Int64
    """Address of its bias, likewise."""

    @doc_hidden
    @staticmethod
    def vector_type(i: Int) -> DType:
        return DType.float32 if i == 0 else Self.bias_dtype

    @doc_hidden
    @always_inline
    def vector_address[
        i: Int
    ](self, part: Int, first: Int, column: Int, row: Int) -> Int:
        comptime if i == 0:
            var scale = self.column_scale
            if part == 1:
                scale = self.second_scale
            elif part == 2:
                scale = self.third_scale
            return Int(
                Vector[DType.float32](
                    unsafe_from_address=Int(scale)
                ).unsafe_offset(column)
            )
        else:
            var bias = self.bias
            if part == 1:
                bias = self.second_bias
            elif part == 2:
                bias = self.third_bias
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
        return (sums * row_terms.scale).fma(column_terms[0], column_terms[1])
