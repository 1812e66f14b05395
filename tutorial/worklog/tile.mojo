"""What steps 3 to 5 share: a tile of 128 by 256 that two warpgroups multiply on tensor cores.

The products are those of MAX's `wgmma_async`, an instruction a call.
"""

from max.gpu.compute.mma import (
    WGMMADescriptor,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
)
from std.sys import inlined_assembly, is_defined

from op.device import Gpu
from op.gemm.sm90.tensor_map import Map, tensor_map
from op.gemm.sm90.wgmma import K_BLOCK, ROW_BYTES

from entry import Task

comptime ROWS = 128
"""Rows of a tile, 64 for each of two warpgroups."""
comptime COLUMNS = 256
"""Columns of a tile."""
comptime A_BYTES = ROWS * ROW_BYTES
"""Bytes of a tile's k block of a."""
comptime B_BYTES = COLUMNS * ROW_BYTES
"""Bytes of a tile's k block of b."""
comptime SUMS = COLUMNS // 2
"""Sums of a thread: 64 by 256 over 128 threads."""

comptime ROLLED = is_defined["rolled_store"]()
"""Whether sums are stored by an ordinary loop: what step 6 shows the cost of."""

comptime Sums = SIMD[DType.float32, SUMS]
"""The sums of a thread."""


def operand_maps[b_box: Int](gpu: Gpu, task: Task) raises -> Tuple[Map, Map]:
    """Describes a and b to TMA: boxes of 128 rows of a, and of some rows of b, by a k block of 64.

    Parameters:
        b_box: Rows of a box of b.

    Args:
        gpu: Where to run.
        task: What to multiply.

    Returns:
        The tensor maps.

    Raises:
        If the driver refuses.
    """
    return (
        tensor_map[DType.bfloat16](gpu.context, task.a, task.m, task.k, ROWS),
        tensor_map[DType.bfloat16](gpu.context, task.b, task.n, task.k, b_box),
    )


@always_inline
def _descriptor(address: UInt32) -> WGMMADescriptor[DType.bfloat16]:
    """Describes rows of 128 bytes to a tensor core: groups of eight rows 1024 bytes apart, swizzled over 128 bytes.

    Above its 18 bits, an address in a cluster holds the rank of the block.
    """
    var low = Int64((address & 0x3FFFF) >> 4) | (1 << 16)
    return {low | (1024 >> 4) << 32 | 1 << 62}


@always_inline
def multiply(sums: Sums, a: UInt32, b: UInt32) -> Sums:
    """Starts adding the product of a k block, as one group: four instructions, each of 16 columns.

    Args:
        sums: What is added to.
        a: Shared address of the warpgroup's 64 rows of a.
        b: Shared address of 256 rows of b.

    Returns:
        The sums, to be used once the group is complete.
    """
    var now = sums
    wgmma_fence_aligned()
    comptime for step in range(K_BLOCK // 16):
        now = wgmma_async[
            64, COLUMNS, 16, a_type=DType.bfloat16, b_type=DType.bfloat16
        ](
            _descriptor(a + UInt32(step * 32)),
            _descriptor(b + UInt32(step * 32)),
            now,
        )
    wgmma_commit_group_sync()
    return now


@always_inline
def _store_pair(address: Int, first: Float32, second: Float32):
    """Rounds two sums and stores them; the compiler may not move this before the wait for the sums."""
    inlined_assembly[
        """{
        .reg .b32 pair;
        cvt.rn.bf16x2.f32 pair, $2, $1;
        st.global.b32 [$0], pair;
        }""",
        NoneType,
        constraints="l,f,f,~{memory}",
    ](address, first, second)


@always_inline
def _store_group(
    sums: Sums, group: Int, c: Int, m: Int, n: Int, upper: Int, first: Int
):
    """Stores what a lane has of one group of eight columns."""
    var at = first + group * 8
    if at < n:
        if upper < m:
            _store_pair(
                c + (upper * n + at) * 2, sums[4 * group], sums[4 * group + 1]
            )
        if upper + 8 < m:
            _store_pair(
                c + ((upper + 8) * n + at) * 2,
                sums[4 * group + 2],
                sums[4 * group + 3],
            )


@always_inline
def store(sums: Sums, c: Int, m: Int, n: Int, row: Int, column: Int, lane: Int):
    """Stores what a warp has of a tile: 16 rows of 256 columns.

    Of each group of eight columns, a lane has two neighbors of row lane / 4, and
    the same two of the row eight below.

    Args:
        sums: The sums of the thread, complete.
        c: Address of c [M, N].
        m: Rows of c.
        n: Columns of c, an even number.
        row: First row of the warp.
        column: First column of the tile.
        lane: Lane of the thread.
    """
    var upper = row + lane // 4
    var first = column + lane % 4 * 2
    comptime if ROLLED:
        for group in range(COLUMNS // 8):
            _store_group(sums, group, c, m, n, upper, first)
    else:
        comptime for group in range(COLUMNS // 8):
            _store_group(sums, group, c, m, n, upper, first)
