"""Loads what a pair is multiplied by: gamma, cosines and sines."""

from std.sys import size_of

from .call import RotaryCall
from .pair import Pair, Places, load


@always_inline
def gamma_of[
    dtype: DType, accum: DType, width: Int, alignment: Int
](call: RotaryCall, places: Places) -> Pair[accum, width]:
    """Loads what a pair is multiplied by after it was normalized.

    Parameters:
        dtype: The type of x.
        accum: The type computed in.
        width: Elements of a piece.
        alignment: Bytes that pieces are aligned to.

    Args:
        call: The heads.
        places: Where the pieces are in a head.

    Returns:
        Gamma and its offset.
    """
    var offset = SIMD[accum, width](call.weight_offset.cast[accum]())
    if call.gamma == 0:
        return {SIMD[accum, width](1), SIMD[accum, width](1)}
    if call.gamma_is_float32 != 0:
        return load[DType.float32, accum, width, alignment](
            call.gamma, 0, places
        ) + Pair(offset, offset)
    return load[dtype, accum, width, alignment](call.gamma, 0, places) + Pair(
        offset, offset
    )


@always_inline
def angles_of[
    dtype: DType, accum: DType, width: Int, alignment: Int
](call: RotaryCall, address: Int, start: Int, places: Places) -> Pair[
    accum, width
]:
    """Loads the cosines or the sines of a pair that is rotated.

    Parameters:
        dtype: The type of x.
        accum: The type computed in.
        width: Elements of a piece.
        alignment: Bytes that pieces are aligned to.

    Args:
        call: The heads.
        address: Address of the cosines or the sines.
        start: Index of the first of the row's.
        places: Where the pieces are in a head.

    Returns:
        One for each element.
    """
    if call.angles_are_float32 != 0:
        return _angles_of[DType.float32, accum, width, alignment](
            call, address, start, places
        )
    return _angles_of[dtype, accum, width, alignment](
        call, address, start, places
    )


@always_inline
def _angles_of[
    dtype: DType, accum: DType, width: Int, alignment: Int
](call: RotaryCall, address: Int, start: Int, places: Places) -> Pair[
    accum, width
]:
    if call.angles == call.rotary:
        return load[dtype, accum, width, alignment](address, start, places)
    if call.is_interleaved == 0:
        var one = Places(places.a, places.a, True)
        return load[dtype, accum, width, alignment](address, start, one)
    return angles_of_neighbors[dtype, accum, width, alignment](
        address, start, places
    )


@always_inline
def angles_of_neighbors[
    dtype: DType, accum: DType, width: Int, alignment: Int
](address: Int, start: Int, places: Places) -> Pair[accum, width]:
    """Loads the cosines or the sines of a pair, of which there is one for two neighbors.

    Parameters:
        dtype: Their type.
        accum: The type computed in.
        width: Elements of a piece.
        alignment: Bytes that pieces are aligned to.

    Args:
        address: Address of the cosines or the sines.
        start: Index of the first of the row's.
        places: Where the pieces are in a head.

    Returns:
        One for each element.
    """
    comptime half = width // 2
    comptime bytes = min(alignment, half * size_of[dtype]())
    var halves = load[dtype, accum, half, bytes](
        address, start, Places(places.a // 2, places.b // 2, True)
    )
    return {
        rebind[SIMD[accum, width]](halves.a.interleave(halves.a)),
        rebind[SIMD[accum, width]](halves.b.interleave(halves.b)),
    }
