"""Runs a row program on a GPU: one warp or one block a row.

Rows up to some thousand elements are read once and stay in registers, packed as they came; each pass takes
them through the stages again, which is cheaper than the memory the GPU waits for. Longer rows are read
again in each pass, mostly from cache. Loads and stores are of `width` elements: 16 bytes where all
addresses allow, one element otherwise.

Grid: a block for each row or, where each warp has a row, for as many rows as it has warps. Persistent
kernels may have fewer blocks: each goes on to further rows, loads the next while it computes one, and keeps
sums over its rows.
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
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp
from std.math import ceildiv
from std.memory import bitcast, stack_allocation
from std.sys import size_of
from std.utils import StaticTuple

from .operands import Operands, accumulator
from .program import CAPACITY, Redo, Row, RowProgram, Terms, Values

comptime GlobalPointer[dtype: DType] = Pointer[
    Scalar[dtype], MutAnyOrigin, address_space=AddressSpace.GLOBAL
]
"""Points to memory of the GPU.

Parameters:
    dtype: The type of its elements.
"""
comptime _SharedPointer[dtype: DType] = Pointer[
    Scalar[dtype], MutUntrackedOrigin, address_space=AddressSpace.SHARED
]
comptime _ColumnSums[P: RowProgram, accum: DType, shape: Shape] = StaticTuple[
    SIMD[accum, shape.width], max(1, P.columns * shape.tile)
]


@fieldwise_init
struct Shape(TrivialRegisterPassable):
    """The compile-time shape of a kernel: who works on a row, and what a thread holds of it."""

    var width: Int
    """Elements of one load."""
    var tile: Int
    """Loads of a thread that are under way together, per input."""
    var whole_block: Bool
    """Whether a block works on a row, or each warp on its own."""
    var resident: Bool
    """Whether the row stays in registers: it has at most tile * width elements a thread."""
    var persistent: Bool
    """Whether blocks go on to further rows."""
    var threads: Int
    """The most threads of a block."""
    var blocks: Int
    """How many such blocks the registers of a multiprocessor must suffice for."""


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
    shared: _SharedPointer[dtype],
    mut flip: Int,
):
    """Reduces the terms of a pass over all threads of a row, in a fixed order, and finishes them.

    Two halves of the shared memory take turns, so that one barrier a reduction is enough.
    """
    comptime warps = ceildiv(shape.threads, WARP_SIZE)
    var half = shared.unsafe_offset(flip * (P.stages * CAPACITY * warps))
    flip = 1 - flip
    comptime for s in range(P.stages):
        comptime if P.pass_of(s) == pass_index:
            var sum = sums[s]
            comptime for t in range(P.terms_of[s]()):
                sum[t] = _butterfly[P.redo_of[s](), WARP_SIZE](sum[t])
                comptime if shape.whole_block:
                    if lane_id() == 0:
                        half.unsafe_offset(
                            (s * CAPACITY + t) * warps + warp_id()
                        ).unsafe_store(sum[t])
            totals[s] = sum
    comptime if shape.whole_block:
        barrier()
        # each group of `warps` lanes adds up the same parts
        var part_index = lane_id() % warps
        var parts = block_dim.x // WARP_SIZE
        comptime for s in range(P.stages):
            comptime if P.pass_of(s) == pass_index:
                comptime redo = P.redo_of[s]()
                var total = Values[dtype, 1]()
                comptime for t in range(P.terms_of[s]()):
                    var part = materialize[redo]().identity[dtype, 1]()
                    if part_index < parts:
                        part = half.unsafe_offset(
                            (s * CAPACITY + t) * warps + part_index
                        ).unsafe_load()
                    total[t] = _butterfly[redo, warps](part)
                totals[s] = total
    comptime for s in range(P.stages):
        comptime if P.pass_of(s) == pass_index:
            totals[s] = P.finish[s](row, totals[s], totals[max(s - 1, 0)])


@always_inline
def _row[
    P: RowProgram, dtype: DType
](operands: Operands[accumulator[dtype]()], index: Int) -> Row[
    accumulator[dtype]()
]:
    """Reads what the stages may know of a row; what they do not ask for is never loaded."""
    comptime accum = accumulator[dtype]()
    var row = Row[accum](
        operands.n, operands.inverse_n, {}, {}, operands.number, 0
    )
    comptime for k in range(P.inputs):
        row.first[k] = (
            GlobalPointer[dtype](unsafe_from_address=Int(operands.inputs[k]))
            .unsafe_offset(index * Int(operands.length))
            .unsafe_load()
            .cast[accum]()
        )
    comptime for k in range(P.saved):
        row.saved[k] = (
            GlobalPointer[accum](unsafe_from_address=Int(operands.saved[k]))
            .unsafe_offset(index)
            .unsafe_load()
        )
    comptime if P.parameter:
        if operands.parameter_is_float32:
            row.parameter = (
                GlobalPointer[DType.float32](
                    unsafe_from_address=Int(operands.parameter)
                )
                .unsafe_load()
                .cast[accum]()
            )
        else:
            row.parameter = (
                GlobalPointer[dtype](
                    unsafe_from_address=Int(operands.parameter)
                )
                .unsafe_load()
                .cast[accum]()
            )
    return row


@always_inline
def _widen[
    dtype: DType, width: Int, //, accum: DType
](value: SIMD[dtype, width]) -> SIMD[accum, width]:
    """Converts to the type computed in; bfloat16 with one instruction an element instead of two."""
    comptime if dtype == DType.bfloat16 and width > 1:
        var pairs = bitcast[DType.uint32, width // 2](value)
        var even = bitcast[DType.float32, width // 2](pairs << 16)
        var odd = bitcast[DType.float32, width // 2](pairs & 0xFFFF0000)
        return rebind[SIMD[accum, width]](even.interleave(odd))
    else:
        return value.cast[accum]()


struct RowReader[P: RowProgram, dtype: DType, ftype: DType, shape: Shape](
    TrivialRegisterPassable
):
    """What a thread holds of a row: packed inputs and features.

    Parameters:
        P: The row program.
        dtype: The type of the inputs.
        ftype: The type of the features.
        shape: What a thread holds.
    """

    comptime width = Self.shape.width
    """Elements of one load."""
    comptime tile = Self.shape.tile
    """Loads per input."""
    comptime accum = accumulator[Self.dtype]()
    """The type computed in."""

    var inputs: StaticTuple[
        SIMD[Self.dtype, Self.width], max(1, Self.P.inputs * Self.tile)
    ]
    """Loads of the first input, then of the next."""
    var features: StaticTuple[
        SIMD[Self.ftype, Self.width], max(1, Self.P.features * Self.tile)
    ]
    """Loads of the first feature, then of the next."""
    var row: Row[Self.accum]
    """What the stages may know of the row."""

    @always_inline
    def __init__(out self):
        """Holds zeros."""
        self.inputs = {fill = 0}
        self.features = {fill = 0}
        self.row = Row[Self.accum](0, 0, {}, {}, 0, 0)

    @always_inline
    def load_inputs(
        mut self,
        operands: Operands[Self.accum],
        row: Int,
        start: Int32,
        step: Int32,
    ):
        """Loads the facts of a row and its elements start, start + step, ...; beyond its end, the last ones.

        Args:
            operands: The tensors.
            row: The row's index.
            start: The first element's index.
            step: The distance of two loads.
        """
        self.row = _row[Self.P, Self.dtype](operands, row)
        comptime for k in range(Self.P.inputs):
            var address = GlobalPointer[Self.dtype](
                unsafe_from_address=Int(operands.inputs[k])
            ).unsafe_offset(row * Int(operands.length))
            comptime for i in range(Self.tile):
                var column = min(
                    start + Int32(i) * step,
                    operands.length - Int32(Self.width),
                )
                self.inputs[k * Self.tile + i] = address.unsafe_offset(
                    Int(column)
                ).unsafe_load[
                    width=Self.width,
                    alignment=Self.width * size_of[Self.dtype](),
                ]()

    @always_inline
    def load_features(
        mut self, operands: Operands[Self.accum], start: Int32, step: Int32
    ):
        """Loads the features of the same elements.

        Args:
            operands: The tensors.
            start: The first element's index.
            step: The distance of two loads.
        """
        comptime for k in range(Self.P.features):
            if operands.features[k] != 0:
                var address = GlobalPointer[Self.ftype](
                    unsafe_from_address=Int(operands.features[k])
                )
                comptime for i in range(Self.tile):
                    var column = min(
                        start + Int32(i) * step,
                        operands.length - Int32(Self.width),
                    )
                    self.features[k * Self.tile + i] = address.unsafe_offset(
                        Int(column)
                    ).unsafe_load[
                        width=Self.width,
                        alignment=min(16, Self.width * size_of[Self.ftype]()),
                        invariant=True,
                    ]()
            else:
                comptime for i in range(Self.tile):
                    self.features[k * Self.tile + i] = operands.absent[k].cast[
                        Self.ftype
                    ]()

    @always_inline
    def values(self, i: Int) -> Values[Self.accum, Self.width]:
        """Returns the values of the i-th load's elements.

        Args:
            i: Which load.

        Returns:
            Inputs, then features.
        """
        var v = Values[Self.accum, Self.width]()
        comptime for k in range(Self.P.inputs):
            v[k] = _widen[Self.accum](self.inputs[k * Self.tile + i])
        comptime for k in range(Self.P.features):
            v[Self.P.inputs + k] = _widen[Self.accum](
                self.features[k * Self.tile + i]
            )
        return v

    @always_inline
    def take[
        pass_index: Int
    ](
        self,
        operands: Operands[Self.accum],
        index: Int,
        start: Int32,
        step: Int32,
        totals: Terms[Self.accum, 1],
        mut sums: Terms[Self.accum, 1],
        mut columns: _ColumnSums[Self.P, Self.accum, Self.shape],
    ):
        """Takes the elements through a pass: adds their terms or, in the last pass, stores their outputs.

        The terms of one load are reduced before the test for the row's end: that costs one selection instead
        of one for each element, and no branch keeps the compiler from sharing work between passes.

        Parameters:
            pass_index: The pass.

        Args:
            operands: The tensors.
            index: The row's index.
            start: The first element's index.
            step: The distance of two loads.
            totals: The totals of earlier passes.
            sums: Receives the terms.
            columns: Receives the terms of sums over rows.
        """
        comptime for i in range(Self.tile):
            var column = start + Int32(i) * step
            var valid = column < operands.length
            var terms = Terms[Self.accum, Self.width](
                fill=Values[Self.accum, Self.width]()
            )
            var v = Self.P.visit[pass_index](
                self.row, self.values(i), totals, terms
            )
            comptime for s in range(Self.P.stages):
                comptime if Self.P.pass_of(s) == pass_index:
                    comptime redo = Self.P.redo_of[s]()
                    var sum = sums[s]
                    comptime for t in range(Self.P.terms_of[s]()):
                        var with_load = materialize[redo]().combine[
                            Self.accum, 1
                        ](sum[t], materialize[redo]().across(terms[s][t]))
                        sum[t] = with_load if valid else sum[t]
                    sums[s] = sum
            comptime if pass_index == Self.P.passes:
                comptime for c in range(Self.P.columns):
                    columns[c * Self.tile + i] += v[Self.P.outputs + c]
                if valid:
                    _store[Self.P, Self.dtype](operands, index, column, v)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(shape.threads)),
    `nvvm.minctasm`=SIMDLength(shape.blocks),
)
def row_kernel[
    P: RowProgram, dtype: DType, ftype: DType, shape: Shape
](operands: Operands[accumulator[dtype]()]):
    """Takes rows through a program.

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
    var shared = stack_allocation[
        2 * P.stages * CAPACITY * ceildiv(shape.threads, WARP_SIZE),
        Scalar[accum],
        address_space=AddressSpace.SHARED,
    ]()
    var flip = 0
    var rows = Int(operands.rows)

    var lane = thread_idx.x
    var threads = block_dim.x
    var index = block_idx.x
    var row_step = grid_dim.x
    comptime if not shape.whole_block:
        lane = lane_id()
        threads = WARP_SIZE
        var warps = block_dim.x // WARP_SIZE
        index = block_idx.x * warps + warp_id()
        row_step = grid_dim.x * warps
    var start = Int32(lane * shape.width)
    var step = Int32(threads * shape.width)

    var columns = _ColumnSums[P, accum, shape](fill=0)
    comptime if shape.persistent:
        var reader = RowReader[P, dtype, ftype, shape]()
        reader.load_inputs(operands, min(index, rows - 1), start, step)
        while index < rows:
            var next = reader
            next.load_inputs(
                operands, min(index + row_step, rows - 1), start, step
            )
            reader.load_features(operands, start, step)
            _resident_row(
                operands, index, reader, start, step, shared, flip, columns
            )
            reader = next
            index += row_step
        comptime if P.columns > 0:
            _store_columns[P, shape](operands, columns, start, step)
    else:
        # warps beyond the last row have nothing to do, and no barrier waits for them
        if index >= rows:
            return
        comptime if shape.resident:
            var reader = RowReader[P, dtype, ftype, shape]()
            reader.load_inputs(operands, index, start, step)
            reader.load_features(operands, start, step)
            _resident_row(
                operands, index, reader, start, step, shared, flip, columns
            )
        else:
            _long_row[P, dtype, ftype, shape](
                operands, index, start, step, shared
            )


