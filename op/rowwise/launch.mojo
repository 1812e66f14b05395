"""Chooses the shape of a GPU kernel for a row program and launches it."""

from max.gpu import WARP_SIZE
from max.gpu.host import DeviceAttribute, DeviceContext, DeviceStream
from std.math import align_up, ceildiv
from std.sys import size_of

from .columns import (
    ADD_UP_THREADS,
    COLUMN_THREADS,
    FINISH_COLUMNS,
    FINISH_LANES,
    add_up_kernel,
    column_kernel,
    finish_columns_kernel,
)
from .gpu import Shape, row_kernel
from .operands import (
    MAX_TENSORS,
    Addresses,
    Operands,
    RowTarget,
    accumulator,
)
from .program import RowProgram

comptime _WARP_THREADS = 128
comptime _LONG_THREADS = 512
comptime _PERSISTENT_THREADS = 512


@fieldwise_init
struct Gpu(Copyable, Movable, RowTarget):
    """A GPU and the stream to launch on."""

    var context: DeviceContext
    """The device."""
    var stream: DeviceStream
    """Where kernels are enqueued."""
    var processors: Int
    """The number of multiprocessors."""

    def __init__(out self, context: DeviceContext, stream: DeviceStream) raises:
        """Asks the device for its size.

        Args:
            context: The device.
            stream: The stream to launch on.

        Raises:
            If the device does not answer.
        """
        self.context = context
        self.stream = stream
        self.processors = context.get_attribute(
            DeviceAttribute.MULTIPROCESSOR_COUNT
        )

    def run[
        P: RowProgram, dtype: DType, ftype: DType
    ](self, operands: Operands[accumulator[dtype]()]) raises:
        """Takes all rows through a program without columns.

        Parameters:
            P: The row program.
            dtype: The type of inputs and outputs.
            ftype: The type of the features.

        Args:
            operands: The tensors.

        Raises:
            If the launch fails.
        """
        launch_rows[P, dtype, ftype](self, operands)

    def add_up[
        accum: DType, dtype: DType
    ](self, terms: Int64, count: Int, output: Int64, accumulate: Bool) raises:
        """Sums a vector in a fixed order.

        Parameters:
            accum: The type of the terms.
            dtype: The type of the sum.

        Args:
            terms: Address of the vector.
            count: The number of its elements.
            output: Address of the sum.
            accumulate: Whether to add to what is there.

        Raises:
            If the launch fails.
        """
        launch_add_up[accum, dtype](self, terms, count, output, accumulate)


def _low_bits(addresses: Addresses) -> Int64:
    var bits = Int64(0)
    comptime for i in range(MAX_TENSORS):
        bits |= addresses[i]
    return bits


def is_wide[dtype: DType](operands: Operands) -> Bool:
    """Returns whether all loads and stores may be of 16 bytes.

    Parameters:
        dtype: The type of inputs and outputs.

    Args:
        operands: The tensors.

    Returns:
        Whether K and all addresses are multiples of that.
    """
    var bits = (
        _low_bits(operands.inputs)
        | _low_bits(operands.outputs)
        | _low_bits(operands.features)
        | Int64(Int(operands.length) * size_of[dtype]())
    )
    return bits % 16 == 0


@always_inline
def _launch[
    P: RowProgram, dtype: DType, ftype: DType, shape: Shape
](
    gpu: Gpu,
    operands: Operands[accumulator[dtype]()],
    blocks: Int,
    threads: Int,
) raises:
    comptime kernel = row_kernel[P, dtype, ftype, shape]
    var compiled = gpu.context.compile_function[kernel]()
    gpu.stream.enqueue_function(
        compiled, operands, grid_dim=blocks, block_dim=threads
    )


def launch_rows[
    P: RowProgram, dtype: DType, ftype: DType
](gpu: Gpu, operands: Operands[accumulator[dtype]()]) raises:
    """Launches a program without columns: a block or a warp for each row.

    Parameters:
        P: The row program.
        dtype: The type of inputs and outputs.
        ftype: The type of the features.

    Args:
        gpu: Where to run.
        operands: The tensors.

    Raises:
        If the launch fails.
    """
    if operands.rows == 0 or operands.length == 0:
        return
    comptime wide = 16 // size_of[dtype]()
    if is_wide[dtype](operands):
        _launch_rows[P, dtype, ftype, wide, 4](gpu, operands)
    else:
        _launch_rows[P, dtype, ftype, 1, 8](gpu, operands)


