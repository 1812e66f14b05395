"""The gradient of a chunk's rows: a product with the vocabulary's weight, then each row's factor.

    dx[m, k] = factor[m] sum over v of e[m, v] weight[v, k]

The sums are multiplied before they are rounded, so that dx leaves the product finished. A chunk has few rows: where
even tiles of 192 columns are too few for all SMs, the two blocks of a cluster share the sums of each.
"""

from ..device import Gpu
from ..gemm.epilogue import ColumnTerms, Epilogue, RowTerms, Vector
from ..gemm.row_hook import NoHook
from ..gemm.sm90.config import Config
from ..gemm.sm90.launch_matrix import BAND, launch_parts
from ..gemm.sm90.parts import Matrices
from ..gemm.sm90.product import Product
from .call import HeadCall

comptime TILES = [256, 192]
"""Columns of a tile that there are kernels for, each also with sums that are shared
(fused_norm/chain/head_tiles.py chooses)."""


@fieldwise_init
struct RowFactors(Epilogue):
    """Sums times a factor of the row."""

    comptime name = StaticString("row_factors")
    """Tells kernels apart."""
    comptime has_row_terms = True
    """The factor."""

    var factors: Vector[DType.float32]
    """Factors of the rows [M]."""

    @doc_hidden
    @always_inline
    def row_terms(self, row: Int) -> RowTerms[]:
        return {self.factors.unsafe_offset(row).unsafe_load(), 0}

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
        return sums * row_terms.scale


def launch_input_gradient(gpu: Gpu, call: HeadCall) raises:
    """Queues the gradient of a chunk's rows.

    Args:
        gpu: Where to run.
        call: The chunk, with its exponentials and factors, and the tile that was chosen.

    Raises:
        If the driver refuses.
    """
    comptime for columns in TILES:
        comptime for splits in [False, True]:
            if call.dx_columns == columns and (call.dx_is_split != 0) == splits:
                _launch[
                    Config.of(
                        columns,
                        b_transposed=True,
                        split=splits,
                        ping_pong=columns < 256 and not splits,
                    )
                ](gpu, call)


def _launch[config: Config](gpu: Gpu, call: HeadCall) raises:
    var product = Product(
        call.M,
        call.K,
        call.V,
        RowFactors({unsafe_from_address = call.factors}),
        NoHook(),
    )
    product.band = BAND
    # The kernel before this one puts labels among the exponentials.
    product.a_is_new = 1
    var e = Matrices(call.exponentials)
    e.pitch = call.pitch
    launch_parts[DType.bfloat16, config](
        gpu, Matrices(call.dx), e, Matrices(call.weight), product
    )