@always_inline
def _resident_row[
    P: RowProgram, dtype: DType, ftype: DType, shape: Shape, //
](
    operands: Operands[accumulator[dtype]()],
    index: Int,
    reader: RowReader[P, dtype, ftype, shape],
    start: Int32,
    step: Int32,
    shared: _SharedPointer[accumulator[dtype]()],
    mut flip: Int,
    mut columns: _ColumnSums[P, accumulator[dtype](), shape],
):
    """Takes a row that is in registers through all passes."""
    var totals = Terms[accumulator[dtype](), 1](fill={})
    comptime for p in range(P.passes + 1):
        var sums = _identities[P, accumulator[dtype]()]()
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
    start: Int32,
    step: Int32,
    shared: _SharedPointer[accumulator[dtype]()],
):
    """Takes a row of any length through all passes, reading it in each."""
    comptime accum = accumulator[dtype]()
    var row = _row[P, dtype](operands, index)
    var totals = Terms[accum, 1](fill={})
    var columns = _ColumnSums[P, accum, shape](fill=0)
    var flip = 0
    comptime for p in range(P.passes + 1):
        var sums = _identities[P, accum]()
        var first = start
        while first < operands.length:
            var reader = RowReader[P, dtype, ftype, shape]()
            reader.load_inputs(operands, index, first, step)
            reader.load_features(operands, first, step)
            reader.take[p](operands, index, first, step, totals, sums, columns)
            first += step * Int32(shape.tile)
        comptime if _reduces[P](p):
            _reduce[P, p, shape](row, sums, totals, shared, flip)
    if start == 0:
        _store_results[P](operands, index, totals)


