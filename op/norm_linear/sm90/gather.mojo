"""Row statistics taken from the tiles of x while they are multiplied.

K must be a multiple of the k block: TMA pads the last one with zeros, which
change no sum but do change a variance. Two neighboring lanes share a row: each
reads half of its 64 elements of a k block from shared memory. A warp gathers
the same 16 rows whose sums its accumulators hold, so that the results need only
a shuffle to reach them.
"""

from max.gpu.primitives import warp

from ...gemm.epilogue import RowTerms, Vector
from ...gemm.row_hook import Part, RowHook, RowSums
from ...gemm.sm90.shared_memory import shared_eight
from ...gemm.sm90.wgmma import K_BLOCK
from ...norms.norm import Norm, part_rstd

comptime _Four = SIMD[DType.float32, 4]


@doc_hidden
@fieldwise_init
struct Moments[N: Norm](RowSums):
    """Sums over the elements one lane has seen of its row."""

    var shift: Float32
    """What distances are measured from, the same in both lanes."""
    var sum: Float32
    """Sum of the distances."""
    var squares: Float32
    """Sum of their squares."""

    @always_inline
    def __init__(out self):
        """Has seen nothing."""
        self = Self(0, 0, 0)

    @always_inline
    def add[dtype: DType, first: Bool](mut self, tile: UInt32, thread: UInt32):
        """Adds one k block."""
        var row = thread >> 1
        var chunk = (thread & 1) * 4
        var address = tile + row * 128
        comptime if first:
            self = Self()
            comptime if Self.N.has_mean:
                var total = SIMD[DType.float32, 8](0)
                comptime for i in range(4):
                    total += shared_eight[dtype](
                        address + (((chunk + UInt32(i)) ^ (row & 7)) << 4)
                    )
                var own = total.reduce_add()
                self.shift = Self.N.shift(
                    own + warp.shuffle_xor(own, 1), Float32(K_BLOCK)
                )
        # A block is summed separately first: sums are shorter chains of roundings.
        var sum = _Four(0)
        var squares = _Four(0)
        comptime for i in range(4):
            var values = shared_eight[dtype](
                address + (((chunk + UInt32(i)) ^ (row & 7)) << 4)
            )
            comptime for half in range(2):
                var distance = Self.N.distance[4](
                    values.slice[4, offset=4 * half](), self.shift
                )
                sum += distance
                squares = distance.fma(distance, squares)
        self.sum += sum.reduce_add()
        self.squares += squares.reduce_add()

    @always_inline
    def part(self, count: Float32) -> Part:
        """Adds up what both lanes have."""
        var sum = self.sum + warp.shuffle_xor(self.sum, 1)
        var squares = self.squares + warp.shuffle_xor(self.squares, 1)
        return Self.N.part(self.shift, sum, squares, count)


@fieldwise_init
struct Statistics[N: Norm](RowHook):
    """Computes rstd and mean of the rows of x for the epilogue, and stores them.

    Parameters:
        N: The norm.
    """

    comptime name = StaticString("_gathers")
    """Tells kernels apart."""
    comptime gathers = True
    """It computes the terms."""
    comptime Sums = Moments[Self.N]
    """The sums that it computes them from."""

    var eps: Float32
    """Added to the variances."""
    var mean: Vector[DType.float32]
    """The means [M], written; not used if the norm has none."""
    var rstd: Vector[DType.float32]
    """The reciprocal deviations [M], written."""

    @doc_hidden
    @always_inline
    def join(self, first: Part, second: Part, counts: Part) -> Part:
        return Self.N.join(first, second, counts)

    @doc_hidden
    @always_inline
    def terms(self, part: Part, count: Float32) -> RowTerms[]:
        return RowTerms[](part_rstd(part, count, self.eps), part[0])

    @doc_hidden
    @always_inline
    def keep(self, row: Int, terms: RowTerms[]):
        comptime if Self.N.has_mean:
            self.mean.unsafe_offset(row).unsafe_store(terms.offset)
        self.rstd.unsafe_offset(row).unsafe_store(terms.scale)
