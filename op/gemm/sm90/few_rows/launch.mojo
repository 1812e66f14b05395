"""Launches of the kernel for few rows."""

from max.gpu.host import FuncAttribute
from std.math import ceildiv

from ....device import Gpu
from ....pdl import pdl_attributes
from ...epilogue import Epilogue
from ...row_hook import RowHook
from ..eight_bits import result_type
from ..parts import HALVES, SIDE_BY_SIDE, WHOLE, Matrices, steps_of
from ..product import Product
from ..tensor_map import Maps, operand_map
from ..tiling import MOST_FEW_ROWS, VERY_FEW_ROWS
from ..wgmma import row_elements
from .kernel import few_rows_kernel
from .layout import (
    FEW_CLUSTER,
    FEW_OUTPUTS,
    FEW_THREADS,
    GATE_ROWS,
    blocks_per_processor,
    few_rows_shared_bytes,
    is_persistent,
)
from .tile import count_maps

# Most rows of each kernel for few rows.
comptime _FEW = [VERY_FEW_ROWS, MOST_FEW_ROWS]


def launch_few_rows[
    E: Epilogue, H: RowHook, //, dtype: DType, b_transposed: Bool
](gpu: Gpu, c: Int, a: Int, b: Int, product: Product[E, H]) raises:
    """Queues c = epilogue(a @ b^T) for few rows of a.

    Parameters:
        E: What becomes of the sums.
        H: What is done with the rows; if it gathers them, K is a multiple of the
            k block.
        dtype: Type of a, b and c: bfloat16, float16, or float32 as tf32.
        b_transposed: Whether b is stored as [K, N].

    Args:
        gpu: Where to run.
        c: Address of c [M, N].
        a: Address of a [M, K].
        b: Address of b [N, K] or [K, N].
        product: Sizes, and what goes with the matrices.

    Raises:
        If the driver refuses.
    """
    launch_few_rows_of_parts[dtype, b_transposed, WHOLE, MOST_FEW_ROWS](
        gpu, Matrices(c), a, Matrices(b), product
    )


def launch_few_rows_of_parts[
    E: Epilogue,
    H: RowHook,
    //,
    dtype: DType,
    b_transposed: Bool,
    parts: Int,
    most: Int = VERY_FEW_ROWS,
](gpu: Gpu, c: Matrices, a: Int, b: Matrices, product: Product[E, H]) raises:
    """Queues c_i = epilogue(a @ b_i^T), or a gate of two b, for few rows of a.

    Parameters:
        E: What becomes of the sums.
        H: What is done with the rows.
        dtype: As for `launch_few_rows`.
        b_transposed: Whether the only b is stored as [K, N].
        parts: WHOLE, SIDE_BY_SIDE or HALVES.
        most: Most rows of a that there may be.

    Args:
        gpu: Where to run.
        c: Where c is.
        a: Address of a [M, K].
        b: Where b is.
        product: Sizes, those of several c among them, and what goes with the matrices.

    Raises:
        If the driver refuses.
    """
    var m = Int(product.m)
    var n = Int(product.n)
    var k = Int(product.k)
    ref ctx = gpu.context
    comptime count = count_maps(parts)
    comptime box_rows = GATE_ROWS if parts == HALVES else row_elements[
        dtype
    ]() if b_transposed else FEW_OUTPUTS
    var tiles = ceildiv(n, FEW_OUTPUTS)
    var first_n = n // 2 if parts == HALVES else n
    comptime if parts == SIDE_BY_SIDE:
        tiles = steps_of(product.sizes, FEW_OUTPUTS)
        first_n = Int(product.sizes[0])
    var b_maps = Maps[count](
        operand_map[dtype, b_transposed](
            ctx, b.addresses[0], first_n, k, box_rows, b.pitch
        )
    )
    comptime for i in range(1, count):
        var own_n = n // 2 if parts == HALVES else Int(product.sizes[i])
        if own_n:
            b_maps.set(
                i,
                operand_map[dtype, b_transposed](
                    ctx, b.addresses[i], own_n, k, box_rows, b.pitch
                ),
            )
    comptime kinds = 1 if most <= VERY_FEW_ROWS else len(_FEW)
    comptime for i in range(kinds):
        comptime rows = _FEW[i]
        if m <= rows:
            var clusters = tiles
            comptime if is_persistent(rows, H.gathers):
                comptime blocks = blocks_per_processor(rows)
                clusters = min(tiles, gpu.processors * blocks // FEW_CLUSTER)
            comptime Output = Pointer[
                Scalar[result_type[dtype]()], MutAnyOrigin
            ]
            var kernel = ctx.compile_function[
                few_rows_kernel[dtype, rows, b_transposed, parts, E, H]
            ](
                func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                    UInt32(few_rows_shared_bytes(rows, H.gathers))
                )
            )
            gpu.stream.enqueue_function(
                kernel,
                b_maps,
                operand_map[dtype, False](ctx, a, m, k, rows),
                Output(unsafe_from_address=c.addresses[0]),
                Output(unsafe_from_address=c.addresses[1]),
                Output(unsafe_from_address=c.addresses[2]),
                Int32(c.pitch),
                Int32(tiles),
                product,
                grid_dim=clusters * FEW_CLUSTER,
                block_dim=FEW_THREADS,
                shared_mem_bytes=few_rows_shared_bytes(rows, H.gathers),
                attributes=pdl_attributes(),
            )
            return
