"""Launches of the matrix kernel."""

from max.gpu.host import FuncAttribute
from max.gpu.host.launch_attribute import (
    LaunchAttribute,
    LaunchAttributeID,
    LaunchAttributeValue,
)

from ...device import Gpu
from ...pdl import pdl_attributes
from ..epilogue import Epilogue
from ..row_hook import RowHook
from .boxes import box_of, stored_type
from .config import THREADS, TILE_ROWS, Config
from .inside import (
    box_columns_of_b,
    box_rows,
    is_worth_it,
    stays_inside,
)
from .kernel import matrix_kernel
from .parts import (
    HALVES,
    IN_TURN,
    ONE_SUM,
    SIDE_BY_SIDE,
    STACKED,
    Matrices,
    steps_of,
)
from .product import Product
from .tensor_map import Maps, maps_of_c, operand_map, tensor_map
from .tiling import count_tiles
from .wgmma import row_elements

comptime BAND = 8
"""Cluster tiles in a band of the walk: 2048 rows of a, about as much as the
columns of b that the other clusters of a wave then need."""


def _all_at_one_time() -> List[LaunchAttribute]:
    """Starts a grid only when all of its blocks can run."""
    return [
        LaunchAttribute(
            LaunchAttributeID.COOPERATIVE, LaunchAttributeValue(True)
        )
    ]


def launch_matrix[
    E: Epilogue, H: RowHook, //, dtype: DType, config: Config
](gpu: Gpu, c: Int, a: Int, b: Int, product: Product[E, H]) raises:
    """Queues c = epilogue(a @ b^T).

    Parameters:
        E: What becomes of the sums.
        H: What is done with the rows.
        dtype: Type of a and b, bfloat16, float16 or float32 as tf32; and of c,
            unless that is added to.
        config: Compile-time choices; they say which operands are transposed.

    Args:
        gpu: Where to run.
        c: Address of c [M, N], for a gate [M, N / 2]; not used where c is added to.
        a: Address of a [M, K] or [K, M].
        b: Address of b [N, K] or [K, N].
        product: Sizes, and what goes with the matrices.

    Raises:
        If the driver refuses.
    """
    launch_parts[dtype, config](
        gpu, Matrices(c), Matrices(a), Matrices(b), product
    )