@always_inline
def _identities[P: RowProgram, dtype: DType]() -> Terms[dtype, 1]:
    """Returns the terms of no elements."""
    var sums = Terms[dtype, 1](fill={})
    comptime for s in range(P.stages):
        comptime redo = P.redo_of[s]()
        var none = materialize[redo]().identity[dtype, 1]()
        sums[s] = {none, none, none, none}
    return sums


@always_inline
def _reduces[P: RowProgram](pass_index: Int) -> Bool:
    """Returns whether any stage reduces in a pass."""
    var found = False
    comptime for s in range(P.stages):
        if P.pass_of(s) == pass_index and P.terms_of[s]() > 0:
            found = True
    return found


@always_inline
def _store[
    P: RowProgram, dtype: DType
](
    operands: Operands[accumulator[dtype]()],
    row: Int,
    column: Int32,
    v: Values[accumulator[dtype](), _],
):
    """Stores the outputs of some elements, or adds them to what is there."""
    comptime alignment = v.width * size_of[dtype]()
    comptime for k in range(P.outputs):
        if operands.outputs[k] != 0:
            var address = GlobalPointer[dtype](
                unsafe_from_address=Int(operands.outputs[k])
            ).unsafe_offset(row * Int(operands.length) + Int(column))
            var value = v[k]
            if operands.accumulate:
                value += address.unsafe_load[
                    width=v.width, alignment=alignment
                ]().cast[accumulator[dtype]()]()
            address.unsafe_store[alignment=alignment](value.cast[dtype]())


