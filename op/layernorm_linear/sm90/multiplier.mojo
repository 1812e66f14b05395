"""The products of a warpgroup: from the tiles in the ring to its accumulators."""

from .config import Config, Ring, Shared
from .gather import Gathering
from .progress import Progress
from .ptx import (
    mbarrier_arrive,
    mbarrier_arrive_cluster,
    mbarrier_wait,
    named_barrier_sync,
)
from .wgmma import (
    Accumulator,
    multiply_first,
    multiply_next,
    wait_previous,
)


# K blocks that take longer than the stores of a tile.
comptime _STORED = 4


@fieldwise_init
struct Multiplier[dtype: DType, config: Config](TrivialRegisterPassable):
    """What a warpgroup needs to multiply the tiles in the ring.

    Parameters:
        dtype: Type of the operands.
        config: Compile-time choices.
    """

    var shared: Shared[Self.config]
    """Shared memory of the block."""
    var consumer: UInt32
    """Which of the consumer warpgroups this is."""
    var x_tiles: UInt32
    """Descriptor of its rows of x in the first slot."""
    var w_tiles: UInt32
    """Descriptor of the weight in the first slot."""
    var rows: UInt32
    """Address of its rows of x in the first slot."""
    var thread: UInt32
    """Thread in its warpgroup."""
    var empty: UInt32
    """Barrier of the first slot of the block to tell."""
    var releases: Bool
    """Whether this thread tells a block that a slot is used up."""

    @always_inline
    def release[gathers: Bool](self, slot: UInt32):
        """Tells every block of the cluster that a slot is used up.

        A warpgroup's products end together, so that one thread may tell;
        reads by its threads do not.

        Parameters:
            gathers: Whether threads have read the slot.

        Args:
            slot: The slot.
        """
        comptime if gathers:
            named_barrier_sync(Int32(self.consumer) + 1, 128)
        if self.releases:
            comptime if Self.config.sharers() > 1:
                mbarrier_arrive_cluster(self.empty + slot * 8)
            else:
                mbarrier_arrive(self.empty + slot * 8)

    @always_inline
    def start[
        G: Gathering, //, gathers: Bool
    ](
        self,
        mut at: Ring,
        mut previous: UInt32,
        mut gathered: G,
        mut progress: Progress[Self.config.passes],
        blocks: UInt32,
    ) -> Accumulator[Self.config.slices * Self.config.columns // 2]:
        """Starts the products of a tile; the last ones still run on return.

        Parameters:
            G: What can be gathered.
            gathers: Whether to do that.

        Args:
            at: Place in the ring.
            previous: Receives the slot still in use.
            gathered: Receives what is gathered.
            progress: What is to be told of the tile before, as soon as its
                stores have had time to end.
            blocks: K blocks of the tile.

        Returns:
            The accumulators.
        """
        comptime columns = Self.config.columns
        comptime slices = Self.config.slices
        comptime x_step = UInt32(Self.config.x_bytes())
        comptime w_step = UInt32(Self.config.w_bytes() // 16)
        mbarrier_wait(self.shared.full(at.slot), at.parity)
        var accumulator = multiply_first[
            Self.dtype,
            columns,
            slices,
            Self.config.x_transposed,
            Self.config.w_transposed,
        ](
            self.x_tiles + at.slot * (x_step // 16),
            self.w_tiles + at.slot * w_step,
        )
        comptime if gathers:
            gathered.add[Self.dtype, True](
                self.rows + at.slot * x_step, self.thread
            )
        previous = at.slot
        at.advance[Self.config.stages]()
        for block in range(UInt32(1), blocks):
            comptime if Self.config.passes:
                if block == _STORED:
                    progress.tell()
            mbarrier_wait(self.shared.full(at.slot), at.parity)
            accumulator = multiply_next[
                Self.dtype,
                columns,
                slices,
                Self.config.x_transposed,
                Self.config.w_transposed,
            ](
                accumulator,
                self.x_tiles + at.slot * (x_step // 16),
                self.w_tiles + at.slot * w_step,
            )
            # One group stays in flight; those before it have read their slot.
            wait_previous()
            self.release[gathers](previous)
            comptime if gathers:
                gathered.add[Self.dtype, False](
                    self.rows + at.slot * x_step, self.thread
                )
            previous = at.slot
            at.advance[Self.config.stages]()
        return accumulator
