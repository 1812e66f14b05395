"""The product for few rows of x: the weight is streamed once, by all blocks.

The weight is the operand of 64 rows and x the one of few columns, so that no
part of a product is wasted. K is split over the two blocks of a cluster; the
second one hands its sums to the first, which adds them in that order. The row
statistics are gathered on the way, by every cluster for itself: the weight
comes from memory no faster.
"""

from std.math import sqrt
from std.memory import AddressSpace, OpaquePointer
from std.sys import inlined_assembly
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.host.nvidia.tma import TMADescriptor
from max.gpu.memory import external_memory
from max.gpu.primitives import warp

from .arguments import Arguments
from .config import Ring
from .epilogue import (
    BIASED,
    CORRECTED,
    RowFactors,
    shared_pair,
    store_shared_pair,
)
from .gather import RowSums
from .ptx import (
    cluster_arrive,
    cluster_rank,
    cluster_wait,
    fence_barrier_init,
    let_later_grids_start,
    load_tile,
    map_to_rank,
    mbarrier_arrive,
    mbarrier_expect_bytes,
    mbarrier_init,
    mbarrier_wait,
    named_barrier_sync,
    wait_on_earlier_grids,
)
from .wgmma import (
    K_BLOCK,
    ROW_BYTES,
    multiply_first,
    multiply_next,
    operand_descriptor,
    row_elements,
    wait_all,
    wait_previous,
)

comptime FEW_THREADS = 160
"""Threads of a block: a warpgroup that multiplies, a warp that copies."""
comptime FEW_CLUSTER = 2
"""Blocks of a cluster, which share the columns of K."""
comptime FEW_OUTPUTS = 64
"""Rows of the weight, columns of y, that a cluster serves."""
comptime _STAGES = 12
comptime _W_BYTES = FEW_OUTPUTS * ROW_BYTES


def few_rows_shared_bytes(rows: Int) -> Int:
    """Counts the shared memory of a block.

    Args:
        rows: Rows of x that the kernel is made for.

    Returns:
        The bytes.
    """
    return (
        _STAGES * (_W_BYTES + rows * ROW_BYTES)
        + FEW_OUTPUTS * rows * 4
        + 2 * 2 * rows * 4
        + 2 * _STAGES * 8
    )


@always_inline
def _address_of(ref map: TMADescriptor) -> OpaquePointer[ImmUntrackedOrigin]:
    return (
        Pointer(to=map)
        .unsafe_bitcast[NoneType]()
        .as_imm()
        .unsafe_origin_cast[ImmUntrackedOrigin]()
    )


@always_inline
def _store_remote(address: UInt32, value: Float32):
    """Stores into the shared memory of a block of the cluster."""
    inlined_assembly[
        "st.shared::cluster.f32 [$0], $1;",
        NoneType,
        constraints="r,f,~{memory}",
    ](address, value)


