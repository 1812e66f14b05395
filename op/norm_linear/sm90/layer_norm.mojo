"""LayerNorm on Hopper.

    xhat = (x - mean) rstd;  z = xhat gamma + beta
    y = rstd (x folded^T - mean s) + c;  folded = round(weight gamma - its row's mean)
    dx = rstd (g - mean(g) - xhat mean(g xhat));  g = dz gamma

Sums are taken of the distances to a shift near the row's mean, so that nothing cancels when the mean is large
against the deviation.
"""

from std.math import sqrt

from ...gemm.epilogue import RowTerms
from ...gemm.row_hook import Part
from ...rows.layernorm import LayerNorm as LayerNormRows
from .norm import HopperNorm

comptime _Some[width: Int] = SIMD[DType.float32, width]


struct LayerNorm(HopperNorm):
    """Rows are centered and divided by their standard deviation."""

    comptime name = StaticString("layer_norm")
    """Tells kernels apart."""
    comptime has_mean = True
    """It has."""
    comptime Rows = LayerNormRows
    """The row program."""

    @doc_hidden
    @staticmethod
    @always_inline
    def shift(sum: Float32, count: Float32) -> Float32:
        return sum / count

    @doc_hidden
    @staticmethod
    @always_inline
    def center[width: Int](x: _Some[width], mean: Float32) -> _Some[width]:
        return x - mean

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
    def terms(part: Part, count: Float32, eps: Float32) -> RowTerms[]:
        return RowTerms[](1 / sqrt(part[1] / count + eps), part[0])

    @doc_hidden
    @staticmethod
    @always_inline
    def fold[
        width: Int
    ](weight: _Some[width], gamma: _Some[width], center: Float32) -> _Some[
        width
    ]:
        return weight.fma(gamma, _Some[width](-center))

    @doc_hidden
    @staticmethod
    @always_inline
    def xhat[
        width: Int
    ](x: _Some[width], mean: Float32, rstd: Float32) -> _Some[width]:
        return (x - mean) * rstd

    @doc_hidden
    @staticmethod
    @always_inline
    def dx[
        width: Int
    ](
        g: _Some[width],
        xhat: _Some[width],
        rstd: Float32,
        c0: Float32,
        c1: Float32,
    ) -> _Some[width]:
        return (g - c0 - xhat * c1) * rstd
