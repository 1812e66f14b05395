"""The persistent, warp-specialized matrix kernel: c = epilogue(a @ b^T).

One thread copies tiles of a and b into a ring of shared-memory slots; two
consumer warpgroups multiply them. Consumers share each tile, or alternate
(ping-pong): each has its own tiles, and one stores while the other multiplies.
The ring continues across output tiles, so the copies for the next tile start
during the epilogue of the last one. Where a hook processes finished rows, the
other warps do that.
"""

from std.memory import AddressSpace
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, grid_dim
from max.gpu import thread_idx
from max.gpu.memory import external_memory
from max.gpu.primitives import warp

from ...call import SCALE_BLOCK
from ...pdl import pdl_trigger, pdl_wait
from ..epilogue import Epilogue
from ..row_hook import RowHook
from .barriers import (
    cluster_rank,
    fence_barrier_init,
    mbarrier_init,
    meet_cluster,
    named_barrier_sync,
    warp_sync,
)
from .config import THREADS, Config
from .consumer import consume
from .parts import IN_TURN, STACKED, WHOLE
from .producer import produce
from .product import Product
from .registers import registers_lower, registers_raise
from .shared_layout import Shared
from .tensor_map import Map, Maps, maps_of_c
from .tiles import Tiles
from .tma import address_of, prefetch_tensor_map
from .wgmma import row_elements


