"""Normalizes rows while they are packed."""

from std.sys import size_of

from ...call import Call, CallPointer
from ...gemm.cpu.blocking import Blocking
from ...gemm.cpu.memory import Buffer, Matrix, buffer, load_first, store_first
from ...gemm.cpu.prologue import RowPrologue
from ...norms.norm import Norm
from ...rounding import converted
from .statistics import Statistics


def normalized_rows(call: Call) -> Int:
    """Finds the rows that a forward normalizes.

    Args:
        call: The forward.

    Returns:
        The address of x, or of the sum of x and residual.
    """
    return call.sum if call.residual != 0 else call.x


struct NormalizeRows[
    x_dtype: DType,
    ThisNorm: Norm,
    *,
    is_saved: Bool,
    is_affine: Bool,
    is_modulated: Bool = False,
](RowPrologue):
    """Normalizes rows of x, or of the sum that a row becomes when it is asked for.

    Parameters:
        x_dtype: Element type of x.
        ThisNorm: The norm.
        is_saved: Whether the forward left the statistics. If not, they are
            computed, and stored where the call asks for them.
        is_affine: Whether gamma and beta are applied.
        is_modulated: Whether groups of rows have a scale and a shift.
    """

    comptime B = Blocking[Self.x_dtype]
    """Block sizes and number formats."""

    var call: CallPointer
    """The call."""
    var gamma: Buffer[Self.B.accum]
    """Weight of the norm in the type of sums."""
    var beta: Buffer[Self.B.accum]
    """Bias of the norm in the type of sums."""
    var shifts: Int
    """Where the statistics are saved, address of what their means lack; 0 for nothing."""
    var statistics: Statistics[Self.x_dtype, Self.ThisNorm]
    """Those of the row at hand."""
    var scale: Int
    """Address of the scale of the row's group, 0 without one."""
    var shift: Int
    """Address of the shift of the row's group, 0 without one."""

    def __init__(
        out self,
        call: CallPointer,
        gamma: Buffer[Self.B.accum],
        beta: Buffer[Self.B.accum],
        shifts: Int = 0,
    ):
        """Begins with no row.

        Args:
            call: The call.
            gamma: Weight of the norm in the type of sums.
            beta: Bias of the norm in the type of sums.
            shifts: Where the statistics are saved, address of what their means lack; 0 for nothing.
        """
        self.call = call
        self.shifts = shifts
        self.gamma = gamma
        self.beta = beta
        self.statistics = {0, 0, 0, 0}
        self.scale = 0
        self.shift = 0

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
            its.statistics = type_of(self.statistics).saved(
                self.call, index, self.shifts
            )
        else:
            ref call = self.call[]
            if call.residual != 0:
                _add_residual[Self.x_dtype](call, index)
            its.statistics = type_of(self.statistics).of_row(
                Matrix[Self.x_dtype](normalized_rows(call), call.K).at(index),
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
        comptime if Self.is_modulated:
            ref call = self.call[]
            var group = index // (call.M // call.groups)
            var pitch = call.modulation_pitch() * size_of[Self.x_dtype]()
            var offset = group * pitch
            its.scale = call.scale + offset if call.scale != 0 else 0
            its.shift = call.shift + offset if call.shift != 0 else 0
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
        var z = self.statistics.normalize(converted[Self.B.accum](value))
        comptime if Self.is_affine:
            z = z.fma(
                load_first[width](self.gamma.unsafe_offset(column), count),
                load_first[width](self.beta.unsafe_offset(column), count),
            )
        comptime if Self.is_modulated:
            if self.scale != 0:
                z *= 1 + _load[Self.x_dtype, width](self.scale, column, count)
            if self.shift != 0:
                z += _load[Self.x_dtype, width](self.shift, column, count)
        return converted[Blocking[dtype].operand](z)


@always_inline
def _load[
    dtype: DType, width: Int
](row: Int, column: Int, count: Int) -> SIMD[Blocking[dtype].accum, width]:
    return converted[Blocking[dtype].accum](
        load_first[width](buffer[dtype](row).unsafe_offset(column), count)
    )


def _add_residual[dtype: DType](call: Call, index: Int):
    """Writes a row of the sum, rounded to its type: what is rounded away is in no statistics."""
    comptime B = Blocking[dtype]
    var x = Matrix[dtype](call.x, call.K).at(index)
    var residual = Matrix[dtype](call.residual, call.K).at(index)
    var sum = Matrix[dtype](call.sum, call.K).at(index)
    for k in range(0, call.K, B.width):
        var left = call.K - k
        var value = converted[B.accum](
            load_first[B.width](x.unsafe_offset(k), left)
        ) + converted[B.accum](
            load_first[B.width](residual.unsafe_offset(k), left)
        )
        store_first(sum.unsafe_offset(k), converted[dtype](value), left)
