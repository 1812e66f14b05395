"""What is computed of a share of heads on a GPU: the formulas of pair.mojo, for a pair of each head."""

from std.math import rsqrt
from std.utils import StaticTuple

from .dense_factors import Angles
from .lanes import add_over_lanes
from .pair import Pair
from .shares import Share
from .way import Slice, Way


@always_inline
def rstds_of[
    dtype: DType, way: Way, //, accum: DType
](
    share: Share[dtype, way], slice: Slice[dtype, way], eps: Float64
) -> StaticTuple[Scalar[accum], way.heads()]:
    """Adds up the squares of each head.

    Parameters:
        dtype: The type of x.
        way: What is done with heads.
        accum: The type computed in.

    Args:
        share: The heads.
        slice: What this lane has of them.
        eps: Added to the mean square.

    Returns:
        The reciprocal root mean square of each; 1 without a norm.
    """
    comptime count = way.heads()
    var rstds = StaticTuple[Scalar[accum], count](fill=1)
    comptime if way.is_normalized:
        comptime for i in range(count):
            var v = share.x[accum, slice.width](i)
            rstds[i] = (v * v).sum() if slice.has_pair else 0
        add_over_lanes[count, slice.log](rstds, slice.log_lanes)
        comptime for i in range(count):
            rstds[i] = rsqrt(
                rstds[i] / Scalar[accum](slice.D) + eps.cast[accum]()
            )
    return rstds


@always_inline
def forward_of[
    dtype: DType, way: Way, accum: DType, width: Int, //
](
    share: Share[dtype, way],
    slice: Slice[dtype, way],
    angles: Angles[accum, width],
    g: Pair[accum, width],
    rstds: StaticTuple[Scalar[accum], way.heads()],
) -> StaticTuple[Pair[accum, width], way.heads()]:
    """Computes y.

    Parameters:
        dtype: The type of x.
        way: What is done with heads.
        accum: The type computed in.
        width: Elements of a piece.

    Args:
        share: The heads.
        slice: What this lane has of them.
        angles: What rotates it.
        g: What it is multiplied by before.
        rstds: What each head is multiplied by before.

    Returns:
        A pair of each head.
    """
    var results = StaticTuple[Pair[accum, width], way.heads()](
        fill=Pair[accum, width](0, 0)
    )
    comptime for i in range(way.heads()):
        var z = share.x[accum, width](i)
        comptime if way.is_normalized:
            z = z * rstds[i] * g
        if slice.places.is_rotated:
            z = z * angles.cos + z.turned[way.is_interleaved]() * angles.sin
        results[i] = z
    return results


@always_inline
def backward_of[
    dtype: DType, way: Way, accum: DType, width: Int, //
](
    share: Share[dtype, way],
    slice: Slice[dtype, way],
    angles: Angles[accum, width],
    g: Pair[accum, width],
    rstds: StaticTuple[Scalar[accum], way.heads()],
    mut sums: Pair[accum, width],
) -> StaticTuple[Pair[accum, width], way.heads()]:
    """Computes the gradient of x, and adds to that of gamma.

    Parameters:
        dtype: The type of x.
        way: What is done with heads.
        accum: The type computed in.
        width: Elements of a piece.

    Args:
        share: The heads.
        slice: What this lane has of them.
        angles: What rotates it.
        g: What it is multiplied by before.
        rstds: What each head is multiplied by before.
        sums: The gradient of gamma.

    Returns:
        A pair of each head.
    """
    comptime Own = Pair[accum, width]
    comptime count = way.heads()
    var results = StaticTuple[Own, count](fill=Own(0, 0))
    var means = StaticTuple[Scalar[accum], count](fill=0)
    comptime for i in range(count):
        var z = share.dy[accum, width](i)
        if slice.places.is_rotated:
            z = z * angles.cos - (z * angles.sin).turned[way.is_interleaved]()
        comptime if way.is_normalized:
            var n = share.x[accum, width](i) * rstds[i]
            # Without an eps, a head that is not there has no rstd.
            if Int32(i) < share.heads and slice.has_pair:
                sums = sums + z * n
            z = z * g
            means[i] = (z * n).sum() if slice.has_pair else 0
        results[i] = z
    comptime if way.is_normalized:
        add_over_lanes[count, slice.log](means, slice.log_lanes)
        comptime for i in range(count):
            var n = share.x[accum, width](i) * rstds[i]
            var mean = means[i] / Scalar[accum](slice.D)
            results[i] = (results[i] - n * mean) * rstds[i]
    return results