@always_inline
def _ceildiv(a: Int32, b: Int) -> UInt32:
    return (UInt32(a) + UInt32(b - 1)) // UInt32(b)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(1),
    `nvvm.cluster_dim`=StaticTuple[Int32, 3](Int32(config.cluster), 1, 1),
)
@__llvm_arg_metadata(a_maps, `nvvm.grid_constant`)
@__llvm_arg_metadata(b_maps, `nvvm.grid_constant`)
@__llvm_arg_metadata(c_maps, `nvvm.grid_constant`)
@__llvm_arg_metadata(more_map, `nvvm.grid_constant`)
@__name(t"fused_norm_matrix_{dtype}_{config.name()}_{E.name}{H.name}")
def matrix_kernel[
    dtype: DType, config: Config, E: Epilogue, H: RowHook
](
    a_maps: Maps[config.a_count()],
    b_maps: Maps[config.b_count()],
    c_maps: Maps[maps_of_c[E](config)],
    more_map: Map,
    product: Product[E, H],
):
    """Computes tiles of c until there are none left.

    Grid: at most a block for each SM, in clusters of config.cluster; with
    config.split, a cluster for each tile. Block: THREADS threads, of which the first
    warpgroup copies and the others multiply.

    Parameters:
        dtype: Type of a, b and c: bfloat16, float16, or float32, multiplied as
            tf32; or that of a, of 8 bits. The last two are neither transposed nor gathered.
        config: Compile-time choices.
        E: What becomes of the sums.
        H: What is done with the rows.

    Args:
        a_maps: Tensor map of a [M, K], boxes of a tile's rows by a k block; of a
            transposed a [K, M], boxes of 64 by 64. Here and in the next two, that
            of each part where several matrices stand for one.
        b_maps: Tensor map of b [N, K], boxes of config.columns / sharers by a
            k block; of a transposed b [K, N], boxes of config.b_box_rows() by 64.
        c_maps: Tensor map of c [M, N], boxes of 16 rows of up to 128 bytes; not read
            where c is added to, or has any number of columns. With gradients of h, then those of a and of what a gate multiplies.
        more_map: Tensor map of h, in c's boxes, which an activation stores as well, or
            gradients load; or of what is added to c, in the same where warps load it,
            otherwise in boxes of a tile's rows.
        product: What goes with the matrices.
    """
    comptime assert not config.sums_rows or config.a_transposed
    comptime assert not config.ping_pong or not (
        config.a_transposed or config.split or config.adds or H.passes_on
    )
    # A transposed a, and vectors, count tiles differently.
    comptime assert config.parts in (WHOLE, STACKED) or not (
        config.a_transposed or config.split
    )
    comptime assert config.parts == WHOLE or not config.adds
    # Only what is stored finds its part.
    comptime assert config.parts != STACKED or not (
        config.ping_pong or E.activates or E.gradients > 0
    )
    # Threads store sums, and vectors, of one matrix alone.
    comptime assert not config.any_columns or not (
        config.split
        or config.adds
        or config.parts != WHOLE
        or E.activates
        or E.adds
        or E.adds_last
    )
    # What is added last waits in the ring, after the k blocks of its tile, for consumers that share it; warps of
    # alternating ones load it.
    comptime assert not E.adds_last or not (
        config.ping_pong != config.loads_h
        or config.split
        or config.adds
        or config.parts != WHOLE
        or E.adds
        or E.activates
        or E.quantizes
        or E.sums_rows
        or E.weighs
        or H.gathers
        or H.passes_on
    )
    # Twice the sums of alternating consumers do not fit their registers.
    comptime assert not E.scales_blocks or not (
        config.ping_pong
        or config.split
        or config.adds
        or config.a_transposed
        or config.parts not in (WHOLE, IN_TURN)
        or E.adds
        or E.has_row_terms
        or H.gathers
    )
    # A scale is that of a row of a tile.
    comptime assert not E.finds_scales or (
        E.quantizes and E.scales_blocks and config.columns == SCALE_BLOCK
    )
    comptime assert config.parts != IN_TURN or E.quantizes
    # Consumers that share a tile would multiply nothing while they wait for h.
    comptime assert config.loads_h == (
        E.gradients > 0 or (E.adds_last and config.ping_pong)
    )
    comptime assert not config.loads_h or (
        config.ping_pong
        and config.parts == WHOLE
        and (E.gradients == 0 or E.vectors <= 1)
        and not (E.activates or E.adds or E.scales_blocks or config.any_columns)
    )
    comptime cluster = config.cluster
    comptime sharers = config.sharers()
    var shared = Shared[config](
        UInt32(
            Int(
                external_memory[
                    UInt8, address_space=AddressSpace.SHARED, alignment=1024
                ]()
            )
        )
    )
    var thread = UInt32(thread_idx.x)
    var warp_in_block = warp.broadcast(thread // 32)
    var rank = UInt32(0)
    comptime if cluster > 1:
        rank = cluster_rank()

    if thread == 0:
        for stage in range(UInt32(config.stages)):
            mbarrier_init(shared.full(stage), 1)
            mbarrier_init(
                shared.empty(stage),
                Int32(config.consumers_of_tile() * sharers),
            )
        comptime for tile in range(config.tiles_at_once()):
            mbarrier_init(shared.vectors_full(UInt32(tile)), 1)
            mbarrier_init(
                shared.vectors_empty(UInt32(tile)),
                Int32(128 * config.consumers_of_tile()),
            )
        fence_barrier_init()
        prefetch_tensor_map(address_of(a_maps))
        prefetch_tensor_map(address_of(b_maps))
        comptime if not config.adds and not config.any_columns:
            prefetch_tensor_map(address_of(c_maps))
        for box in range(UInt32(config.h_boxes())):
            mbarrier_init(shared.h_full(0) + box * 8, 1)
        comptime if E.activates or E.adds_last or config.loads_h:
            prefetch_tensor_map(address_of(more_map))
    # An earlier grid may still be writing the operands. But a kernel that makes
    # the terms of rows has itself waited for all earlier ones, and so has the
    # grid that this one follows.
    comptime if not E.has_row_terms or H.gathers:
        if not (config.split and product.follows != 0):
            pdl_wait()
    elif E.has_row_terms:
        if product.a_is_new != 0:
            pdl_wait()
    pdl_trigger()
    # No block may use its neighbor's barriers before they are initialized.
    comptime if cluster > 1:
        meet_cluster()
    else:
        named_barrier_sync(0, THREADS)

    var tiles = Tiles.of_cluster(
        _ceildiv(product.m, config.cluster_rows()),
        _ceildiv(product.n, config.columns),
        UInt32(product.band),
        UInt32(block_idx.x) // UInt32(cluster),
        UInt32(grid_dim.x) // UInt32(cluster),
    )
    var first_block = UInt32(0)
    var blocks = _ceildiv(product.k, row_elements[dtype]())
    var rank_of_sharers = rank
    comptime if config.split:
        rank_of_sharers = 0
        first_block = rank * blocks // UInt32(cluster)
        blocks = (rank + 1) * blocks // UInt32(cluster) - first_block

    if warp_in_block < 4:
        # Where the other warps have work as well, registers stay as they are.
        comptime if not H.passes_on:
            registers_lower[24]()
        if thread == 0:
            produce[dtype, config](
                shared,
                tiles,
                rank_of_sharers,
                first_block,
                blocks,
                address_of(a_maps),
                address_of(b_maps),
                address_of(more_map),
                product,
            )
        # The consumers meet like this before and after they exchange sums.
        comptime if config.split:
            meet_cluster()
            meet_cluster()
    else:
        comptime if not H.passes_on:
            registers_raise[240]()
        consume[dtype, config](
            shared,
            tiles,
            rank,
            blocks,
            (warp_in_block >> 2) - 1,
            warp_in_block & 3,
            thread & 127,
            address_of(c_maps),
            address_of(more_map),
            product,
        )

    comptime if H.passes_on:
        warp_sync()
        product.hook.take_on[dtype](thread & 31)

    # Blocks leave together: a neighbor may still copy into this one's slots
    # or arrive at its barriers.
    comptime if sharers > 1:
        meet_cluster()
