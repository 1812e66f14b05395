"""Launches of both kernels."""

from max.gpu.host import FuncAttribute
from max.gpu.host.launch_attribute import (
    LaunchAttribute,
    LaunchAttributeID,
    LaunchAttributeValue,
)
from std.math import ceildiv
from std.sys import size_of
from std.utils import StaticTuple

from ...device import Gpu
from ...grids import beside_earlier
from ..epilogue import Epilogue
from ..row_hook import NoHook, RowHook
from .config import THREADS, TILE_ROWS, Config
from .eight_bits import is_eight_bits, result_type
from .few_rows import (
    FEW_CLUSTER,
    FEW_OUTPUTS,
    FEW_THREADS,
    GATE_ROWS,
    blocks_of_processor,
    count_maps,
    few_rows_kernel,
    few_rows_shared_bytes,
    walks,
)
from .kernel import matrix_kernel
from .parts import HALVES, MOST_PARTS, ONE_SUM, SIDE_BY_SIDE, WHOLE, steps_of
from .product import Product
from .store import box_of
from .tensor_map import Maps, operand_map, tensor_map
from .wgmma import row_elements
from .tiling import (
    ANY_COLUMNS,
    COMMON_SHAPES,
    FEW_ROWS,
    MOST_FEW_ROWS,
    NARROWEST_GATE,
    ROW_ALIGNMENT,
    SHAPES,
    VERY_FEW_ROWS,
    Tiling,
    count_tiles,
)

comptime BAND = 8
"""Cluster tiles in a band of the walk: 2048 rows of a, about as much as the
columns of b that the other clusters of a wave then need."""

# Most rows of each kernel for few rows.
comptime _FEW = [VERY_FEW_ROWS, MOST_FEW_ROWS]


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


@fieldwise_init
struct Matrices(TrivialRegisterPassable):
    """Matrices that stand for one operand, one after another."""

    var addresses: StaticTuple[Int, MOST_PARTS]
    """Their addresses."""
    var pitch: Int
    """Elements from one row of each to its next; 0 for as many as a row has."""

    def __init__(out self, only: Int):
        """Has one.

        Args:
            only: Its address.
        """
        self.addresses = StaticTuple[Int, MOST_PARTS](fill=only)
        self.pitch = 0


def launch_parts[
    E: Epilogue, H: RowHook, //, dtype: DType, config: Config
](gpu: Gpu, c: Matrices, a: Matrices, b: Matrices, whole: Product[E, H]) raises:
    """Queues c_i = epilogue(a @ b_i^T), or c = epilogue(sum over i of a_i @ b_i^T), or a gate of two b.

    Parameters:
        E: What becomes of the sums.
        H: What is done with the rows.
        dtype: As for `launch_matrix`.
        config: Compile-time choices; they say which of the two is computed.

    Args:
        gpu: Where to run.
        c: Where c is.
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
    comptime a_rows = row_elements[
        dtype
    ]() if config.a_transposed else TILE_ROWS
    comptime b_rows = config.b_box_rows()
    comptime c_dtype = result_type[dtype]()
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
    var c_maps = Maps[config.c_count()](a_map)
    comptime for i in range(config.b_count()):
        comptime sides = config.parts == SIDE_BY_SIDE
        var own_n, own_k = n, k
        comptime if sides:
            own_n = Int(product.sizes[i])
        elif config.parts == HALVES:
            own_n = n // 2 if i < 2 else 0
        elif config.parts == ONE_SUM:
            own_k = Int(product.sizes[i])
        if own_n and own_k:
            b_maps.put(
                i,
                operand_map[dtype, config.b_transposed](
                    ctx, b.addresses[i], own_n, own_k, b_rows, b.pitch
                ),
            )
            comptime if config.parts == ONE_SUM and i > 0:
                a_maps.put(
                    i,
                    operand_map[dtype, config.a_transposed](
                        ctx, a.addresses[i], m, own_k, a_rows, a.pitch
                    ),
                )
            comptime if (
                not config.adds
                and not config.any_columns
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
                c_maps.put(i, c_map)
    # Each part begins with a tile, or with a k block, of its own.
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
    elif E.adds:
        more_map = tensor_map[c_dtype](
            ctx, product.epilogue.addend(), m, n, TILE_ROWS
        )
    comptime if config.any_columns:
        product.c = Int64(c.addresses[0])
    var clusters = count_tiles(config, m, n)
    comptime if not config.split:
        clusters = min(clusters, gpu.processors // config.cluster)
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
        attributes=_all_at_one_time() if H.passes_on else beside_earlier(),
    )


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
            b_maps.put(
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
            comptime if walks(rows, H.gathers):
                comptime beside = blocks_of_processor(rows)
                clusters = min(tiles, gpu.processors * beside // FEW_CLUSTER)
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
                attributes=beside_earlier(),
            )
            return


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
        If the driver refuses.
    """
    var product = Product(m, n, k, epilogue, NoHook())
    product.b_is_older = Int32(b_is_older)
    product.a_is_new = Int32(a_is_new)
    if tiling.columns == FEW_ROWS:
        launch_few_rows[dtype, b_transposed](gpu, c, a, b, product)
        return
    product.band = BAND
    comptime if not (
        E.activates or E.adds or b_transposed or is_eight_bits[dtype]()
    ):
        if n * size_of[dtype]() % ROW_ALIGNMENT != 0:
            launch_matrix[dtype, ANY_COLUMNS](gpu, c, a, b, product)
            return
    comptime for i in range(len(SHAPES)):
        comptime shape = SHAPES[i]
        comptime config = Config.of(
            shape.columns,
            b_transposed=b_transposed,
            takes_turns=shape.takes_turns,
        )
        # A box of a gate's c takes twice its columns.
        comptime if not (E.is_gate and config.columns < NARROWEST_GATE) and (
            i < COMMON_SHAPES or not (E.activates or dtype == DType.float32)
        ):
            if (
                tiling.columns == config.columns
                and tiling.takes_turns == config.takes_turns
            ):
                launch_matrix[dtype, config](gpu, c, a, b, product)
