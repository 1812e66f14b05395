"""The epilogue of the gradient of an activation: sums are that of a = act(h), and c becomes that of h.

    dh = da act'(h)        of a gate, a = act(gate) up: dgate = da up act'(gate), dup = da act(gate)

Kernels load h, and store a as well if it is wanted, which the gradient of the next layer's weight needs: with the
activation's backward in a pass of its own, da would be written and read once more.
"""

from .activation import SmoothBackward, SmoothCurve
from .epilogue import ColumnTerms, Epilogue, Gradients, RowTerms


@fieldwise_init
struct Differentiated[gates: Bool](Epilogue):
    """The gradient of an activation's input.

    Parameters:
        gates: Whether half of it gates the rest.
    """

    comptime name = StaticString(
        "gate_gradient"
    ) if Self.gates else StaticString("gradient")
    """Tells kernels apart."""
    comptime gradients = 2 if Self.gates else 1
    """Of the gates, and of what they gate."""
    comptime may_store_a = True
    """It may."""

    var input: Int64
    """Address of h [M, N], of a gate [M, 2N]."""
    var activation_address: Int64
    """Address of a [M, N], 0 if it is not wanted."""
    var curve: SmoothCurve
    """Which activation."""

    @doc_hidden
    @always_inline
    def h(self) -> Int:
        return Int(self.input)

    @doc_hidden
    @always_inline
    def a(self) -> Int:
        return Int(self.activation_address)

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
        comptime if Self.gates:
            var gate = SmoothBackward[width](self.curve, h, da * up)
            return {gate.a * up, gate.dh, da * gate.a}
        else:
            var both = SmoothBackward[width](self.curve, h, da)
            return {both.a, both.dh, both.dh}

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
