"""The backward: two products, and between them one pass over their common rows.

    dz = dy W;  dx, dgamma, dbeta from dz and x;  z = LayerNorm(x) in place of dz;  dW = dy^T z, db

Where the first product takes long enough, the pass runs in its kernel.
Not beside collectives: all blocks of that kernel have to run at one time, so
that it would wait for a collective to end, and that one for other GPUs.
"""

from std.math import align_up

from ...device import Gpu
from ..between_products import BetweenProducts, workspace_bytes
from .launch_product import launch_product, product_fills
from .launch_row_pass import (
    can_pass_rows,
    launch_row_pass,
    passes_rows,
    row_pass_bytes,
)
from .launch_weight_gradient import (
    launch_weight_gradient,
    weight_gradient_fills,
    weight_gradient_workspace,
)

# Up to so many products, what counts is how soon one has begun after another:
# in a graph on the device, else, with some tens of microseconds of work, on the
# host.
comptime _FEW_PRODUCTS = 500_000_000
comptime _FEW_PRODUCTS_LAUNCHED = 5_000_000_000


def is_fast(gpu: Gpu, m: Int, n: Int, k: Int, in_graph: Bool) -> Bool:
    """Tells whether no other product is faster than those of the backward.

    Args:
        gpu: Where to run.
        m: Rows.
        n: Outputs.
        k: Features.
        in_graph: Whether launches cost the host nothing.

    Returns:
        Whether both fill the device, or are so small that it does not matter.
    """
    var few = _FEW_PRODUCTS if in_graph else _FEW_PRODUCTS_LAUNCHED
    return m * n * k <= few or (
        product_fills(gpu, m, k, n) and weight_gradient_fills(gpu, m, n, k)
    )


def backward_workspace[
    dtype: DType
](
    gpu: Gpu, m: Int, n: Int, k: Int, wants_sums: Bool, wants_weight: Bool
) -> Int:
    """Counts the bytes that the backward needs.

    Parameters:
        dtype: Type of the matrices.

    Args:
        gpu: Where to run.
        m: Rows.
        n: Outputs.
        k: Features.
        wants_sums: Whether gradients of gamma or beta are wanted.
        wants_weight: Whether the gradient of the weight is wanted.

    Returns:
        The bytes: dz, then partial sums.
    """
    # The sums of rows are used up when those of the weight's gradient start.
    return align_up(2 * m * k, 256) + max(
        workspace_bytes[dtype](
            gpu, m, k if wants_sums else 0, 0 if wants_weight else n
        ),
        max(
            weight_gradient_workspace(gpu, m, n, k),
            row_pass_bytes(gpu, m, n, k),
        ) if wants_weight else 0,
    )


def launch_backward[
    dtype: DType, ln_dtype: DType
](
    gpu: Gpu,
    between: BetweenProducts,
    dw: Int,
    w: Int,
    accumulates: Bool,
    alone: Bool,
) raises:
    """Queues the gradients that are wanted.

    Parameters:
        dtype: Type of the matrices: bfloat16 or float16.
        ln_dtype: Type of gamma, beta and their gradients.

    Args:
        gpu: Where to run.
        between: All tensors but two. Its workspace is of `backward_workspace`
            bytes; z, dz and its own workspace are laid out in it.
        dw: Address of the weight's gradient [N, K], or 0.
        w: Address of the weight [N, K].
        accumulates: Whether dw and, beside it, db are float32 and are added
            to.
        alone: Whether a grid may wait until all of its blocks can run.

    Raises:
        If the driver refuses.
    """
    var m = between.M
    var n = between.N
    var k = between.K
    var rows = between
    rows.dz = between.workspace
    rows.workspace = rows.dz + Int64(align_up(2 * m * k, 256))
    if dw != 0:
        rows.z = rows.dz
        rows.db = 0
    var wants_sums = between.dgamma != 0 or between.dbeta != 0
    var wants_dz = between.dx != 0 or wants_sums
    if (
        alone
        and wants_dz
        and passes_rows(gpu, m, n, k)
        and can_pass_rows[dtype](rows)
    ):
        launch_row_pass[dtype, ln_dtype](gpu, rows, w)
    else:
        if wants_dz:
            launch_product[dtype, True](
                gpu, Int(rows.dz), Int(rows.dy), w, m, k, n
            )
        rows.launch[dtype, ln_dtype](gpu)
    if dw == 0:
        return
    comptime for wide in [False, True]:
        if accumulates == wide:
            launch_weight_gradient[dtype, DType.float32 if wide else dtype](
                gpu,
                dw,
                Int(between.db),
                Int(between.dy),
                Int(rows.dz),
                Int(rows.workspace),
                m,
                n,
                k,
                accumulates,
            )
