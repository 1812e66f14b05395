"""Launch of the kernel for few rows."""

from max.gpu.host import FuncAttribute
from std.math import ceildiv

from ...device import Gpu
from .arguments import Arguments
from .few_rows import (
    FEW_CLUSTER,
    FEW_OUTPUTS,
    FEW_THREADS,
    few_rows_kernel,
    few_rows_shared_bytes,
)
from .launch_matrix import beside_earlier
from .tensor_map import operand_map
from .wgmma import K_BLOCK

# Rows that kernels are made for.
comptime _ROWS = [16, _MOST_ROWS]
comptime _MOST_ROWS = 64


def are_few(m: Int, k: Int) -> Bool:
    """Tells whether the kernel for few rows can take a product.

    Args:
        m: Rows of the product.
        k: Length of its sums.

    Returns:
        Whether the rows are few, and the sums long enough to share.
    """
    return m <= _MOST_ROWS and k > K_BLOCK


def launch_few_rows[
    dtype: DType, w_transposed: Bool, mode: Int, gathers: Bool = False
](gpu: Gpu, y: Int, x: Int, w: Int, arguments: Arguments) raises:
    """Queues y = epilogue(x @ w^T) for few rows of x.

    Parameters:
        dtype: Type of x, w and y: bfloat16, float16, or float32 as tf32.
        w_transposed: Whether w is stored as [k, n].
        mode: Epilogue, `PLAIN`, `CORRECTED` or `BIASED`.
        gathers: Whether the kernel takes the row statistics; k % 64 == 0 then.

    Args:
        gpu: Where to run.
        y: Address of y [m, n].
        x: Address of x [m, k].
        w: Address of w [n, k] or [k, n].
        arguments: Sizes, and what goes with the matrices.

    Raises:
        If the driver refuses.
    """
    var m = Int(arguments.m)
    var n = Int(arguments.n)
    var k = Int(arguments.k)
    ref ctx = gpu.context
    comptime for i in range(len(_ROWS)):
        comptime rows = _ROWS[i]
        if m <= rows:
            var kernel = ctx.compile_function[
                few_rows_kernel[dtype, rows, w_transposed, mode, gathers]
            ](
                func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                    UInt32(few_rows_shared_bytes(rows))
                )
            )
            gpu.stream.enqueue_function(
                kernel,
                operand_map[dtype, w_transposed](ctx, w, n, k, FEW_OUTPUTS),
                operand_map[dtype, False](ctx, x, m, k, rows),
                Pointer[Scalar[dtype], MutAnyOrigin](unsafe_from_address=y),
                arguments,
                grid_dim=ceildiv(n, FEW_OUTPUTS) * FEW_CLUSTER,
                block_dim=FEW_THREADS,
                shared_mem_bytes=few_rows_shared_bytes(rows),
                attributes=beside_earlier(),
            )
            return
