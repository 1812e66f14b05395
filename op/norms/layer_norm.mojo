"""LayerNorm: rows are centered and divided by their standard deviation."""

from .norm import Norm, Part


struct LayerNorm(Norm):
    """The formulas of LayerNorm."""

    comptime has_mean = True
    """The mean is taken off."""
    comptime has_rstd = True
    """Rows are divided by their standard deviation."""

    @doc_hidden
    @staticmethod
    @always_inline
    def variance[
        dtype: DType, //
    ](
        sum: Scalar[dtype], squares: Scalar[dtype], inverse_k: Scalar[dtype]
    ) -> Scalar[dtype]:
        var rest = sum * inverse_k
        return squares * inverse_k - rest * rest

    @doc_hidden
    @staticmethod
    @always_inline
    def xhat[
        dtype: DType, width: Int, //
    ](x: SIMD[dtype, width], mean: Scalar[dtype], rstd: Scalar[dtype]) -> SIMD[
        dtype, width
    ]:
        return (x - mean) * rstd

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
        return rstd * (g - c0 - xhat * c1)

    @doc_hidden
    @staticmethod
    @always_inline
    def shift(sum: Float32, count: Float32) -> Float32:
        return sum / count

    @doc_hidden
    @staticmethod
    @always_inline
    def distance[
        width: Int
    ](x: SIMD[DType.float32, width], shift: Float32) -> SIMD[
        DType.float32, width
    ]:
        return x - shift

    @doc_hidden
    @staticmethod
    @always_inline
    def part(
        shift: Float32, sum: Float32, squares: Float32, count: Float32
    ) -> Part:
        var offset = sum / count
        return {shift + offset, max(squares - sum * offset, 0)}

    @doc_hidden
    @staticmethod
    @always_inline
    def join(first: Part, second: Part, counts: Part) -> Part:
        var count = counts.reduce_add()
        var apart = second[0] - first[0]
        return {
            first[0] + apart * (counts[1] / count),
            first[1]
            + second[1]
            + apart * apart * (counts[0] * counts[1] / count),
        }

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
        return weight.fma(gamma, SIMD[DType.float32, width](-mean))
