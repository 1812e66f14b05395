"""The persistent matrix kernel: y = epilogue(x @ w^T).

One thread copies tiles of x and w into a ring of shared-memory slots; two
warpgroups multiply them. The ring runs on across output tiles, so the copies
for the next tile start while the last one is being finished. Where rows of y
are passed on, the other warps do that.
"""

from std.memory import AddressSpace, OpaquePointer
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, grid_dim
from max.gpu import thread_idx
from max.gpu.host.nvidia.tma import TMADescriptor
from max.gpu.memory import external_memory
from max.gpu.primitives import warp

from .arguments import Arguments
from .cluster_sum import meet_cluster
from .config import (
    CONSUMERS,
    CONSUMER_WARPS,
    THREADS,
    Config,
    Shared,
)
from .consumer import consume
from .epilogue import CORRECTED, WIDE
from .producer import produce
from .ptx import (
    cluster_rank,
    fence_barrier_init,
    let_later_grids_start,
    mbarrier_init,
    named_barrier_sync,
    prefetch_tensor_map,
    registers_lower,
    registers_raise,
    wait_on_earlier_grids,
    warp_sync,
)
from .take_rows import take_rows
from .tiles import Tiles
from .wgmma import row_elements


@always_inline
def _address_of(ref map: TMADescriptor) -> OpaquePointer[ImmUntrackedOrigin]:
    return (
        Pointer(to=map)
        .unsafe_bitcast[NoneType]()
        .as_imm()
        .unsafe_origin_cast[ImmUntrackedOrigin]()
    )


@always_inline
def _ceildiv(a: Int32, b: Int) -> UInt32:
    return (UInt32(a) + UInt32(b - 1)) // UInt32(b)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(1),
    `nvvm.cluster_dim`=StaticTuple[Int32, 3](Int32(config.cluster), 1, 1),
)
@__llvm_arg_metadata(x_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(w_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(y_map, `nvvm.grid_constant`)
@__name(t"fused_norm_matrix_{dtype}_{config.name()}_{mode}")
def matrix_kernel[
    dtype: DType, config: Config, mode: Int
](
    x_map: TMADescriptor,
    w_map: TMADescriptor,
    y_map: TMADescriptor,
    arguments: Arguments,
):
    """Computes tiles of y until there are none left.

    Parameters:
        dtype: Type of x, w and y: bfloat16, float16, or float32, multiplied as
            tf32 and then neither transposed nor gathered.
        config: Compile-time choices.
        mode: Epilogue, `PLAIN`, `CORRECTED`, `WIDE` or `BIASED`.

    Args:
        x_map: Tensor map of x [m, k], boxes of config.rows() by a k block;
            of a transposed x [k, m], boxes of 64 by 64.
        w_map: Tensor map of w [n, k], boxes of config.columns / sharers by a
            k block; of a transposed w [k, n], boxes of 64 by 64.
        y_map: Tensor map of y [m, n], boxes of 16 rows of 128 bytes; in mode
            `WIDE` not read.
        arguments: What goes with the matrices.
    """
    comptime assert not config.gather or config.slices == 1
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
                Int32(CONSUMERS * sharers),
            )
        mbarrier_init(shared.vectors_full(), 1)
        mbarrier_init(shared.vectors_empty(), CONSUMER_WARPS)
        fence_barrier_init()
        prefetch_tensor_map(_address_of(x_map))
        prefetch_tensor_map(_address_of(w_map))
        comptime if mode != WIDE:
            prefetch_tensor_map(_address_of(y_map))
    # Anyone may have written the operands just now; but the kernel that makes
    # the statistics has itself waited for all earlier ones, and so has the one
    # that this one follows.
    comptime if mode != CORRECTED or config.gather:
        if not (config.split and arguments.follows != 0):
            wait_on_earlier_grids()
    let_later_grids_start()
    # No block may reach for its neighbour's barriers before they are made.
    comptime if cluster > 1:
        meet_cluster()
    else:
        named_barrier_sync(0, THREADS)

    var tiles = Tiles.of_cluster(
        _ceildiv(arguments.m, config.cluster_rows()),
        _ceildiv(arguments.n, config.columns),
        UInt32(arguments.band),
        UInt32(block_idx.x) // UInt32(cluster),
        UInt32(grid_dim.x) // UInt32(cluster),
    )
    var first_block = UInt32(0)
    var blocks = _ceildiv(arguments.k, row_elements[dtype]())
    var rank_of_sharers = rank
    comptime if config.split:
        rank_of_sharers = 0
        first_block = rank * blocks // UInt32(cluster)
        blocks = (rank + 1) * blocks // UInt32(cluster) - first_block

    if warp_in_block < 4:
        # Where those that do not produce have work of their own, registers
        # suffice as they are shared out.
        comptime if not config.passes:
            registers_lower[24]()
        if thread == 0:
            produce[dtype, config, mode](
                shared,
                tiles,
                rank_of_sharers,
                first_block,
                blocks,
                _address_of(x_map),
                _address_of(w_map),
                arguments,
            )
        # The consumers meet like this around what they hand over.
        comptime if config.split:
            meet_cluster()
            meet_cluster()
    else:
        comptime if not config.passes:
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
            arguments,
        )

    comptime if config.passes:
        warp_sync()
        take_rows[dtype](arguments.rows, thread & 31)

    # Blocks leave together: a neighbour may still copy into this one's slots
    # or arrive at its barriers.
    comptime if sharers > 1:
        meet_cluster()
