"""Terms over rows on a GPU without atomics: partial sums of blocks, then their sum in a fixed order.

The partial sums are [columns, parts, K]. Either the blocks of `row_kernel` write them on the way, or
`column_kernel` does, where a row is too long for its sums to stay in a block's registers or where nothing
else is wanted.
"""

from max.gpu import barrier, block_idx, grid_dim, thread_idx
from max.gpu.memory import AddressSpace
from std.memory import stack_allocation
from std.sys import size_of
from std.utils import StaticTuple

from .gpu_row import GlobalPointer, RowReader, Shape
from .operands import Addresses, Operands, accumulator
from .program import RowProgram
from .values import Terms, Values

comptime COLUMN_THREADS = 256
"""Threads of a block of `column_kernel`."""
comptime _ROWS_AT_ONCE = 4
comptime FINISH_COLUMNS = 32
"""Columns of a block of `finish_columns_kernel`."""
comptime FINISH_LANES = 32
"""Threads that share a column of `finish_columns_kernel`."""

comptime ADD_UP_THREADS = 1024
"""Threads of `add_up_kernel`."""


def column_kernel[
    P: RowProgram, dtype: DType, ftype: DType, shape: Shape
](operands: Operands[accumulator[dtype]()]):
    """Terms a program's columns over a part of the rows.

    Grid: (columns / (COLUMN_THREADS width), parts).

    Parameters:
        P: The row program.
        dtype: The type of inputs.
        ftype: The type of the features.
        shape: Says how wide loads are; the rest of it is not used.

    Args:
        operands: The tensors.
    """
    comptime accum = accumulator[dtype]()
    comptime width = shape.width
    comptime Reader = RowReader[P, dtype, ftype, shape]
    var length = Int(operands.length)
    var rows = Int(operands.rows)
    var column = Int32((block_idx.x * COLUMN_THREADS + thread_idx.x) * width)
    if column >= operands.length:
        return
    var part_rows = (rows + grid_dim.y - 1) // grid_dim.y
    var first = block_idx.y * part_rows
    var end = min(rows, first + part_rows)

    var columns = StaticTuple[SIMD[accum, width], max(1, P.columns)](fill=0)
    var features = Reader()
    features.load_features(operands, column, 0)
    for base in range(first, end, _ROWS_AT_ONCE):
        var readers = StaticTuple[Reader, _ROWS_AT_ONCE](fill=features)
        comptime for i in range(_ROWS_AT_ONCE):
            var reader = features
            reader.load_inputs(operands, min(base + i, end - 1), column, 0)
            readers[i] = reader
        comptime for i in range(_ROWS_AT_ONCE):
            if base + i < end:
                var terms = Terms[accum, width](fill=Values[accum, width]())
                var v = P.visit[P.passes](
                    readers[i].row,
                    readers[i].values(0),
                    Terms[accum, 1](fill=Values[accum, 1]()),
                    terms,
                )
                comptime for c in range(P.columns):
                    columns[c] += v[P.outputs + c]
    comptime for c in range(P.columns):
        GlobalPointer[accum](
            unsafe_from_address=Int(operands.column_sums)
        ).unsafe_offset(
            (c * grid_dim.y + block_idx.y) * length + Int(column)
        ).unsafe_store(
            columns[c]
        )


def finish_columns_kernel[
    accum: DType, dtype: DType
](outputs: Addresses, partial: Int64, parts: Int64, length: Int64):
    """Adds the partial sums of each column, in the same order every time.

    Grid: (K / FINISH_COLUMNS, columns); FINISH_LANES threads share a column.

    Parameters:
        accum: The type of the partial sums.
        dtype: The type of the sums.

    Args:
        outputs: Vectors [K] to write; 0 where not wanted.
        partial: Address of the partial sums [columns, parts, K].
        parts: Number of partial sums of a column.
        length: Number of elements K of a row.
    """
    var shared = stack_allocation[
        FINISH_COLUMNS * FINISH_LANES,
        Scalar[accum],
        address_space=AddressSpace.SHARED,
    ]()
    var output = outputs[0]
    if block_idx.y == 1:
        output = outputs[1]
    if output == 0:
        return
    var K = Int(length)
    var count = Int(parts)
    var x = thread_idx.x % FINISH_COLUMNS
    var lane = thread_idx.x // FINISH_COLUMNS
    var column = block_idx.x * FINISH_COLUMNS + x
    var sum = Scalar[accum](0)
    if column < K:
        var source = GlobalPointer[accum](
            unsafe_from_address=Int(partial)
        ).unsafe_offset(block_idx.y * count * K + column)
        comptime UNROLL = 4
        for part in range(lane, count, FINISH_LANES * UNROLL):
            var terms = SIMD[accum, UNROLL](0)
            comptime for u in range(UNROLL):
                var index = part + u * FINISH_LANES
                if index < count:
                    terms[u] = source.unsafe_offset(index * K).unsafe_load()
            sum += terms.reduce_add()
    shared.unsafe_offset(thread_idx.x).unsafe_store(sum)
    barrier()
    comptime for level in range(5):
        comptime half = FINISH_LANES >> (level + 1)
        if lane < half:
            sum += shared.unsafe_offset(
                thread_idx.x + half * FINISH_COLUMNS
            ).unsafe_load()
            shared.unsafe_offset(thread_idx.x).unsafe_store(sum)
        barrier()
    if lane == 0 and column < K:
        GlobalPointer[dtype](unsafe_from_address=Int(output)).unsafe_offset(
            column
        ).unsafe_store(sum.cast[dtype]())


def add_up_kernel[
    accum: DType, dtype: DType
](terms: Int64, count: Int64, output: Int64, accumulate: Int32):
    """Sums a vector in a fixed order, in one block of ADD_UP_THREADS threads.

    Parameters:
        accum: The type of the terms.
        dtype: The type of the sum.

    Args:
        terms: Address of the vector.
        count: The number of its elements.
        output: Address of the sum.
        accumulate: Not 0 to add to what is there.
    """
    var shared = stack_allocation[
        ADD_UP_THREADS, Scalar[accum], address_space=AddressSpace.SHARED
    ]()
    var sum = Scalar[accum](0)
    comptime UNROLL = 4
    for first in range(thread_idx.x, Int(count), ADD_UP_THREADS * UNROLL):
        var part = SIMD[accum, UNROLL](0)
        comptime for u in range(UNROLL):
            var i = first + u * ADD_UP_THREADS
            if i < Int(count):
                part[u] = (
                    GlobalPointer[accum](unsafe_from_address=Int(terms))
                    .unsafe_offset(i)
                    .unsafe_load()
                )
        sum += part.reduce_add()
    shared.unsafe_offset(thread_idx.x).unsafe_store(sum)
    barrier()
    comptime for level in range(10):
        comptime half = ADD_UP_THREADS >> (level + 1)
        if thread_idx.x < half:
            sum += shared.unsafe_offset(thread_idx.x + half).unsafe_load()
            shared.unsafe_offset(thread_idx.x).unsafe_store(sum)
        barrier()
    if thread_idx.x == 0:
        var place = GlobalPointer[dtype](unsafe_from_address=Int(output))
        if accumulate != 0:
            sum += place.unsafe_load().cast[accum]()
        place.unsafe_store(sum.cast[dtype]())
