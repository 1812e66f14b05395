"""Step 3: TMA copies the tiles, tensor cores multiply them, one after the other.

One thread asks for a k block of a and b, everybody waits for it, two warpgroups
multiply it, and everybody waits for them before the next one is asked for.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
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
from op.gemm.sm90.barriers import (
    fence_barrier_init,
    mbarrier_expect_bytes,
    mbarrier_init,
    mbarrier_wait,
)
from op.gemm.sm90.tensor_map import Map
from op.gemm.sm90.tma import address_of, load_tile
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

comptime THREADS = 256
"""Threads of a block: two warpgroups."""
comptime SHARED_BYTES = A_BYTES + B_BYTES + 8
"""A k block of both matrices, and a barrier."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS))
)
@__llvm_arg_metadata(a_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(b_map, `nvvm.grid_constant`)
def tensor_core_kernel(
    a_map: Map,
    b_map: Map,
    c: Int64,
    m: Int32,
    n: Int32,
    k: Int32,
):
    """Computes a tile of 128 by 256 for each block.

    Grid: tile columns on x, tile rows on y. Block: 256. Shared memory: a k block
    of a, one of b, a barrier that completes when both have arrived.

    Args:
        a_map: Tensor map of a [M, K], boxes of 128 by 64.
        b_map: Tensor map of b [N, K], boxes of 256 by 64.
        c: Address of c [M, N].
        m: Rows of a.
        n: Rows of b, a multiple of 8.
        k: Columns of both, a multiple of 8.
    """
    var a_tile = UInt32(
        Int(
            external_memory[
                UInt8, address_space=AddressSpace.SHARED, alignment=1024
            ]()
        )
    )
    var b_tile = a_tile + A_BYTES
    var full = b_tile + B_BYTES
    var thread = Int(thread_idx.x)
    var warp_in_block = Int(warp.broadcast(UInt32(thread // 32)))
    var row = Int(block_idx.y) * ROWS
    var column = Int(block_idx.x) * COLUMNS
    if thread == 0:
        mbarrier_init(full, 1)
        fence_barrier_init()
    barrier()

    var own_rows = a_tile + UInt32(warp_in_block // 4 * SLICE_BYTES)
    var sums = Sums(0)
    for block in range(ceildiv(Int(k), K_BLOCK)):
        if thread == 0:
            mbarrier_expect_bytes(full, A_BYTES + B_BYTES)
            var at = Int32(block * K_BLOCK)
            load_tile(a_tile, address_of(a_map), full, at, Int32(row))
            load_tile(b_tile, address_of(b_map), full, at, Int32(column))
        mbarrier_wait(full, UInt32(block & 1))
        sums = multiply(sums, own_rows, b_tile)
        wgmma_wait_group_sync[0]()
        # Both warpgroups have read the tiles, which the next ones replace.
        barrier()
    store(
        sums,
        Int(c),
        Int(m),
        Int(n),
        row + warp_in_block * 16,
        column,
        thread % 32,
    )


def launch(gpu: Gpu, task: Task) raises:
    """Queues the kernel.

    Args:
        gpu: Where to run.
        task: What to multiply.

    Raises:
        If the driver refuses.
    """
    var maps = operand_maps[COLUMNS](gpu, task)
    var kernel = gpu.context.compile_function[tensor_core_kernel](
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(SHARED_BYTES)
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
        grid_dim=(ceildiv(task.n, COLUMNS), ceildiv(task.m, ROWS)),
        block_dim=THREADS,
        shared_mem_bytes=SHARED_BYTES,
    )


@export
def PyInit_step3_tensor_cores() abi("C") -> PythonObject:
    """Makes the module.

    Returns:
        The module.
    """
    return new_module["step3_tensor_cores", launch]()
