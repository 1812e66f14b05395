"""The gradient before an activation or a gate, of numbers in bfloat16 that a thread loads together."""

from std.utils import StaticTuple

from ..gemm.activation import Backward
from .words import (
    Words,
    high_halves,
    load_words,
    low_halves,
    rounded_words,
    used_from_here,
)


@always_inline
def gradients[
    gates: Bool
](kind: Int32, da: Words, h: Words, up: Words) -> StaticTuple[Words, 2]:
    """Computes dh, rounded.

    Parameters:
        gates: Whether h gates something.

    Args:
        kind: The activation, without its gate.
        da: The gradient of its result.
        h: Its input.
        up: What it gates.

    Returns:
        dh; of a gate that of the gate and that of what it gates.
    """
    comptime Both = Backward[DType.float32, 4, True]
    var low_da = low_halves(da)
    var high_da = high_halves(da)
    comptime if gates:
        var low = Both(kind, low_halves(h), low_da * low_halves(up))
        var high = Both(kind, high_halves(h), high_da * high_halves(up))
        return StaticTuple[Words, 2](
            rounded_words(low.dh, high.dh),
            rounded_words(low_da * low.a, high_da * high.a),
        )
    else:
        var low = Both(kind, low_halves(h), low_da)
        var high = Both(kind, high_halves(h), high_da)
        return StaticTuple[Words, 2](rounded_words(low.dh, high.dh), Words(0))


@always_inline
def rows_before_gate(
    kind: Int32,
    da: Int64,
    h: Int64,
    row: Int,
    column: Int,
    half: Int,
    left: Int32,
) -> StaticTuple[Words, 4]:
    """Computes 8 columns of four rows of the gradient before a gate, zeros where there are none.

    Args:
        kind: The gate's activation.
        da: Address of the gradient after the gate [m, half].
        h: Address of what is before it [m, 2 half]; its left half gates the right one.
        row: The first row.
        column: The first column of those of both halves.
        half: Columns of one, a multiple of 8.
        left: How many rows there are from the first one on.

    Returns:
        The numbers, rounded.
    """
    if column >= half:
        return _rows_of_part[1](kind, da, h, row, column - half, half, left)
    return _rows_of_part[0](kind, da, h, row, column, half, left)


@always_inline
def _rows_of_part[
    part: Int
](
    kind: Int32,
    da: Int64,
    h: Int64,
    row: Int,
    column: Int,
    half: Int,
    left: Int32,
) -> StaticTuple[Words, 4]:
    var rows = StaticTuple[Words, 4](fill=Words(0))
    var next = _BeforeGate[part](da, h, row, column, half, left > 0)
    comptime for i in range(4):
        var here = next
        # The next row is on its way while this one is computed, one after the other: all at once would take too many
        # registers.
        comptime if i < 3:
            next = _BeforeGate[part](
                da, h, row + i + 1, column, half, left > Int32(i + 1)
            )
        var its_da = used_from_here(here.da)
        var its_gate = used_from_here(here.gate)
        var both = gradients[True](kind, its_da, its_gate, here.other)
        rows[i] = used_from_here(both[part])
    return rows


struct _BeforeGate[part: Int](TrivialRegisterPassable):
    """What a thread has loaded of a row, as far as a part of the gradient needs it; zeros where there is nothing."""

    var da: Words
    var gate: Words
    var other: Words

    @always_inline
    def __init__(
        out self,
        da: Int64,
        h: Int64,
        row: Int,
        column: Int,
        half: Int,
        is_here: Bool,
    ):
        self.da = Words(0)
        self.gate = Words(0)
        self.other = Words(0)
        if is_here:
            self.da = load_words(da, row * half + column)
            self.gate = load_words(h, 2 * row * half + column)
            comptime if Self.part == 0:
                self.other = load_words(h, (2 * row + 1) * half + column)
