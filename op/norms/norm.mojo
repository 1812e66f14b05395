"""A norm as formulas of one row, for row programs and for products that normalize.

    xhat = (x - mean) rstd;  z = xhat gamma + beta;  g = dz gamma
    dx = rstd (g - c0 - xhat c1), the c means over the row;  dgamma = sum over rows dz xhat;  dbeta = sum over rows dz

Folded into a weight [N, K], for products of x itself:

    y = rstd (x folded^T - mean s) + c;  folded = round(weight gamma - its row's mean)
    s = row sums of folded;  c = bias + weight beta
"""

from std.math import sqrt

comptime Part = SIMD[DType.float32, 2]
"""What is known of a row or of a part of it: its mean, and the sum of squares that the norm divides by."""


trait Norm:
    """What tells one norm from another; gamma and beta are applied the same way in all."""

    comptime has_mean: Bool
    """Whether rows are centered. If not, mean and c0 are 0 and need no computation."""
    comptime has_rstd: Bool
    """Whether rows are divided by anything. If not, rstd is 1 and needs no computation."""

    @staticmethod
    def variance[
        dtype: DType, //
    ](
        sum: Scalar[dtype], squares: Scalar[dtype], inverse_k: Scalar[dtype]
    ) -> Scalar[dtype]:
        """Returns the mean of the squares that a row is divided by the root of, about the mean if rows are centered.

        Parameters:
            dtype: The type computed in.

        Args:
            sum: The sum of the row, as near to 0 as its scale can be shifted.
            squares: The sum of its squares.
            inverse_k: 1 / K.

        Returns:
            The variance.
        """
        ...

    @staticmethod
    @always_inline
    def rstd[
        dtype: DType, //
    ](
        sum: Scalar[dtype],
        squares: Scalar[dtype],
        inverse_k: Scalar[dtype],
        eps: Scalar[dtype],
    ) -> Scalar[dtype]:
        """Returns what a row is divided by, as a factor.

        Parameters:
            dtype: The type computed in.

        Args:
            sum: The sum of the row, as near to 0 as its scale can be shifted.
            squares: The sum of its squares.
            inverse_k: 1 / K.
            eps: Added before the square root.

        Returns:
            The factor.
        """
        return inverse_sqrt(Self.variance(sum, squares, inverse_k) + eps)

    @staticmethod
    def xhat[
        dtype: DType, width: Int, //
    ](x: SIMD[dtype, width], mean: Scalar[dtype], rstd: Scalar[dtype]) -> SIMD[
        dtype, width
    ]:
        """Returns normalized elements, before gamma and beta.

        Parameters:
            dtype: The type computed in.
            width: The number of elements.

        Args:
            x: The elements.
            mean: The row's mean.
            rstd: The row's factor.

        Returns:
            The normalized elements.
        """
        ...

    @staticmethod
    def dx[
        dtype: DType, width: Int, //
    ](
        g: SIMD[dtype, width],
        xhat: SIMD[dtype, width],
        rstd: Scalar[dtype],
        c0: Scalar[dtype],
        c1: Scalar[dtype],
    ) -> SIMD[dtype, width]:
        """Returns the gradient of x.

        Parameters:
            dtype: The type computed in.
            width: The number of elements.

        Args:
            g: The gradient of xhat.
            xhat: The normalized elements.
            rstd: The row's factor.
            c0: The row's mean of g.
            c1: The row's mean of g xhat.

        Returns:
            The gradient.
        """
        ...

    # For code that sees a row in parts: the sums are of differences from a shift near the mean, so that nothing
    # cancels when the mean is large compared with the deviation.

    @staticmethod
    def shift(sum: Float32, count: Float32) -> Float32:
        """Chooses the shift by a row's first elements.

        Args:
            sum: Their sum.
            count: How many there are.

        Returns:
            A value near the row's mean.
        """
        ...

    @staticmethod
    def distance[
        width: Int
    ](x: SIMD[DType.float32, width], shift: Float32) -> SIMD[
        DType.float32, width
    ]:
        """Returns the distances to the shift, or to the mean.

        Parameters:
            width: The number of elements.

        Args:
            x: The elements.
            shift: What stands for the row's mean.

        Returns:
            The distances.
        """
        ...

    @staticmethod
    def part(
        shift: Float32, sum: Float32, squares: Float32, count: Float32
    ) -> Part:
        """Turns sums into what can be joined with other parts.

        Args:
            shift: The shift.
            sum: The sum of the distances.
            squares: The sum of their squares.
            count: How many there are.

        Returns:
            What is known of the part.
        """
        ...

    @staticmethod
    def join(first: Part, second: Part, counts: Part) -> Part:
        """Joins two parts of a row.

        Args:
            first: The one.
            second: The other.
            counts: The elements of each.

        Returns:
            What is known of both.
        """
        ...

    @staticmethod
    def fold[
        width: Int
    ](
        weight: SIMD[DType.float32, width],
        gamma: SIMD[DType.float32, width],
        mean: Float32,
    ) -> SIMD[DType.float32, width]:
        """Folds the norm into some elements of a weight.

        Parameters:
            width: The number of elements.

        Args:
            weight: The elements.
            gamma: Those of gamma.
            mean: The mean of the row of weight gamma, 0 if rows are not centered.

        Returns:
            The folded elements.
        """
        ...


@always_inline
def part_rstd(part: Part, count: Float32, eps: Float32) -> Float32:
    """Returns what a row is divided by, as a factor.

    Args:
        part: What is known of the whole row.
        count: Its elements.
        eps: Added before the square root.

    Returns:
        The factor.
    """
    return 1 / sqrt(part[1] / count + eps)


@always_inline
def inverse_sqrt[dtype: DType, //](a: Scalar[dtype]) -> Scalar[dtype]:
    """Returns 1 / sqrt(a) to the last bit or so, also for subnormal numbers.

    GPUs have an approximation that takes subnormal numbers for zero.

    Parameters:
        dtype: The type computed in.

    Args:
        a: The number.

    Returns:
        The inverse root; infinity for 0, NaN below.
    """
    comptime if dtype == DType.float32:
        var tiny = a < 7.888609052210118e-31
        var scaled = a * 1.8446744073709552e19 if tiny else a
        var guess = 1 / sqrt(scaled)
        var better = guess + guess * (0.5 - 0.5 * scaled * guess * guess)
        # 0 and infinity make the refinement NaN, and the guess is right
        guess = better if better == better else guess
        return guess * 4294967296.0 if tiny else guess
    else:
        return 1 / sqrt(a)
