"""Hopper instructions as functions: barriers, TMA, clusters, shared memory.

Shared memory is addressed by its 32-bit shared-window address throughout, so
that address arithmetic stays in 32-bit registers.
"""

from std.memory import OpaquePointer, bitcast
from std.sys import _RegisterPackType, inlined_assembly


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
def prefetch_tensor_map(map: OpaquePointer[ImmUntrackedOrigin]):
    """Fetches a tensor map into the descriptor cache."""
    inlined_assembly[
        "prefetch.tensormap [$0];", NoneType, constraints="l,~{memory}"
    ](map)


@doc_hidden
@always_inline
def load_tile(
    dst: UInt32,
    map: OpaquePointer[ImmUntrackedOrigin],
    barrier: UInt32,
    column: Int32,
    row: Int32,
):
    """Starts a copy of one box of a matrix into this block."""
    inlined_assembly[
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global"
            ".mbarrier::complete_tx::bytes [$0], [$1, {$3, $4}], [$2];"
        ),
        NoneType,
        constraints="r,l,r,r,r,~{memory}",
    ](dst, map, barrier, column, row)


@doc_hidden
@always_inline
def load_tile_multicast(
    dst: UInt32,
    map: OpaquePointer[ImmUntrackedOrigin],
    barrier: UInt32,
    column: Int32,
    row: Int32,
    blocks: UInt16,
):
    """Starts a copy of one box of a matrix into several blocks of the cluster, one bit of `blocks` for each; `dst` and
    `barrier` are the same in all."""
    inlined_assembly[
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global"
            ".mbarrier::complete_tx::bytes.multicast::cluster"
            " [$0], [$1, {$3, $4}], [$2], $5;"
        ),
        NoneType,
        constraints="r,l,r,r,r,h,~{memory}",
    ](dst, map, barrier, column, row, blocks)


@doc_hidden
@always_inline
def load_bytes(
    dst: UInt32,
    src: Int,
    bytes: Int32,
    barrier: UInt32,
):
    """Starts a copy of consecutive bytes into this block; addresses and length are multiples of 16."""
    inlined_assembly[
        (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [$0], [$1], $2, [$3];"
        ),
        NoneType,
        constraints="r,l,r,r,~{memory}",
    ](dst, src, bytes, barrier)


@doc_hidden
@always_inline
def store_tile(
    map: OpaquePointer[ImmUntrackedOrigin],
    src: UInt32,
    column: Int32,
    row: Int32,
):
    """Starts a copy of one box from this block into a matrix."""
    inlined_assembly[
        (
            "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
            " [$0, {$2, $3}], [$1];"
        ),
        NoneType,
        constraints="l,r,r,r,~{memory}",
    ](map, src, column, row)


@doc_hidden
@always_inline
def store_commit():
    """Closes a group of the stores this thread has started."""
    inlined_assembly[
        "cp.async.bulk.commit_group;", NoneType, constraints="~{memory}"
    ]()


@doc_hidden
@always_inline
def store_wait_read[pending: Int]():
    """Waits until all but some store groups have read their shared memory."""
    inlined_assembly[
        "cp.async.bulk.wait_group.read $0;",
        NoneType,
        constraints="n,~{memory}",
    ](Int32(pending))


@doc_hidden
@always_inline
def store_wait_all():
    """Waits until every store of this thread is complete."""
    inlined_assembly[
        "cp.async.bulk.wait_group 0;", NoneType, constraints="~{memory}"
    ]()


@doc_hidden
@always_inline
def fence_async_shared():
    """Orders this thread's shared-memory writes before later bulk copies."""
    inlined_assembly[
        "fence.proxy.async.shared::cta;", NoneType, constraints="~{memory}"
    ]()


@doc_hidden
@always_inline
def store_matrix_x4(
    address: UInt32, a: UInt32, b: UInt32, c: UInt32, d: UInt32
):
    """Stores four 8x8 matrices of 16-bit elements from a warp's fragments; each lane names the address of a row."""
    inlined_assembly[
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
        NoneType,
        constraints="r,r,r,r,r,~{memory}",
    ](address, a, b, c, d)


@doc_hidden
@always_inline
def registers_raise[count: Int]():
    """Raises the registers of each thread of this warpgroup."""
    inlined_assembly[
        "setmaxnreg.inc.sync.aligned.u32 $0;",
        NoneType,
        constraints="n,~{memory}",
    ](Int32(count))


@doc_hidden
@always_inline
def registers_lower[count: Int]():
    """Lowers the registers of each thread of this warpgroup."""
    inlined_assembly[
        "setmaxnreg.dec.sync.aligned.u32 $0;",
        NoneType,
        constraints="n,~{memory}",
    ](Int32(count))


