"""The epilogue of operands with a scale for each 128 elements of K: of each row of a, and of each 128 rows of b.

    c[m, n] = bias[n] + sum over blocks j of row_scale[m, j] column_scale[n / 128, j] sum over k in j of a[m, k] b[n, k]

The scales are those of DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 3.3.2). Tensor cores add up one block, and
float32 registers what becomes of it, as DeepGEMM has it.
"""

from ..call import SCALE_BLOCK
from .epilogue import ColumnTerms, Epilogue, RowTerms, Vector


@fieldwise_init
struct BlockScaled[bias_dtype: DType](Epilogue):
    """Sums of scaled sums, plus a bias if there is one.

    Parameters:
        bias_dtype: Type of the bias and of c.
    """

    comptime name = StaticString("block_scaled")
    """Tells kernels apart."""
    comptime vectors = 1
    """The bias."""
    comptime may_lack_vectors = True
    """The bias may be lacking."""
    comptime vector_dtype = Self.bias_dtype
    """Its type."""
    comptime scales_blocks = True
    """Those of both operands."""

    var row_scales: Int64
    """Address of the scales of a [M, blocks], float32."""
    var column_scales: Int64
    """Address of the scales of b [ceil(N / 128), blocks], float32."""
    var bias: Int64
    """Address of the bias [N], 0 for none."""

    @doc_hidden
    @always_inline
    def vector[i: Int](self) -> Vector[Self.vector_dtype]:
        return {unsafe_from_address = Int(self.bias)}

    @doc_hidden
    @always_inline
    def row_block_scale(self, row: Int, block: Int, blocks: Int) -> Float32:
        return (
            Vector[DType.float32](unsafe_from_address=Int(self.row_scales))
            .unsafe_offset(row * blocks + block)
            .unsafe_load()
        )

    @doc_hidden
    @always_inline
    def column_block_scale[
        second: Bool = False
    ](self, column: Int, block: Int, blocks: Int) -> Float32:
        return (
            Vector[DType.float32](unsafe_from_address=Int(self.column_scales))
            .unsafe_offset(column // SCALE_BLOCK * blocks + block)
            .unsafe_load()
        )

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
