"""The gradient before an activation or a gate, on numbers in bfloat16 that a thread loads together."""

from std.utils import StaticTuple

from ..gemm.activation import Backward
from .words import Words, high_halves, low_halves, rounded_words


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
