"""Sums of the rows of a transposed a, taken while its tiles are multiplied.

The gradient of a bias is such a sum: in wgrad, a is the transposed dy. In a tile of 64 rows of K by 64 rows of a, a thread adds up 8 neighboring
rows of a over every sixteenth row of K; the 16 threads that share them add up in a
fixed order at the end.
"""

from max.gpu.primitives import warp

from ..row_hook import Gathering
from .barriers import named_barrier_sync
from .shared_memory import shared_eight, shared_value, store_shared_value
from .wgmma import K_BLOCK

comptime _Eight = SIMD[DType.float32, 8]


@doc_hidden
@fieldwise_init
struct TransposedSums(Gathering):
    """Sums over the elements one thread has seen of 8 rows."""

    var sums: _Eight
    """The sums."""

    @always_inline
    def add[dtype: DType, first: Bool](mut self, tile: UInt32, thread: UInt32):
        """Adds one k block."""
        var chunk = thread & 7
        var down = thread >> 3
        # Every sixteenth row has the same place in the swizzle.
        var address = tile + down * 128 + ((chunk ^ (down & 7)) << 4)
        var block = _Eight(0)
        comptime for i in range(K_BLOCK // 16):
            block += shared_eight[dtype](address + UInt32(i * 16 * 128))
        self.sums = block if first else self.sums + block

    @always_inline
    def finish(
        self, vectors: UInt32, consumer: UInt32, thread: UInt32
    ) -> Float32:
        """Adds up what the threads of a warpgroup have."""
        var sums = self.sums
        comptime for distance in [8, 16]:
            comptime for i in range(8):
                sums[i] += warp.shuffle_xor(sums[i], UInt32(distance))
        var own = vectors + consumer * 1024
        if thread & 31 < 8:
            var address = own + (thread >> 5) * 256 + (thread & 7) * 32
            comptime for i in range(8):
                store_shared_value(address + UInt32(i * 4), sums[i])
        named_barrier_sync(Int32(consumer) + 1, 128)
        var total = Float32(0)
        if thread < 64:
            comptime for i in range(4):
                total += shared_value(own + thread * 4 + UInt32(i * 256))
        return total
