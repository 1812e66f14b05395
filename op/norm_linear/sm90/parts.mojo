"""The parts of a call: grouped Linear layers, on the same rows."""

from ...call import Call, Part
from ...gemm.sm90.parts import Matrices
from ...gemm.sm90.parts import PartSizes


@always_inline
def part_at(call: Call, i: Int) -> Part:
    """Returns one of a call's parts.

    Args:
        call: The call.
        i: Which part.

    Returns:
        The part.
    """
    return Pointer[Part, MutUntrackedOrigin](
        unsafe_from_address=call.parts
    ).unsafe_offset(i)[]


def sizes_of(call: Call) -> PartSizes:
    """Returns the outputs of each part.

    Args:
        call: The call.

    Returns:
        Their numbers, 0 where there are fewer parts.
    """
    var sizes = PartSizes(fill=0)
    for i in range(call.part_count):
        sizes[i] = Int32(part_at(call, i).N)
    return sizes


@fieldwise_init
struct InputGradient(TrivialRegisterPassable):
    """What dz = sum over i of dy_i weight_i is made of."""

    var gradients: Matrices
    """Each dy."""
    var weights: Matrices
    """Each weight."""

    def __init__(out self, call: Call):
        """Takes them from a call.

        Args:
            call: The call.
        """
        self.gradients = Matrices(0)
        self.weights = Matrices(0)
        self.gradients.pitch = call.pitch
        for i in range(call.part_count):
            var part = part_at(call, i)
            self.gradients.addresses[i] = part.dy
            self.weights.addresses[i] = part.weight
