"""LayerNorm: rows are centered and divided by their standard deviation."""

from .norm import Norm, inverse_sqrt


struct LayerNorm(Norm):
    """The formulas of LayerNorm."""

    comptime has_mean = True
    """The mean is taken off."""

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
        """Returns 1 / sqrt(variance + eps).

        Parameters:
            dtype: The type computed in.

        Args:
            sum: The sum of the row less a number near its mean.
            squares: The sum of the squares of that.
            inverse_k: 1 / K.
            eps: Added before the square root.

        Returns:
            The reciprocal standard deviation.
        """
        var rest = sum * inverse_k
        return inverse_sqrt(squares * inverse_k - rest * rest + eps)

    @staticmethod
    @always_inline
    def xhat[
        dtype: DType, width: Int, //
    ](x: SIMD[dtype, width], mean: Scalar[dtype], rstd: Scalar[dtype]) -> SIMD[
        dtype, width
    ]:
        """Returns (x - mean) rstd.

        Parameters:
            dtype: The type computed in.
            width: The number of elements.

        Args:
            x: The elements.
            mean: The row's mean.
            rstd: The row's reciprocal standard deviation.

        Returns:
            The normalized elements.
        """
        return (x - mean) * rstd

    @staticmethod
    @always_inline
    def dx[
        dtype: DType, width: Int, //
    ](
        g: SIMD[dtype, width],
        xhat: SIMD[dtype, width],
        rstd: Scalar[dtype],
        c0: Scalar[dtype],
        c1: Scalar[dtype],
    ) -> SIMD[dtype, width]:
        """Returns rstd (g - c0 - xhat c1).

        Parameters:
            dtype: The type computed in.
            width: The number of elements.

        Args:
            g: The gradient of xhat.
            xhat: The normalized elements.
            rstd: The row's reciprocal standard deviation.
            c0: The row's mean of g.
            c1: The row's mean of g xhat.

        Returns:
            The gradient of x.
        """
        return rstd * (g - c0 - xhat * c1)
