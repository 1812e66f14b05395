"""Step 5: a block for each SM takes tile after tile, and two blocks share every tile of b.

The ring runs on across tiles, so that the first copies for a tile start while
the last one is stored. Each block of a cluster copies half of b's k block into
both, which halves what the L2 cache serves of b. Tiles are taken in bands of
rows, so that those computed at one time share rows of a and of b.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.compute.mma import wgmma_wait_group_sync
from max.gpu.host import FuncAttribute
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.primitives import warp
from std.math import ceildiv
from std.python import PythonObject
from std.utils import StaticTuple

from op.device import Gpu
from op.gemm.sm90.config import CONSUMERS, THREADS, Config
from op.gemm.sm90.ring import RingPlace
from op.gemm.sm90.shared_layout import Shared
from op.gemm.sm90.barriers import (
    cluster_rank,
    fence_barrier_init,
    map_to_rank,
    mbarrier_arrive_cluster,
    mbarrier_expect_bytes,
    mbarrier_init,
    mbarrier_wait,
    meet_cluster,
)
from op.gemm.sm90.registers import registers_lower, registers_raise
from op.gemm.sm90.tensor_map import Map
from op.gemm.sm90.tma import address_of, load_tile, load_tile_multicast
from op.gemm.sm90.tiles import Tiles
from op.gemm.sm90.wgmma import K_BLOCK, SLICE_BYTES

from entry import Task, new_module
from tile import (
    A_BYTES,
    B_BYTES,
    COLUMNS,
    ROWS,
    Sums,
    multiply,
    operand_maps,
    store,
)

comptime CONFIG = Config.of(COLUMNS)
"""The library's layout of shared memory: four slots, then their barriers."""
comptime CLUSTER = 2
"""Blocks that share a tile of b; each has 128 rows of the cluster's tile."""
comptime B_ROWS = COLUMNS // CLUSTER
"""Rows of b that a block copies into both."""
comptime BAND = 8
"""Rows of cluster tiles in a band of the walk."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(1),
    `nvvm.cluster_dim`=StaticTuple[Int32, 3](Int32(CLUSTER), 1, 1),
)
@__llvm_arg_metadata(a_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(b_map, `nvvm.grid_constant`)
def cluster_kernel(
    a_map: Map,
    b_map: Map,
    c: Int64,
    m: Int32,
    n: Int32,
    k: Int32,
):
    """Computes tiles of 256 by 256 for each cluster until there are none left.

    Grid: at most a block for each SM, in clusters of two. Block: 384, of which
    thread 0 copies and threads 128 to 383 multiply.

    Args:
        a_map: Tensor map of a [M, K], boxes of 128 by 64.
        b_map: Tensor map of b [N, K], boxes of 128 by 64.
        c: Address of c [M, N].
        m: Rows of a.
        n: Rows of b, a multiple of 8.
        k: Columns of both, a multiple of 8.
    """
    var shared = Shared[CONFIG](
        UInt32(
            Int(
                external_memory[
                    UInt8, address_space=AddressSpace.SHARED, alignment=1024
                ]()
            )
        )
    )
    var thread = Int(thread_idx.x)
    var warp_in_block = Int(warp.broadcast(UInt32(thread // 32)))
    var rank = cluster_rank()
    var blocks = ceildiv(Int(k), K_BLOCK)
    var tiles = Tiles.of_cluster(
        UInt32(ceildiv(Int(m), CLUSTER * ROWS)),
        UInt32(ceildiv(Int(n), COLUMNS)),
        BAND,
        UInt32(block_idx.x) // CLUSTER,
        UInt32(grid_dim.x) // CLUSTER,
    )
    if thread == 0:
        for slot in range(UInt32(CONFIG.stages)):
            mbarrier_init(shared.full(slot), 1)
            # The consumers of both blocks read what this block copies.
            mbarrier_init(shared.empty(slot), CONSUMERS * CLUSTER)
        fence_barrier_init()
    # No block may reach for its neighbor's barriers before they are made.
    meet_cluster()

    if warp_in_block < 4:
        registers_lower[24]()
        if thread == 0:
            # A fresh barrier's round before its first counts as complete.
            var at = RingPlace(0, 1)
            var index = tiles.first
            while index < tiles.end:
                var place = tiles.at(index)
                index += tiles.step
                var row = Int32((place[0] * CLUSTER + rank) * ROWS)
                var column = Int32(place[1] * COLUMNS + rank * B_ROWS)
                for block in range(blocks):
                    var full = shared.full(at.slot)
                    mbarrier_wait(shared.empty(at.slot), at.parity)
                    mbarrier_expect_bytes(full, A_BYTES + B_BYTES)
                    var first = Int32(block * K_BLOCK)
                    load_tile(
                        shared.a_tile(at.slot),
                        address_of(a_map),
                        full,
                        first,
                        row,
                    )
                    load_tile_multicast(
                        shared.b_tile(at.slot)
                        + rank * UInt32(B_BYTES // CLUSTER),
                        address_of(b_map),
                        full,
                        first,
                        column,
                        (1 << CLUSTER) - 1,
                    )
                    at.advance[CONFIG.stages]()
    else:
        registers_raise[240]()
        var own_rows = UInt32((warp_in_block // 4 - 1) * SLICE_BYTES)
        # The first threads of a warpgroup tell one block each.
        var its_thread = UInt32(thread % 128)
        var tells = its_thread < CLUSTER
        var empty = map_to_rank(shared.empty(0), its_thread % CLUSTER)
        var at = RingPlace(0, 0)
        var index = tiles.first
        while index < tiles.end:
            var place = tiles.at(index)
            index += tiles.step
            var previous = UInt32(0)
            var sums = Sums(0)
            for block in range(blocks):
                mbarrier_wait(shared.full(at.slot), at.parity)
                sums = multiply(
                    sums,
                    shared.a_tile(at.slot) + own_rows,
                    shared.b_tile(at.slot),
                )
                # One group stays in flight; the one before has read its slot.
                wgmma_wait_group_sync[1]()
                if block > 0 and tells:
                    mbarrier_arrive_cluster(empty + previous * 8)
                previous = at.slot
                at.advance[CONFIG.stages]()
            wgmma_wait_group_sync[0]()
            if tells:
                mbarrier_arrive_cluster(empty + previous * 8)
            store(
                sums,
                Int(c),
                Int(m),
                Int(n),
                Int(place[0] * CLUSTER + rank) * ROWS
                + (warp_in_block - 4) * 16,
                Int(place[1]) * COLUMNS,
                thread % 32,
            )
    # A neighbor may still copy into this block's slots or arrive at its barriers.
    meet_cluster()


def launch(gpu: Gpu, task: Task) raises:
    """Queues the kernel.

    Args:
        gpu: Where to run.
        task: What to multiply.

    Raises:
        If the driver refuses.
    """
    var maps = operand_maps[B_ROWS](gpu, task)
    var tiles = ceildiv(task.m, CLUSTER * ROWS) * ceildiv(task.n, COLUMNS)
    var kernel = gpu.context.compile_function[cluster_kernel](
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(CONFIG.shared_bytes())
        )
    )
    gpu.stream.enqueue_function(
        kernel,
        maps[0],
        maps[1],
        Int64(task.c),
        Int32(task.m),
        Int32(task.n),
        Int32(task.k),
        grid_dim=min(tiles, gpu.processors // CLUSTER) * CLUSTER,
        block_dim=THREADS,
        shared_mem_bytes=CONFIG.shared_bytes(),
    )


@export
def PyInit_step5_clusters() abi("C") -> PythonObject:
    """Makes the module.

    Returns:
        The module.
    """
    return new_module["step5_clusters", launch]()
