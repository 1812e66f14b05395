"""The persistent matrix kernel: y = epilogue(x @ w^T).

One thread copies tiles of x and w into a ring of shared-memory slots; two
warpgroups multiply them. The ring runs on across output tiles, so the copies
for the next tile start while the last one is being finished.
"""

from std.memory import AddressSpace, OpaquePointer
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, grid_dim
from max.gpu import thread_idx
from max.gpu.host.nvidia.tma import TMADescriptor
from max.gpu.memory import external_memory
from max.gpu.primitives import warp

from .config import (
    CONSUMERS,
    CONSUMER_WARPS,
    THREADS,
    Config,
    Shared,
)
from .consumer import consume
from .epilogue import PLAIN
from .producer import produce
from .ptx import (
    cluster_arrive,
    cluster_rank,
    cluster_wait,
    fence_barrier_init,
    let_later_grids_start,
    mbarrier_init,
    named_barrier_sync,
    prefetch_tensor_map,
    registers_lower,
    registers_raise,
    wait_on_earlier_grids,
)
from .tiles import Tiles
from .wgmma import K_BLOCK


@always_inline
def _address_of(ref map: TMADescriptor) -> OpaquePointer[ImmutAnyOrigin]:
    return (
        Pointer(to=map)
        .unsafe_bitcast[NoneType]()
        .as_imm()
        .unsafe_origin_cast[ImmutAnyOrigin]()
    )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(1),
    `nvvm.cluster_dim`=StaticTuple[Int32, 3](Int32(config.cluster), 1, 1),
)
@__llvm_arg_metadata(x_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(w_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(y_map, `nvvm.grid_constant`)
@__name(
    t"fused_norm_matrix_{dtype}_{config.rows()}x{config.columns}_{config.gather}_{mode}"
)
def matrix_kernel[
    dtype: DType, config: Config, mode: Int
](
    x_map: TMADescriptor,
    w_map: TMADescriptor,
    y_map: TMADescriptor,
    mean: Pointer[Float32, MutAnyOrigin],
    rstd: Pointer[Float32, MutAnyOrigin],
    eps: Float32,
    s: Pointer[Float32, ImmutAnyOrigin],
    c: Pointer[Float32, ImmutAnyOrigin],
    m: Int32,
    n: Int32,
    k: Int32,
    band: Int32,
):
    """Computes tiles of y until there are none left.

    Parameters:
        dtype: Type of x, w and y: bfloat16 or float16.
        config: Compile-time choices.
        mode: Epilogue, `PLAIN`, `SCALED` or `CORRECTED`.

    Args:
        x_map: Tensor map of x [m, k], boxes of config.rows() by 64.
        w_map: Tensor map of w [n, k], boxes of config.columns / cluster by 64.
        y_map: Tensor map of y [m, n], boxes of 16 by 64.
        mean: Means of the rows of x [m]; written if gathered, otherwise read
            in mode `CORRECTED`.
        rstd: Reciprocal deviations of the rows [m]; written if gathered,
            otherwise read unless in mode `PLAIN`.
        eps: Added to gathered variances.
        s: Row sums of w [n]; read in mode `CORRECTED`.
        c: Constants added to the columns [n]; not read in mode `PLAIN`.
        m: Rows of x and y.
        n: Columns of y.
        k: Columns of x and w.
        band: Rows of cluster tiles in a band of the walk; 0 to walk in runs.
    """
    comptime gathers = config.gather and mode != PLAIN
    comptime assert not gathers or config.slices == 1
    comptime cluster = config.cluster
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
                Int32(CONSUMERS * cluster),
            )
        mbarrier_init(shared.vectors_full(), 1)
        mbarrier_init(shared.vectors_empty(), CONSUMER_WARPS)
        fence_barrier_init()
        prefetch_tensor_map(_address_of(x_map))
        prefetch_tensor_map(_address_of(w_map))
        prefetch_tensor_map(_address_of(y_map))
    # Anyone may have written the operands just now; but the kernel that makes
    # the statistics has itself waited for all earlier ones.
    comptime if mode == PLAIN or gathers:
        wait_on_earlier_grids()
    let_later_grids_start()
    # No block may reach for its neighbour's barriers before they are made.
    comptime if cluster > 1:
        cluster_arrive()
        cluster_wait()
    else:
        named_barrier_sync(0, THREADS)

    comptime cluster_rows = cluster * config.rows()
    var tiles = Tiles.of_cluster(
        UInt32(m + Int32(cluster_rows - 1)) // UInt32(cluster_rows),
        UInt32(n + Int32(config.columns - 1)) // UInt32(config.columns),
        UInt32(band),
        UInt32(block_idx.x) // UInt32(cluster),
        UInt32(grid_dim.x) // UInt32(cluster),
    )
    var blocks = UInt32(k + Int32(K_BLOCK - 1)) // UInt32(K_BLOCK)

    if warp_in_block < 4:
        registers_lower[24]()
        if thread == 0:
            produce[config, mode](
                shared,
                tiles,
                rank,
                blocks,
                _address_of(x_map),
                _address_of(w_map),
                s,
                c,
                n,
            )
    else:
        registers_raise[240]()
        consume[dtype, config, mode](
            shared,
            tiles,
            rank,
            blocks,
            (warp_in_block >> 2) - 1,
            warp_in_block & 3,
            thread & 127,
            _address_of(y_map),
            mean,
            rstd,
            eps,
            UInt32(m),
            UInt32(k),
        )

    # Blocks leave together: a neighbour may still copy into this one's slots
    # or arrive at its barriers.
    comptime if cluster > 1:
        cluster_arrive()
        cluster_wait()
