"""Row statistics taken from the tiles of x while they are multiplied.

K must be a multiple of the k block: the copy engine pads the last one with
zeros, which sums may ignore but a variance may not. Two neighbouring lanes share a row: each reads half of its 64 elements of a k
block from shared memory. A warp gathers the same 16 rows whose sums its
accumulators hold, so that the results need only a shuffle to reach them.
"""

from std.math import sqrt
from std.memory import bitcast
from std.sys import _RegisterPackType, inlined_assembly
from max.gpu.primitives import warp

from .epilogue import RowFactors
from .wgmma import K_BLOCK


trait Gathering(TrivialRegisterPassable):
    """What a warpgroup gathers from its rows of x while it multiplies them."""

    def add[dtype: DType, first: Bool](mut self, tile: UInt32, thread: UInt32):
        """Adds one k block.

        Parameters:
            dtype: Type of x.
            first: Whether this is the rows' first block.

        Args:
            tile: Shared address of the warpgroup's 64 rows of the block.
            thread: Thread in its warpgroup.
        """
        ...


comptime _Four = SIMD[DType.float32, 4]


@always_inline
def shared_chunk[dtype: DType](address: UInt32) -> SIMD[DType.float32, 8]:
    """Loads eight neighbouring elements.

    Parameters:
        dtype: Their type.

    Args:
        address: Their shared address, a multiple of 16.

    Returns:
        The elements.
    """
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


@fieldwise_init
struct RowSums(Gathering):
    """Sums over the elements one lane has seen of its row."""

    var shift: Float32
    """A value near the row's mean, the same in both lanes."""
    var sum: Float32
    """Sum of the distances to the shift."""
    var squares: Float32
    """Sum of the squared distances."""

    @always_inline
    def add[dtype: DType, first: Bool](mut self, tile: UInt32, thread: UInt32):
        """Adds one k block.

        Parameters:
            dtype: Type of x.
            first: Whether this is the row's first block, which sets the shift.

        Args:
            tile: Shared address of the warpgroup's 64 rows of the block.
            thread: Thread in its warpgroup.
        """
        var row = thread >> 1
        var chunk = (thread & 1) * 4
        var address = tile + row * 128
        comptime if first:
            var total = SIMD[DType.float32, 8](0)
            comptime for i in range(4):
                total += shared_chunk[dtype](
                    address + (((chunk + UInt32(i)) ^ (row & 7)) << 4)
                )
            var own = total.reduce_add()
            self = Self((own + warp.shuffle_xor(own, 1)) / K_BLOCK, 0, 0)
        # A block is summed by itself first: fewer roundings in a row.
        var sum = _Four(0)
        var squares = _Four(0)
        comptime for i in range(4):
            var values = shared_chunk[dtype](
                address + (((chunk + UInt32(i)) ^ (row & 7)) << 4)
            )
            comptime for half in range(2):
                var distance = values.slice[4, offset=4 * half]() - self.shift
                sum += distance
                squares = distance.fma(distance, squares)
        self.sum += sum.reduce_add()
        self.squares += squares.reduce_add()

    @always_inline
    def finish_part(self, k: Float32) -> SIMD[DType.float32, 2]:
        """Turns the sums of both lanes into what is joined with other parts.

        Args:
            k: Elements of this part of the row.

        Returns:
            Their mean, and the sum of their squared distances to it; the same
            in both lanes.
        """
        var sum = self.sum + warp.shuffle_xor(self.sum, 1)
        var squares = self.squares + warp.shuffle_xor(self.squares, 1)
        var offset = sum / k
        return {self.shift + offset, max(squares - sum * offset, 0)}

    @always_inline
    def finish(self, k: Float32, eps: Float32) -> RowFactors:
        """Turns the sums of both lanes into the row's statistics.

        Args:
            k: Elements of the row.
            eps: Added to the variance.

        Returns:
            The statistics, the same in both lanes.
        """
        var own = self.finish_part(k)
        return RowFactors(1 / sqrt(own[1] / k + eps), own[0])


@always_inline
def factors_of_row(own: RowFactors, row: UInt32) -> RowFactors:
    """Fetches the statistics of a row of this warp.

    Args:
        own: Statistics of row lane / 2.
        row: Which of the 16 rows.

    Returns:
        Its statistics.
    """
    return RowFactors(
        warp.shuffle_idx(own.rstd, row * 2), warp.shuffle_idx(own.mean, row * 2)
    )
