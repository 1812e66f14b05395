"""The kernel for few rows of a: b is streamed once, by all blocks.

B is the operand of 64 rows and a the one of few columns, so that no part of a
product is wasted. K is split over the two blocks of a cluster; the second one
sends its sums to the first, which adds them in that order. Every cluster
gathers for itself what a hook wants of the rows of a, while it waits for b.

Of at most 16 rows, two blocks fit an SM: those of the next product read its b
while these end. A cluster computes one tile after another without a pause in what it reads.
"""

from std.memory import AddressSpace
from std.utils import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.memory import external_memory
from max.gpu.primitives import warp

from ....pdl import pdl_trigger, pdl_wait
from ...epilogue import Epilogue, RowTerms
from ...row_hook import RowHook
from ..barriers import (
    cluster_rank,
    fence_barrier_init,
    map_to_rank,
    mbarrier_arrive,
    mbarrier_init,
    mbarrier_wait,
    meet_cluster,
    named_barrier_sync,
)
from ..eight_bits import result_type, right_type
from ..parts import HALVES, SIDE_BY_SIDE, WHOLE, size_of_part
from ..product import Product
from ..ring import RingPlace
from ..shared_memory import (
    shared_pair,
    shared_value,
    store_remote_value,
    store_shared_pair,
    store_shared_value,
)
from ..tensor_map import Map, Maps
from ..tma import address_of
from ..wgmma import (
    K_BLOCK,
    multiply_first,
    multiply_next,
    operand_descriptor,
    row_elements,
    wait_all,
    wait_previous,
)
from .addend import FewRowsAddend
from .column_terms import load_column_terms, prefetch_column_terms
from .layout import (
    B_BYTES,
    FEW_CLUSTER,
    FEW_THREADS,
    FewRowsShared,
    is_persistent,
)
from .producer import produce
from .tile import FewRowsTile, count_maps, parts_name


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(FEW_THREADS)),
    `nvvm.cluster_dim`=StaticTuple[Int32, 3](Int32(FEW_CLUSTER), 1, 1),
)
@__llvm_arg_metadata(b_maps, `nvvm.grid_constant`)
@__llvm_arg_metadata(a_map, `nvvm.grid_constant`)
@__name(
    t"fused_norm_few_rows_{dtype}_{rows}_{b_transposed}{parts_name(parts)}_{E.name}{H.name}"
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
    a_map: Map,
    first_c: Pointer[Scalar[result_type[dtype]()], MutAnyOrigin],
    second_c: Pointer[Scalar[result_type[dtype]()], MutAnyOrigin],
    third_c: Pointer[Scalar[result_type[dtype]()], MutAnyOrigin],
    pitch: Int32,
    tiles: Int32,
    product: Product[E, H],
):
    """Computes tiles of FEW_OUTPUTS columns of c until there are none left.

    Grid: clusters of FEW_CLUSTER blocks, one for each tile unless the kernel `is_persistent`. Block:
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
    comptime assert parts == WHOLE or not (
        b_transposed or E.adds or E.adds_last
    )
    comptime assert not E.adds_last or not E.activates
    comptime Shared = FewRowsShared[rows, H.gathers]
    comptime persistent = is_persistent(rows, H.gathers)
    var shared = Shared(
        UInt32(
            Int(
                external_memory[
                    UInt8, address_space=AddressSpace.SHARED, alignment=1024
                ]()
            )
        )
    )
    var row_sums = shared.row_sums()
    var thread = UInt32(thread_idx.x)
    var warp_in_block = warp.broadcast(thread // 32)
    var rank = cluster_rank()
    var cluster = UInt32(block_idx.x) // FEW_CLUSTER
    var clusters = UInt32(grid_dim.x) // FEW_CLUSTER

    if thread == 0:
        for slot in range(UInt32(Shared.slots)):
            mbarrier_init(shared.full(slot), 1)
            mbarrier_init(shared.empty(slot), 1)
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
        produce[dtype, b_transposed, parts, waits](
            shared,
            product,
            address_of(b_maps),
            address_of(a_map),
            cluster,
            clusters,
            UInt32(tiles),
            first,
            last,
            thread == 128,
        )
        return

    comptime if waits:
        pdl_wait()
    pdl_trigger()
    comptime c_dtype = result_type[dtype]()
    var n = product.n
    var lane = thread & 31
    var b_descriptor = operand_descriptor[b_transposed](shared.b_tile(0))
    var a_descriptor = operand_descriptor[False](shared.a_tile(0))
    var at = RingPlace(0, 0)
    # Where the other block's sums are: the next tile's do not wait until these are read.
    var partial = shared.partial_sums(0)
    var next = cluster
    while next < UInt32(tiles):
        var tile = next
        next += clusters
        comptime if persistent:
            partial = shared.partial_sums((tile // clusters) & 1)
        var own_tile = FewRowsTile[parts](tile, product.sizes)
        var c = first_c
        comptime if parts == SIDE_BY_SIDE:
            n = size_of_part(product.sizes, own_tile.part)
            if own_tile.part == 1:
                c = second_c
            elif own_tile.part == 2:
                c = third_c
        var row_pitch = pitch if pitch != 0 else n
        var columns = own_tile.columns_of(warp_in_block, UInt32(n))
        if rank == 0 and lane == 0 and columns.first < columns.width:
            prefetch_column_terms(
                product, own_tile, columns.first, columns.half
            )
        var addend = FewRowsAddend[c_dtype, rows]()
        comptime if E.adds_last:
            # An earlier grid may still be writing it; the products wait for that one, too.
            pdl_wait()
            if rank == 0:
                addend.load(
                    product,
                    own_tile.first_output + warp_in_block * 16 + (lane >> 2),
                    lane,
                )
        mbarrier_wait(shared.full(at.slot), at.parity)
        var accumulator = multiply_first[
            right_type[dtype](), rows, 1, b_transposed, False, dtype
        ](
            b_descriptor + at.slot * (B_BYTES // 16),
            a_descriptor + at.slot * UInt32(Shared.a_bytes // 16),
        )
        var sums = H.Sums()
        comptime if H.gathers:
            if thread < UInt32(2 * rows):
                sums.add[dtype, True](shared.a_tile(0), thread)
        var previous = at.slot
        at.advance[Shared.slots]()
        for _ in range(first + 1, last):
            mbarrier_wait(shared.full(at.slot), at.parity)
            accumulator = multiply_next[
                right_type[dtype](), rows, 1, b_transposed, False, dtype
            ](
                accumulator,
                b_descriptor + at.slot * (B_BYTES // 16),
                a_descriptor + at.slot * UInt32(Shared.a_bytes // 16),
            )
            wait_previous()
            comptime if H.gathers:
                # Reads of a slot, unlike its products, do not end together.
                named_barrier_sync(1, 128)
            if thread == 0:
                mbarrier_arrive(shared.empty(previous))
            comptime if H.gathers:
                if thread < UInt32(2 * rows):
                    sums.add[dtype, False](shared.a_tile(at.slot), thread)
            previous = at.slot
            at.advance[Shared.slots]()
        accumulator = wait_all[rows // 2](accumulator)
        comptime if persistent:
            # For the next tile.
            if thread == 0:
                mbarrier_arrive(shared.empty(previous))

        comptime if H.gathers:
            if thread < UInt32(2 * rows):
                var own = sums.part(Float32((last - first) * K_BLOCK))
                if thread & 1 == 0:
                    var place = (
                        map_to_rank(row_sums, 0)
                        + (rank * UInt32(2 * rows) + thread) * 4
                    )
                    store_remote_value(place, own[0])
                    store_remote_value(place + 4, own[1])
        if rank == 1:
            var remote = map_to_rank(partial, 0) + thread * 4
            comptime for i in range(rows // 2):
                store_remote_value(
                    remote + UInt32(i * 128 * 4),
                    rebind[Float32](accumulator[i]),
                )
        meet_cluster()
        comptime if E.has_row_terms and not H.gathers:
            pdl_wait()
        if rank == 1:
            comptime if persistent:
                continue
            return

        # All are loaded at once, even for rows that do not exist. A lane's columns of
        # the product are the rows group * 8 + lane % 4 * 2 + side of a.
        var terms = StaticTuple[RowTerms[], rows // 4](RowTerms[](1, 0))
        comptime if H.gathers:
            if thread < UInt32(rows):
                var counts = SIMD[DType.float32, 2](
                    Float32(half * K_BLOCK), Float32((blocks - half) * K_BLOCK)
                )
                var own = product.hook.terms(
                    product.hook.join(
                        shared_pair(row_sums + thread * 8),
                        shared_pair(row_sums + (UInt32(rows) + thread) * 8),
                        counts,
                    ),
                    counts.reduce_add(),
                )
                store_shared_pair(
                    row_sums + thread * 8, {own.offset, own.scale}
                )
                if tile == 0 and thread < UInt32(product.m):
                    product.hook.keep(Int(thread), own)
            named_barrier_sync(1, 128)
        comptime if E.has_row_terms:
            comptime for i in range(rows // 4):
                comptime row = i // 2 * 8 + i % 2
                comptime if H.gathers:
                    var pair = shared_pair(
                        row_sums + UInt32(row * 8) + (lane & 3) * 16
                    )
                    terms[i] = RowTerms[](pair[1], pair[0])
                    continue
                terms[i] = product.epilogue.row_terms(
                    Int(min(Int32(row) + Int32(lane & 3) * 2, product.m - 1))
                )
        # Row lane / 4 of b's 16 in this warp, and the one 8 below. Of a gate's two b, two warps have each; of one b
        # whose rows alternate, the one below is the other half.
        comptime is_apart = parts == HALVES
        comptime alternates = E.is_gate and not is_apart
        var gates = StaticTuple[Float32, rows // 2](0)
        comptime for below in range(2):
            var output = columns.first + (lane >> 2) + UInt32(8 * below)
            if output < columns.width:
                var vectors = load_column_terms(
                    product, own_tile, output, columns.half
                )
                comptime for group in range(rows // 8):
                    comptime for side in range(2):
                        comptime i = group * 4 + below * 2 + side
                        var row = UInt32(group * 8 + side) + (lane & 3) * 2
                        if row < UInt32(product.m):
                            var own = partial + thread * 4 + UInt32(i * 128 * 4)
                            var other = shared_value(own)
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
                                vectors,
                                Int(row),
                                Int(output),
                            )
                            comptime if E.adds_last:
                                sum += addend.values[i].cast[DType.float32]()
                            comptime if not E.activates:
                                c.unsafe_offset(
                                    Int(row) * Int(row_pitch) + Int(output)
                                ).unsafe_store(sum.cast[c_dtype]())
                                continue
                            var width = Int(columns.width)
                            var place = Int(output)
                            comptime if alternates:
                                width //= 2
                                place = Int(
                                    own_tile.first_output // 2
                                    + warp_in_block * 8
                                    + (lane >> 2)
                                )
                            var h = product.epilogue.h()
                            if h != 0:
                                var half = columns.half
                                comptime if alternates:
                                    half = UInt32(below)
                                Pointer[Scalar[c_dtype], MutAnyOrigin](
                                    unsafe_from_address=h
                                ).unsafe_offset(
                                    Int(row) * Int(n)
                                    + place
                                    + Int(half) * width
                                ).unsafe_store(
                                    sum.cast[c_dtype]()
                                )
                            comptime if is_apart:
                                # The other block's sum was read: its place now has what the gate multiplies.
                                gates[i] = sum
                                if columns.half == 1:
                                    store_shared_value(own, sum)
                            elif alternates and below == 0:
                                gates[i] = sum
                            else:
                                comptime gate = i - 2 if alternates else i
                                c.unsafe_offset(
                                    Int(row) * width + place
                                ).unsafe_store(
                                    product.epilogue.activated[1](
                                        gates[gate] if alternates else sum, sum
                                    ).cast[c_dtype]()
                                )
        comptime if is_apart:
            named_barrier_sync(1, 128)
            if columns.half == 0:
                comptime for i in range(rows // 2):
                    var output = (
                        columns.first + (lane >> 2) + UInt32(i // 2 % 2 * 8)
                    )
                    var row = UInt32(i // 4 * 8 + i % 2) + (lane & 3) * 2
                    if output < columns.width and row < UInt32(product.m):
                        var up = shared_value(
                            partial + (thread + 64) * 4 + UInt32(i * 128 * 4)
                        )
                        c.unsafe_offset(
                            Int(row) * Int(columns.width) + Int(output)
                        ).unsafe_store(
                            product.epilogue.activated[1](gates[i], up).cast[
                                c_dtype
                            ]()
                        )
        comptime if not persistent:
            return
