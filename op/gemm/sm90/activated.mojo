"""Queues a product with an activation or a gate, or their gradient, or one to whose result a tensor is added, in
ping-pong kernels: one consumer stores while the other multiplies.

The activation takes as long as a third of the products of K = 1024. Only ping-pong hides that.
"""

from std.sys import size_of

from ...device import Gpu
from ..epilogue import Epilogue
from ..row_hook import NoHook
from .config import Config
from .few_rows.launch import launch_few_rows_of_parts
from .launch_matrix import BAND, launch_matrix, launch_parts
from .parts import HALVES, WHOLE, Matrices
from .product import Product
from .tiling import (
    ACTIVATED_SHAPES,
    FEW_ROWS,
    SHAPES,
    activated_tiling,
    tiling_with_h,
)


def launch_activated[
    E: Epilogue, //, dtype: DType
](
    gpu: Gpu,
    c: Int,
    a: Int,
    b: Int,
    up: Int,
    m: Int,
    n: Int,
    k: Int,
    epilogue: E,
    a_is_new: Bool = False,
    b_is_older: Bool = False,
) raises:
    """Queues c = epilogue(a @ b^T), or for a gate c = epilogue(a @ b^T, a @ up^T).

    Parameters:
        E: What becomes of the sums.
        dtype: Type of a and b: of 16 bits, or of 8.

    Args:
        gpu: Where to run.
        c: Address of c [M, N], for a gate [M, N / 2].
        a: Address of a [M, K].
        b: Address of b [N, K], for a gate of its first half.
        up: Address of the other half of a gate.
        m: Rows of a, at least 1.
        n: Rows of b, for a gate of both halves.
        k: Length of the sums, a multiple of 16 bytes.
        epilogue: Finishes the sums; it may quantize them.
        a_is_new: Whether the kernel queued before this one writes a, where the epilogue has terms of rows.
        b_is_older: As for `launch_product`.

    Raises:
        If the driver refuses.
    """
    var product = Product(m, n, k, epilogue, NoHook())
    product.band = BAND
    product.a_is_new = Int32(a_is_new)
    product.b_is_older = Int32(b_is_older)
    var halves = Matrices(b)
    halves.addresses[1] = up
    var columns = activated_tiling[dtype](m, n, k, gpu.processors).columns
    if columns == FEW_ROWS:
        # Where a pass quantizes few rows, it is not this that is called; and products of few rows keep no maxima.
        comptime if not E.quantizes:
            if epilogue.maxima() == 0:
                comptime parts = HALVES if E.is_gate else WHOLE
                launch_few_rows_of_parts[dtype, False, parts](
                    gpu, Matrices(c), a, halves, product
                )
                return
        comptime first = ACTIVATED_SHAPES[0]
        comptime narrow = SHAPES[first].columns
        columns = narrow
    comptime for i in ACTIVATED_SHAPES:
        comptime width = SHAPES[i].columns
        if columns == width:
            comptime if E.is_gate:
                comptime config = Config.of(width, ping_pong=True, parts=HALVES)
                launch_parts[dtype, config](
                    gpu, Matrices(c), Matrices(a), halves, product
                )
            else:
                comptime config = Config.of(width, ping_pong=True)
                launch_matrix[dtype, config](gpu, c, a, b, product)


def launch_with_h[
    E: Epilogue, //, dtype: DType, b_transposed: Bool
](
    gpu: Gpu,
    c: Int,
    a: Int,
    b: Int,
    m: Int,
    n: Int,
    k: Int,
    epilogue: E,
    second: Int = 0,
    b_is_older: Bool = False,
) raises:
    """Queues a product whose warps load a tensor h of its shape: c becomes the gradient of the input h of an activation,
    or h is added to it.

    Parameters:
        E: What becomes of the sums.
        dtype: Type of a and b: of 16 bits, that of all, or of 8.
        b_transposed: Whether b is stored as [K, N].

    Args:
        gpu: Where to run.
        c: Address of c [M, N], for a gate [M, 2N], or [M, N] if it has a second matrix.
        a: Address of a [M, K].
        b: Address of b [N, K] or [K, N].
        m: Rows of a.
        n: Columns of c, of a gate's gradient those of each half; a multiple of 16 bytes, for a gate of 32.
        k: Length of the sums, a multiple of 16 bytes.
        epilogue: Makes c of the sums.
        second: Address of a second matrix [M, N], the gradient of what a gate multiplies; or 0.
        b_is_older: As for `launch_product`.

    Raises:
        If the driver refuses.
    """
    var product = Product(m, n, k, epilogue, NoHook())
    product.band = BAND
    product.a_is_new = 1
    product.b_is_older = Int32(b_is_older)
    comptime gates = E.gradients == 2
    var outputs = Matrices(c)
    comptime if gates:
        outputs.addresses[1] = second if second != 0 else c + 2 * n
        outputs.pitch = n if second != 0 else 2 * n
    var columns = tiling_with_h[dtype](m, n, k, gates, gpu.processors).columns
    if columns == FEW_ROWS:
        comptime first = ACTIVATED_SHAPES[0]
        comptime narrow = SHAPES[first].columns
        columns = narrow
    comptime for i in ACTIVATED_SHAPES:
        comptime width = SHAPES[i].columns
        comptime config = Config.of(
            width, b_transposed=b_transposed, ping_pong=True, loads_h=True
        )
        comptime is_narrow = gates or size_of[dtype]() == 1
        comptime if not is_narrow or i == ACTIVATED_SHAPES[0]:
            if columns == width:
                launch_parts[dtype, config](
                    gpu, outputs, Matrices(a), Matrices(b), product
                )
