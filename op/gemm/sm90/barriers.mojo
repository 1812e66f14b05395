"""Barriers of a block and of a cluster, as functions of one instruction each.

An mbarrier is a counter in shared memory, given by its 32-bit address there.
"""

from std.sys import inlined_assembly


@doc_hidden
@always_inline
def mbarrier_init(barrier: UInt32, arrivals: Int32):
    """Makes a barrier whose phase completes after a number of arrivals."""
    inlined_assembly[
        "mbarrier.init.shared::cta.b64 [$0], $1;",
        NoneType,
        constraints="r,r,~{memory}",
    ](barrier, arrivals)


@doc_hidden
@always_inline
def fence_barrier_init():
    """Makes initialized barriers visible to the cluster and to bulk copies."""
    inlined_assembly[
        "fence.mbarrier_init.release.cluster;",
        NoneType,
        constraints="~{memory}",
    ]()


@doc_hidden
@always_inline
def mbarrier_wait(barrier: UInt32, parity: UInt32):
    """Waits until the phase of the given parity is complete."""
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


@doc_hidden
@always_inline
def mbarrier_expect_bytes(barrier: UInt32, bytes: Int32):
    """Arrives once and adds bytes that bulk copies have yet to deliver."""
    inlined_assembly[
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
        NoneType,
        constraints="r,r,~{memory}",
    ](barrier, bytes)


@doc_hidden
@always_inline
def mbarrier_arrive(barrier: UInt32):
    """Arrives at a barrier of this block."""
    inlined_assembly[
        "mbarrier.arrive.shared::cta.b64 _, [$0];",
        NoneType,
        constraints="r,~{memory}",
    ](barrier)


@doc_hidden
@always_inline
def mbarrier_arrive_cluster(barrier: UInt32):
    """Arrives at a barrier of any block of the cluster, by its address from `map_to_rank`."""
    inlined_assembly[
        "mbarrier.arrive.shared::cluster.b64 _, [$0];",
        NoneType,
        constraints="r,~{memory}",
    ](barrier)


@doc_hidden
@always_inline
def named_barrier_sync(id: Int32, threads: Int32):
    """Meets other warps at one of the sixteen block barriers; `threads` counts all that arrive."""
    inlined_assembly["bar.sync $0, $1;", NoneType, constraints="r,r,~{memory}"](
        id, threads
    )


@doc_hidden
@always_inline
def named_barrier_arrive(id: Int32, threads: Int32):
    """Arrives at one of the sixteen block barriers without waiting."""
    inlined_assembly[
        "bar.arrive $0, $1;", NoneType, constraints="r,r,~{memory}"
    ](id, threads)


@doc_hidden
@always_inline
def warp_sync():
    """Meets the other lanes of the warp, and orders their memory accesses."""
    inlined_assembly[
        "bar.warp.sync 0xffffffff;", NoneType, constraints="~{memory}"
    ]()


@doc_hidden
@always_inline
def map_to_rank(address: UInt32, rank: UInt32) -> UInt32:
    """Turns an address of this block into the same place of another block."""
    return inlined_assembly[
        "mapa.shared::cluster.u32 $0, $1, $2;",
        UInt32,
        constraints="=r,r,r",
        has_side_effect=False,
    ](address, rank)


@doc_hidden
@always_inline
def cluster_rank() -> UInt32:
    """Tells this block's rank in its cluster."""
    return inlined_assembly[
        "mov.u32 $0, %cluster_ctarank;",
        UInt32,
        constraints="=r",
        has_side_effect=False,
    ]()


@doc_hidden
@always_inline
def cluster_arrive():
    """Arrives at the cluster barrier without waiting."""
    inlined_assembly[
        "barrier.cluster.arrive.release;",
        NoneType,
        constraints="~{memory}",
    ]()


@doc_hidden
@always_inline
def cluster_wait():
    """Waits until every thread of the cluster has arrived."""
    inlined_assembly[
        "barrier.cluster.wait.acquire;",
        NoneType,
        constraints="~{memory}",
    ]()


@doc_hidden
@always_inline
def meet_cluster():
    """Waits for all threads of the cluster, and orders their accesses."""
    cluster_arrive()
    cluster_wait()
