"""The epilogue of products with scales of blocks whose results stay in 8 bits: what an MLP's second layer multiplies.

    a = round(act(scaled sums + bias))      or, of two matrices in turn, round(act(first sums) second sums)
    scale[m, j] = max(max |a|, 1e-12) / 448 over the columns of block j;  c[m, n] = round(a[m, n] / scale[m, n / 128])

These are the bits of a result in bfloat16 that a pass quantizes.
"""

from std.memory import bitcast

from ...gemm.activation import ANY, activate
from ...gemm.block_scaled import BlockScaled
from ...gemm.epilogue import ColumnTerms, Epilogue, RowTerms, Vector
from ...gemm.sm90.shared_memory import unpack_pair
from ...rows.eight_bits import pack_eight_bits
from ...rows.scales import divided, scale_of

comptime _E4M3 = DType.float8_e4m3fn
comptime _BF16 = DType.bfloat16


@fieldwise_init
struct BlockQuantized[gates: Bool](Epilogue):
    """Activated sums of scaled sums, in e4m3.

    Parameters:
        gates: Whether what the first of two matrices gives gates what the second gives.
    """

    comptime name = StaticString(
        "gate_in_8_bits"
    ) if Self.gates else StaticString("activate_in_8_bits")
    """Tells kernels apart."""
    comptime vectors = 1
    """The bias."""
    comptime may_lack_vectors = True
    """The bias may be lacking."""
    comptime vector_dtype = _BF16
    """Its type."""
    comptime scales_blocks = True
    """Those of all operands."""
    comptime quantizes = True
    """It does."""
    comptime finds_scales = True
    """Of each block."""

    var first: BlockScaled[_BF16]
    """What the first matrix, or the only one, has: scales and a bias."""
    var second: BlockScaled[_BF16]
    """What the second one has."""
    var scales: Int64
    """Address of the scales of c [M, ceil(N / 128)], float32."""
    var kind: Int32
    """Which activation."""
    var power_of_two: Int32
    """Whether the scales of c are rounded up to powers of two."""

    @doc_hidden
    @always_inline
    def vector_of_part[
        i: Int
    ](self, part: Int, first: Int) -> Vector[Self.vector_dtype]:
        var bias = self.second.bias if part == 1 else self.first.bias
        return {unsafe_from_address = Int(bias)}

    @doc_hidden
    @always_inline
    def row_block_scale(self, row: Int, block: Int, blocks: Int) -> Float32:
        return self.first.row_block_scale(row, block, blocks)

    @doc_hidden
    @always_inline
    def column_block_scale[
        second: Bool = False
    ](self, column: Int, block: Int, blocks: Int) -> Float32:
        comptime if second:
            return self.second.column_block_scale(column, block, blocks)
        else:
            return self.first.column_block_scale(column, block, blocks)

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

    @doc_hidden
    @always_inline
    def activation(self) -> Int32:
        return self.kind

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
    def block_scale(self, most: UInt32) -> Float32:
        return scale_of[_E4M3](
            bitcast[DType.float32](most), self.power_of_two != 0
        )

    @doc_hidden
    @always_inline
    def in_eight_bits(
        self,
        pairs: SIMD[DType.uint32, 2],
        scales: SIMD[DType.float32, 2],
        inverses: SIMD[DType.float32, 2],
    ) -> UInt32:
        var four = unpack_pair[_BF16](pairs[0]).join(
            unpack_pair[_BF16](pairs[1])
        )
        comptime Four = SIMD[DType.float32, 4]
        return pack_eight_bits[_E4M3](
            divided[width=4](
                four,
                Four(scales[0], scales[0], scales[1], scales[1]),
                Four(inverses[0], inverses[0], inverses[1], inverses[1]),
            )
        )

    @doc_hidden
    @always_inline
    def keep_block_scale(
        self, row: Int, block: Int, blocks: Int, scale: Float32
    ):
        Vector[DType.float32](
            unsafe_from_address=Int(self.scales)
        ).unsafe_offset(row * blocks + block).unsafe_store(scale)
