"""No norm: rows stay as they are, so that kernels for normalized rows compute a product alone."""

from .norm import Norm, Part


struct NoNorm(Norm):
    """The formulas of what changes nothing."""

    comptime has_mean = False
    """Nothing is taken off."""
    comptime has_rstd = False
    """Nothing is divided by."""

    @doc_hidden
    @staticmethod
    @always_inline
    def variance[
        dtype: DType, //
    ](
        sum: Scalar[dtype], squares: Scalar[dtype], inverse_k: Scalar[dtype]
    ) -> Scalar[dtype]:
        return 1

    @doc_hidden
    @staticmethod
    @always_inline
    def xhat[
        dtype: DType, width: Int, //
    ](x: SIMD[dtype, width], mean: Scalar[dtype], rstd: Scalar[dtype]) -> SIMD[
        dtype, width
    ]:
        return x

    @doc_hidden
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
        return g

    @doc_hidden
    @staticmethod
    @always_inline
    def shift(sum: Float32, count: Float32) -> Float32:
        return 0

    @doc_hidden
    @staticmethod
    @always_inline
    def distance[
        width: Int
    ](x: SIMD[DType.float32, width], shift: Float32) -> SIMD[
        DType.float32, width
    ]:
        return x

    @doc_hidden
    @staticmethod
    @always_inline
    def part(
        shift: Float32, sum: Float32, squares: Float32, count: Float32
    ) -> Part:
        return {0, 1}

    @doc_hidden
    @staticmethod
    @always_inline
    def join(first: Part, second: Part, counts: Part) -> Part:
        return {0, 1}

    @doc_hidden
    @staticmethod
    @always_inline
    def fold[
        width: Int
    ](
        weight: SIMD[DType.float32, width],
        gamma: SIMD[DType.float32, width],
        mean: Float32,
    ) -> SIMD[DType.float32, width]:
        return weight
