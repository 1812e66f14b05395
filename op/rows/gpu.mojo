"""Runs a row program on a GPU: one warp or one block a row.

Rows of up to some thousand elements are read once and stay in registers, in the type they are stored in; each
pass runs the stages again, which costs less than the memory latency. Longer rows are read again in each pass,
mostly from cache. Loads and stores are of `width` elements: 16 bytes where all addresses allow, one element
otherwise.

Grid: a block for each row of a group or, where each warp has a row, for as many rows as it has warps; groups.
Persistent kernels may have fewer blocks: each processes several rows and keeps sums over them. Where they have all
registers of an SM, they prefetch the next row before the passes of this one: memory is saturated only while some
tens of kilobytes are in flight to every SM, also while threads add up or store.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    barrier,
    block_dim,
    block_idx,
    grid_dim,
    lane_id,
    thread_idx,
    warp_id,
)
from max.gpu.primitives import warp
from std.math import ceildiv
from std.sys import size_of
from std.utils import StaticTuple

from ..pdl import LINE, pdl_trigger, pdl_wait, prefetch
from .gpu_elements import GlobalPointer, load_row
from .gpu_place import Place, SharedPointer, reduction_room
from .gpu_row import ColumnSums, RowReader
from .operands import Operands, accumulator
from .program import RowProgram
from .shape import Shape
from .values import CAPACITY, Redo, Row, Terms, Values

# Rows that take less time than the misses of their features.
comptime _FEW_ROWS = 64


@always_inline
def _butterfly[
    dtype: DType, //, redo: Redo, lanes: Int
](value: Scalar[dtype]) -> Scalar[dtype]:
    """Reduces over groups of lanes, a power of two; all of them get the same bits."""
    comptime if lanes == 1:
        return value
    else:
        comptime half = lanes // 2
        var other = warp.shuffle_xor(value, UInt32(half))
        return _butterfly[redo, half](
            materialize[redo]().combine[dtype, 1](value, other)
        )


@always_inline
def _reduce[
    dtype: DType, //, P: RowProgram, pass_index: Int, shape: Shape
](
    row: Row[dtype],
    sums: Terms[dtype, 1],
    mut totals: Terms[dtype, 1],
    shared: SharedPointer[dtype],
    mut flip: Int,
):
    """Reduces the terms of a pass over all threads of a row, in a fixed order, and finishes them.

    Shared memory is a double buffer, so that one barrier a reduction is enough.
    """
    comptime warps = ceildiv(shape.threads, WARP_SIZE)
    var half = shared.unsafe_offset(flip * (P.stages * CAPACITY * warps))
    flip = 1 - flip
    var parts = block_dim.x // WARP_SIZE
    comptime for s in range(P.stages):
        comptime if P.pass_of(s) == pass_index:
            var sum = sums[s]
            comptime for t in range(P.Stages[s].terms):
                sum[t] = _butterfly[P.Stages[s].redo, WARP_SIZE](sum[t])
                comptime if shape.whole_block:
                    if lane_id() == 0:
                        half.unsafe_offset(
                            (s * CAPACITY + t) * warps + warp_id()
                        ).unsafe_store(sum[t])
            totals[s] = sum
    comptime if shape.whole_block:
        if parts > 1:
            barrier()
            # each group of `warps` lanes adds up the same parts
            var part_index = lane_id() % warps
            comptime for s in range(P.stages):
                comptime if P.pass_of(s) == pass_index:
                    comptime redo = P.Stages[s].redo
                    var total = Values[dtype, 1]()
                    comptime for t in range(P.Stages[s].terms):
                        var part = materialize[redo]().identity[dtype, 1]()
                        if part_index < parts:
                            part = half.unsafe_offset(
                                (s * CAPACITY + t) * warps + part_index
                            ).unsafe_load()
                        total[t] = _butterfly[redo, warps](part)
                    totals[s] = total
    P.finish[pass_index](row, totals)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(shape.threads)),
    `nvvm.minctasm`=SIMDLength(shape.blocks),
)
def row_kernel[
    P: RowProgram, dtype: DType, ftype: DType, shape: Shape
](operands: Operands[accumulator[dtype]()]):
    """Takes rows through a program.

    Grid: (rows of a group, groups); where each warp has a row, (rows / warps, groups); of a persistent kernel,
    as many blocks as run at one time. Block: whole warps, at most shape.threads threads. Shared memory: two
    halves of the double buffer, each a term of every stage for every warp.

    Parameters:
        P: The row program.
        dtype: The type of inputs and outputs.
        ftype: The type of the features.
        shape: Who works on a row, and what a thread holds of it.

    Args:
        operands: The tensors.

    Constraints:
        Blocks are whole warps, shape.threads a power of two of them. If shape.resident, a row has at most
        shape.tile * shape.width elements for each of its threads. If shape.width > 1, K is a multiple of it
        and all tensors start at multiples of 16 bytes. A program with columns needs a persistent kernel, and
        there is a row for every block.
    """
    comptime accum = accumulator[dtype]()
    comptime assert (
        shape.persistent or P.columns == 0
    ), "column sums are kept in the registers of persistent blocks"
    comptime assert (
        shape.resident or not shape.persistent
    ), "persistent blocks keep their rows in registers"
    comptime if not shape.persistent and P.features > 0:
        prefetch_features[P, ftype](operands)
    pdl_wait()
    pdl_trigger()
    var shared = reduction_room[P, accum, shape]()
    var flip = 0
    var place = Place.__init__[shape](Int(operands.rows))
    var index = place.index
    var end = place.end
    var group = place.group
    var start = place.start
    var step = place.step
    var columns = ColumnSums[P, accum, shape](fill=0)
    comptime if shape.persistent:
        comptime ahead = shape.blocks == 1
        var reader = RowReader[P, dtype, ftype, shape]()
        comptime if ahead:
            reader.load_inputs(operands, min(index, end - 1), start, step)
        while index < end:
            var next = reader
            comptime if ahead:
                next.load_inputs(
                    operands, min(index + place.row_step, end - 1), start, step
                )
            else:
                reader.load_inputs(operands, index, start, step)
            reader.load_addend(operands, index, start, step)
            reader.load_features(operands, group, start, step)
            resident_row(
                operands, index, reader, start, step, shared, flip, columns
            )
            comptime if ahead:
                reader = next
            index += place.row_step
        comptime if P.columns > 0:
            if operands.column_sums != 0:
                _store_columns[P, shape](operands, columns, start, step)
    else:
        # warps beyond the last row have nothing to do, and no barrier waits for them
        if index >= end:
            return
        comptime if shape.resident:
            var reader = RowReader[P, dtype, ftype, shape]()
            reader.load_inputs(operands, index, start, step)
            reader.load_addend(operands, index, start, step)
            reader.load_features(operands, group, start, step)
            resident_row(
                operands, index, reader, start, step, shared, flip, columns
            )
        else:
            _long_row[P, dtype, ftype, shape](
                operands, index, group, start, step, shared
            )


@always_inline
def prefetch_features[P: RowProgram, ftype: DType](operands: Operands[...]):
    """Has the features of a few rows fetched while the kernel before ends. Those of more are soon in the cache.

    Parameters:
        P: The row program.
        ftype: The type of the features.

    Args:
        operands: The tensors.
    """
    if operands.rows > _FEW_ROWS:
        return
    var bytes = Int(operands.length) * size_of[ftype]()
    for offset in range(thread_idx.x * LINE, bytes, block_dim.x * LINE):
        comptime for k in range(P.features):
            if operands.features[k] != 0:
                prefetch(Int(operands.features[k]) + offset)


@always_inline
def resident_row[
    P: RowProgram,
    dtype: DType,
    ftype: DType,
    shape: Shape,
    in_stream: Bool,
    //,
](
    operands: Operands[accumulator[dtype]()],
    index: Int,
    reader: RowReader[P, dtype, ftype, shape, in_stream],
    start: Int32,
    step: Int32,
    shared: SharedPointer[accumulator[dtype]()],
    mut flip: Int,
    mut columns: ColumnSums[P, accumulator[dtype](), shape],
):
    """Takes a row that is in registers through all passes.

    Parameters:
        P: The row program.
        dtype: The type of the inputs.
        ftype: The type of the features.
        shape: What a thread holds.
        in_stream: Whether it is one of many rows, as for `RowReader`.

    Args:
        operands: The tensors.
        index: The row's index.
        reader: What the thread holds of it.
        start: The first element's index.
        step: The distance of two loads.
        shared: The `reduction_room`.
        flip: Which half of it is next.
        columns: Receives the terms of sums over rows.
    """
    var totals = Terms[accumulator[dtype](), 1](fill={})
    comptime for p in range(P.passes + 1):
        var sums = P.identities[accumulator[dtype](), 1]()
        comptime if P.is_optional(p):
            if P.needs[p](reader.row):
                reader.take[p](
                    operands, index, start, step, totals, sums, columns
                )
                _reduce[P, p, shape](reader.row, sums, totals, shared, flip)
            else:
                P.finish[p](reader.row, totals)
        else:
            reader.take[p](operands, index, start, step, totals, sums, columns)
            comptime if _reduces[P](p):
                _reduce[P, p, shape](reader.row, sums, totals, shared, flip)
    if start == 0:
        _store_results[P](operands, index, totals)


@always_inline
def _long_row[
    P: RowProgram, dtype: DType, ftype: DType, shape: Shape
](
    operands: Operands[accumulator[dtype]()],
    index: Int,
    group: Int,
    start: Int32,
    step: Int32,
    shared: SharedPointer[accumulator[dtype]()],
):
    """Takes a row of any length through all passes, reading it in each.

    What is read together is added up separately first: in one long sum, the roundings of numbers of few digits
    would no longer be random.
    """
    comptime accum = accumulator[dtype]()
    var row = load_row[P, dtype](operands, index)
    var totals = Terms[accum, 1](fill={})
    var columns = ColumnSums[P, accum, shape](fill=0)
    var flip = 0
    comptime for p in range(P.passes + 1):
        var sums = P.identities[accum, 1]()
        var first = start
        while first < operands.length:
            var reader = RowReader[P, dtype, ftype, shape]()
            reader.load_inputs(operands, index, first, step)
            comptime if p == P.passes:
                reader.load_addend(operands, index, first, step)
            reader.load_features(operands, group, first, step)
            var part = P.identities[accum, 1]()
            reader.take[p](operands, index, first, step, totals, part, columns)
            sums = P.combine[p](sums, part)
            first += step * Int32(shape.tile)
        comptime if _reduces[P](p):
            _reduce[P, p, shape](row, sums, totals, shared, flip)
    if start == 0:
        _store_results[P](operands, index, totals)


@always_inline
def _reduces[P: RowProgram](pass_index: Int) -> Bool:
    """Returns whether any stage reduces in a pass."""
    var found = False
    comptime for s in range(P.stages):
        if P.pass_of(s) == pass_index and P.Stages[s].terms > 0:
            found = True
    return found


@always_inline
def _store_results[
    accum: DType, //, P: RowProgram
](operands: Operands[accum], index: Int, totals: Terms[accum, 1]):
    """Stores the totals of a row that are results."""
    comptime for s in range(P.stages):
        comptime for r in range(P.Stages[s].results):
            comptime slot = P.results_before(s) + r
            if operands.results[slot] != 0:
                GlobalPointer[accum](
                    unsafe_from_address=Int(operands.results[slot])
                ).unsafe_offset(index).unsafe_store(totals[s][r])


@always_inline
def _store_columns[
    accum: DType, //, P: RowProgram, shape: Shape
](
    operands: Operands[accum],
    columns: ColumnSums[P, accum, shape],
    start: Int32,
    step: Int32,
):
    """Stores the sums over the block's rows."""
    comptime alignment = min(16, shape.width * size_of[accum]())
    var length = Int(operands.length)
    comptime for c in range(P.columns):
        var partial = GlobalPointer[accum](
            unsafe_from_address=Int(operands.column_sums)
        ).unsafe_offset(
            ((c * grid_dim.y + block_idx.y) * grid_dim.x + block_idx.x) * length
        )
        comptime for i in range(shape.tile):
            var column = start + Int32(i) * step
            if column < operands.length:
                partial.unsafe_offset(Int(column)).unsafe_store[
                    alignment=alignment
                ](columns[c * shape.tile + i])
