"""The epilogue of products with scales of rows whose results stay in 8 bits: what an MLP's second layer multiplies.

    h = row_scale column_scale sums + bias
    a = round(act(h))       or, of the halves of a gate, round(act(h of the first) h of the second)
    c[m, n] = round(a[m, n] / scale)

The scale is one for all rows, since a row's own would only be known after its last column. It comes from a bound of a
(fused_norm/ops/hidden_scale.py) and is a power of two, so that dividing is exact.
"""

from std.memory import bitcast
from std.utils.numerics import nan

from ...gemm.activation import ANY, activate
from ...gemm.epilogue import ColumnTerms, Epilogue, RowTerms, Vector
from ...gemm.scaled import Scaled
from ...gemm.sm90.shared_memory import multiply_pair, pack_pair, unpack_pair
from ...rows.eight_bits import largest, pack_eight_bits

comptime _E4M3 = DType.float8_e4m3fn
comptime _BF16 = DType.bfloat16


@fieldwise_init
struct RowQuantized[gates: Bool](Epilogue):
    """Activated scaled sums, in e4m3.

    Parameters:
        gates: Whether what the first of two matrices gives gates what the second gives.
    """

    comptime name = StaticString(
        "gate_in_8_bits"
    ) if Self.gates else StaticString("in_8_bits")
    """Tells kernels apart."""
    comptime vectors = 2
    """The columns' scales, then the bias."""
    comptime may_lack_vectors = True
    """The bias may be lacking."""
    comptime has_row_terms = True
    """The rows' scales."""
    comptime quantizes = True
    """It does."""
    comptime is_gate = Self.gates
    """Of a tile's columns, the first half gates the other."""

    var before: Scaled[_BF16]
    """What is activated, and what is gated."""
    var scales: Int64
    """Address of the scales of c [M], float32: they are written, all the same."""
    var scale: Float32
    """That, a power of two."""
    var kind: Int32
    """Which activation."""

    @doc_hidden
    @staticmethod
    def vector_type(i: Int) -> DType:
        return Scaled[_BF16].vector_type(i)

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
        # What no bound allows is not to saturate unseen: the row becomes NaN, as one does that has an infinity.
        var limit = bitcast[DType.uint32](largest[_E4M3]() * self.scale)
        return self.scale if most <= limit else nan[DType.float32]()

    @doc_hidden
    @always_inline
    def in_eight_bits(
        self,
        pairs: SIMD[DType.uint32, 2],
        scales: SIMD[DType.float32, 2],
        inverses: SIMD[DType.float32, 2],
    ) -> UInt32:
        # Powers of two are as exact in 16 bits, where an instruction multiplies two.
        var above = multiply_pair(pairs[0], pack_pair[_BF16](inverses[0]))
        var below = multiply_pair(pairs[1], pack_pair[_BF16](inverses[1]))
        return pack_eight_bits[_E4M3](
            unpack_pair[_BF16](above).join(unpack_pair[_BF16](below))
        )

    @doc_hidden
    @always_inline
    def keep_block_scale(
        self, row: Int, block: Int, blocks: Int, scale: Float32
    ):
        if block == 0:
            Vector[DType.float32](
                unsafe_from_address=Int(self.scales)
            ).unsafe_offset(row).unsafe_store(self.scale)
