"""Computes a tile of `dy^T @ x_hat` and what it gives the parameters' gradients."""

from .blocking import Blocking, Buffer
from .gradients import Gradients
from .many_rows_plan import BLOCK_STEPS, ManyRowsPlan, WeightTile
from .microkernel import multiply_block
from .pack import pack_panels
from .parameter_gradients import SUM_ROWS, WeightRows
from .workspace import Arena, buffer, ceildiv


def compute_weight_tile[
    dtype: DType
](
    plan: ManyRowsPlan[dtype],
    tensors: Gradients[dtype],
    gamma: Buffer[Blocking[dtype].accum],
    beta: Buffer[Blocking[dtype].accum],
    workspace: Int,
    task: Int,
    own: Int,
):
    """Computes a tile's part of the parameters' gradients.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        plan: How the work is divided.
        tensors: The gradients and what they are made from.
        gamma: LayerNorm's weight `[K]` in the type of sums.
        beta: LayerNorm's bias `[K]` in the type of sums.
        workspace: Address of the workspace.
        task: Which tile.
        own: Address of the worker's own part of the workspace.
    """
    comptime B = Blocking[dtype]
    var N = tensors.N
    var K = tensors.K
    var arena = Arena(0)
    var tile = WeightTile[dtype](arena, plan.tile_rows, plan.tile_panels, own)
    var n = task // plan.tiles_across * plan.tile_rows
    var k = task % plan.tiles_across * plan.tile_panels * B.tile_n
    var rows = min(plan.tile_rows, N - n)
    var columns = min(plan.tile_panels * B.tile_n, K - k)
    var dbias = buffer[DType.float64](workspace + plan.dbias).unsafe_offset(n)
    if plan.wanted.dweight or plan.wanted.dln_weight:
        for m in range(0, tensors.M, BLOCK_STEPS * B.pair):
            _add_product(tile, tensors, n, m, rows, k, columns)

    var product = buffer[B.accum](tile.product)
    for first in range(0, rows, SUM_ROWS):
        var weight_rows = WeightRows[dtype](
            min(SUM_ROWS, rows - first),
            columns,
            tensors.weight.unsafe_offset((n + first) * K + k),
            K,
            product.unsafe_offset(first * tile.product_stride),
            tile.product_stride,
            dbias.unsafe_offset(first),
            gamma.unsafe_offset(k),
            beta.unsafe_offset(k),
        )
        if plan.wanted.dweight:
            weight_rows.store_weight_gradient(
                buffer[dtype](tensors.dweight).unsafe_offset(
                    (n + first) * K + k
                )
            )
        if plan.wanted.affine():
            var place = (n + first) // SUM_ROWS * K + k
            weight_rows.store_partial_sums(
                _partial[dtype](
                    plan.wanted.dln_weight,
                    workspace + plan.dgamma_partial,
                    place,
                ),
                _partial[dtype](
                    plan.wanted.dln_bias, workspace + plan.dbeta_partial, place
                ),
            )


def _add_product[
    dtype: DType
](
    tile: WeightTile[dtype],
    tensors: Gradients[dtype],
    n: Int,
    m: Int,
    rows: Int,
    k: Int,
    columns: Int,
):
    """Adds what a block of rows of dy and x contributes to a tile."""
    comptime B = Blocking[dtype]
    comptime block_rows = BLOCK_STEPS * B.pair
    var N = tensors.N
    var K = tensors.K
    var depth = min(block_rows, tensors.M - m)
    var dy = buffer[B.operand](tile.dy)
    var x_hat = buffer[B.operand](tile.x_hat)
    pack_panels[dtype, width=B.tile_m, vectors=1](
        dy,
        tile.dy_stride,
        tensors.dy.unsafe_offset(m * N + n),
        N,
        rows,
        depth,
    )
    pack_panels[dtype, width=B.width, vectors=B.tile_vectors, normalize=True](
        x_hat,
        block_rows * B.tile_n,
        tensors.x.unsafe_offset(m * K + k),
        K,
        columns,
        depth,
        tensors.mean.unsafe_offset(m),
        tensors.rstd.unsafe_offset(m),
    )
    for column in range(0, columns, B.tile_n):
        multiply_block[dtype, a_is_panel=True](
            buffer[B.accum](tile.product).unsafe_offset(column),
            tile.product_stride,
            dy,
            tile.dy_stride,
            x_hat.unsafe_offset(column * block_rows),
            rows,
            ceildiv(min(B.tile_n, columns - column), B.width),
            ceildiv(depth, B.pair),
            m > 0,
        )


def _partial[
    dtype: DType
](wanted: Bool, address: Int, place: Int) -> Optional[
    Buffer[Blocking[dtype].accum]
]:
    """Returns where partial sums go, if they are wanted."""
    if not wanted:
        return None
    return buffer[Blocking[dtype].accum](address).unsafe_offset(place)
