"""Hopper instructions as functions: barriers, bulk copies, clusters.

Shared memory is addressed by its 32-bit shared-window address throughout, so
that address arithmetic stays in 32-bit registers.
"""

from std.sys import inlined_assembly
from std.memory import OpaquePointer


@always_inline
def mbarrier_init(barrier: UInt32, arrivals: Int32):
    """Makes a barrier whose phase completes after a number of arrivals.

    Args:
        barrier: Shared address of the barrier.
        arrivals: Arrivals that complete one phase.
    """
    inlined_assembly[
        "mbarrier.init.shared::cta.b64 [$0], $1;",
        NoneType,
        constraints="r,r,~{memory}",
    ](barrier, arrivals)


@always_inline
def fence_barrier_init():
    """Makes initialised barriers visible to the cluster and to bulk copies."""
    inlined_assembly[
        "fence.mbarrier_init.release.cluster;",
        NoneType,
        constraints="~{memory}",
    ]()


@always_inline
def mbarrier_wait(barrier: UInt32, parity: UInt32):
    """Waits until the phase of the given parity is complete.

    Args:
        barrier: Shared address of the barrier.
        parity: Parity of the phase to wait for.
    """
    inlined_assembly[
        """{
        .reg .pred done;
        again:
        mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;
        @!done bra again;
        }""",
        NoneType,
        constraints="r,r,~{memory}",
    ](barrier, parity)


@always_inline
def mbarrier_expect_bytes(barrier: UInt32, bytes: Int32):
    """Arrives once and adds bytes that bulk copies have yet to deliver.

    Args:
        barrier: Shared address of the barrier.
        bytes: Bytes the current phase waits for.
    """
    inlined_assembly[
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
        NoneType,
        constraints="r,r,~{memory}",
    ](barrier, bytes)


@always_inline
def mbarrier_arrive(barrier: UInt32):
    """Arrives at a barrier of this block.

    Args:
        barrier: Shared address of the barrier.
    """
    inlined_assembly[
        "mbarrier.arrive.shared::cta.b64 _, [$0];",
        NoneType,
        constraints="r,~{memory}",
    ](barrier)


@always_inline
def mbarrier_arrive_cluster(barrier: UInt32):
    """Arrives at a barrier of any block of the cluster.

    Args:
        barrier: Cluster-window address from `map_to_rank`.
    """
    inlined_assembly[
        "mbarrier.arrive.shared::cluster.b64 _, [$0];",
        NoneType,
        constraints="r,~{memory}",
    ](barrier)


@always_inline
def map_to_rank(address: UInt32, rank: UInt32) -> UInt32:
    """Turns an address of this block into the same place of another block.

    Args:
        address: Shared address in this block.
        rank: Rank of the other block in the cluster.

    Returns:
        The cluster-window address.
    """
    return inlined_assembly[
        "mapa.shared::cluster.u32 $0, $1, $2;",
        UInt32,
        constraints="=r,r,r",
        has_side_effect=False,
    ](address, rank)


@always_inline
def cluster_rank() -> UInt32:
    """Tells this block's rank in its cluster.

    Returns:
        The rank.
    """
    return inlined_assembly[
        "mov.u32 $0, %cluster_ctarank;",
        UInt32,
        constraints="=r",
        has_side_effect=False,
    ]()


@always_inline
def cluster_arrive():
    """Arrives at the cluster barrier without waiting."""
    inlined_assembly[
        "barrier.cluster.arrive.release;",
        NoneType,
        constraints="~{memory}",
    ]()


@always_inline
def cluster_wait():
    """Waits until every thread of the cluster has arrived."""
    inlined_assembly[
        "barrier.cluster.wait.acquire;",
        NoneType,
        constraints="~{memory}",
    ]()


@always_inline
def named_barrier_sync(id: Int32, threads: Int32):
    """Meets other warps at one of the sixteen block barriers.

    Args:
        id: Number of the barrier.
        threads: Threads that meet, arrivals included.
    """
    inlined_assembly["bar.sync $0, $1;", NoneType, constraints="r,r,~{memory}"](
        id, threads
    )


@always_inline
def named_barrier_arrive(id: Int32, threads: Int32):
    """Arrives at one of the sixteen block barriers without waiting.

    Args:
        id: Number of the barrier.
        threads: Threads that meet, arrivals included.
    """
    inlined_assembly[
        "bar.arrive $0, $1;", NoneType, constraints="r,r,~{memory}"
    ](id, threads)


@always_inline
def warp_sync():
    """Meets the other lanes of the warp, and orders their memory accesses."""
    inlined_assembly[
        "bar.warp.sync 0xffffffff;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def prefetch_tensor_map(map: OpaquePointer[ImmUntrackedOrigin]):
    """Fetches a tensor map into the descriptor cache.

    Args:
        map: Address of the tensor map.
    """
    inlined_assembly[
        "prefetch.tensormap [$0];", NoneType, constraints="l,~{memory}"
    ](map)


@always_inline
def load_tile(
    dst: UInt32,
    map: OpaquePointer[ImmUntrackedOrigin],
    barrier: UInt32,
    column: Int32,
    row: Int32,
):
    """Starts a copy of one box of a matrix into this block.

    Args:
        dst: Shared address of the box.
        map: Tensor map of the matrix.
        barrier: Barrier that the copied bytes are counted on.
        column: First column of the box.
        row: First row of the box.
    """
    inlined_assembly[
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global"
            ".mbarrier::complete_tx::bytes [$0], [$1, {$3, $4}], [$2];"
        ),
        NoneType,
        constraints="r,l,r,r,r,~{memory}",
    ](dst, map, barrier, column, row)


