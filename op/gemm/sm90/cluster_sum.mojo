"""Adds up the sums that the blocks of a cluster have of one tile, through shared memory.

Each block has multiplied its own part of the k blocks, and so has sums of the
whole tile. It sends each block, itself included, a share of the columns; each
adds up what it has received, in the order of the ranks. The ring is free by
then, and holds the sums that are exchanged.
"""

from std.sys import _RegisterPackType, inlined_assembly
from std.utils import StaticTuple

from .barriers import map_to_rank
from .config import CONSUMERS, TILE_ROWS, Config
from .shared_layout import Shared
from .shared_memory import shared_value, store_remote_value
from .sums import Sums

comptime _THREADS = CONSUMERS * 128
# Bytes of the ring for shares of columns; sums of rows follow.
comptime _ROW_SUMS = 128 * 1024


@doc_hidden
@fieldwise_init
struct Totals[count: Int](Sums):
    """Sums over the blocks of a cluster."""

    var values: StaticTuple[Float32, Self.count]
    """The sums."""

    @always_inline
    def at[i: Int](self) -> Float32:
        """Returns a sum."""
        return self.values[i]


@doc_hidden
@fieldwise_init
struct ClusterSum[config: Config](TrivialRegisterPassable):
    """What a consumer thread needs to sum over the blocks of its cluster."""

    comptime share = Self.config.columns // 2 // Self.config.cluster
    """Sums that a thread ends with."""
    comptime columns = Self.config.columns // Self.config.cluster
    """Columns that a block ends with."""

    var shared: Shared[Self.config]
    """Shared memory of the block."""
    var rank: UInt32
    """Rank of the block."""
    var thread: UInt32
    """The thread, counted from the first consumer."""

    @always_inline
    def _place(self, base: UInt32, source: UInt32, chunk: Int) -> UInt32:
        # Neighboring threads write neighboring chunks of 16 bytes.
        return (
            base
            + (
                (source * UInt32(Self.share // 4) + UInt32(chunk)) * _THREADS
                + self.thread
            )
            * 16
        )

    @always_inline
    def send[S: Sums, //](self, own: S):
        """Hands the blocks their shares."""
        comptime for receiver in range(Self.config.cluster):
            var base = map_to_rank(self.shared.a_tile(0), UInt32(receiver))
            comptime for chunk in range(Self.share // 4):
                comptime first = receiver * Self.share + chunk * 4
                inlined_assembly[
                    "st.shared::cluster.v4.f32 [$0], {$1, $2, $3, $4};",
                    NoneType,
                    constraints="r,f,f,f,f,~{memory}",
                ](
                    self._place(base, self.rank, chunk),
                    own.at[first](),
                    own.at[first + 1](),
                    own.at[first + 2](),
                    own.at[first + 3](),
                )

    @always_inline
    def send_row_sum(self, sum: Float32, row: UInt32):
        """Hands the sum of a row of a to the first block."""
        var base = map_to_rank(self.shared.a_tile(0) + _ROW_SUMS, 0)
        store_remote_value(
            base + (self.rank * UInt32(TILE_ROWS) + row) * 4, sum
        )

    @always_inline
    def total(self) -> Totals[Self.share]:
        """Sums up this block's share."""
        var totals = Totals[Self.share](
            StaticTuple[Float32, Self.share](Float32(0))
        )
        comptime for source in range(Self.config.cluster):
            comptime for chunk in range(Self.share // 4):
                var four = inlined_assembly[
                    "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];",
                    _RegisterPackType[Float32, Float32, Float32, Float32],
                    constraints="=f,=f,=f,=f,r,~{memory}",
                ](self._place(self.shared.a_tile(0), UInt32(source), chunk))
                comptime first = chunk * 4
                totals.values[first] += four[0]
                totals.values[first + 1] += four[1]
                totals.values[first + 2] += four[2]
                totals.values[first + 3] += four[3]
        return totals

    @always_inline
    def total_row_sum(self, row: UInt32) -> Float32:
        """Sums up the sums of a row of a, in the first block."""
        var total = Float32(0)
        comptime for source in range(Self.config.cluster):
            total += shared_value(
                self.shared.a_tile(0)
                + _ROW_SUMS
                + (UInt32(source * TILE_ROWS) + row) * 4
            )
        return total
