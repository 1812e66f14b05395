"""The sum of what the blocks of a cluster have of one tile, through shared memory.

Each block has multiplied its own part of the k blocks, and so has sums for the
whole tile. It hands each block, itself included, a share of the columns; each
adds up what it has received in the order of the ranks. The ring is used up by
then, and takes what is handed over.
"""

from std.sys import _RegisterPackType, inlined_assembly
from std.utils import StaticTuple

from .config import CONSUMERS, Config, Shared
from .epilogue import Sums
from .ptx import cluster_arrive, cluster_wait, map_to_rank

comptime _THREADS = CONSUMERS * 128
# Bytes of the ring for shares of columns; sums of rows follow.
comptime _ROW_SUMS = 128 * 1024


@fieldwise_init
struct Totals[count: Int](Sums):
    """Sums over the blocks of a cluster.

    Parameters:
        count: How many a thread has.
    """

    var values: StaticTuple[Float32, Self.count]
    """The sums."""

    @always_inline
    def at[i: Int](self) -> Float32:
        """Returns a sum.

        Parameters:
            i: Which one.

        Returns:
            The sum.
        """
        return self.values[i]


@fieldwise_init
struct ClusterSum[config: Config](TrivialRegisterPassable):
    """What a consumer thread needs to sum over the blocks of its cluster.

    Parameters:
        config: Compile-time choices.
    """

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
        # Neighbouring threads write neighbouring chunks of 16 bytes.
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
        """Hands the blocks their shares.

        Parameters:
            S: How the sums are kept.

        Args:
            own: The block's own sums.
        """
        comptime for receiver in range(Self.config.cluster):
            var base = map_to_rank(self.shared.x_tile(0), UInt32(receiver))
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
        """Hands the sum of a row of x to the first block.

        Args:
            sum: The block's own sum.
            row: The row in the tile.
        """
        var base = map_to_rank(self.shared.x_tile(0) + _ROW_SUMS, 0)
        inlined_assembly[
            "st.shared::cluster.f32 [$0], $1;",
            NoneType,
            constraints="r,f,~{memory}",
        ](base + (self.rank * UInt32(Self.config.rows()) + row) * 4, sum)

    @always_inline
    def total(self) -> Totals[Self.share]:
        """Sums up this block's share.

        Returns:
            The sums over all blocks.
        """
        var totals = Totals[Self.share](
            StaticTuple[Float32, Self.share](Float32(0))
        )
        comptime for source in range(Self.config.cluster):
            comptime for chunk in range(Self.share // 4):
                var four = inlined_assembly[
                    "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];",
                    _RegisterPackType[Float32, Float32, Float32, Float32],
                    constraints="=f,=f,=f,=f,r,~{memory}",
                ](self._place(self.shared.x_tile(0), UInt32(source), chunk))
                comptime first = chunk * 4
                totals.values[first] += four[0]
                totals.values[first + 1] += four[1]
                totals.values[first + 2] += four[2]
                totals.values[first + 3] += four[3]
        return totals

    @always_inline
    def total_row_sum(self, row: UInt32) -> Float32:
        """Sums up the sums of a row of x, in the first block.

        Args:
            row: The row in the tile.

        Returns:
            The sum over all blocks.
        """
        var total = Float32(0)
        comptime for source in range(Self.config.cluster):
            total += inlined_assembly[
                "ld.shared.f32 $0, [$1];",
                Float32,
                constraints="=f,r,~{memory}",
            ](
                self.shared.x_tile(0)
                + _ROW_SUMS
                + (UInt32(source * Self.config.rows()) + row) * 4
            )
        return total


@always_inline
def meet_cluster():
    """Waits for all threads of the cluster, and orders their accesses."""
    cluster_arrive()
    cluster_wait()
