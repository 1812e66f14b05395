"""The products of a warpgroup: from the tiles in the ring to its accumulators."""

from ...call import SCALE_BLOCK
from ..epilogue import Epilogue
from ..row_hook import Gathering, RowHook
from .addend import TileAddend, load_accumulator
from .barriers import (
    mbarrier_arrive,
    mbarrier_arrive_cluster,
    mbarrier_wait,
    named_barrier_arrive,
    named_barrier_sync,
)
from .config import Config
from .counters import Progress
from .eight_bits import result_type
from .product import Product
from .promotion import BlockScales, add_scaled, no_sums
from .ring import RingPlace
from .shared_layout import Shared
from .wgmma import (
    ROW_BYTES,
    SLICE_BYTES,
    Accumulator,
    multiply_first,
    multiply_next,
    row_elements,
    wait_all,
    wait_previous,
)


# After this many k blocks, the stores of the previous tile are complete.
comptime _STORED = 4
# After this many k blocks, tensor cores start with sums of nothing where they are added up in float32: what they lose of
# 512 products is far below what operands of 8 bits lose (docs/hopper-log.md, "Sums of gradients").
comptime _PROMOTED = UInt32(4)
# The first of the block's barriers at which alternating consumers wait for each other; those
# before are for the threads of each consumer.
comptime _PING_PONG = Int32(3)


