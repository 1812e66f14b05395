"""Loads what heads of dense tensors are multiplied by on a GPU, without branches that loads after them would wait for."""

from std.sys import size_of

from .call import RotaryCall
from .factors import angles_of_neighbors
from .pair import Pair, Places
from .way import Slice, Way
from .words import either_at, numbers_at


@always_inline
def gamma_at[
    dtype: DType, accum: DType, width: Int
](call: RotaryCall, address: Int, other: Int, places: Places) -> Pair[
    accum, width
]:
    """Loads what a pair is multiplied by after it was normalized.

    Parameters:
        dtype: The type of x.
        accum: The type computed in.
        width: Elements of a piece.

    Args:
        call: The heads.
        address: Address of gamma, 0 for ones.
        other: Address of as many other numbers of the type of x, which are read where there is no gamma.
        places: Where the pieces are in a head.

    Returns:
        Gamma and its offset.
    """
    comptime Read = either_at[dtype, accum, width]
    var offset = SIMD[accum, width](call.weight_offset.cast[accum]())
    var one = SIMD[accum, width](1)
    var is_float32 = call.gamma_is_float32 != 0 and address != 0
    var read = address if address != 0 else other
    var a = Read(read, places.a, is_float32) + offset
    var b = Read(read, places.b, is_float32) + offset
    return {a if address != 0 else one, b if address != 0 else one}


@fieldwise_init
struct Angles[accum: DType, width: Int](TrivialRegisterPassable):
    """What rotates a pair.

    Parameters:
        accum: The type computed in.
        width: Elements of a piece.
    """

    var cos: Pair[Self.accum, Self.width]
    """The cosines."""
    var sin: Pair[Self.accum, Self.width]
    """The sines."""

    @always_inline
    def __init__(out self):
        """Rotates by nothing."""
        self.cos = Pair[Self.accum, Self.width](1, 1)
        self.sin = Pair[Self.accum, Self.width](0, 0)


@always_inline
def angles_at[
    dtype: DType, way: Way, //, accum: DType, width: Int
](call: RotaryCall, start: Int, slice: Slice[dtype, way]) -> Angles[
    accum, width
]:
    """Loads the cosines and the sines of a pair that is rotated.

    Parameters:
        dtype: The type of x.
        way: What is done with heads.
        accum: The type computed in.
        width: Elements of a piece.

    Args:
        call: The heads.
        start: Index of the first of the row's.
        slice: Which pair.

    Returns:
        One of each for each element.
    """
    var is_float32 = call.angles_are_float32 != 0
    comptime if way.is_interleaved:
        if slice.is_half:
            if is_float32:
                return _of_neighbors[DType.float32, accum, width](
                    call, start, slice.places
                )
            return _of_neighbors[dtype, accum, width](call, start, slice.places)
    # Of half the angles, both pieces have the same.
    var a = start + slice.places.a
    var b = start + (slice.places.a if slice.is_half else slice.places.b)
    comptime if slice.is_known:
        comptime Read = numbers_at[dtype, accum, width]
        return Angles(
            Pair(Read(call.cos, a), Read(call.cos, b)),
            Pair(Read(call.sin, a), Read(call.sin, b)),
        )
    else:
        comptime Read = either_at[dtype, accum, width]
        return Angles(
            Pair(Read(call.cos, a, is_float32), Read(call.cos, b, is_float32)),
            Pair(Read(call.sin, a, is_float32), Read(call.sin, b, is_float32)),
        )


@always_inline
def _of_neighbors[
    dtype: DType, accum: DType, width: Int
](call: RotaryCall, start: Int, places: Places) -> Angles[accum, width]:
    comptime Read = angles_of_neighbors[
        dtype, accum, width, width * size_of[dtype]()
    ]
    return Angles(Read(call.cos, start, places), Read(call.sin, start, places))
