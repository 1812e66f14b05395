"""What a backward is asked for, and what it is given."""

from .blocking import Blocking, Buffer
from .parameters import Parameter


@fieldwise_init
struct Wanted(TrivialRegisterPassable):
    """Says which gradients to compute."""

    var dx: Bool
    """Whether the input's."""
    var dln_weight: Bool
    """Whether LayerNorm's weight's."""
    var dln_bias: Bool
    """Whether LayerNorm's bias's."""
    var dweight: Bool
    """Whether the linear weight's."""
    var dbias: Bool
    """Whether the linear bias's."""

    def affine(self) -> Bool:
        """Decides whether a LayerNorm parameter's gradient is needed.

        Returns:
            Whether any of the two is wanted.
        """
        return self.dln_weight or self.dln_bias


@fieldwise_init
struct Gradients[dtype: DType](Copyable, Movable):
    """The tensors of a backward; what is not wanted or absent is 0.

    Parameters:
        dtype: Element type of `x`, `dy` and the Linear layer.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    var M: Int
    """Rows."""
    var K: Int
    """Features."""
    var N: Int
    """Outputs."""
    var dx: Int
    """Address of the input's gradient `[M, K]`."""
    var dln_weight: Parameter
    """The gradient of LayerNorm's weight `[K]`."""
    var dln_bias: Parameter
    """The gradient of LayerNorm's bias `[K]`."""
    var dweight: Int
    """Address of the linear weight's gradient `[N, K]`."""
    var dbias: Int
    """Address of the linear bias's gradient `[N]`."""
    var dy: Buffer[Self.dtype]
    """Gradient of the output `[M, N]`."""
    var x: Buffer[Self.dtype]
    """Input `[M, K]`."""
    var mean: Buffer[Self.B.accum]
    """Row means `[M]`."""
    var rstd: Buffer[Self.B.accum]
    """Reciprocal standard deviations `[M]`."""
    var ln_weight: Parameter
    """LayerNorm's weight `[K]`."""
    var ln_bias: Parameter
    """LayerNorm's bias `[K]`."""
    var weight: Buffer[Self.dtype]
    """The Linear layer's weight `[N, K]`."""

    def wanted(self) -> Wanted:
        """Says which gradients have an address.

        Returns:
            Those to compute.
        """
        return Wanted(
            self.dx != 0,
            self.dln_weight.address != 0,
            self.dln_bias.address != 0,
            self.dweight != 0,
            self.dbias != 0,
        )
