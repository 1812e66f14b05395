"""A norm as formulas of one row, for whoever runs it: row programs, and products that normalize on the way.

    xhat = (x - mean) rstd;  z = xhat gamma + beta;  g = dz gamma
    dx = rstd (g - c0 - xhat c1), the c means over the row;  dgamma = sum over rows dz xhat;  dbeta = sum over rows dz
"""

from std.math import sqrt


trait Norm:
    """What tells one norm from another; gamma and beta are applied the same way in all."""

    comptime has_mean: Bool
    """Whether rows are centered. If not, mean and c0 are 0 and nobody has to find them."""

    @staticmethod
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
        ...

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
