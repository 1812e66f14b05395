"""Sums over rows on a GPU without atomics: partial sums of blocks, then their sum in a fixed order.

The partial sums are [columns, groups, parts, K]. Either the blocks of `row_kernel` write them as well, or
`column_kernel` does, where a row is too long for its sums to stay in a block's registers or where nothing else is
wanted, or `panel_kernel`, where nothing is reduced over a row. `total_kernel` adds them all in one launch.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    barrier,
    block_idx,
    grid_dim,
    lane_id,
    thread_idx,
    warp_id,
)
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp
from std.math import ceildiv
from std.memory import stack_allocation
from std.sys import size_of
from std.utils import StaticTuple

from ..argument import KernelArgument
from ..pdl import pdl_trigger, pdl_wait
from .gpu_elements import GlobalPointer
from .gpu_row import RowReader
from .operands import MAX_TENSORS, Operands, accumulator
from .program import RowProgram
from .shape import Shape
from .types import store_as
from .values import Terms, Values

comptime COLUMN_WARPS = 8
"""Warps of a block of `column_kernel`, which share its rows."""
comptime TOTAL_COLUMNS = 32
"""Columns of a block of `total_kernel`."""
comptime TOTAL_NARROW = 8
"""Columns of its blocks where those would be fewer than the SMs."""
comptime TOTAL_THREADS = 1024
"""Threads of its blocks."""
# Sums of a column that are added up separately.
comptime _TOTAL_LANES = 32
# Partial sums that a thread loads together.
comptime _AT_ONCE = 4
# As many partial sums of a column are added by one thread.
comptime _FEW_PARTS = 16


def column_kernel[
    P: RowProgram, dtype: DType, ftype: DType, shape: Shape
](operands: Operands[accumulator[dtype]()]):
    """Sums a program's columns over a part of the rows of a group.

    Each thread adds up `width` columns in every COLUMN_WARPS-th of the rows; the sums of the warps are then
    added in their order. A thread's sums thus stay in registers however long a row is.

    Grid: (K / (WARP_SIZE width), parts, groups). Block: COLUMN_WARPS warps.

    Parameters:
        P: The row program.
        dtype: The type of inputs.
        ftype: The type of the features.
        shape: Says how wide loads are; its other fields are not used.

    Args:
        operands: The tensors.
    """
    _take_columns[P, dtype, ftype, shape, False](operands)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(shape.threads)),
    `nvvm.minctasm`=SIMDLength(shape.blocks),
)
def panel_kernel[
    P: RowProgram, dtype: DType, ftype: DType, shape: Shape
](operands: Operands[accumulator[dtype]()]):
    """Does the same for a program that reduces nothing over a row, and stores its outputs.

    Grid: (K / (WARP_SIZE width), parts, groups). Block: COLUMN_WARPS warps.

    Parameters:
        P: The row program.
        dtype: The type of inputs.
        ftype: The type of the features.
        shape: Says how wide loads are and how many blocks an SM has to have room for.

    Args:
        operands: The tensors.
    """
    _take_columns[P, dtype, ftype, shape, True](operands)


@always_inline
def _take_columns[
    P: RowProgram, dtype: DType, ftype: DType, shape: Shape, stores: Bool
](operands: Operands[accumulator[dtype]()]):
    """Takes the block's columns of its rows through the program's last pass."""
    comptime assert P.passes == 0 or not stores, "outputs depend on a whole row"
    pdl_wait()
    pdl_trigger()
    comptime accum = accumulator[dtype]()
    comptime width = shape.width
    comptime Reader = RowReader[P, dtype, ftype, shape]
    # outputs to store take registers as well
    comptime at_once = max(1, (4 if stores else 8) // P.inputs)
    comptime block_columns = WARP_SIZE * width
    var rows = Int(operands.rows)
    var left = block_idx.x * block_columns
    var column = Int32(left + lane_id() * width)
    var part_rows = (rows + grid_dim.y - 1) // grid_dim.y
    var group = block_idx.z
    var first = block_idx.y * part_rows
    var end = min(rows, first + part_rows) + group * rows
    first += group * rows

    var columns = StaticTuple[SIMD[accum, width], max(1, P.columns)](fill=0)
    var features = Reader()
    features.load_features(operands, group, column, 0)
    for base in range(first + warp_id(), end, at_once * COLUMN_WARPS):
        var readers = StaticTuple[Reader, at_once](fill=features)
        comptime for i in range(at_once):
            var reader = features
            var row = min(base + i * COLUMN_WARPS, end - 1)
            reader.load_inputs(operands, row, column, 0)
            reader.load_addend(operands, row, column, 0)
            readers[i] = reader
        comptime for i in range(at_once):
            var row = base + i * COLUMN_WARPS
            if row < end:
                var terms = Terms[accum, width](fill=Values[accum, width]())
                var v = P.visit[P.passes](
                    readers[i].row,
                    readers[i].values(operands, 0),
                    Terms[accum, 1](fill=Values[accum, 1]()),
                    terms,
                )
                comptime for c in range(P.columns):
                    columns[c] += v[P.outputs + c]
                comptime if stores:
                    if column < operands.length:
                        readers[i].store(operands, row, 0, column, v)

    comptime if P.columns > 0:
        _store_columns[P, width](operands, columns, left)


@always_inline
def _store_columns[
    accum: DType, //, P: RowProgram, width: Int
](
    operands: Operands[accum],
    columns: StaticTuple[SIMD[accum, width], max(1, P.columns)],
    left: Int,
):
    """Stores the sums over the block's rows, those of its warps added in their order."""
    comptime block_columns = WARP_SIZE * width
    comptime threads = COLUMN_WARPS * WARP_SIZE
    comptime alignment = min(16, width * size_of[accum]())
    var length = Int(operands.length)
    var shared = stack_allocation[
        COLUMN_WARPS * block_columns,
        Scalar[accum],
        address_space=AddressSpace.SHARED,
        alignment=16,
    ]()
    comptime for c in range(P.columns):
        shared.unsafe_offset(
            warp_id() * block_columns + lane_id() * width
        ).unsafe_store[alignment=alignment](columns[c])
        barrier()
        var partial = GlobalPointer[accum](
            unsafe_from_address=Int(operands.column_sums)
        ).unsafe_offset(
            ((c * grid_dim.z + block_idx.z) * grid_dim.y + block_idx.y) * length
            + left
        )
        for i in range(
            thread_idx.x, min(block_columns, length - left), threads
        ):
            var sum = shared.unsafe_offset(i).unsafe_load()
            comptime for w in range(1, COLUMN_WARPS):
                sum += shared.unsafe_offset(w * block_columns + i).unsafe_load()
            partial.unsafe_offset(i).unsafe_store(sum)
        comptime if c + 1 < P.columns:
            barrier()


