"""What a norm is to CPU kernels, and how rows are normalized while they are packed."""

from ...call import CallPointer
from ...gemm.cpu.blocking import Blocking
from ...gemm.cpu.memory import Buffer, buffer, load_first
from ...gemm.cpu.prologue import RowPrologue


@fieldwise_init
struct Statistics[accum: DType](TrivialRegisterPassable):
    """A row's statistics, and how they normalize it.

    Parameters:
        accum: The type of sums and statistics.
    """

    var mean: Scalar[Self.accum]
    """The row's mean."""
    var rstd: Scalar[Self.accum]
    """Reciprocal of the standard deviation."""
    var center: Scalar[Self.accum]
    """A number near the mean, which is subtracted first."""
    var shift: Scalar[Self.accum]
    """What is added to the scaled deviations from it."""

    @always_inline
    def normalize[
        width: Int
    ](self, x: SIMD[Self.accum, width]) -> SIMD[Self.accum, width]:
        """Normalizes a vector of the row.

        Parameters:
            width: Number of lanes.

        Args:
            x: The vector.

        Returns:
            The vector x_hat.
        """
        # Deviations from the center are exact or nearly so; the small shift
        # joins them after scaling, in one rounding.
        return (x - self.center).fma(
            SIMD[Self.accum, width](self.rstd),
            SIMD[Self.accum, width](self.shift),
        )


trait Norm:
    """The maths of a norm."""

    @staticmethod
    def statistics[
        dtype: DType
    ](x: Buffer[dtype], K: Int, eps: Float64) -> Statistics[
        Blocking[dtype].accum
    ]:
        """Computes the statistics of a row.

        Parameters:
            dtype: Element type of the row.

        Args:
            x: The row.
            K: Number of features.
            eps: Added to the variance before the square root.

        Returns:
            The statistics.
        """
        ...

    @staticmethod
    def saved[accum: DType](call: CallPointer, row: Int) -> Statistics[accum]:
        """Reads the statistics that a forward left to its backward.

        Parameters:
            accum: The type of statistics.

        Args:
            call: The backward.
            row: Which row.

        Returns:
            The statistics.
        """
        ...

    @staticmethod
    def finish_input_gradient[
        dtype: DType
    ](
        dx: Buffer[dtype],
        h: Buffer[Blocking[dtype].accum],
        x: Buffer[dtype],
        gamma: Buffer[Blocking[dtype].accum],
        K: Int,
        statistics: Statistics[Blocking[dtype].accum],
    ):
        """Computes a row of dx from the same row of `dy @ weight`.

        Parameters:
            dtype: Element type of the tensors.

        Args:
            dx: The row of the gradient.
            h: The row of `dy @ weight`, readable in whole vectors; overwritten.
            x: The row of the input.
            gamma: Weight of the norm.
            K: Number of features.
            statistics: Those of the row.
        """
        ...


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
    var statistics: Statistics[Self.B.accum]
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
            its.statistics = Self.ThisNorm.saved[Self.B.accum](self.call, index)
        else:
            ref call = self.call[]
            its.statistics = Self.ThisNorm.statistics(
                buffer[Self.x_dtype](call.x).unsafe_offset(index * call.K),
                call.K,
                call.eps,
            )
            if call.mean != 0:
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
