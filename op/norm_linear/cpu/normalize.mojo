"""Normalizes rows while they are packed."""

from ...call import CallPointer
from ...gemm.cpu.blocking import Blocking
from ...gemm.cpu.memory import Buffer, buffer, load_first
from ...gemm.cpu.prologue import RowPrologue
from ...norms.norm import Norm
from .statistics import Statistics


struct NormalizeRows[
    x_dtype: DType, ThisNorm: Norm, *, is_saved: Bool, is_affine: Bool
](RowPrologue):
    """Normalizes rows of x.

    Parameters:
        x_dtype: Element type of x.
        ThisNorm: The norm.
        is_saved: Whether the forward left the statistics. If not, they are
            computed, and stored where the call asks for them.
        is_affine: Whether gamma and beta are applied.
    """

    comptime B = Blocking[Self.x_dtype]
    """Block sizes and number formats."""

    var call: CallPointer
    """The call."""
    var gamma: Buffer[Self.B.accum]
    """Weight of the norm in the type of sums."""
    var beta: Buffer[Self.B.accum]
    """Bias of the norm in the type of sums."""
    var statistics: Statistics[Self.x_dtype, Self.ThisNorm]
    """Those of the row at hand."""

    def __init__(
        out self,
        call: CallPointer,
        gamma: Buffer[Self.B.accum],
        beta: Buffer[Self.B.accum],
    ):
        """Begins with no row.

        Args:
            call: The call.
            gamma: Weight of the norm in the type of sums.
            beta: Bias of the norm in the type of sums.
        """
        self.call = call
        self.gamma = gamma
        self.beta = beta
        self.statistics = {0, 0, 0, 0}

    @always_inline
    def row(self, index: Int) -> Self:
        """Gets a row's statistics.

        Args:
            index: Which row of x.

        Returns:
            What normalizes it.
        """
        var its = self
        comptime if Self.is_saved:
            its.statistics = type_of(self.statistics).saved(self.call, index)
        else:
            ref call = self.call[]
            its.statistics = type_of(self.statistics).of_row(
                buffer[Self.x_dtype](call.x).unsafe_offset(index * call.K),
                call.K,
                call.eps,
            )
            if Self.ThisNorm.has_mean and call.mean != 0:
                buffer[Self.B.accum](call.mean).unsafe_offset(
                    index
                ).unsafe_store(its.statistics.mean)
            if call.rstd != 0:
                buffer[Self.B.accum](call.rstd).unsafe_offset(
                    index
                ).unsafe_store(its.statistics.rstd)
        return its

    @always_inline
    def apply[
        dtype: DType, width: Int
    ](self, value: SIMD[dtype, width], column: Int, count: Int) -> SIMD[
        Blocking[dtype].operand, width
    ]:
        """Normalizes a vector of the row.

        Parameters:
            dtype: Element type of x.
            width: Number of lanes.

        Args:
            value: The vector.
            column: Index of its first feature.
            count: Number of features that are there.

        Returns:
            The operand, x_hat or z.
        """
        var z = self.statistics.normalize(value.cast[Self.B.accum]())
        comptime if Self.is_affine:
            z = z.fma(
                load_first[width](self.gamma.unsafe_offset(column), count),
                load_first[width](self.beta.unsafe_offset(column), count),
            )
        return z.cast[Blocking[dtype].operand]()