def launch_parts[
    E: Epilogue, H: RowHook, //, dtype: DType, config: Config
](gpu: Gpu, c: Matrices, a: Matrices, b: Matrices, whole: Product[E, H]) raises:
    """Queues c_i = epilogue(a @ b_i^T), or c = epilogue(sum over i of a_i @ b_i^T), or a gate of two b, or one c after
    another = epilogue(a @ b^T), whose rows are those of one a, or each of an a with K first.

    Parameters:
        E: What becomes of the sums.
        H: What is done with the rows.
        dtype: As for `launch_matrix`.
        config: Compile-time choices; they say which of the two is computed.

    Args:
        gpu: Where to run.
        c: Where c is; of a gate's gradients, the second is that of what it multiplies.
        a: Where a is.
        b: Where b is.
        whole: Sizes, those of the parts among them, and what goes with the matrices.

    Raises:
        If the driver refuses.
    """
    var product = whole
    var m = Int(product.m)
    var n = Int(product.n)
    var k = Int(product.k)
    ref ctx = gpu.context
    var a_rows = box_rows[E, H](config, m)
    comptime if config.a_transposed:
        a_rows = row_elements[dtype]()
    var b_rows = box_columns_of_b[E, H](config, n)
    comptime if config.b_transposed:
        b_rows = config.b_box_rows()
    comptime c_dtype = stored_type[E, dtype]()
    comptime box = box_of[E, c_dtype](config)
    var a_map = operand_map[dtype, config.a_transposed](
        ctx,
        a.addresses[0],
        m,
        Int(product.sizes[0]) if config.parts == ONE_SUM else k,
        a_rows,
        a.pitch,
    )
    var a_maps = Maps[config.a_count()](a_map)
    var b_maps = Maps[config.b_count()](a_map)
    var c_map = a_map
    var c_maps = Maps[maps_of_c[E](config)](a_map)
    comptime for i in range(config.b_count()):
        comptime sides = config.parts == SIDE_BY_SIDE
        var own_n, own_k = n, k
        comptime if sides:
            own_n = Int(product.sizes[i])
        elif config.parts == HALVES:
            own_n = n // 2 if i < 2 else 0
        elif config.parts == IN_TURN:
            own_n = n if i < 2 else 0
        elif config.parts == ONE_SUM:
            own_k = Int(product.sizes[i])
        if own_n and own_k:
            b_maps.set(
                i,
                operand_map[dtype, config.b_transposed](
                    ctx, b.addresses[i], own_n, own_k, b_rows, b.pitch
                ),
            )
            comptime if config.parts == ONE_SUM and i > 0:
                a_maps.set(
                    i,
                    operand_map[dtype, config.a_transposed](
                        ctx, a.addresses[i], m, own_k, a_rows, a.pitch
                    ),
                )
            comptime if (
                not config.adds
                and not config.any_columns
                and config.parts != STACKED
                and i < config.c_count()
            ):
                c_map = tensor_map[c_dtype](
                    ctx,
                    c.addresses[i],
                    m,
                    n // 2 if E.is_gate else own_n,
                    16,
                    c.pitch,
                    box,
                )
                c_maps.set(i, c_map)
    comptime if config.parts == STACKED:
        comptime for i in range(config.c_count()):
            var own_m = Int(product.sizes[i])
            comptime if config.a_transposed:
                if own_m:
                    a_maps.set(
                        i,
                        operand_map[dtype, True](
                            ctx, a.addresses[i], own_m, k, a_rows, a.pitch
                        ),
                    )
            if own_m:
                c_maps.set(
                    i,
                    tensor_map[c_dtype](
                        ctx, c.addresses[i], own_m, n, 16, c.pitch, box
                    ),
                )
        # Rows of one a are what they are.
        comptime if config.a_transposed:
            comptime step = config.stacked_rows()
            m = steps_of(product.sizes, step) * step
            product.m = Int32(m)
    # Each part begins with a new tile, or with a new k block.
    comptime if config.parts == SIDE_BY_SIDE:
        n = steps_of(product.sizes, config.columns) * config.columns
        product.n = Int32(n)
    elif config.parts == ONE_SUM:
        comptime block = row_elements[dtype]()
        product.k = Int32(steps_of(product.sizes, block) * block)
    var more_map = c_map
    comptime if E.activates:
        if product.epilogue.h() != 0:
            more_map = tensor_map[c_dtype](
                ctx, product.epilogue.h(), m, n, 16, box_columns=box
            )
    elif E.gradients > 0:
        more_map = tensor_map[c_dtype](
            ctx,
            product.epilogue.h(),
            m,
            n * E.gradients,
            16,
            box_columns=box,
        )
        if product.epilogue.a() != 0:
            c_maps.set(
                1,
                tensor_map[c_dtype](
                    ctx, product.epilogue.a(), m, n, 16, box_columns=box
                ),
            )
        comptime if E.gradients == 2:
            c_maps.set(
                2,
                tensor_map[c_dtype](
                    ctx, c.addresses[1], m, n, 16, c.pitch, box
                ),
            )
    elif E.adds or E.adds_last:
        comptime if config.loads_h:
            more_map = tensor_map[c_dtype](
                ctx, product.epilogue.addend(), m, n, 16, box_columns=box
            )
        else:
            more_map = tensor_map[c_dtype](
                ctx, product.epilogue.addend(), m, n, TILE_ROWS
            )
    comptime if config.any_columns:
        product.c = Int64(c.addresses[0])
    var clusters = count_tiles(config, m, n)
    var at_once = gpu.processors // config.cluster
    comptime if stays_inside[E, H](config):
        if is_worth_it(clusters, at_once, k):
            product.last_row = Int32(max(m - TILE_ROWS, 0))
            product.last_column = Int32(max(n - config.columns, 0))
    comptime if not config.split:
        clusters = min(clusters, at_once)
    var kernel = ctx.compile_function[matrix_kernel[dtype, config, E, H]](
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(config.shared_bytes())
        )
    )
    gpu.stream.enqueue_function(
        kernel,
        a_maps,
        b_maps,
        c_maps,
        more_map,
        product,
        grid_dim=clusters * config.cluster,
        block_dim=THREADS,
        shared_mem_bytes=config.shared_bytes(),
        attributes=_all_at_one_time() if H.passes_on else pdl_attributes(),
    )