@always_inline
def _launch_rows[
    P: RowProgram, dtype: DType, ftype: DType, width: Int, tile: Int
](gpu: Gpu, operands: Operands[accumulator[dtype]()]) raises:
    """Takes the smallest shape that holds a row: a warp, a block, a larger block, or a row read in parts."""
    # what a thread holds of each of several inputs has to fit the same registers
    comptime block_tile = tile if P.inputs == 1 else tile // 2
    comptime threads = 256 if P.inputs == 1 else 512
    var rows = Int(operands.rows)
    var loads = ceildiv(Int(operands.length), width)
    comptime for warp_tile in [tile // 2, tile]:
        if loads <= WARP_SIZE * warp_tile:
            comptime blocks = 6 if P.inputs == 1 else 4
            comptime shape = Shape(
                width, warp_tile, False, True, False, _WARP_THREADS, blocks
            )
            _launch[P, dtype, ftype, shape](
                gpu,
                operands,
                ceildiv(rows, _WARP_THREADS // WARP_SIZE),
                _WARP_THREADS,
            )
            return
    if loads <= threads * block_tile:
        comptime blocks = 3 if P.inputs == 1 else 2
        comptime shape = Shape(
            width, block_tile, True, True, False, threads, blocks
        )
        _launch[P, dtype, ftype, shape](
            gpu, operands, rows, align_up(ceildiv(loads, block_tile), WARP_SIZE)
        )
        return
    comptime if P.inputs == 1:
        # one such block fills a multiprocessor, so it has to load ahead
        if loads <= _PERSISTENT_THREADS * tile:
            comptime shape = Shape(
                width, tile, True, True, True, _PERSISTENT_THREADS, 1
            )
            var launch = _persistent_blocks(
                gpu, rows, align_up(ceildiv(loads, tile), WARP_SIZE)
            )
            _launch[P, dtype, ftype, shape](
                gpu, operands, launch.blocks, launch.threads
            )
            return
    comptime shape = Shape(width, tile, True, False, False, _LONG_THREADS, 2)
    _launch[P, dtype, ftype, shape](gpu, operands, rows, _LONG_THREADS)


@fieldwise_init
struct _Persistent(TrivialRegisterPassable):
    """The launch of a persistent kernel."""

    var blocks: Int
    var threads: Int


def _persistent_warps(gpu: Gpu, rows: Int) -> _Persistent:
    comptime threads = _PERSISTENT_THREADS // 2
    return {
        min(gpu.processors, ceildiv(rows, threads // WARP_SIZE)),
        threads,
    }


def _persistent_blocks(gpu: Gpu, rows: Int, threads: Int) -> _Persistent:
    var together = _PERSISTENT_THREADS // threads
    return {min(rows, gpu.processors * together), threads}


def _column_parts(gpu: Gpu, rows: Int, length: Int, width: Int) -> Int:
    """Returns how many parts of the rows `column_kernel` sums."""
    var across = ceildiv(length, COLUMN_THREADS * width)
    return min(ceildiv(4 * gpu.processors, across), ceildiv(rows, 8))


def column_sums_bytes[
    P: RowProgram, dtype: DType
](gpu: Gpu, rows: Int, length: Int) -> Int:
    """Returns the size of the workspace for a program's sums over rows.

    Parameters:
        P: The row program.
        dtype: The type of inputs and outputs.

    Args:
        gpu: Where to run.
        rows: The number of rows M.
        length: The number of elements K of a row.

    Returns:
        The number of bytes.
    """
    comptime wide = 16 // size_of[dtype]()
    var parts = 0
    comptime for width in [1, wide]:
        parts = max(parts, _column_parts(gpu, rows, length, width))
        comptime tile = 2 if width > 1 else 8
        var threads = align_up(ceildiv(length, width * tile), WARP_SIZE)
        if threads <= _PERSISTENT_THREADS:
            parts = max(parts, _persistent_blocks(gpu, rows, threads).blocks)
    return P.columns * parts * length * size_of[accumulator[dtype]()]()


def launch_rows_and_columns[
    P: RowProgram, without_columns: RowProgram, dtype: DType, ftype: DType
](gpu: Gpu, operands: Operands[accumulator[dtype]()], sums: Addresses) raises:
    """Launches a program with columns, and the kernel that adds their partial sums.

    Rows whose sums fit the registers of a block are read once. Longer rows are read by two kernels.

    Parameters:
        P: The row program.
        without_columns: The same program, without its columns.
        dtype: The type of inputs and outputs.
        ftype: The type of the features and of the sums.

    Args:
        gpu: Where to run.
        operands: The tensors; `column_sums` points to `column_sums_bytes` bytes.
        sums: Vectors [K] to write; 0 where not wanted.

    Raises:
        If the launch fails.
    """
    if operands.length == 0:
        return
    var parts = 0
    if operands.rows > 0:
        comptime wide = 16 // size_of[dtype]()
        if is_wide[dtype](operands):
            parts = _launch_columns[P, dtype, ftype, wide, [2, 4], 2](
                gpu, operands
            )
        else:
            parts = _launch_columns[P, dtype, ftype, 1, [], 8](gpu, operands)
        if parts == 0:
            if operands.outputs[0] != 0:
                launch_rows[without_columns, dtype, ftype](gpu, operands)
            if is_wide[dtype](operands):
                parts = _launch_column_kernel[P, dtype, ftype, wide](
                    gpu, operands
                )
            else:
                parts = _launch_column_kernel[P, dtype, ftype, 1](gpu, operands)
    comptime kernel = finish_columns_kernel[accumulator[dtype](), ftype]
    var compiled = gpu.context.compile_function[kernel]()
    gpu.stream.enqueue_function(
        compiled,
        sums,
        operands.column_sums,
        Int64(parts),
        Int64(Int(operands.length)),
        grid_dim=(ceildiv(Int(operands.length), FINISH_COLUMNS), P.columns),
        block_dim=FINISH_COLUMNS * FINISH_LANES,
    )


@always_inline
def _launch_columns[
    P: RowProgram,
    dtype: DType,
    ftype: DType,
    width: Int,
    warp_tiles: List[Int],
    block_tile: Int,
](gpu: Gpu, operands: Operands[accumulator[dtype]()]) raises -> Int:
    """Launches a persistent kernel and returns the number of partial sums; 0 if rows are too long for one."""
    var rows = Int(operands.rows)
    var loads = ceildiv(Int(operands.length), width)
    if operands.outputs[0] == 0:
        return 0
    comptime for tile in warp_tiles:
        if loads <= WARP_SIZE * tile:
            comptime threads = _PERSISTENT_THREADS // 2
            comptime shape = Shape(width, tile, False, True, True, threads, 1)
            var launch = _persistent_warps(gpu, rows)
            _launch[P, dtype, ftype, shape](
                gpu, operands, launch.blocks, launch.threads
            )
            return launch.blocks
    var threads = align_up(ceildiv(loads, block_tile), WARP_SIZE)
    if threads <= _PERSISTENT_THREADS:
        comptime shape = Shape(
            width, block_tile, True, True, True, _PERSISTENT_THREADS, 1
        )
        var launch = _persistent_blocks(gpu, rows, threads)
        _launch[P, dtype, ftype, shape](
            gpu, operands, launch.blocks, launch.threads
        )
        return launch.blocks
    return 0


@always_inline
def _launch_column_kernel[
    P: RowProgram, dtype: DType, ftype: DType, width: Int
](gpu: Gpu, operands: Operands[accumulator[dtype]()]) raises -> Int:
    """Launches `column_kernel` and returns the number of partial sums."""
    comptime shape = Shape(width, 1, True, True, False, COLUMN_THREADS, 1)
    comptime kernel = column_kernel[P, dtype, ftype, shape]
    var parts = _column_parts(
        gpu, Int(operands.rows), Int(operands.length), width
    )
    var compiled = gpu.context.compile_function[kernel]()
    gpu.stream.enqueue_function(
        compiled,
        operands,
        grid_dim=(
            ceildiv(Int(operands.length), COLUMN_THREADS * width),
            parts,
        ),
        block_dim=COLUMN_THREADS,
    )
    return parts


def launch_add_up[
    accum: DType, dtype: DType
](gpu: Gpu, terms: Int64, count: Int, output: Int64, accumulate: Bool) raises:
    """Sums a vector in a fixed order.

    Parameters:
        accum: The type of the terms.
        dtype: The type of the sum.

    Args:
        gpu: Where to run.
        terms: Address of the vector.
        count: The number of its elements.
        output: Address of the sum.
        accumulate: Whether to add to what is there.

    Raises:
        If the launch fails.
    """
    comptime kernel = add_up_kernel[accum, dtype]
    var compiled = gpu.context.compile_function[kernel]()
    gpu.stream.enqueue_function(
        compiled,
        terms,
        Int64(count),
        output,
        Int32(1 if accumulate else 0),
        grid_dim=1,
        block_dim=ADD_UP_THREADS,
    )
