"""The activation of a call, for plans and for the backward."""

from ...call import Call
from ...gemm.activation import GATED, SILU


def is_served(activation: Int) -> Bool:
    """Says whether a forward can end in an activation.

    Args:
        activation: Its number in the record; 0 for none.

    Returns:
        Whether it can.
    """
    var kind = activation % GATED
    return activation == 0 or 0 < kind <= Int(SILU) and activation < 2 * GATED


def before_activation(call: Call) -> Call:
    """Returns the backward of the norm and the Linear layer alone, given the gradient of their product.

    Args:
        call: The backward. With an activation, dh has been made from da.

    Returns:
        One without an activation, on as many outputs as the product has.
    """
    var linear = call
    if call.activation != 0:
        linear.dy = call.dh
        linear.N *= 2 if call.activation >= GATED else 1
        linear.activation = 0
    return linear
