"""The product with the vocabulary whose epilogue leaves exponentials in place of logits.

    e[m, v] = exp(z - offset[m]) for z = x[m] . w[v] + bias[v]

Sums over the columns of each tile are those of the unrounded values. The offset is known before the product, so no
pass over the logits has to compute it; any within about 70 of the row's largest logit works, as bfloat16 has the
range of float32. No logit is ever rounded. With a softcap, z is the limited logit, and what is stored is
multiplied by the slope of tanh.
"""

from std.math import exp2, min

from ..device import Gpu
from ..gemm.epilogue import ColumnTerms, Epilogue, RowTerms, Vector
from ..gemm.row_hook import NoHook
from ..gemm.sm90.config import Config
from ..gemm.sm90.launch_matrix import BAND, launch_parts
from ..gemm.sm90.parts import Matrices
from ..gemm.sm90.product import Product
from .call import HeadCall
from .softcap import capped, slope

comptime LOG2E = Float32(1.4426950408889634)
"""Logarithm to the base 2 of e."""
comptime LARGEST = Float32(100)
"""Logarithm to the base 2 of the largest exponential. Sums of more are none of the safe ones."""

comptime TILES = [192, 128, 256]
"""Columns of a tile that there are kernels for: by ping-pong consumers but for the widest."""
comptime TILES_WITH_BIAS = 128
"""Those of the kernel for a product with a bias."""


@fieldwise_init
struct Exponentials[
    bias_dtype: DType, has_bias: Bool, keeps: Bool, is_capped: Bool
](Epilogue):
    """Exponentials of sums less an offset of the row, and their sums over a tile.

    Parameters:
        bias_dtype: Type of the bias.
        has_bias: Whether there is one.
        keeps: Whether the exponentials are stored.
        is_capped: Whether tanh limits the logits.
    """

    comptime name = StaticString(
        "capped_exponentials" if Self.is_capped else "exponentials"
    ) if Self.keeps else StaticString(
        "capped_exponential_sums" if Self.is_capped else "exponential_sums"
    )
    """Tells kernels apart."""
    comptime vectors = 1 if Self.has_bias else 0
    """The bias."""
    comptime vector_dtype = Self.bias_dtype
    """Its type."""
    comptime has_row_terms = True
    """The offset."""
    comptime stores = Self.keeps
    """Whether they are."""
    comptime sums_rows = True
    """They are."""
    comptime weighs = Self.is_capped and Self.keeps
    """By the slope of tanh."""

    var bias: Int64
    """Address of the bias [N]."""
    var offsets: Vector[DType.float32]
    """Offsets of the rows [M]."""
    var partials: Int64
    """Address of the sums [M, tiles], float32."""
    var tiles: Int32
    """Tiles of a row."""
    var softcap: Float32
    """What tanh limits logits to."""

    @doc_hidden
    @always_inline
    def vector[i: Int](self) -> Vector[Self.bias_dtype]:
        return {unsafe_from_address = Int(self.bias)}

    @doc_hidden
    @always_inline
    def row_terms(self, row: Int) -> RowTerms[]:
        return {1, self.offsets.unsafe_offset(row).unsafe_load() * LOG2E}

    @doc_hidden
    @always_inline
    def keep_row_sum(self, row: Int, tile: Int, sum: Float32):
        Pointer[Float32, MutAnyOrigin](
            unsafe_from_address=Int(self.partials)
        ).unsafe_offset(row * Int(self.tiles) + tile).unsafe_store(sum)

    @always_inline
    def _logits[
        dtype: DType, width: Int
    ](
        self,
        sums: SIMD[dtype, width],
        column_terms: ColumnTerms[dtype, width, Self.vectors],
    ) -> SIMD[DType.float32, width]:
        """Returns logits before they are limited."""
        var logits = sums.cast[DType.float32]()
        comptime if Self.has_bias:
            logits += column_terms[0].cast[DType.float32]()
        return logits

    @doc_hidden
    @always_inline
    def weights[
        dtype: DType, width: Int
    ](
        self,
        sums: SIMD[dtype, width],
        column_terms: ColumnTerms[dtype, width, Self.vectors],
    ) -> SIMD[dtype, width]:
        return slope[width](
            self._logits(sums, column_terms), self.softcap
        ).cast[dtype]()

    @doc_hidden
    @always_inline
    def finish[
        dtype: DType, width: Int
    ](
        self,
        sums: SIMD[dtype, width],
        row_terms: RowTerms[dtype],
        column_terms: ColumnTerms[dtype, width, Self.vectors],
        row: Int,
        column: Int,
    ) -> SIMD[dtype, width]:
        comptime Some = SIMD[DType.float32, width]
        var logits = self._logits(sums, column_terms)
        comptime if Self.is_capped:
            logits = capped[width](logits, self.softcap)
        var offset = row_terms.offset.cast[DType.float32]()
        var exponents = logits.fma(Some(LOG2E), Some(-offset))
        return exp2(min(exponents, Some(LARGEST))).cast[dtype]()


def launch_exponentials(gpu: Gpu, call: HeadCall) raises:
    """Queues the exponentials of a chunk's logits, and their sums over each tile.

    Args:
        gpu: Where to run.
        call: The chunk.

    Raises:
        If the driver refuses.
    """
    comptime for keeps in [True, False]:
        if (call.exponentials != 0) == keeps:
            comptime for has_bias in [True, False]:
                comptime for is_capped in [True, False]:
                    if (call.bias != 0) == has_bias and (
                        call.softcap != 0
                    ) == is_capped:
                        _launch_tile[has_bias, keeps, is_capped](gpu, call)


def _launch_tile[
    has_bias: Bool, keeps: Bool, is_capped: Bool
](gpu: Gpu, call: HeadCall) raises:
    """Chooses the kernel of a tile, where there is more than one."""
    comptime if has_bias:
        comptime config = Config.of(TILES_WITH_BIAS, ping_pong=True)
        _launch[config, True, keeps, is_capped](gpu, call)
    else:
        # With a softcap there is the first alone.
        comptime for i in range(1 if is_capped else len(TILES)):
            comptime columns = TILES[i]
            comptime config = Config.of(columns, ping_pong=columns < 256)
            if call.columns == columns:
                _launch[config, False, keeps, is_capped](gpu, call)


def _launch[
    config: Config, has_bias: Bool, keeps: Bool, is_capped: Bool
](gpu: Gpu, call: HeadCall) raises:
    var product = Product(
        call.M,
        call.V,
        call.K,
        Exponentials[DType.bfloat16, has_bias, keeps, is_capped](
            Int64(call.bias),
            {unsafe_from_address = call.offsets},
            Int64(call.partials),
            Int32(call.tiles),
            call.softcap.cast[DType.float32](),
        ),
        NoHook(),
    )
    product.band = BAND
    product.a_is_new = 1
    var c = Matrices(call.exponentials if keeps else call.x)
    c.pitch = call.pitch
    launch_parts[DType.bfloat16, config](
        gpu, c, Matrices(call.x), Matrices(call.weight), product
    )
