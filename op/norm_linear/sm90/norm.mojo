"""What the kernels on Hopper ask of a norm: one file for each norm answers, and knows of no kernel.

Gamma and beta are applied the same way in all.
"""

from ...gemm.epilogue import RowTerms
from ...gemm.row_hook import Part
from ...rows.program import RowProgram


trait HopperNorm:
    """A norm of rows: its statistics, its fold into a weight, its gradient."""

    comptime name: StaticString
    """Tells kernels apart."""
    comptime has_mean: Bool
    """Whether a row's mean is taken off; if so, the rows of a folded weight are centered as well."""
    comptime Rows: RowProgram
    """From x, gamma, beta and eps to z, with the results mean and rstd."""

    # Statistics: of the distances of a row's elements to a shift, their sum and that of their squares.

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
    def center[
        width: Int
    ](x: SIMD[DType.float32, width], mean: Float32) -> SIMD[
        DType.float32, width
    ]:
        """Takes off the mean.

        Parameters:
            width: How many elements.

        Args:
            x: The elements.
            mean: The row's mean, or what stands for it.

        Returns:
            The distances.
        """
        ...

    @staticmethod
    def part(
        shift: Float32, sum: Float32, squares: Float32, count: Float32
    ) -> Part:
        """Turns sums into what can be joined with other parts of the row.

        Args:
            shift: The shift.
            sum: Sum of the distances to it.
            squares: Sum of their squares.
            count: How many elements there are.

        Returns:
            What `join` and `terms` understand.
        """
        ...

    @staticmethod
    def join(first: Part, second: Part, counts: Part) -> Part:
        """Joins two parts of a row.

        Args:
            first: The one.
            second: The other.
            counts: Elements of each.

        Returns:
            The same of both.
        """
        ...

    @staticmethod
    def terms(part: Part, count: Float32, eps: Float32) -> RowTerms[]:
        """Finds the statistics of a row.

        Args:
            part: The whole row.
            count: Its elements.
            eps: Added to the variance.

        Returns:
            Rstd and mean, by which the epilogue finishes x folded^T.
        """
        ...

    # The fold: y = rstd (x folded^T - mean s) + c, with s = row sums of folded, c = bias + weight beta.

    @staticmethod
    def fold[
        width: Int
    ](
        weight: SIMD[DType.float32, width],
        gamma: SIMD[DType.float32, width],
        center: Float32,
    ) -> SIMD[DType.float32, width]:
        """Folds some elements of the weight.

        Parameters:
            width: How many.

        Args:
            weight: The elements.
            gamma: Those of gamma.
            center: Mean of the row of weight gamma, 0 without a mean.

        Returns:
            The elements of the folded weight.
        """
        ...

    # The gradient, with g = dz gamma.

    @staticmethod
    def xhat[
        width: Int
    ](x: SIMD[DType.float32, width], mean: Float32, rstd: Float32) -> SIMD[
        DType.float32, width
    ]:
        """Normalizes some elements, before gamma and beta.

        Parameters:
            width: How many.

        Args:
            x: The elements.
            mean: The row's mean.
            rstd: The row's rstd.

        Returns:
            (x - mean) rstd.
        """
        ...

    @staticmethod
    def dx[
        width: Int
    ](
        g: SIMD[DType.float32, width],
        xhat: SIMD[DType.float32, width],
        rstd: Float32,
        c0: Float32,
        c1: Float32,
    ) -> SIMD[DType.float32, width]:
        """Finds the gradient of x.

        Parameters:
            width: How many elements.

        Args:
            g: Gradient of xhat.
            xhat: The elements.
            rstd: The row's rstd.
            c0: The row's mean of g, 0 without a mean.
            c1: The row's mean of g xhat.

        Returns:
            The gradient.
        """
        ...
