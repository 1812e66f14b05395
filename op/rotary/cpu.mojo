"""Normalizes and rotates heads on a CPU, forward and backward: parts of the heads on PyTorch's threads."""

from std.math import ceildiv, rsqrt
from std.sys import size_of

from ..pages import prefer_large_pages
from ..rows.operands import accumulator
from ..team import Data, Team
from .call import RotaryCall
from .factors import angles_of, gamma_of
from .pair import Pair, Places, load

comptime WIDTH = 8
"""Elements of a piece: D and `rotary` are multiples of two."""


def run_rotary[dtype: DType](call: RotaryCall):
    """Runs the forward, or the backward where dy is given.

    Parameters:
        dtype: The type of x, y and their gradients.

    Args:
        call: The heads.
    """
    var job = call
    prefer_large_pages(
        call.y if call.dy == 0 else call.dx,
        call.units() * call.D * size_of[dtype](),
    )
    if call.second_heads > 0 and call.slots == 0:
        prefer_large_pages(
            call.second_y, call.second_units() * call.D * size_of[dtype]()
        )
    var team = Team(call.context, call.threads)
    if call.dy == 0:
        team.run(_forward_part[dtype], call.parts, job)
    else:
        team.run(_backward_part[dtype], call.parts, job)


@always_inline
def _rstd[
    dtype: DType
](call: RotaryCall, start: Int) -> Scalar[accumulator[dtype]()]:
    """Returns the reciprocal root mean square of the head that starts at an element, 1 without a norm."""
    comptime accum = accumulator[dtype]()
    if call.is_normalized == 0:
        return 1
    var squares = Pair[accum, WIDTH](0, 0)
    for i in range(call.D // (2 * WIDTH)):
        var x = _load[dtype](call.x, start, Places(i, WIDTH, 0))
        squares = squares + x * x
    var mean = squares.sum() / Scalar[accum](call.D)
    return rsqrt(mean + call.eps.cast[accum]())


@always_inline
def _load[
    dtype: DType
](address: Int, start: Int, places: Places) -> Pair[
    accumulator[dtype](), WIDTH
]:
    return load[dtype, accumulator[dtype](), WIDTH, size_of[dtype]()](
        address, start, places
    )


@always_inline
def _angles[
    dtype: DType
](call: RotaryCall, address: Int, row: Int, places: Places) -> Pair[
    accumulator[dtype](), WIDTH
]:
    var start = row % call.positions * call.angles
    return angles_of[dtype, accumulator[dtype](), WIDTH, size_of[dtype]()](
        call, address, start, places
    )


def _forward_part[dtype: DType](data: Data, part: Int):
    """Computes y of the heads of a part: of the first tensor, then of the second, then of the third."""
    ref call = data.unsafe_bitcast[RotaryCall]()[]
    var first, second = call.units(), call.second_units()
    var third = second if call.third_x != 0 else 0
    var size = ceildiv(first + second + third, call.parts)
    var begin = part * size
    var end = begin + size
    _forward_heads[dtype](call, begin, min(end, first))
    begin, end = max(begin - first, 0), end - first
    if end > 0 and second > 0:
        var its = call
        its.turn_to_second()
        _forward_heads[dtype](its, begin, min(end, second))
    begin, end = max(begin - second, 0), end - second
    if end > 0 and third > 0:
        var its = call
        its.turn_to_third()
        _forward_heads[dtype](its, begin, min(end, third))


def _forward_heads[dtype: DType](call: RotaryCall, begin: Int, end: Int):
    """Computes y of some heads."""
    comptime accum = accumulator[dtype]()
    var interleaved = call.is_interleaved != 0
    for unit in range(begin, end):
        var own = call.start_of(unit)
        var row = unit // call.heads
        var start = call.start_of_y(row, unit - row * call.heads)
        var rstd = _rstd[dtype](call, own)
        for i in range(call.D // (2 * WIDTH)):
            var places = Places(i, WIDTH, call.rotary)
            var z = _load[dtype](call.x, own, places)
            if call.is_normalized != 0:
                z = (z * rstd) * gamma_of[
                    dtype, accum, WIDTH, size_of[dtype]()
                ](call, places)
            if places.is_rotated:
                z = z * _angles[dtype](call, call.cos, row, places) + z.turned(
                    interleaved
                ) * _angles[dtype](call, call.sin, row, places)
            z.store[dtype, size_of[dtype]()](call.y, start, places)


@always_inline
def _turned_back[
    dtype: DType
](call: RotaryCall, start: Int, row: Int, places: Places) -> Pair[
    accumulator[dtype](), WIDTH
]:
    """Returns a pair of the gradient of what was rotated."""
    var dz = _load[dtype](call.dy, start, places)
    if not places.is_rotated:
        return dz
    var sines = dz * _angles[dtype](call, call.sin, row, places)
    return dz * _angles[dtype](call, call.cos, row, places) - sines.turned(
        call.is_interleaved != 0
    )


def _backward_part[dtype: DType](data: Data, part: Int):
    """Computes dx of the heads of a part, and what they add to dgamma."""
    comptime accum = accumulator[dtype]()
    ref call = data.unsafe_bitcast[RotaryCall]()[]
    var size = ceildiv(call.units(), call.parts)
    var pairs = call.D // (2 * WIDTH)
    var sums = part * call.D
    if call.dgamma != 0:
        for i in range(pairs):
            var zero = Pair[accum, WIDTH](0, 0)
            zero.store[accum, size_of[accum]()](
                call.dgamma, sums, Places(i, WIDTH, call.rotary)
            )
    for unit in range(part * size, min((part + 1) * size, call.units())):
        var start = unit * call.D
        var own = call.start_of(unit)
        var row = unit // call.heads
        var rstd = _rstd[dtype](call, own)
        var products = Pair[accum, WIDTH](0, 0)
        for i in range(pairs):
            var places = Places(i, WIDTH, call.rotary)
            var dz = _turned_back[dtype](call, start, row, places)
            if call.is_normalized == 0:
                dz.store[dtype, size_of[dtype]()](call.dx, start, places)
                continue
            var n = _load[dtype](call.x, own, places) * rstd
            if call.dgamma != 0:
                var sum = load[accum, accum, WIDTH, size_of[accum]()](
                    call.dgamma, sums, places
                )
                (sum + dz * n).store[accum, size_of[accum]()](
                    call.dgamma, sums, places
                )
            var g = dz * gamma_of[dtype, accum, WIDTH, size_of[dtype]()](
                call, places
            )
            products = products + g * n
        if call.is_normalized == 0:
            continue
        var mean = products.sum() / Scalar[accum](call.D)
        for i in range(pairs):
            var places = Places(i, WIDTH, call.rotary)
            var dz = _turned_back[dtype](call, start, row, places)
            var n = _load[dtype](call.x, own, places) * rstd
            var g = dz * gamma_of[dtype, accum, WIDTH, size_of[dtype]()](
                call, places
            )
            ((g - n * mean) * rstd).store[dtype, size_of[dtype]()](
                call.dx, start, places
            )