@always_inline
def _store_results[
    accum: DType, //, P: RowProgram
](operands: Operands[accum], index: Int, totals: Terms[accum, 1]):
    """Stores the totals of a row that are results."""
    comptime for s in range(P.stages):
        comptime for r in range(P.results_of[s]()):
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
    columns: _ColumnSums[P, accum, shape],
    start: Int32,
    step: Int32,
):
    """Stores the sums over the block's rows, those of its warps added in their order."""
    comptime width = shape.width
    comptime tile = shape.tile
    var length = Int(operands.length)
    comptime for c in range(P.columns):
        var partial = GlobalPointer[accum](
            unsafe_from_address=Int(operands.column_sums)
        ).unsafe_offset((c * grid_dim.x + block_idx.x) * length)
        comptime if shape.whole_block:
            comptime for i in range(tile):
                var column = start + Int32(i) * step
                if column < operands.length:
                    partial.unsafe_offset(Int(column)).unsafe_store(
                        columns[c * tile + i]
                    )
        else:
            var shared = stack_allocation[
                WARP_SIZE * tile * width,
                Scalar[accum],
                address_space=AddressSpace.SHARED,
                alignment=16,
            ]()
            for w in range(block_dim.x // WARP_SIZE):
                if w == warp_id():
                    comptime for i in range(tile):
                        var sum = columns[c * tile + i]
                        var place = shared.unsafe_offset(
                            Int(start + Int32(i) * step)
                        )
                        if w > 0:
                            sum += place.unsafe_load[width=width]()
                        place.unsafe_store(sum)
                barrier()
            for column in range(thread_idx.x, length, block_dim.x):
                partial.unsafe_offset(column).unsafe_store(
                    shared.unsafe_offset(column).unsafe_load()
                )
            barrier()
