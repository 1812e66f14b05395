"""The product for few rows of a: b is streamed once, by all blocks.

B is the operand of 64 rows and a the one of few columns, so that no part of a
product is wasted. K is split over the two blocks of a cluster; the second one
hands its sums to the first, which adds them in that order. Every cluster
gathers for itself what a hook wants of the rows of a, while it waits for b.

Of at most 16 rows, two blocks fit an SM: those of the next product read its b
while these end. Clusters go from tile to tile without a pause in what they read.
"""

from std.memory import AddressSpace, OpaquePointer
from std.utils import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host.nvidia.tma import TMADescriptor
from max.gpu.memory import external_memory
from max.gpu.primitives import warp

from ...grids import let_later_grids_start, wait_on_earlier_grids
from ..epilogue import ColumnTerms, Epilogue, RowTerms
from ..row_hook import RowHook
from .config import RingPlace
from .eight_bits import result_type, right_type
from .parts import (
    HALVES,
    SIDE_BY_SIDE,
    WHOLE,
    PartSizes,
    Parts,
    first_of,
    part_of,
    size_of_part,
)
from .product import Product
from .ptx import (
    address_of,
    cluster_arrive,
    cluster_rank,
    cluster_wait,
    fence_barrier_init,
    load_tile,
    map_to_rank,
    mbarrier_arrive,
    mbarrier_expect_bytes,
    mbarrier_init,
    mbarrier_wait,
    meet_cluster,
    named_barrier_sync,
    shared_pair,
    shared_value,
    store_remote_value,
    store_shared_pair,
)
from .tensor_map import Maps
from .tiling import VERY_FEW_ROWS
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
"""Columns of c that a cluster serves."""
comptime GATE_ROWS = 8
"""Rows of a gate's halves that alternate among those of a cluster."""
comptime _B_BYTES = FEW_OUTPUTS * ROW_BYTES
# Dynamic shared memory of a block that has an SM alone, and where two share one.
comptime _ALONE_BYTES = 227 * 1024
comptime _SHARED_BYTES = 113 * 1024


def blocks_of_processor(rows: Int) -> Int:
    """Counts the blocks that fit an SM.

    Args:
        rows: Rows of a that the kernel is made for.

    Returns:
        How many do.
    """
    return 2 if rows <= VERY_FEW_ROWS else 1


def _slot_bytes(rows: Int) -> Int:
    return _B_BYTES + rows * ROW_BYTES + 2 * 8


def walks(rows: Int, gathers: Bool) -> Bool:
    """Tells whether clusters go from tile to tile: more rows leave no registers for it, and what is
    gathered lies where the next tile's sums would.

    Args:
        rows: Rows of a that the kernel is made for.
        gathers: Whether a hook gathers sums of them.

    Returns:
        Whether they do; each has one tile otherwise.
    """
    return rows <= VERY_FEW_ROWS and not gathers


def _sums_bytes(rows: Int, gathers: Bool) -> Int:
    """Counts what the blocks of a cluster hand over: sums of a tile, and of the next or of rows."""
    var bytes = FEW_OUTPUTS * rows * 4
    if walks(rows, gathers):
        return 2 * bytes
    return bytes + (2 * 2 * rows * 4 if gathers else 0)


def _stages(rows: Int, gathers: Bool) -> Int:
    """Counts the slots of the ring: as many as fit."""
    var bytes = (
        _SHARED_BYTES if blocks_of_processor(rows) == 2 else _ALONE_BYTES
    )
    return (bytes - _sums_bytes(rows, gathers)) // _slot_bytes(rows)


def name_of(parts: Int) -> String:
    """Names how several matrices make the product.

    Args:
        parts: WHOLE, SIDE_BY_SIDE or HALVES.

    Returns:
        The name.
    """
    if parts == SIDE_BY_SIDE:
        return "_side_by_side"
    return "_halves" if parts == HALVES else ""


def count_maps(parts: Int) -> Int:
    """Counts the tensor maps of b.

    Args:
        parts: WHOLE, SIDE_BY_SIDE or HALVES.

    Returns:
        How many there are.
    """
    return 3 if parts == SIDE_BY_SIDE else 2 if parts == HALVES else 1


