"""The epilogue of the gradient of an activation that comes from scaled operands.

    da = row_scale[m] column_scale[n] sum over k of a[m, k] b[n, k]        c = that of h, as of `Differentiated`

The largest magnitudes of c are kept: the pass that quantizes it needs no other one.
"""

from .differentiated import Differentiated
from .epilogue import ColumnTerms, Epilogue, Gradients, RowTerms, Vector


@fieldwise_init
struct ScaledGradient[gates: Bool](Epilogue):
    """The gradient of an activation's input, of scaled sums.

    Parameters:
        gates: Whether half of it gates the rest.
    """

    comptime name = StaticString(
        "scaled_gate_gradient"
    ) if Self.gates else StaticString("scaled_gradient")
    """Tells kernels apart."""
    comptime vectors = 1
    """The columns' scales."""
    comptime has_row_terms = True
    """The rows' scales."""
    comptime gradients = 2 if Self.gates else 1
    """Of the gates, and of what they gate."""
    comptime keeps_maxima = True
    """They are kept."""

    var row_scale: Int64
    """Address of the rows' scales [M], float32."""
    var column_scale: Int64
    """Address of the columns' scales [N], float32."""
    var before: Differentiated[Self.gates]
    """What becomes of da."""
    var kept: Int64
    """Address of the largest magnitudes of c, or of its first matrix."""
    var second_kept: Int64
    """Address of those of the second matrix, 0 if there is none."""
    var keeps_one: Int32
    """Whether there is one of all of a matrix."""

    @doc_hidden
    @always_inline
    def vector[i: Int](self) -> Vector[DType.float32]:
        return {unsafe_from_address = Int(self.column_scale)}

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
    def h(self) -> Int:
        return self.before.h()

    @doc_hidden
    @always_inline
    def maxima(self) -> Int64:
        return self.kept

    @doc_hidden
    @always_inline
    def second_maxima(self) -> Int64:
        return self.second_kept

    @doc_hidden
    @always_inline
    def has_one_maximum(self) -> Bool:
        return self.keeps_one != 0

    @doc_hidden
    @always_inline
    def differentiated[
        width: Int
    ](
        self,
        da: SIMD[DType.float32, width],
        h: SIMD[DType.float32, width],
        up: SIMD[DType.float32, width],
    ) -> Gradients[width]:
        return self.before.differentiated[width](da, h, up)

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
        return sums * row_terms.scale * column_terms[0]
