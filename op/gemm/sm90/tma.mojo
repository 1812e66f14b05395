"""Copies by TMA between global and shared memory, as functions of one instruction each.

Shared memory is given by 32-bit addresses, so that address arithmetic needs no 64-bit registers.
"""

from std.memory import OpaquePointer
from std.sys import inlined_assembly


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
def fence_async_shared():
    """Orders this thread's shared-memory writes before later bulk copies."""
    inlined_assembly[
        "fence.proxy.async.shared::cta;", NoneType, constraints="~{memory}"
    ]()


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
