"""The alignment of a call's tensors. Boxes of TMA and vector loads start at multiples of 16 bytes, so every plan checks
all tensors at once, whichever its kernels read: `has_kernels` in choice.mojo, `can` in grouped.mojo.
"""

from ...call import Call
from .parts import part_at

comptime ALIGNMENT = 16
"""Boxes that TMA copies, and every row, start at multiples of this many bytes."""

# Stands for a tensor that is wanted and not allocated yet: it will be aligned.
comptime _WANTED = 1


def are_aligned(call: Call) -> Bool:
    """Tells whether all tensors of a call start where kernels can read and write them.

    Statistics, and gradients of vectors, may start anywhere: they are read and written number by number. What
    modulates rows is for passes, whose row programs ask themselves.

    Args:
        call: The call; its parts are asked about as well.

    Returns:
        Whether they do, as far as they are there.
    """
    var bits = _together(
        # Of the norm.
        call.x,
        call.residual,
        call.sum,
        call.gamma,
        call.beta,
        call.z,
        # Of the product.
        call.weight,
        call.bias,
        call.up,
        call.up_bias,
        call.gate,
        call.fold_weight,
        call.y,
        call.h,
        call.a,
        # Gradients.
        call.dy,
        call.da,
        call.dh,
        call.dz,
        call.dsum,
        call.dx,
        call.dweight,
    )
    for i in range(call.part_count):
        var part = part_at(call, i)
        bits |= _together(part.weight, part.bias, part.y, part.dy)
    return bits % ALIGNMENT == 0


def behind_pass(call: Call) -> Call:
    """Leaves the tensors that a product reads whose rows a pass has normalized.

    Args:
        call: A forward.

    Returns:
        The call without those that only the pass reads, which row programs read at any address.
    """
    var product = call
    product.x = 0
    product.residual = 0
    product.sum = 0
    product.gamma = 0
    product.beta = 0
    return product


@always_inline
def _together(*addresses: Int) -> Int:
    var bits = 0
    for address in addresses:
        if address != _WANTED:
            bits |= address
    return bits
