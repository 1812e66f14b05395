"""Row statistics taken from the tiles of x while they are multiplied.

The warps beside the producing one have nothing else to do. Each reads groups
of 16 rows of every k block from shared memory, two neighbouring lanes a row,
and leaves the results of a tile in the output boxes of the warps that need
them, which are unused at that time.
"""

from std.math import sqrt
from std.memory import bitcast
from std.sys import _RegisterPackType, inlined_assembly
from std.utils import StaticTuple
from max.gpu.primitives import warp

from .config import BOX_BYTES, CONSUMER_WARPS, GATHERERS, Config, Ring, Shared
from .epilogue import RowFactors
from .ptx import mbarrier_arrive, mbarrier_wait, warp_sync
from .tiles import Tiles
from .wgmma import K_BLOCK

comptime _Four = SIMD[DType.float32, 4]
comptime _GROUPS = (CONSUMER_WARPS + GATHERERS - 1) // GATHERERS


@always_inline
def _chunk[dtype: DType](address: UInt32) -> SIMD[DType.float32, 8]:
    var words = inlined_assembly[
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
        _RegisterPackType[UInt32, UInt32, UInt32, UInt32],
        constraints="=r,=r,=r,=r,r,~{memory}",
    ](address)
    var pairs = SIMD[DType.uint32, 4](words[0], words[1], words[2], words[3])
    comptime if dtype == DType.bfloat16:
        # Either half is the upper half of a float32; a sum does not mind that
        # this changes their order.
        return bitcast[DType.float32, 4](pairs << 16).join(
            bitcast[DType.float32, 4](pairs & 0xFFFF0000)
        )
    else:
        return bitcast[dtype, 8](pairs).cast[DType.float32]()


@fieldwise_init
struct RowSums(TrivialRegisterPassable):
    """Sums over the elements one lane has seen of its row."""

    var shift: Float32
    """A value near the row's mean, the same in both lanes."""
    var sum: Float32
    """Sum of the distances to the shift."""
    var squares: Float32
    """Sum of the squared distances."""

    @always_inline
    def add[dtype: DType](mut self, rows: UInt32, lane: UInt32, first: Bool):
        """Adds one k block.

        Parameters:
            dtype: Type of x.

        Args:
            rows: Shared address of the 16 rows of the block.
            lane: Lane of the thread.
            first: Whether this is the row's first block, which sets the shift.
        """
        var row = lane >> 1
        var chunk = (lane & 1) * 4
        var address = rows + row * 128
        if first:
            var total = SIMD[DType.float32, 8](0)
            comptime for i in range(4):
                total += _chunk[dtype](
                    address + (((chunk + UInt32(i)) ^ (row & 7)) << 4)
                )
            var own = total.reduce_add()
            self = Self((own + warp.shuffle_xor(own, 1)) / K_BLOCK, 0, 0)
        # A block is summed by itself first: fewer roundings in a row.
        var sum = _Four(0)
        var squares = _Four(0)
        comptime for i in range(4):
            var values = _chunk[dtype](
                address + (((chunk + UInt32(i)) ^ (row & 7)) << 4)
            )
            comptime for half in range(2):
                var distance = values.slice[4, offset=4 * half]() - self.shift
                sum += distance
                squares = distance.fma(distance, squares)
        self.sum += sum.reduce_add()
        self.squares += squares.reduce_add()

    @always_inline
    def finish(self, k: Float32, eps: Float32) -> RowFactors:
        """Turns the sums of both lanes into the row's statistics.

        Args:
            k: Elements of the row.
            eps: Added to the variance.

        Returns:
            The statistics, the same in both lanes.
        """
        var sum = self.sum + warp.shuffle_xor(self.sum, 1)
        var squares = self.squares + warp.shuffle_xor(self.squares, 1)
        var offset = sum / k
        var variance = max(squares - sum * offset, 0) / k
        return RowFactors(1 / sqrt(variance + eps), self.shift + offset)


@always_inline
def gather[
    dtype: DType, config: Config
](
    shared: Shared[config],
    tiles: Tiles,
    rank: UInt32,
    blocks: UInt32,
    gatherer: UInt32,
    lane: UInt32,
    mean: Pointer[Float32, MutAnyOrigin],
    rstd: Pointer[Float32, MutAnyOrigin],
    eps: Float32,
    m: UInt32,
):
    """Gathers the statistics of the rows of all tiles of this block.

    Parameters:
        dtype: Type of x.
        config: Compile-time choices.

    Args:
        shared: Shared memory of the block.
        tiles: The tiles.
        rank: Rank of the block in its cluster.
        blocks: K blocks of a tile.
        gatherer: Which of the gathering warps this is.
        lane: Lane of the thread.
        mean: Receives the means [m].
        rstd: Receives the reciprocal deviations [m].
        eps: Added to the variances.
        m: Rows of x.
    """
    var at = Ring(0, 0)
    var parity = UInt32(0)
    var sums = StaticTuple[RowSums, _GROUPS](RowSums(0, 0, 0))
    var index = tiles.first
    while index < tiles.count():
        var place = tiles.at(index)
        index += tiles.step
        for block in range(blocks):
            mbarrier_wait(shared.full(at.slot), at.parity)
            comptime for i in range(_GROUPS):
                var group = gatherer + UInt32(i * GATHERERS)
                if group < CONSUMER_WARPS:
                    sums[i].add[dtype](
                        shared.x_tile(at.slot) + group * BOX_BYTES,
                        lane,
                        block == 0,
                    )
            warp_sync()
            # Only this block's own copies overwrite its tile of x.
            if lane == 0:
                mbarrier_arrive(shared.empty(at.slot))
            at.advance[config.stages]()

        mbarrier_wait(shared.statistics_empty(), parity)
        parity ^= 1
        comptime for i in range(_GROUPS):
            var group = gatherer + UInt32(i * GATHERERS)
            if group < CONSUMER_WARPS:
                var own = sums[i].finish(Float32(blocks * K_BLOCK), eps)
                var row = (
                    (place[0] * UInt32(config.cluster) + rank)
                    * UInt32(config.rows())
                    + group * 16
                    + (lane >> 1)
                )
                if (lane & 1) == 0:
                    inlined_assembly[
                        "st.shared.v2.f32 [$0], {$1, $2};",
                        NoneType,
                        constraints="r,f,f,~{memory}",
                    ](
                        shared.boxes(group) + BOX_BYTES + (lane >> 1) * 8,
                        own.rstd,
                        own.mean,
                    )
                    if place[1] == 0 and row < m:
                        mean.unsafe_offset(Int(row)).unsafe_store(own.mean)
                        rstd.unsafe_offset(Int(row)).unsafe_store(own.rstd)
        warp_sync()
        if lane == 0:
            mbarrier_arrive(shared.statistics_full())