def few_rows_shared_bytes(rows: Int, gathers: Bool) -> Int:
    """Counts the shared memory of a block.

    Args:
        rows: Rows of a that the kernel is made for.
        gathers: Whether a hook gathers sums of them.

    Returns:
        The bytes.
    """
    return _stages(rows, gathers) * _slot_bytes(rows) + _sums_bytes(
        rows, gathers
    )


@always_inline
def _load_b[
    transposed: Bool, parts: Int
](
    tiles: UInt32,
    full: UInt32,
    slot: UInt32,
    a_bytes: Int32,
    map: OpaquePointer[ImmUntrackedOrigin],
    k: Int32,
    output: Int32,
):
    """Starts to fill a slot, which waits for a as well."""
    var barrier = full + slot * 8
    mbarrier_expect_bytes(barrier, _B_BYTES + a_bytes)
    comptime if parts == HALVES:
        comptime for i in range(FEW_OUTPUTS // GATE_ROWS):
            load_tile(
                tiles + slot * _B_BYTES + UInt32(i * GATE_ROWS * ROW_BYTES),
                part_of(map, UInt32(i % 2)),
                barrier,
                k,
                output // 2 + Int32(i // 2 * GATE_ROWS),
            )
        return
    load_tile(
        tiles + slot * _B_BYTES,
        map,
        barrier,
        output if transposed else k,
        k if transposed else output,
    )


@fieldwise_init
struct _Tile[parts: Int](TrivialRegisterPassable):
    """Which columns a tile has."""

    var part: UInt32
    """Which of several b."""
    var first_output: UInt32
    """The first of its columns there."""

    @always_inline
    def __init__(out self, tile: UInt32, sizes: PartSizes):
        self.part = 0
        self.first_output = tile * FEW_OUTPUTS
        comptime if Self.parts == SIDE_BY_SIDE:
            var found = Parts(sizes, FEW_OUTPUTS).find(tile)
            self.part = found[0]
            self.first_output = found[1] * FEW_OUTPUTS


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(FEW_THREADS)),
    `nvvm.cluster_dim`=StaticTuple[Int32, 3](Int32(FEW_CLUSTER), 1, 1),
)
@__llvm_arg_metadata(b_maps, `nvvm.grid_constant`)
@__llvm_arg_metadata(a_map, `nvvm.grid_constant`)
@__name(
    t"fused_norm_few_rows_{dtype}_{rows}_{b_transposed}{name_of(parts)}_{E.name}{H.name}"
)
def few_rows_kernel[
    dtype: DType,
    rows: Int,
    b_transposed: Bool,
    parts: Int,
    E: Epilogue,
    H: RowHook,
](
    b_maps: Maps[count_maps(parts)],
    a_map: TMADescriptor,
    first_c: Pointer[Scalar[result_type[dtype]()], MutAnyOrigin],
    second_c: Pointer[Scalar[result_type[dtype]()], MutAnyOrigin],
    third_c: Pointer[Scalar[result_type[dtype]()], MutAnyOrigin],
    pitch: Int32,
    tiles: Int32,
    product: Product[E, H],
):
    """Computes tiles of FEW_OUTPUTS columns of c until there are none left.

    Grid: clusters of FEW_CLUSTER blocks, one for each tile unless `walks`. Block:
    FEW_THREADS threads, of which the last warp copies and the others multiply.

    Parameters:
        dtype: Type of a, b and c: bfloat16, float16, or float32, multiplied as
            tf32; or that of a, of 8 bits. The last two are neither transposed nor gathered.
        rows: Most rows of a, a multiple of 8.
        b_transposed: Whether b is stored as [K, N].
        parts: WHOLE; SIDE_BY_SIDE for several b and c; HALVES for a gate of two b, which
            are not transposed.
        E: What becomes of the sums.
        H: What is done with the rows; if it gathers them, K is a multiple of the
            k block.

    Args:
        b_maps: Tensor map of each b, boxes of 64 by a k block; of a gate's of GATE_ROWS.
        a_map: Tensor map of a [M, K], boxes of rows by a k block.
        first_c: Receives c [M, N], for a gate [M, N / 2]; the first of several.
        second_c: Receives the second of several.
        third_c: Receives the third.
        pitch: Elements from one row of each c to its next; 0 for as many as a row has.
        tiles: Tiles of all c.
        product: Sizes, K more than one k block; and what goes with the matrices.
    """
    comptime assert parts == WHOLE or not (b_transposed or E.adds)
    comptime stages = _stages(rows, H.gathers)
    var m = product.m
    var n = product.n
    comptime c_dtype = result_type[dtype]()
    comptime a_bytes = rows * ROW_BYTES
    comptime registers = rows // 2
    var base = UInt32(
        Int(
            external_memory[
                UInt8, address_space=AddressSpace.SHARED, alignment=1024
            ]()
        )
    )
    var a_tiles = base + UInt32(stages * _B_BYTES)
    var partials = a_tiles + UInt32(stages * a_bytes)
    var statistics = partials + UInt32(FEW_OUTPUTS * rows * 4)
    var full = partials + UInt32(_sums_bytes(rows, H.gathers))
    var empty = full + UInt32(stages * 8)
    var thread = UInt32(thread_idx.x)
    var warp_in_block = warp.broadcast(thread // 32)
    var rank = cluster_rank()
    var cluster = UInt32(block_idx.x) // FEW_CLUSTER
    var clusters = UInt32(grid_dim.x) // FEW_CLUSTER

    if thread == 0:
        for stage in range(UInt32(stages)):
            mbarrier_init(full + stage * 8, 1)
            mbarrier_init(empty + stage * 8, 1)
        fence_barrier_init()
    # Also makes sure that the neighbor runs: its memory is written below.
    meet_cluster()
    # The grid that makes the terms of rows has waited for what makes both operands.
    comptime waits = not E.has_row_terms or H.gathers

    comptime k_block = row_elements[dtype]()
    var blocks = UInt32(product.k + Int32(k_block - 1)) // UInt32(k_block)
    var half = (blocks + 1) // 2
    var first = rank * half
    var last = min(blocks, first + half)

    if warp_in_block == 4:
        # What of b fills the ring need not wait for a.
        var ahead = first
        var at = RingPlace(0, 1)
        var tile = cluster
        while tile < UInt32(tiles):
            var own = _Tile[parts](tile, product.sizes)
            var b_map = part_of(address_of(b_maps), own.part)
            if thread == 128:
                if tile == cluster:
                    if product.b_is_older != 0:
                        ahead = min(last, first + UInt32(stages))
                    for block in range(first, ahead):
                        _load_b[b_transposed, parts](
                            base,
                            full,
                            block - first,
                            Int32(a_bytes),
                            b_map,
                            Int32(block) * Int32(k_block),
                            Int32(own.first_output),
                        )
                    if waits or product.a_is_new != 0:
                        wait_on_earlier_grids()
                    let_later_grids_start()
                for block in range(first, last):
                    var k = Int32(block) * Int32(k_block)
                    mbarrier_wait(empty + at.slot * 8, at.parity)
                    if block >= ahead:
                        _load_b[b_transposed, parts](
                            base,
                            full,
                            at.slot,
                            Int32(a_bytes),
                            b_map,
                            k,
                            Int32(own.first_output),
                        )
                    load_tile(
                        a_tiles + at.slot * UInt32(a_bytes),
                        address_of(a_map),
                        full + at.slot * 8,
                        k,
                        0,
                    )
                    at.advance[stages]()
                ahead = first
            # The others meet at the end of each tile; this warp is one tile ahead.
            if tile != cluster:
                cluster_wait()
            cluster_arrive()
            tile += clusters
        cluster_wait()
        return

    comptime if waits:
        wait_on_earlier_grids()
    let_later_grids_start()
    var lane = thread & 31
    var b_descriptor = operand_descriptor[b_transposed](base)
    var a_descriptor = operand_descriptor[False](a_tiles)
    var at = RingPlace(0, 0)
    # Where the other block's sums are: the next tile's do not wait until these are read.
    var partial = partials
    var next = cluster
    while next < UInt32(tiles):
        var tile = next
        next += clusters
        comptime if walks(rows, H.gathers):
            partial = partials + UInt32(FEW_OUTPUTS * rows * 4) * (
                (tile // clusters) & 1
            )
        var own_tile = _Tile[parts](tile, product.sizes)
        var part = own_tile.part
        var first_output = own_tile.first_output
        comptime if parts == SIDE_BY_SIDE:
            n = size_of_part(product.sizes, part)
        var c = first_c
        comptime if parts == SIDE_BY_SIDE:
            if part == 1:
                c = second_c
            elif part == 2:
                c = third_c
        var row_pitch = pitch if pitch != 0 else n
        mbarrier_wait(full + at.slot * 8, at.parity)
        var accumulator = multiply_first[
            right_type[dtype](), rows, 1, b_transposed, False, dtype
        ](
            b_descriptor + at.slot * (_B_BYTES // 16),
            a_descriptor + at.slot * UInt32(a_bytes // 16),
        )
        var sums = H.Sums()
        comptime if H.gathers:
            if thread < UInt32(2 * rows):
                sums.add[dtype, True](a_tiles, thread)
        var previous = at.slot
        at.advance[stages]()
        for _ in range(first + 1, last):
            mbarrier_wait(full + at.slot * 8, at.parity)
            accumulator = multiply_next[
                right_type[dtype](), rows, 1, b_transposed, False, dtype
            ](
                accumulator,
                b_descriptor + at.slot * (_B_BYTES // 16),
                a_descriptor + at.slot * UInt32(a_bytes // 16),
            )
            wait_previous()
            comptime if H.gathers:
                # Reads of a slot, unlike its products, do not end together.
                named_barrier_sync(1, 128)
            if thread == 0:
                mbarrier_arrive(empty + previous * 8)
            comptime if H.gathers:
                if thread < UInt32(2 * rows):
                    sums.add[dtype, False](
                        a_tiles + at.slot * UInt32(a_bytes), thread
                    )
            previous = at.slot
            at.advance[stages]()
        accumulator = wait_all[rows // 2](accumulator)
        comptime if walks(rows, H.gathers):
            # For the next tile.
            if thread == 0:
                mbarrier_arrive(empty + previous * 8)

        comptime if H.gathers:
            if thread < UInt32(2 * rows):
                var own = sums.part(Float32((last - first) * K_BLOCK))
                if thread & 1 == 0:
                    var place = (
                        map_to_rank(statistics, 0)
                        + (rank * UInt32(2 * rows) + thread) * 4
                    )
                    store_remote_value(place, own[0])
                    store_remote_value(place + 4, own[1])
        if rank == 1:
            var remote = map_to_rank(partial, 0) + thread * 4
            comptime for i in range(registers):
                store_remote_value(
                    remote + UInt32(i * 128 * 4),
                    rebind[Float32](accumulator[i]),
                )
        meet_cluster()
        comptime if E.has_row_terms and not H.gathers:
            wait_on_earlier_grids()
        if rank == 1:
            comptime if walks(rows, H.gathers):
                continue
            return

        # All are loaded at once, even for rows that do not exist. A lane's columns of
        # the product are the rows group * 8 + lane % 4 * 2 + side of a.
        var terms = StaticTuple[RowTerms[], registers // 2](RowTerms[](1, 0))
        comptime if H.gathers:
            if thread < UInt32(rows):
                var counts = SIMD[DType.float32, 2](
                    Float32(half * K_BLOCK), Float32((blocks - half) * K_BLOCK)
                )
                var own = product.hook.terms(
                    product.hook.join(
                        shared_pair(statistics + thread * 8),
                        shared_pair(statistics + (UInt32(rows) + thread) * 8),
                        counts,
                    ),
                    counts.reduce_add(),
                )
                store_shared_pair(
                    statistics + thread * 8, {own.offset, own.scale}
                )
                if tile == 0 and thread < UInt32(m):
                    product.hook.keep(Int(thread), own)
            named_barrier_sync(1, 128)
        comptime if E.has_row_terms:
            comptime for i in range(registers // 2):
                comptime if H.gathers:
                    comptime row = (i // 2) * 8 + i % 2
                    var pair = shared_pair(
                        statistics + UInt32(row * 8) + (lane & 3) * 16
                    )
                    terms[i] = RowTerms[](pair[1], pair[0])
                    continue
                var row = min(
                    Int32((i // 2) * 8 + i % 2) + Int32(lane & 3) * 2, m - 1
                )
                terms[i] = product.epilogue.row_terms(Int(row))
        # Row lane / 4 of b's 16 in this warp, and the one 8 below.
        var gates = StaticTuple[Float32, registers // 2](0)
        comptime for below in range(2):
            var output = (
                first_output
                + warp_in_block * 16
                + (lane >> 2)
                + UInt32(8 * below)
            )
            if output < UInt32(n):
                # Its place in the half of a gate that it belongs to.
                var column = Int(
                    first_output // 2 + warp_in_block * 8 + (lane >> 2)
                )
                var columns = ColumnTerms[DType.float32, 1, E.vectors](fill=0)
                comptime for i in range(E.vectors):
                    comptime if E.may_lack_vectors:
                        if product.epilogue.vector_address[i](0, 0, 0) == 0:
                            continue
                    var vector: Int
                    comptime if parts == HALVES:
                        vector = product.epilogue.vector_address[i](
                            below, 0, column
                        )
                    elif parts == SIDE_BY_SIDE:
                        vector = product.epilogue.vector_address[i](
                            Int(part),
                            first_of(product.sizes, Int(part)),
                            Int(output),
                        )
                    else:
                        vector = product.epilogue.vector_address[i](
                            0, 0, Int(output)
                        )
                    columns[i] = (
                        Pointer[Scalar[E.vector_type(i)], MutUntrackedOrigin](
                            unsafe_from_address=vector
                        )
                        .unsafe_load()
                        .cast[DType.float32]()
                    )
                comptime for group in range(rows // 8):
                    comptime for side in range(2):
                        comptime i = group * 4 + below * 2 + side
                        var row = UInt32(group * 8 + side) + (lane & 3) * 2
                        if row < UInt32(m):
                            var other = shared_value(
                                partial + thread * 4 + UInt32(i * 128 * 4)
                            )
                            comptime if E.adds:
                                other += (
                                    Pointer[
                                        Scalar[c_dtype], MutUntrackedOrigin
                                    ](
                                        unsafe_from_address=product.epilogue.addend()
                                    )
                                    .unsafe_offset(
                                        Int(row) * Int(n) + Int(output)
                                    )
                                    .unsafe_load()
                                    .cast[DType.float32]()
                                )
                            var sum = product.epilogue.finish[DType.float32, 1](
                                rebind[Float32](accumulator[i]) + other,
                                terms[group * 2 + side],
                                columns,
                                Int(row),
                                Int(output),
                            )
                            comptime if not E.activates:
                                c.unsafe_offset(
                                    Int(row) * Int(row_pitch) + Int(output)
                                ).unsafe_store(sum.cast[c_dtype]())
                                continue
                            var width = Int(n)
                            comptime if E.is_gate:
                                width //= 2
                            else:
                                column = Int(output)
                            var h = product.epilogue.h()
                            if h != 0:
                                Pointer[Scalar[c_dtype], MutAnyOrigin](
                                    unsafe_from_address=h
                                ).unsafe_offset(
                                    Int(row) * Int(n)
                                    + column
                                    + (below * width if E.is_gate else 0)
                                ).unsafe_store(
                                    sum.cast[c_dtype]()
                                )
                            comptime at = group * 2 + side
                            comptime if E.is_gate and below == 0:
                                gates[at] = sum
                            else:
                                c.unsafe_offset(
                                    Int(row) * width + column
                                ).unsafe_store(
                                    product.epilogue.activated[1](
                                        gates[at] if E.is_gate else sum, sum
                                    ).cast[c_dtype]()
                                )
        comptime if not walks(rows, H.gathers):
            return