@fieldwise_init
struct Total(TrivialRegisterPassable):
    """Partial sums, and where their sum goes."""

    var output: Int64
    """Address of the vectors [groups, length] to write; 0 where they are not wanted."""
    var partial: Int64
    """Address of the partial sums [groups, parts, length]."""
    var parts: Int32
    """Number of partial sums of a column; 0 for no rows."""
    var length: Int32
    """Number of columns."""
    var groups: Int32
    """Number of groups."""
    var type: Int32
    """The type of the vectors, a number of types.mojo."""

    def has_few_parts(self) -> Bool:
        """Decides who adds the partial sums of a column.

        Returns:
            Whether it is one thread.
        """
        return Int(self.parts) <= _FEW_PARTS

    def blocks(self, columns: Int) -> Int:
        """Counts the blocks that add them up.

        Args:
            columns: Columns of a block whose threads share them.

        Returns:
            How many there are.
        """
        if self.has_few_parts():
            return ceildiv(Int(self.groups) * Int(self.length), TOTAL_THREADS)
        return Int(self.groups) * ceildiv(Int(self.length), columns)


struct Totals(KernelArgument, TrivialRegisterPassable):
    """What one launch of `total_kernel` adds up."""

    var jobs: StaticTuple[Total, MAX_TENSORS]
    """The vectors."""
    var count: Int
    """How many there are."""

    def __init__(out self):
        """Names none yet."""
        self.jobs = {fill = Total(0, 0, 0, 0, 0, 0)}
        self.count = 0

    def add(mut self, job: Total):
        """Takes on one more, if it is wanted.

        Args:
            job: The partial sums.
        """
        if job.output != 0:
            self.jobs[self.count] = job
            self.count += 1

    def blocks(self, columns: Int) -> Int:
        """Counts the blocks of the one that needs most.

        Args:
            columns: Columns of a block whose threads share them.

        Returns:
            How many there are.
        """
        var most = 0
        for i in range(self.count):
            most = max(most, self.jobs[i].blocks(columns))
        return most


