"""Step 4: one warpgroup copies, two multiply, with a ring of four slots between them.

Copies run up to four k blocks ahead of the products. A slot has two barriers:
`full` completes when its bytes have arrived, `empty` when both warpgroups have
read it.
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
from op.gemm.sm90.config import CONSUMERS, THREADS, Config
from op.gemm.sm90.ring import RingPlace
from op.gemm.sm90.shared_layout import Shared
from op.gemm.sm90.barriers import (
    fence_barrier_init,
    mbarrier_arrive,
    mbarrier_expect_bytes,
    mbarrier_init,
    mbarrier_wait,
)
from op.gemm.sm90.registers import registers_lower, registers_raise
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

comptime CONFIG = Config.of(COLUMNS)
"""The library's layout of shared memory: four slots, then their barriers."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(1),
)
@__llvm_arg_metadata(a_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(b_map, `nvvm.grid_constant`)
def ring_kernel(
    a_map: Map,
    b_map: Map,
    c: Int64,
    m: Int32,
    n: Int32,
    k: Int32,
):
    """Computes a tile of 128 by 256 for each block.

    Grid: tile columns on x, tile rows on y. Block: 384, of which thread 0 copies
    and threads 128 to 383 multiply.

    Args:
        a_map: Tensor map of a [M, K], boxes of 128 by 64.
        b_map: Tensor map of b [N, K], boxes of 256 by 64.
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
    var row = Int(block_idx.y) * ROWS
    var column = Int(block_idx.x) * COLUMNS
    var blocks = ceildiv(Int(k), K_BLOCK)
    if thread == 0:
        for slot in range(UInt32(CONFIG.stages)):
            mbarrier_init(shared.full(slot), 1)
            mbarrier_init(shared.empty(slot), CONSUMERS)
        fence_barrier_init()
    barrier()

    if warp_in_block < 4:
        registers_lower[24]()
        if thread == 0:
            # A fresh barrier's round before its first counts as complete.
            var at = RingPlace(0, 1)
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
                    Int32(row),
                )
                load_tile(
                    shared.b_tile(at.slot),
                    address_of(b_map),
                    full,
                    first,
                    Int32(column),
                )
                at.advance[CONFIG.stages]()
    else:
        registers_raise[240]()
        var own_rows = UInt32((warp_in_block // 4 - 1) * SLICE_BYTES)
        var at = RingPlace(0, 0)
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
            if block > 0 and thread % 128 == 0:
                mbarrier_arrive(shared.empty(previous))
            previous = at.slot
            at.advance[CONFIG.stages]()
        wgmma_wait_group_sync[0]()
        store(
            sums,
            Int(c),
            Int(m),
            Int(n),
            row + (warp_in_block - 4) * 16,
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
    var kernel = gpu.context.compile_function[ring_kernel](
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
        grid_dim=(ceildiv(task.n, COLUMNS), ceildiv(task.m, ROWS)),
        block_dim=THREADS,
        shared_mem_bytes=CONFIG.shared_bytes(),
    )


@export
def PyInit_step4_ring() abi("C") -> PythonObject:
    """Makes the module.

    Returns:
        The module.
    """
    return new_module["step4_ring", launch]()
