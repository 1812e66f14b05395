"""The persistent matrix kernel: y = epilogue(x @ w^T).

One warp copies tiles of x and w into a ring of shared-memory slots; two
warpgroups multiply them. The ring runs on across output tiles, so the copies
for the next tile start while the last one is being finished.
"""

from std.memory import AddressSpace, OpaquePointer
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, grid_dim
from max.gpu import thread_idx
from max.gpu.host.nvidia.tma import TMADescriptor
from max.gpu.memory import external_memory
from max.gpu.primitives import warp

from .config import CONSUMERS, THREADS, Config
from .epilogue import CORRECTED, PLAIN, RowFactors, store_slice
from .gather import RowSums, factors_of_row
from .ptx import *
from .tiles import Tiles
from .wgmma import (
    K_BLOCK,
    Accumulator,
    multiply_first,
    multiply_next,
    operand_descriptor,
    wait_all,
    wait_previous,
)

comptime _LEAD_BARRIER = 1


@always_inline
def _address_of(ref map: TMADescriptor) -> OpaquePointer[ImmutAnyOrigin]:
    return (
        Pointer(to=map)
        .unsafe_bitcast[NoneType]()
        .as_imm()
        .unsafe_origin_cast[ImmutAnyOrigin]()
    )


@fieldwise_init
struct Ring(TrivialRegisterPassable):
    """A place in the ring: which slot, and the parity of its current round."""

    var slot: UInt32
    """The slot."""
    var parity: UInt32
    """Parity of completed rounds."""

    @always_inline
    def advance[stages: Int](mut self):
        """Moves to the next slot.

        Parameters:
            stages: Slots of the ring.
        """
        self.slot += 1
        if self.slot == UInt32(stages):
            self.slot = 0
            self.parity ^= 1


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(1),
    `nvvm.cluster_dim`=StaticTuple[Int32, 3](Int32(config.cluster), 1, 1),
)
@__llvm_arg_metadata(x_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(w_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(y_map, `nvvm.grid_constant`)
@__name(
    t"fused_norm_gemm_{dtype}_{config.rows()}x{config.columns}x{config.stages}_lead{config.lead}_cluster{config.cluster}_bulk{config.bulk}_gather{config.gather}_mode{mode}"
)
def matrix_kernel[
    dtype: DType, config: Config, mode: Int
](
    x_map: TMADescriptor,
    w_map: TMADescriptor,
    y_map: TMADescriptor,
    y: Pointer[UInt8, MutAnyOrigin],
    mean: Pointer[Float32, MutAnyOrigin],
    rstd: Pointer[Float32, MutAnyOrigin],
    eps: Float32,
    s: Pointer[Float32, ImmutAnyOrigin],
    c: Pointer[Float32, ImmutAnyOrigin],
    m: Int32,
    n: Int32,
    k: Int32,
    band: Int32,
):
    """Computes tiles of y until there are none left.

    Parameters:
        dtype: Type of x, w and y: bfloat16 or float16.
        config: Compile-time choices.
        mode: Epilogue, `PLAIN`, `SCALED` or `CORRECTED`.

    Args:
        x_map: Tensor map of x [m, k], boxes of config.rows() by 64.
        w_map: Tensor map of w [n, k], boxes of config.columns / cluster by 64.
        y_map: Tensor map of y [m, n], boxes of 16 by 64.
        y: Address of y.
        mean: Means of the rows of x [m]; written if gathered, otherwise read
            in mode `CORRECTED`.
        rstd: Reciprocal deviations of the rows [m]; written if gathered,
            otherwise read unless in mode `PLAIN`.
        eps: Added to gathered variances.
        s: Row sums of w [n]; read in mode `CORRECTED`.
        c: Constants added to the columns [n]; not read in mode `PLAIN`.
        m: Rows of x and y.
        n: Columns of y.
        k: Columns of x and w.
        band: Rows of cluster tiles in a band of the walk.
    """
    comptime assert not config.gather or config.slices == 1
    comptime stages = config.stages
    comptime cluster = config.cluster
    comptime slices = config.slices
    comptime columns = config.columns
    comptime x_step = config.x_bytes()
    comptime w_step = config.w_bytes()
    # A warpgroup's products end together; reads by its threads do not.
    comptime releases_per_consumer = 4 if config.gather else 1
    comptime gather = config.gather and mode != PLAIN

    var base = UInt32(
        Int(
            external_memory[
                UInt8, address_space=AddressSpace.SHARED, alignment=1024
            ]()
        )
    )
    var full = base + UInt32(config.barriers_offset())
    var empty = full + UInt32(stages * 8)
    var vectors_full = empty + UInt32(stages * 8)
    var vectors_empty = vectors_full + 8
    var vectors = base + UInt32(config.vectors_offset())

    var thread = UInt32(thread_idx.x)
    var group = warp.broadcast(thread // 128)
    var rank = UInt32(0)
    comptime if cluster > 1:
        rank = cluster_rank()

    if thread == 0:
        comptime for stage in range(stages):
            mbarrier_init(full + UInt32(stage * 8), 1)
            mbarrier_init(
                empty + UInt32(stage * 8),
                Int32(CONSUMERS * cluster * releases_per_consumer),
            )
        mbarrier_init(vectors_full, 1)
        mbarrier_init(vectors_empty, Int32(CONSUMERS * 4))
        fence_barrier_init()
        prefetch_tensor_map(_address_of(x_map))
        prefetch_tensor_map(_address_of(w_map))
        prefetch_tensor_map(_address_of(y_map))
    # Anyone may have written the operands just now; but the kernel that makes
    # the statistics has itself waited for all earlier ones.
    comptime if mode == PLAIN or config.gather:
        wait_on_earlier_grids()
    let_later_grids_start()
    # No block may reach for its neighbour's barriers before they are made.
    comptime if cluster > 1:
        cluster_arrive()
        cluster_wait()
    else:
        named_barrier_sync(0, Int32(THREADS))

    comptime cluster_rows = cluster * config.rows()
    var tiles = Tiles(
        UInt32(m + Int32(cluster_rows - 1)) // UInt32(cluster_rows),
        UInt32(n + Int32(columns - 1)) // UInt32(columns),
        UInt32(band),
    )
    var blocks = UInt32(k + Int32(K_BLOCK - 1)) // UInt32(K_BLOCK)
    var count = tiles.count()
    var step = UInt32(grid_dim.x) // UInt32(cluster)
    var index = UInt32(block_idx.x) // UInt32(cluster)

    if group == 0:
        registers_lower[24]()
        if thread == 0:
            var at = Ring(0, 1)
            while index < count:
                var place = tiles.at(index)
                var row = Int32(
                    (place[0] * UInt32(cluster) + rank)
                    * UInt32(config.rows())
                )
                var column = Int32(
                    place[1] * UInt32(columns)
                    + rank * UInt32(columns // cluster)
                )
                for block in range(blocks):
                    var barrier = full + at.slot * 8
                    mbarrier_wait(empty + at.slot * 8, at.parity)
                    mbarrier_expect_bytes(barrier, Int32(x_step + w_step))
                    load_tile(
                        base + at.slot * UInt32(x_step),
                        _address_of(x_map),
                        barrier,
                        Int32(block) * K_BLOCK,
                        row,
                    )
                    var w_tile = (
                        base
                        + UInt32(config.w_offset())
                        + at.slot * UInt32(w_step)
                    )
                    comptime if cluster > 1:
                        load_tile_multicast(
                            w_tile + rank * UInt32(w_step // cluster),
                            _address_of(w_map),
                            barrier,
                            Int32(block) * K_BLOCK,
                            column,
                            UInt16((1 << cluster) - 1),
                        )
                    else:
                        load_tile(
                            w_tile,
                            _address_of(w_map),
                            barrier,
                            Int32(block) * K_BLOCK,
                            column,
                        )
                    at.advance[stages]()
                index += step
        comptime if mode != PLAIN:
            if thread == 32:
                var parity = UInt32(1)
                while index < count:
                    var place = tiles.at(index)
                    var column = Int32(place[1] * UInt32(columns))
                    var bytes = min(Int32(columns), n - column) * 4
                    mbarrier_wait(vectors_empty, parity)
                    comptime if mode == CORRECTED:
                        mbarrier_expect_bytes(vectors_full, 2 * bytes)
                        load_bytes(
                            vectors + UInt32(columns * 4),
                            s.unsafe_offset(Int(column)),
                            bytes,
                            vectors_full,
                        )
                    else:
                        mbarrier_expect_bytes(vectors_full, bytes)
                    load_bytes(
                        vectors,
                        c.unsafe_offset(Int(column)),
                        bytes,
                        vectors_full,
                    )
                    parity ^= 1
                    index += step
    else:
        registers_raise[240]()
        var consumer = group - 1
        var lane = thread & 31
        var warp_in_group = warp.broadcast(thread >> 5) & 3
        var staging = (
            base
            + UInt32(config.staging_offset())
            + (consumer * 4 + warp_in_group) * 4096
        )
        var x_tiles = operand_descriptor(
            base + consumer * UInt32(slices * 64 * K_BLOCK * 2)
        )
        var w_tiles = operand_descriptor(base + UInt32(config.w_offset()))
        var releaser = lane if config.gather else thread & 127
        var releases = releaser < UInt32(cluster)
        var release = empty
        comptime if cluster > 1:
            release = map_to_rank(empty, releaser & UInt32(cluster - 1))
        var gathered = (
            base + consumer * UInt32(slices * 64 * 128) + warp_in_group * 2048
        )

        var at = Ring(0, 0)
        var parity = UInt32(0)
        while index < count:
            var place = tiles.at(index)
            index += step
            var row = (
                (place[0] * UInt32(cluster) + rank) * UInt32(config.rows())
                + consumer * UInt32(slices * 64)
                + warp_in_group * 16
            )
            var column = place[1] * UInt32(columns)

            # The second consumer starts a little later, so that one of them
            # finishes a tile while the other one multiplies.
            comptime if config.lead > 0:
                if consumer == 1:
                    named_barrier_sync(_LEAD_BARRIER, CONSUMERS * 128)
            mbarrier_wait(full + at.slot * 8, at.parity)
            var accumulator = multiply_first[dtype, columns, slices](
                x_tiles + at.slot * UInt32(x_step // 16),
                w_tiles + at.slot * UInt32(w_step // 16),
            )
            var sums = RowSums(0, 0, 0)
            comptime if gather:
                sums.add[dtype, True](
                    gathered + at.slot * UInt32(x_step), lane
                )
            var previous = at.slot
            at.advance[stages]()
            for block in range(UInt32(1), blocks):
                mbarrier_wait(full + at.slot * 8, at.parity)
                accumulator = multiply_next[dtype, columns, slices](
                    accumulator,
                    x_tiles + at.slot * UInt32(x_step // 16),
                    w_tiles + at.slot * UInt32(w_step // 16),
                )
                # One group stays in flight; the one before it has read its
                # slot.
                wait_previous()
                comptime if gather:
                    warp_sync()
                if releases:
                    comptime if cluster > 1:
                        mbarrier_arrive_cluster(release + previous * 8)
                    else:
                        mbarrier_arrive(release + previous * 8)
                comptime if config.lead > 0:
                    if consumer == 0 and block == UInt32(config.lead):
                        named_barrier_arrive(_LEAD_BARRIER, CONSUMERS * 128)
                comptime if gather:
                    sums.add[dtype, False](
                        gathered + at.slot * UInt32(x_step), lane
                    )
                previous = at.slot
                at.advance[stages]()
            comptime if config.lead > 0:
                if consumer == 0 and blocks <= UInt32(config.lead):
                    named_barrier_arrive(_LEAD_BARRIER, CONSUMERS * 128)
            # The last products still run while these are fetched. The grid
            # that makes them may have been running beside this one so far.
            wait_on_earlier_grids()
            var upper = StaticTuple[RowFactors, slices]()
            var lower = StaticTuple[RowFactors, slices]()
            comptime for slice in range(slices):
                upper[slice] = RowFactors(1, 0)
                lower[slice] = RowFactors(1, 0)
                comptime if gather:
                    var own = sums.finish(Float32(k), eps)
                    upper[slice] = factors_of_row(own, lane >> 2)
                    lower[slice] = factors_of_row(own, (lane >> 2) + 8)
                    var first = row + (lane >> 1)
                    if column == 0 and (lane & 1) == 0 and first < UInt32(m):
                        mean.unsafe_offset(Int(first)).unsafe_store(own.mean)
                        rstd.unsafe_offset(Int(first)).unsafe_store(own.rstd)
                elif mode != PLAIN:
                    var first = Int32(row + UInt32(slice * 64) + (lane >> 2))
                    if first < m:
                        upper[slice].rstd = rstd.unsafe_offset(
                            Int(first)
                        ).unsafe_load()
                        comptime if mode == CORRECTED:
                            upper[slice].mean = mean.unsafe_offset(
                                Int(first)
                            ).unsafe_load()
                    if first + 8 < m:
                        lower[slice].rstd = rstd.unsafe_offset(
                            Int(first + 8)
                        ).unsafe_load()
                        comptime if mode == CORRECTED:
                            lower[slice].mean = mean.unsafe_offset(
                                Int(first + 8)
                            ).unsafe_load()

            accumulator = wait_all[slices * columns // 2](accumulator)
            comptime if gather:
                warp_sync()
            if releases:
                comptime if cluster > 1:
                    mbarrier_arrive_cluster(release + previous * 8)
                else:
                    mbarrier_arrive(release + previous * 8)

            comptime if mode != PLAIN:
                mbarrier_wait(vectors_full, parity)
            comptime for slice in range(slices):
                store_slice[
                    slices * columns // 2,
                    dtype,
                    mode,
                    columns,
                    slice * columns // 2,
                    config.bulk,
                ](
                    accumulator,
                    upper[slice],
                    lower[slice],
                    vectors,
                    staging,
                    lane,
                    _address_of(y_map),
                    y,
                    UInt32(m),
                    UInt32(n),
                    column,
                    row + UInt32(slice * 64),
                )
            comptime if mode != PLAIN:
                if lane == 0:
                    mbarrier_arrive(vectors_empty)
                parity ^= 1
        comptime if config.bulk:
            if lane == 0:
                store_wait_read[0]()

    # Blocks leave together: a neighbour may still copy into this one's slots
    # or arrive at its barriers.
    comptime if cluster > 1:
        cluster_arrive()
        cluster_wait()