@always_inline
def _add_few[accum: DType](job: Total, index: Int):
    """Adds the few partial sums of one column, in the same order every time."""
    var length = Int(job.length)
    if index >= Int(job.groups) * length:
        return
    var group, column = divmod(index, length)
    var source = GlobalPointer[accum](
        unsafe_from_address=Int(job.partial)
    ).unsafe_offset(group * Int(job.parts) * length + column)
    var terms = SIMD[accum, _FEW_PARTS](0)
    comptime for part in range(_FEW_PARTS):
        if part < Int(job.parts):
            terms[part] = source.unsafe_offset(part * length).unsafe_load()
    store_as[space=AddressSpace.GLOBAL](
        job.type, job.output, index, terms.reduce_add()
    )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(TOTAL_THREADS))
)
def total_kernel[accum: DType, columns: Int](totals: Totals):
    """Adds the partial sums of each column, in the same order every time and for any width of the blocks.

    Grid: (the most blocks of a sum, sums). Block: TOTAL_THREADS threads, which share columns, or have one each where
    there are few partial sums.

    Parameters:
        accum: The type of the partial sums.
        columns: Columns of a block: more threads share each of fewer, and have all that they load in flight at once.

    Args:
        totals: What to add up.
    """
    pdl_wait()
    pdl_trigger()
    comptime lanes = columns * _TOTAL_LANES
    comptime turns = TOTAL_THREADS // lanes
    # One more in each row, so that the lanes of a warp read a column without bank conflicts.
    comptime pitch = columns + 1
    comptime lane_pitch = _TOTAL_LANES * pitch
    var shared = stack_allocation[
        turns * lane_pitch,
        Scalar[accum],
        address_space=AddressSpace.SHARED,
    ]()
    var job = totals.jobs[0]
    comptime for i in range(1, MAX_TENSORS):
        if block_idx.y == i:
            job = totals.jobs[i]
    if block_idx.x >= job.blocks(columns):
        return
    var length = Int(job.length)
    if job.has_few_parts():
        _add_few[accum](job, block_idx.x * TOTAL_THREADS + thread_idx.x)
        return
    var parts = Int(job.parts)
    var group, block = divmod(block_idx.x, ceildiv(length, columns))
    var column = thread_idx.x % columns
    var lane = thread_idx.x // columns % _TOTAL_LANES
    var turn = thread_idx.x // lanes
    var place = lane * pitch + column
    var sum = Scalar[accum](0)
    # Beyond the last column, the last one.
    var source = GlobalPointer[accum](
        unsafe_from_address=Int(job.partial)
    ).unsafe_offset(
        group * parts * length + min(block * columns + column, length - 1)
    )
    comptime step = _TOTAL_LANES * _AT_ONCE
    for first in range(0, parts, step * turns):
        var terms = SIMD[accum, _AT_ONCE](0)
        comptime for i in range(_AT_ONCE):
            var part = first + turn * step + i * _TOTAL_LANES + lane
            if part < parts:
                terms[i] = source.unsafe_offset(part * length).unsafe_load()
        comptime if turns == 1:
            sum += terms.reduce_add()
        else:
            shared.unsafe_offset(turn * lane_pitch + place).unsafe_store(
                terms.reduce_add()
            )
            barrier()
            if turn == 0:
                comptime for i in range(turns):
                    sum += shared.unsafe_offset(
                        i * lane_pitch + place
                    ).unsafe_load()
            barrier()
    if turn == 0:
        shared.unsafe_offset(place).unsafe_store(sum)
    barrier()
    # Now neighboring threads have the sums of one column.
    column = thread_idx.x // _TOTAL_LANES
    if column >= columns:
        return
    lane = thread_idx.x % _TOTAL_LANES
    sum = shared.unsafe_offset(lane * pitch + column).unsafe_load()
    comptime for level in range(5):
        comptime distance = _TOTAL_LANES >> (level + 1)
        sum += warp.shuffle_xor(sum, UInt32(distance))
    column += block * columns
    if lane == 0 and column < length:
        store_as[space=AddressSpace.GLOBAL](
            job.type, job.output, group * length + column, sum
        )