@always_inline
def _joined(
    first: SIMD[DType.float32, 2],
    second: SIMD[DType.float32, 2],
    sizes: SIMD[DType.float32, 2],
    eps: Float32,
) -> RowFactors:
    """Turns the means and squared deviations of a row's two parts into its
    statistics."""
    var k = sizes.reduce_add()
    var apart = second[0] - first[0]
    var mean = first[0] + apart * (sizes[1] / k)
    var squares = (
        first[1] + second[1] + apart * apart * (sizes[0] * sizes[1] / k)
    )
    return RowFactors(1 / sqrt(squares / k + eps), mean)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(FEW_THREADS)),
    `nvvm.cluster_dim`=StaticTuple[Int32, 3](Int32(FEW_CLUSTER), 1, 1),
)
@__llvm_arg_metadata(w_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(x_map, `nvvm.grid_constant`)
@__name(t"fused_norm_few_rows_{dtype}_{rows}_{w_transposed}_{mode}_{gathers}")
def few_rows_kernel[
    dtype: DType, rows: Int, w_transposed: Bool, mode: Int, gathers: Bool
](
    w_map: TMADescriptor,
    x_map: TMADescriptor,
    y: Pointer[Scalar[dtype], MutAnyOrigin],
    arguments: Arguments,
):
    """Computes 64 columns of y per cluster.

    Parameters:
        dtype: Type of x, w and y: bfloat16, float16, or float32, multiplied as
            tf32 and then neither transposed nor gathered.
        rows: Most rows of x, a multiple of 8.
        w_transposed: Whether w is stored as [k, n].
        mode: Epilogue, `PLAIN`, `CORRECTED` or `BIASED`.
        gathers: Whether the kernel takes the row statistics itself, and writes
            them; k is a multiple of the k block then.

    Args:
        w_map: Tensor map of w, boxes of 64 by a k block.
        x_map: Tensor map of x [m, k], boxes of rows by a k block.
        y: Receives y [m, n].
        arguments: Sizes, k more than one k block; and the vectors that go with
            the matrices.
    """
    var m = arguments.m
    var n = arguments.n
    comptime x_bytes = rows * ROW_BYTES
    comptime registers = rows // 2
    var base = UInt32(
        Int(
            external_memory[
                UInt8, address_space=AddressSpace.SHARED, alignment=1024
            ]()
        )
    )
    var x_tiles = base + _STAGES * _W_BYTES
    var partial = x_tiles + UInt32(_STAGES * x_bytes)
    var statistics = partial + UInt32(FEW_OUTPUTS * rows * 4)
    var full = statistics + UInt32(2 * 2 * rows * 4)
    var empty = full + _STAGES * 8
    var thread = UInt32(thread_idx.x)
    var warp_in_block = warp.broadcast(thread // 32)
    var rank = cluster_rank()
    var first_output = UInt32(block_idx.x) // FEW_CLUSTER * FEW_OUTPUTS

    if thread == 0:
        for stage in range(UInt32(_STAGES)):
            mbarrier_init(full + stage * 8, 1)
            mbarrier_init(empty + stage * 8, 1)
        fence_barrier_init()
    comptime if mode != CORRECTED or gathers:
        wait_on_earlier_grids()
    let_later_grids_start()
    # Also tells that the neighbour has started, whose memory is written below.
    cluster_arrive()
    cluster_wait()

    comptime k_block = row_elements[dtype]()
    var blocks = UInt32(arguments.k + Int32(k_block - 1)) // UInt32(k_block)
    var half = (blocks + 1) // 2
    var first = rank * half
    var last = min(blocks, first + half)

    if warp_in_block == 4:
        if thread == 128:
            var at = Ring(0, 1)
            for block in range(first, last):
                var barrier = full + at.slot * 8
                mbarrier_wait(empty + at.slot * 8, at.parity)
                mbarrier_expect_bytes(barrier, Int32(_W_BYTES + x_bytes))
                var k = Int32(block) * Int32(k_block)
                var output = Int32(first_output)
                load_tile(
                    base + at.slot * _W_BYTES,
                    _address_of(w_map),
                    barrier,
                    output if w_transposed else k,
                    k if w_transposed else output,
                )
                load_tile(
                    x_tiles + at.slot * UInt32(x_bytes),
                    _address_of(x_map),
                    barrier,
                    k,
                    0,
                )
                at.advance[_STAGES]()
        cluster_arrive()
        cluster_wait()
        return

    var lane = thread & 31
    var w_descriptor = operand_descriptor[w_transposed](base)
    var x_descriptor = operand_descriptor[False](x_tiles)
    var at = Ring(0, 0)
    mbarrier_wait(full, 0)
    var accumulator = multiply_first[dtype, rows, 1, w_transposed, False](
        w_descriptor, x_descriptor
    )
    var sums = RowSums(0, 0, 0)
    comptime if gathers:
        if thread < UInt32(2 * rows):
            sums.add[dtype, True](x_tiles, thread)
    var previous = UInt32(0)
    at.advance[_STAGES]()
    for _ in range(first + 1, last):
        mbarrier_wait(full + at.slot * 8, at.parity)
        accumulator = multiply_next[dtype, rows, 1, w_transposed, False](
            accumulator,
            w_descriptor + at.slot * (_W_BYTES // 16),
            x_descriptor + at.slot * UInt32(x_bytes // 16),
        )
        wait_previous()
        comptime if gathers:
            # Reads of a slot do not end together, as its products do.
            named_barrier_sync(1, 128)
        if thread == 0:
            mbarrier_arrive(empty + previous * 8)
        comptime if gathers:
            if thread < UInt32(2 * rows):
                sums.add[dtype, False](
                    x_tiles + at.slot * UInt32(x_bytes), thread
                )
        previous = at.slot
        at.advance[_STAGES]()
    accumulator = wait_all[rows // 2](accumulator)

    comptime if gathers:
        if thread < UInt32(2 * rows):
            var own = sums.finish_part(Float32((last - first) * K_BLOCK))
            if thread & 1 == 0:
                var place = (
                    map_to_rank(statistics, 0)
                    + (rank * UInt32(2 * rows) + thread) * 4
                )
                _store_remote(place, own[0])
                _store_remote(place + 4, own[1])
    if rank == 1:
        var remote = map_to_rank(partial, 0) + thread * 4
        comptime for i in range(registers):
            _store_remote(
                remote + UInt32(i * 128 * 4), rebind[Float32](accumulator[i])
            )
    cluster_arrive()
    cluster_wait()
    comptime if mode == CORRECTED and not gathers:
        wait_on_earlier_grids()
    if rank == 1:
        return

    # All at once, and so of rows that there may not be: a lane's columns of the
    # product are the rows group * 8 + lane % 4 * 2 + side of x.
    var factors = StaticTuple[RowFactors, registers // 2](RowFactors(1, 0))
    comptime if gathers:
        if thread < UInt32(rows):
            var sizes = SIMD[DType.float32, 2](
                Float32(half * K_BLOCK), Float32((blocks - half) * K_BLOCK)
            )
            var own = _joined(
                shared_pair(statistics + thread * 8),
                shared_pair(statistics + (UInt32(rows) + thread) * 8),
                sizes,
                arguments.eps,
            )
            store_shared_pair(statistics + thread * 8, {own.mean, own.rstd})
            if first_output == 0 and thread < UInt32(m):
                var row = Int(thread)
                arguments.mean.unsafe_offset(row).unsafe_store(own.mean)
                arguments.rstd.unsafe_offset(row).unsafe_store(own.rstd)
        named_barrier_sync(1, 128)
    comptime if mode == CORRECTED:
        comptime for i in range(registers // 2):
            comptime if gathers:
                comptime row = (i // 2) * 8 + i % 2
                var pair = shared_pair(
                    statistics + UInt32(row * 8) + (lane & 3) * 16
                )
                factors[i] = RowFactors(pair[1], pair[0])
                continue
            var row = min(
                Int32((i // 2) * 8 + i % 2) + Int32(lane & 3) * 2, m - 1
            )
            factors[i] = RowFactors(
                arguments.rstd.unsafe_offset(Int(row)).unsafe_load(),
                arguments.mean.unsafe_offset(Int(row)).unsafe_load(),
            )
    # Row lane / 4 of the weight's 16 in this warp, and the one 8 below.
    comptime for below in range(2):
        var output = (
            first_output + warp_in_block * 16 + (lane >> 2) + UInt32(8 * below)
        )
        if output < UInt32(n):
            var its_s = Float32(0)
            var its_c = Float32(0)
            comptime if mode == BIASED:
                its_c = (
                    Pointer[Scalar[dtype], ImmUntrackedOrigin](
                        unsafe_from_address=Int(arguments.bias)
                    )
                    .unsafe_offset(Int(output))
                    .unsafe_load()
                    .cast[DType.float32]()
                )
            comptime if mode == CORRECTED:
                its_s = arguments.s.unsafe_offset(Int(output)).unsafe_load()
                its_c = arguments.c.unsafe_offset(Int(output)).unsafe_load()
            comptime for group in range(rows // 8):
                comptime for side in range(2):
                    comptime i = group * 4 + below * 2 + side
                    var row = UInt32(group * 8 + side) + (lane & 3) * 2
                    if row < UInt32(m):
                        var other = inlined_assembly[
                            "ld.shared.f32 $0, [$1];",
                            Float32,
                            constraints="=f,r,~{memory}",
                        ](partial + thread * 4 + UInt32(i * 128 * 4))
                        var sum = rebind[Float32](accumulator[i]) + other
                        comptime if mode == BIASED:
                            sum += its_c
                        comptime if mode == CORRECTED:
                            comptime at = group * 2 + side
                            sum = (
                                factors[at].rstd
                                * (sum - factors[at].mean * its_s)
                                + its_c
                            )
                        y.unsafe_offset(
                            Int(row) * Int(n) + Int(output)
                        ).unsafe_store(sum.cast[dtype]())