@doc_hidden
@fieldwise_init
struct Multiplier[dtype: DType, config: Config, passes_on: Bool, adds: Bool](
    TrivialRegisterPassable
):
    """What a warpgroup needs to multiply the tiles in the ring."""

    var shared: Shared[Self.config]
    """Shared memory of the block."""
    var consumer: UInt32
    """Which of the consumer warpgroups this is."""
    var a_tiles: UInt32
    """Descriptor of its rows of a in the first slot."""
    var b_tiles: UInt32
    """Descriptor of b in the first slot."""
    var rows: UInt32
    """Address of its rows of a in the first slot."""
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
        """
        comptime if gathers:
            named_barrier_sync(Int32(self.consumer) + 1, 128)
        if self.releases:
            comptime if Self.config.sharers() > 1:
                mbarrier_arrive_cluster(self.empty + slot * 8)
            else:
                mbarrier_arrive(self.empty + slot * 8)

    @always_inline
    def _ping_pong_wait(self, waits: Bool):
        """Waits until the other consumer has started its last products."""
        comptime if Self.config.ping_pong:
            if waits:
                named_barrier_sync(_PING_PONG + Int32(self.consumer), 256)

    @always_inline
    def ping_pong_arrive(self):
        """Lets the other consumer start its products."""
        comptime if Self.config.ping_pong:
            named_barrier_arrive(_PING_PONG + 1 - Int32(self.consumer), 256)

    @always_inline
    def addend(self, mut at: RingPlace) -> TileAddend[Self.config]:
        """Finds what is added to a tile in the ring, once it is there."""
        comptime Found = TileAddend[Self.config]
        var lane = self.thread & 31
        var row = (self.thread >> 5) * 16 + (lane & 15)
        comptime if not Self.config.ping_pong:
            row += self.consumer * 64
        row *= ROW_BYTES
        var found = Found()
        comptime for slot in range(Found.slots):
            mbarrier_wait(self.shared.full(at.slot), at.parity)
            found.used[slot] = at.slot
            comptime for i in range(Found.boxes_of_half):
                comptime if i // Self.config.boxes_of_slot() == slot:
                    var box = row + self.shared.box_in_slot(
                        at.slot, i % Self.config.boxes_of_slot()
                    )
                    comptime for half in range(Self.config.halves()):
                        found.boxes[
                            half * Found.boxes_of_half + i
                        ] = box + UInt32(half * SLICE_BYTES)
            at.advance[Self.config.stages]()
        return found

    @always_inline
    def release_addend(self, addend: TileAddend[Self.config]):
        """Gives back its slots, once all threads of the warpgroup have read them."""
        comptime for slot in range(addend.slots):
            self.release[True](addend.used[slot])

    @always_inline
    def _first_sums(
        self, mut at: RingPlace
    ) -> Accumulator[Self.config.columns // 2 * Self.config.halves()]:
        """Takes what is added to a tile out of the ring, as sums to start with."""
        var found = self.addend(at)
        var sums = load_accumulator[
            result_type[Self.dtype](), Self.config.columns, Self.config.halves()
        ](found.boxes, self.thread & 31)
        self.release_addend(found)
        return sums

    @always_inline
    def start[
        G: Gathering, //, gathers: Bool
    ](
        self,
        mut at: RingPlace,
        mut previous: UInt32,
        mut gathered: G,
        mut progress: Progress[Self.passes_on],
        blocks: UInt32,
        waits: Bool,
    ) -> Accumulator[Self.config.columns // 2 * Self.config.halves()]:
        """Starts the products of a tile, for which this may have to wait for its turn;
        the last ones still run on return."""
        comptime columns = Self.config.columns
        comptime a_step = UInt32(Self.config.a_bytes())
        comptime b_step = UInt32(Self.config.b_bytes() // 16)
        var accumulator: Accumulator[
            Self.config.columns // 2 * Self.config.halves()
        ]
        # A slot may also be full with what came into it a round before: only now can
        # that not be.
        self._ping_pong_wait(waits)
        comptime if Self.adds:
            accumulator = self._first_sums(at)
        else:
            mbarrier_wait(self.shared.full(at.slot), at.parity)
            accumulator = multiply_first[
                Self.dtype,
                columns,
                Self.config.halves(),
                Self.config.a_transposed,
                Self.config.b_transposed,
            ](
                self.a_tiles + at.slot * (a_step // 16),
                self.b_tiles + at.slot * b_step,
            )
            comptime if gathers:
                gathered.add[Self.dtype, True](
                    self.rows + at.slot * a_step, self.thread
                )
            previous = at.slot
            at.advance[Self.config.stages]()
        for block in range(UInt32(0 if Self.adds else 1), blocks):
            comptime if Self.passes_on:
                if block == _STORED:
                    progress.tell()
            mbarrier_wait(self.shared.full(at.slot), at.parity)
            accumulator = multiply_next[
                Self.dtype,
                columns,
                Self.config.halves(),
                Self.config.a_transposed,
                Self.config.b_transposed,
            ](
                accumulator,
                self.a_tiles + at.slot * (a_step // 16),
                self.b_tiles + at.slot * b_step,
            )
            # One group stays in flight; those before it have read their slot.
            wait_previous()
            if not Self.adds or block > 0:
                self.release[gathers](previous)
            comptime if gathers:
                gathered.add[Self.dtype, False](
                    self.rows + at.slot * a_step, self.thread
                )
            previous = at.slot
            at.advance[Self.config.stages]()
        return accumulator

    @always_inline
    def scaled[
        E: Epilogue, H: RowHook, //, second: Bool = False
    ](
        self,
        mut at: RingPlace,
        blocks: UInt32,
        product: Product[E, H],
        row: UInt32,
        column: UInt32,
    ) -> Accumulator[Self.config.columns // 2 * Self.config.halves()]:
        """Multiplies a tile, the sums of each k block by scales of their own; nothing runs on on return.

        While this warpgroup scales, the other one multiplies."""
        comptime columns = Self.config.columns
        comptime registers = columns // 2 * Self.config.halves()
        comptime a_step = UInt32(Self.config.a_bytes() // 16)
        comptime b_step = UInt32(Self.config.b_bytes() // 16)
        comptime assert SCALE_BLOCK % columns == 0
        comptime assert row_elements[Self.dtype]() == SCALE_BLOCK
        var sums = no_sums[registers]()
        var scales = BlockScales.load[second](product, row, column, 0, blocks)
        for block in range(blocks):
            mbarrier_wait(self.shared.full(at.slot), at.parity)
            var sums_of_block = multiply_first[
                Self.dtype,
                columns,
                Self.config.halves(),
                Self.config.a_transposed,
                Self.config.b_transposed,
            ](self.a_tiles + at.slot * a_step, self.b_tiles + at.slot * b_step)
            # Those of the next block arrive while this one is multiplied.
            var next = BlockScales.load[second](
                product, row, column, min(block + 1, blocks - 1), blocks
            )
            sums_of_block = wait_all[registers](sums_of_block)
            self.release[False](at.slot)
            sums = add_scaled[registers](sums, sums_of_block, scales)
            scales = next
            at.advance[Self.config.stages]()
        return sums

    @always_inline
    def promoted(
        self, mut at: RingPlace, blocks: UInt32
    ) -> Accumulator[Self.config.columns // 2 * Self.config.halves()]:
        """Multiplies a tile, the sums of a few k blocks at a time added up in float32; nothing runs on on return.

        While this warpgroup adds, the other one multiplies: it adds half as many k blocks later."""
        comptime columns = Self.config.columns
        comptime registers = columns // 2 * Self.config.halves()
        comptime a_step = UInt32(Self.config.a_bytes() // 16)
        comptime b_step = UInt32(Self.config.b_bytes() // 16)
        comptime assert not Self.config.ping_pong and not Self.adds
        var sums = no_sums[registers]()
        var first = UInt32(0)
        var end = _PROMOTED // (1 + self.consumer)
        while first < blocks:
            mbarrier_wait(self.shared.full(at.slot), at.parity)
            var few = multiply_first[
                Self.dtype,
                columns,
                Self.config.halves(),
                Self.config.a_transposed,
                Self.config.b_transposed,
            ](self.a_tiles + at.slot * a_step, self.b_tiles + at.slot * b_step)
            var previous = at.slot
            at.advance[Self.config.stages]()
            for _ in range(first + 1, min(end, blocks)):
                mbarrier_wait(self.shared.full(at.slot), at.parity)
                few = multiply_next[
                    Self.dtype,
                    columns,
                    Self.config.halves(),
                    Self.config.a_transposed,
                    Self.config.b_transposed,
                ](
                    few,
                    self.a_tiles + at.slot * a_step,
                    self.b_tiles + at.slot * b_step,
                )
                wait_previous()
                self.release[False](previous)
                previous = at.slot
                at.advance[Self.config.stages]()
            few = wait_all[registers](few)
            self.release[False](previous)
            sums = add_scaled[registers](sums, few, BlockScales(1, 1))
            first = end
            end += _PROMOTED
        return sums
