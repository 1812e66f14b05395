"""Runs a row program on a GPU that copies rows to shared memory while others are computed.

As many blocks run as there is room for, and each goes on to further rows. What threads need of the features stays in
their registers, converted once: in a norm of bfloat16, that and the addresses are a third of all instructions. So few
registers are left that rows on their way are in shared memory, where each thread copies what it reads itself: none
waits for another.

Rows have one stream or, with a residual, two.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, thread_idx
from max.gpu.memory import (
    AddressSpace,
    async_copy,
    async_copy_commit_group,
    async_copy_wait_group,
)
from std.memory import stack_allocation
from std.sys import size_of
from std.utils import StaticTuple

from ..pdl import pdl_trigger, pdl_wait
from .gpu import prefetch_features, resident_row
from .gpu_elements import GlobalPointer, load_row, rounded_sum
from .gpu_place import Place, SharedPointer, reduction_room
from .gpu_row import ColumnSums, RowReader
from .operands import Operands, accumulator
from .program import RowProgram
from .shape import Shape


struct _Ring[P: RowProgram, dtype: DType, shape: Shape](
    TrivialRegisterPassable
):
    """A thread's part of the rows on their way, each in a slot."""

    comptime streams = 2 if Self.P.has_residual else 1
    # Two streams have as many bytes on their way in one slot.
    comptime slots = 2 // Self.streams
    comptime load = Self.shape.threads * Self.shape.width
    comptime slot = Self.streams * Self.shape.tile * Self.load

    var mine: SharedPointer[Self.dtype]
    var place: Place
    var next: Int

    @always_inline
    def __init__(out self, place: Place):
        self.mine = stack_allocation[
            Self.slots * Self.slot,
            Scalar[Self.dtype],
            address_space=AddressSpace.SHARED,
            alignment=16,
        ]().unsafe_offset(thread_idx.x * Self.shape.width)
        self.place = place
        self.next = 0

    @always_inline
    def start(self, operands: Operands[accumulator[Self.dtype]()], index: Int):
        """Starts the copies of a row, if there is one; they are a group of copies in any case."""
        if index < self.place.end:
            comptime for k in range(Self.streams):
                var row = GlobalPointer[Self.dtype](
                    unsafe_from_address=Int(
                        operands.inputs[0] if k == 0 else operands.residual
                    )
                ).unsafe_offset(index * Int(operands.length))
                comptime for i in range(Self.shape.tile):
                    var column = self.place.start + Int32(i) * self.place.step
                    comptime if i == Self.shape.tile - 1:
                        # Beyond the end of a row, the last elements, as `RowReader` loads them.
                        column = min(
                            column, operands.length - Int32(Self.shape.width)
                        )
                    async_copy[Self.shape.width * size_of[Self.dtype]()](
                        row.unsafe_offset(Int(column)), self._at(k, i)
                    )
        async_copy_commit_group()

    @always_inline
    def take(
        mut self,
        operands: Operands[accumulator[Self.dtype]()],
        index: Int,
        mut reader: RowReader[Self.P, Self.dtype, _, Self.shape, True],
    ):
        """Waits for a row and takes it to registers, and starts the copies of the one that its slot is for next."""
        async_copy_wait_group(Int32(Self.slots - 1))
        comptime for i in range(Self.shape.tile):
            reader.inputs[i] = self._loaded(0, i)
            comptime if Self.P.has_residual:
                reader.inputs[i] = rounded_sum(
                    reader.inputs[i], self._loaded(1, i)
                )
                var column = self.place.start + Int32(i) * self.place.step
                if i < Self.shape.tile - 1 or column < operands.length:
                    reader.store_sum(operands, index, i, column)
        self.start(operands, index + Self.slots * self.place.row_step)
        comptime if Self.slots > 1:
            self.next = (self.next + 1) % Self.slots

    @always_inline
    def _at(self, stream: Int, i: Int) -> SharedPointer[Self.dtype]:
        return self.mine.unsafe_offset(
            self.next * Self.slot + (stream * Self.shape.tile + i) * Self.load
        )

    @always_inline
    def _loaded(
        self, stream: Int, i: Int
    ) -> SIMD[Self.dtype, Self.shape.width]:
        return self._at(stream, i).unsafe_load[
            width=Self.shape.width,
            alignment=Self.shape.width * size_of[Self.dtype](),
        ]()


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(shape.threads)),
    `nvvm.minctasm`=SIMDLength(shape.blocks),
)
def stream_kernel[
    P: RowProgram, dtype: DType, ftype: DType, shape: Shape
](operands: Operands[accumulator[dtype]()]):
    """Takes rows through a program while the next ones are on their way.

    Grid: (as many blocks as run at one time, groups). Block: as for `row_kernel`. Shared memory: the reductions' double
    buffer, and the ring.

    Parameters:
        P: The row program, of one input.
        dtype: The type of inputs and outputs.
        ftype: The type of the features.
        shape: Who works on a row, and what a thread holds of it.

    Args:
        operands: The tensors.

    Constraints:
        As for persistent blocks of `row_kernel`; K is a multiple of 16 bytes and all tensors start at them. All loads of a
        thread but the last are inside of rows.
    """
    comptime accum = accumulator[dtype]()
    comptime assert shape.persistent and shape.resident and P.columns == 0
    comptime assert P.inputs == 1 and P.first_half_input > 0
    comptime assert shape.width * size_of[dtype]() == 16
    prefetch_features[P, ftype](operands)
    pdl_wait()
    pdl_trigger()
    var place = Place.__init__[shape](Int(operands.rows))
    var index = place.index
    # Warps without a row have nothing to do, and no barrier waits for them.
    if index >= place.end:
        return
    var shared = reduction_room[P, accum, shape]()
    var flip = 0
    var columns = ColumnSums[P, accum, shape](fill=0)
    var ring = _Ring[P, dtype, shape](place)
    comptime for slot in range(ring.slots):
        ring.next = slot
        ring.start(operands, index + slot * place.row_step)
    ring.next = 0
    var reader = RowReader[P, dtype, ftype, shape, True]()
    reader.load_features(operands, place.group, place.start, place.step)
    var row = load_row[P, dtype](operands, index)
    while index < place.end:
        ring.take(operands, index, reader)
        reader.row = row
        var next = index + place.row_step
        if next < place.end:
            row = load_row[P, dtype](operands, next)
        resident_row(
            operands,
            index,
            reader,
            place.start,
            place.step,
            shared,
            flip,
            columns,
        )
        index = next
