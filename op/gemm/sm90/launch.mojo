"""Launches a product in the kernel and the shape that were chosen for it."""

from std.sys import size_of

from ...device import Gpu
from ..epilogue import Epilogue
from ..row_hook import NoHook
from .config import ROW_ALIGNMENT, Config
from .eight_bits import is_eight_bits
from .few_rows.launch import launch_few_rows
from .few_tiles import SPLITS
from .launch_matrix import BAND, launch_matrix
from .product import Product
from .tiling import (
    ANY_COLUMNS,
    COMMON_SHAPES,
    FEW_ROWS,
    NARROWEST_GATE,
    SHAPES,
    Tiling,
)


def can_split[E: Epilogue, dtype: DType, b_transposed: Bool]() -> Bool:
    """Tells whether the blocks of a cluster may share the sums of a product's tile.

    Parameters:
        E: What becomes of the sums.
        dtype: Type of the operands.
        b_transposed: Whether b is stored as [K, N].

    Returns:
        Whether there are such kernels.
    """
    return (
        not (E.activates or E.adds or E.adds_last or E.has_row_terms)
        and E.vectors == 1
        and size_of[dtype]() == 2
        and not b_transposed
    )


def launch_product[
    E: Epilogue, //, dtype: DType, b_transposed: Bool = False
](
    gpu: Gpu,
    tiling: Tiling,
    c: Int,
    a: Int,
    b: Int,
    m: Int,
    n: Int,
    k: Int,
    epilogue: E,
    b_is_older: Bool = False,
    a_is_new: Bool = False,
) raises:
    """Queues c = epilogue(a @ b^T) in the kernel that was chosen.

    Parameters:
        E: What becomes of the sums.
        dtype: Type of a, b and c: bfloat16, float16, or float32 as tf32.
        b_transposed: Whether b is stored as [K, N].

    Args:
        gpu: Where to run.
        tiling: The choice.
        c: Address of c [M, N], for a gate [M, N / 2].
        a: Address of a [M, K].
        b: Address of b [N, K] or [K, N].
        m: Rows of a, at least 1.
        n: Rows of b; a multiple of 16 bytes where b is transposed, or the epilogue activates or adds a tensor.
        k: Length of the sums, a multiple of 16 bytes.
        epilogue: Finishes the sums.
        b_is_older: Whether the kernel queued before this one waits for those before it, and writes nothing of b.
        a_is_new: Whether that kernel writes a, where the epilogue has terms of rows.

    Raises:
        If the driver refuses, or no kernel has such tiles.
    """
    var product = Product(m, n, k, epilogue, NoHook())
    product.b_is_older = Int32(b_is_older)
    product.a_is_new = Int32(a_is_new)
    if tiling.columns == FEW_ROWS:
        launch_few_rows[dtype, b_transposed](gpu, c, a, b, product)
        return
    product.band = BAND
    comptime if not (
        E.activates
        or E.adds
        or E.adds_last
        or b_transposed
        or is_eight_bits[dtype]()
    ):
        if n * size_of[dtype]() % ROW_ALIGNMENT != 0:
            launch_matrix[dtype, ANY_COLUMNS](gpu, c, a, b, product)
            return
    comptime if can_split[E, dtype, b_transposed]():
        comptime for split in SPLITS:
            if tiling.columns == split.columns and tiling.split == split.blocks:
                comptime config = Config.of(
                    split.columns, split=True, cluster=split.blocks
                )
                launch_matrix[dtype, config](gpu, c, a, b, product)
                return
    comptime for i in range(len(SHAPES)):
        comptime shape = SHAPES[i]
        comptime config = Config.of(
            shape.columns,
            b_transposed=b_transposed,
            ping_pong=shape.ping_pong,
        )
        # A box of a gate's c takes twice its columns.
        comptime if not (E.is_gate and config.columns < NARROWEST_GATE) and (
            i < COMMON_SHAPES or not (E.activates or dtype == DType.float32)
        ) and not (E.adds_last and shape.ping_pong):
            if (
                tiling.columns == config.columns
                and tiling.split == 1
                and tiling.ping_pong == config.ping_pong
            ):
                launch_matrix[dtype, config](gpu, c, a, b, product)
                return
    raise Error(
        "no kernel has tiles of ", tiling.columns, " columns for this product"
    )
