"""The warp that keeps the ring of a block for few rows filled."""

from std.memory import OpaquePointer

from ....pdl import pdl_trigger, pdl_wait
from ...epilogue import Epilogue
from ...row_hook import RowHook
from ..barriers import (
    cluster_arrive,
    cluster_wait,
    mbarrier_expect_bytes,
    mbarrier_wait,
)
from ..parts import HALVES, part_of
from ..product import Product
from ..ring import RingPlace
from ..tma import load_tile
from ..wgmma import ROW_BYTES, row_elements
from .layout import B_BYTES, FEW_OUTPUTS, GATE_ROWS, FewRowsShared
from .tile import FewRowsTile


@always_inline
def _load_b[
    rows: Int, gathers: Bool, //, transposed: Bool, parts: Int
](
    shared: FewRowsShared[rows, gathers],
    slot: UInt32,
    map: OpaquePointer[ImmUntrackedOrigin],
    k: Int32,
    output: Int32,
):
    """Starts to fill a slot, whose barrier waits for a as well."""
    var barrier = shared.full(slot)
    mbarrier_expect_bytes(barrier, Int32(B_BYTES + shared.a_bytes))
    comptime if parts == HALVES:
        comptime for i in range(2):
            load_tile(
                shared.b_tile(slot) + UInt32(i * GATE_ROWS * ROW_BYTES),
                part_of(map, UInt32(i)),
                barrier,
                k,
                output // 2,
            )
        return
    load_tile(
        shared.b_tile(slot),
        map,
        barrier,
        output if transposed else k,
        k if transposed else output,
    )


@doc_hidden
@always_inline
def produce[
    rows: Int,
    E: Epilogue,
    H: RowHook,
    //,
    dtype: DType,
    b_transposed: Bool,
    parts: Int,
    waits: Bool,
](
    shared: FewRowsShared[rows, H.gathers],
    product: Product[E, H],
    b_maps: OpaquePointer[ImmUntrackedOrigin],
    a_map: OpaquePointer[ImmUntrackedOrigin],
    cluster: UInt32,
    clusters: UInt32,
    tiles: UInt32,
    ref first: UInt32,
    last: UInt32,
    is_leader: Bool,
):
    """Copies the operands of all tiles of this cluster, of this block's k blocks from `first` to `last`.

    By value, `first` would have the compiler reorder the kernel.
    """
    comptime k_block = row_elements[dtype]()
    # What of b fills the ring need not wait for a.
    var ahead = first
    var at = RingPlace(0, 1)
    var tile = cluster
    while tile < tiles:
        var own = FewRowsTile[parts](tile, product.sizes)
        var b_map = part_of(b_maps, own.part)
        if is_leader:
            if tile == cluster:
                if product.b_is_older != 0:
                    ahead = min(last, first + UInt32(shared.slots))
                for block in range(first, ahead):
                    _load_b[b_transposed, parts](
                        shared,
                        block - first,
                        b_map,
                        Int32(block) * Int32(k_block),
                        Int32(own.first_output),
                    )
                if waits or product.a_is_new != 0:
                    pdl_wait()
                pdl_trigger()
            for block in range(first, last):
                var k = Int32(block) * Int32(k_block)
                mbarrier_wait(shared.empty(at.slot), at.parity)
                if block >= ahead:
                    _load_b[b_transposed, parts](
                        shared, at.slot, b_map, k, Int32(own.first_output)
                    )
                load_tile(
                    shared.a_tile(at.slot), a_map, shared.full(at.slot), k, 0
                )
                at.advance[shared.slots]()
            ahead = first
        # The others meet at the end of each tile; this warp is one tile ahead.
        if tile != cluster:
            cluster_wait()
        cluster_arrive()
        tile += clusters
    cluster_wait()