@always_inline
def load_tile_multicast(
    dst: UInt32,
    map: OpaquePointer[ImmUntrackedOrigin],
    barrier: UInt32,
    column: Int32,
    row: Int32,
    blocks: UInt16,
):
    """Starts a copy of one box of a matrix into several blocks of the cluster.

    Args:
        dst: Shared address of the box, the same in each block.
        map: Tensor map of the matrix.
        barrier: Barrier that the bytes are counted on, the same in each block.
        column: First column of the box.
        row: First row of the box.
        blocks: One bit for each receiving rank.
    """
    inlined_assembly[
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global"
            ".mbarrier::complete_tx::bytes.multicast::cluster"
            " [$0], [$1, {$3, $4}], [$2], $5;"
        ),
        NoneType,
        constraints="r,l,r,r,r,h,~{memory}",
    ](dst, map, barrier, column, row, blocks)


@always_inline
def load_bytes(
    dst: UInt32,
    src: Pointer[Float32, ImmUntrackedOrigin],
    bytes: Int32,
    barrier: UInt32,
):
    """Starts a copy of consecutive bytes into this block.

    Args:
        dst: Shared address, a multiple of 16.
        src: Global address, a multiple of 16.
        bytes: How many, a multiple of 16.
        barrier: Barrier that the copied bytes are counted on.
    """
    inlined_assembly[
        (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [$0], [$1], $2, [$3];"
        ),
        NoneType,
        constraints="r,l,r,r,~{memory}",
    ](dst, src, bytes, barrier)


@always_inline
def store_tile(
    map: OpaquePointer[ImmUntrackedOrigin],
    src: UInt32,
    column: Int32,
    row: Int32,
):
    """Starts a copy of one box from this block into a matrix.

    Args:
        map: Tensor map of the matrix.
        src: Shared address of the box.
        column: First column of the box.
        row: First row of the box.
    """
    inlined_assembly[
        (
            "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
            " [$0, {$2, $3}], [$1];"
        ),
        NoneType,
        constraints="l,r,r,r,~{memory}",
    ](map, src, column, row)


@always_inline
def store_commit():
    """Closes a group of the stores this thread has started."""
    inlined_assembly[
        "cp.async.bulk.commit_group;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def store_wait_read[pending: Int]():
    """Waits until all but some store groups have read their shared memory.

    Parameters:
        pending: Groups that may still be reading.
    """
    inlined_assembly[
        "cp.async.bulk.wait_group.read $0;",
        NoneType,
        constraints="n,~{memory}",
    ](Int32(pending))


@always_inline
def store_wait_all():
    """Waits until every store of this thread is complete."""
    inlined_assembly[
        "cp.async.bulk.wait_group 0;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def fence_async_shared():
    """Orders this thread's shared-memory writes before later bulk copies."""
    inlined_assembly[
        "fence.proxy.async.shared::cta;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def store_matrix_x4(
    address: UInt32, a: UInt32, b: UInt32, c: UInt32, d: UInt32
):
    """Stores four 8x8 matrices of 16-bit elements from a warp's fragments.

    Args:
        address: Shared address of the row this lane names.
        a: Fragment of the first matrix.
        b: Fragment of the second matrix.
        c: Fragment of the third matrix.
        d: Fragment of the fourth matrix.
    """
    inlined_assembly[
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
        NoneType,
        constraints="r,r,r,r,r,~{memory}",
    ](address, a, b, c, d)


@always_inline
def registers_raise[count: Int]():
    """Raises the registers of each thread of this warpgroup.

    Parameters:
        count: Registers a thread, a multiple of 8.
    """
    inlined_assembly[
        "setmaxnreg.inc.sync.aligned.u32 $0;",
        NoneType,
        constraints="n,~{memory}",
    ](Int32(count))


@always_inline
def registers_lower[count: Int]():
    """Lowers the registers of each thread of this warpgroup.

    Parameters:
        count: Registers a thread, a multiple of 8.
    """
    inlined_assembly[
        "setmaxnreg.dec.sync.aligned.u32 $0;",
        NoneType,
        constraints="n,~{memory}",
    ](Int32(count))


@always_inline
def wait_on_earlier_grids():
    """Waits until the grids this one was launched after are complete."""
    inlined_assembly[
        "griddepcontrol.wait;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def let_later_grids_start():
    """Allows a dependent grid to be scheduled before this one ends."""
    inlined_assembly[
        "griddepcontrol.launch_dependents;",
        NoneType,
        constraints="~{memory}",
    ]()
