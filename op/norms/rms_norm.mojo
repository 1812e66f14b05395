"""RMSNorm: rows are divided by the root of their mean square, and not centered."""

from .norm import Norm, Part


struct RmsNorm(Norm):
    """The formulas of RMSNorm."""

    comptime has_mean = False
    """Nothing is taken off."""
    comptime has_rstd = True
    """Rows are divided by the root of their mean square."""

    @doc_hidden
    @staticmethod
    @always_inline
    def variance[
        dtype: DType, //
    ](
        sum: Scalar[dtype], squares: Scalar[dtype], inverse_k: Scalar[dtype]
    ) -> Scalar[dtype]:
        return squares * inverse_k

    @doc_hidden
    @staticmethod
    @always_inline
    def xhat[
        dtype: DType, width: Int, //
    ](x: SIMD[dtype, width], mean: Scalar[dtype], rstd: Scalar[dtype]) -> SIMD[
        dtype, width
    ]:
        return x * rstd

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
        return rstd * (g - xhat * c1)

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
        return {0, squares}

    @doc_hidden
    @staticmethod
    @always_inline
    def join(first: Part, second: Part, counts: Part) -> Part:
        return {0, first[1] + second[1]}

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
        return weight * gamma
