"""A scale and a shift for each group of rows, folded with gamma and beta into one vector each.

    z = (xhat g + beta) (1 + scale) + shift = xhat G + T,  g = gamma + offset
    G = g (1 + scale);  T = beta (1 + scale) + shift

In the backward, from the sums over a group's rows dG = sum dz xhat and dT = sum dz:

    dscale = dG g + dT beta;  dshift = dT;  dgamma = sum over groups dG (1 + scale);  dbeta = the same for dT
"""

from max.gpu.memory import AddressSpace
from std.math import align_up
from std.sys import size_of

from ..argument import KernelArgument
from ..call import Call
from ..rows.operands import Operands
from ..rows.types import code_of, load_as, store_as


struct Modulation[accum: DType](KernelArgument, TrivialRegisterPassable):
    """The vectors of a modulation, forward or backward, by address: [groups, K] except for gamma and beta.

    Parameters:
        accum: The type computed in, and of G, T, dG and dT.
    """

    var is_backward: Bool
    """Whether it is the backward's."""
    var groups: Int32
    """The number of groups."""
    var length: Int32
    """The number of elements K."""
    var pitch: Int32
    """Elements from the scale or the shift of one group to the next."""
    var type: Int32
    """The type of scale and shift and of their gradients, a number of rows/types.mojo."""
    var norm_type: Int32
    """That of gamma and beta."""
    var offset: Scalar[Self.accum]
    """Added to gamma, if there is one."""
    var gamma: Int64
    """Weight of the norm [K], or 0."""
    var beta: Int64
    """Bias of the norm [K], or 0."""
    var scale: Int64
    """The scale, or 0."""
    var shift: Int64
    """The shift, or 0."""
    var dscale: Int64
    """The gradient of the scale, or 0."""
    var dshift: Int64
    """The gradient of the shift, or 0."""
    var G: Int64
    """G; in the backward dG, replaced by dG (1 + scale)."""
    var T: Int64
    """T; in the backward dT, replaced by dT (1 + scale)."""

    def __init__(
        out self, call: Call, type: Int32, folded: Int, is_backward: Bool
    ):
        """Names the vectors of a call.

        Args:
            call: The call.
            type: The type of x.
            folded: Address of G, and of T behind it, or of dG and dT.
            is_backward: Whether it is the backward's.
        """
        self.is_backward = is_backward
        self.groups = Int32(call.groups)
        self.length = Int32(call.K)
        self.pitch = Int32(call.modulation_pitch())
        self.type = type
        self.norm_type = (
            code_of[Self.accum]() if call.norm_is_float32 != 0 else type
        )
        self.offset = call.weight_offset.cast[Self.accum]()
        self.gamma = Int64(call.gamma)
        self.beta = Int64(call.beta)
        self.scale = Int64(call.scale)
        self.shift = Int64(call.shift)
        self.dscale = Int64(call.dscale)
        self.dshift = Int64(call.dshift)
        self.G = Int64(folded)
        self.T = Int64(folded + folded_bytes[Self.accum](call) // 2)

    @always_inline
    def at[
        space: AddressSpace = AddressSpace.GENERIC
    ](self, group: Int, column: Int):
        """Computes one element of each vector.

        Parameters:
            space: Where the vectors are.

        Args:
            group: Which group.
            column: Which element of its vectors.
        """
        comptime code = code_of[Self.accum]()
        var i = group * Int(self.length) + column
        var given = group * Int(self.pitch) + column
        var g = Scalar[Self.accum](1)
        if self.gamma != 0:
            g = self.offset + load_as[Self.accum, space](
                self.norm_type, self.gamma, column
            )
        var b = Scalar[Self.accum](0)
        if self.beta != 0:
            b = load_as[Self.accum, space](self.norm_type, self.beta, column)
        var factor = Scalar[Self.accum](1)
        if self.scale != 0:
            factor += load_as[Self.accum, space](self.type, self.scale, given)
        if not self.is_backward:
            var t = b * factor
            if self.shift != 0:
                t += load_as[Self.accum, space](self.type, self.shift, given)
            store_as[space=space](code, self.G, i, g * factor)
            store_as[space=space](code, self.T, i, t)
            return
        var dG = load_as[Self.accum, space](code, self.G, i)
        var dT = load_as[Self.accum, space](code, self.T, i)
        if self.dscale != 0:
            store_as[space=space](self.type, self.dscale, i, dG * g + dT * b)
        if self.dshift != 0:
            store_as[space=space](self.type, self.dshift, i, dT)
        store_as[space=space](code, self.G, i, dG * factor)
        store_as[space=space](code, self.T, i, dT * factor)


def is_folded(call: Call) -> Bool:
    """Decides whether scale and shift have to be folded with gamma and beta.

    Without these, passes read scale and shift in their place, and dG and dT are the gradients.

    Args:
        call: The tensors, and which gradients are wanted.

    Returns:
        Whether they have to.
    """
    return (
        call.groups != 0
        and (call.gamma | call.beta | call.dgamma | call.dbeta) != 0
    )


def read_in_place(mut rows: Operands, call: Call):
    """Names scale and shift as what rows are multiplied by, once 1 is added, and what is added to them.

    Args:
        rows: The operands.
        call: The tensors; nothing is folded.
    """
    rows.features[0] = Int64(call.scale)
    rows.features[1] = Int64(call.shift)
    rows.feature_pitch = Int64(call.modulation_pitch())
    if call.scale != 0:
        rows.offset = 1


def has_wide_features(call: Call) -> Bool:
    """Finds the type of what rows are multiplied by.

    Args:
        call: The tensors, and which gradients are wanted.

    Returns:
        Whether it is that of sums, where x is narrower.
    """
    if call.groups != 0:
        return is_folded(call)
    return call.norm_is_float32 != 0


def folded_bytes[accum: DType](call: Call) -> Int:
    """Returns the size of G and T, or of dG and dT.

    Parameters:
        accum: Their type.

    Args:
        call: Sizes.

    Returns:
        The number of bytes, a multiple of 32; 0 if nothing is folded.
    """
    if not is_folded(call):
        return 0
    return 2 * align_up(call.groups * call.K * size_of[accum](), 16)