@doc_hidden
@always_inline
def shared_value(address: UInt32) -> Float32:
    """Loads a value."""
    return inlined_assembly[
        "ld.shared.f32 $0, [$1];", Float32, constraints="=f,r,~{memory}"
    ](address)


@doc_hidden
@always_inline
def store_shared_value(address: UInt32, value: Float32):
    """Stores a value."""
    inlined_assembly[
        "st.shared.f32 [$0], $1;", NoneType, constraints="r,f,~{memory}"
    ](address, value)


@doc_hidden
@always_inline
def shared_element[dtype: DType](address: UInt32) -> Scalar[dtype]:
    """Loads an element of 16 or 32 bits."""
    comptime if dtype == DType.float32:
        return rebind[Scalar[dtype]](shared_value(address))
    else:
        return bitcast[dtype, 1](
            inlined_assembly[
                "ld.shared.b16 $0, [$1];",
                UInt16,
                constraints="=h,r,~{memory}",
            ](address)
        )


@doc_hidden
@always_inline
def store_shared_element[dtype: DType](address: UInt32, element: Scalar[dtype]):
    """Stores an element of 16 or 32 bits."""
    comptime if dtype == DType.float32:
        store_shared_value(address, rebind[Float32](element))
    else:
        inlined_assembly[
            "st.shared.b16 [$0], $1;", NoneType, constraints="r,h,~{memory}"
        ](address, bitcast[DType.uint16, 1](element))


@doc_hidden
@always_inline
def store_remote_value(address: UInt32, value: Float32):
    """Stores a value in any block of the cluster, by its address from `map_to_rank`."""
    inlined_assembly[
        "st.shared::cluster.f32 [$0], $1;",
        NoneType,
        constraints="r,f,~{memory}",
    ](address, value)


@doc_hidden
@always_inline
def shared_pair[
    dtype: DType = DType.float32
](address: UInt32) -> SIMD[DType.float32, 2]:
    """Loads two neighboring elements, from a multiple of their size together."""
    comptime if dtype == DType.float32:
        var pair = inlined_assembly[
            "ld.shared.v2.f32 {$0, $1}, [$2];",
            _RegisterPackType[Float32, Float32],
            constraints="=f,=f,r,~{memory}",
        ](address)
        return SIMD[DType.float32, 2](pair[0], pair[1])
    else:
        var word = inlined_assembly[
            "ld.shared.b32 $0, [$1];",
            UInt32,
            constraints="=r,r,~{memory}",
        ](address)
        return bitcast[dtype, 2](word).cast[DType.float32]()


@doc_hidden
@always_inline
def store_shared_pair(address: UInt32, pair: SIMD[DType.float32, 2]):
    """Stores two neighboring values, to a multiple of 8."""
    inlined_assembly[
        "st.shared.v2.f32 [$0], {$1, $2};",
        NoneType,
        constraints="r,f,f,~{memory}",
    ](address, pair[0], pair[1])


@doc_hidden
@always_inline
def shared_eight[dtype: DType](address: UInt32) -> SIMD[DType.float32, 8]:
    """Loads eight neighboring elements of 16 bits, from a multiple of 16."""
    var words = inlined_assembly[
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
        _RegisterPackType[UInt32, UInt32, UInt32, UInt32],
        constraints="=r,=r,=r,=r,r,~{memory}",
    ](address)
    var pairs = SIMD[DType.uint32, 4](words[0], words[1], words[2], words[3])
    comptime if dtype == DType.bfloat16:
        # Either half is the upper half of a float32.
        return bitcast[DType.float32, 4](pairs << 16).interleave(
            bitcast[DType.float32, 4](pairs & 0xFFFF0000)
        )
    else:
        return bitcast[dtype, 8](pairs).cast[DType.float32]()


@doc_hidden
@always_inline
def pack_pair[dtype: DType](pair: SIMD[DType.float32, 2]) -> UInt32:
    """Rounds two values to 16 bits each, the first in the lower half."""
    comptime kind = "bf16x2" if dtype == DType.bfloat16 else "f16x2"
    return inlined_assembly[
        "cvt.rn." + kind + ".f32 $0, $1, $2;",
        UInt32,
        constraints="=r,f,f",
        has_side_effect=False,
    ](pair[1], pair[0])


@doc_hidden
@always_inline
def meet_cluster():
    """Waits for all threads of the cluster, and orders their accesses."""
    cluster_arrive()
    cluster_wait()


@doc_hidden
@always_inline
def address_of[
    Kind: AnyType, //
](ref map: Kind) -> OpaquePointer[ImmUntrackedOrigin]:
    """Locates a tensor map, or several, among a kernel's arguments."""
    return (
        Pointer(to=map)
        .unsafe_bitcast[NoneType]()
        .as_imm()
        .unsafe_origin_cast[ImmUntrackedOrigin]()
    )
