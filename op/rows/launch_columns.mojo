"""Launches row programs with sums over rows on a GPU.

A launch leaves partial sums in its workspace; `launch_totals` adds up those of several launches.
"""

from max.gpu import WARP_SIZE
from std.math import align_up, ceildiv
from std.sys import size_of

from ..device import Gpu
from .columns import (
    COLUMN_WARPS,
    TOTAL_COLUMNS,
    TOTAL_LANES,
    Total,
    Totals,
    column_kernel,
    total_kernel,
)
from .gpu_row import Shape
from .launch import (
    PERSISTENT_THREADS,
    _launch,
    _persistent_blocks,
    _persistent_warps,
    can_vectorize,
    launch_rows,
)
from .operands import Addresses, Operands, accumulator
from .program import Program, RowProgram
from .stage import Stage

# enough blocks to hide memory's latency, and enough rows for each warp to be worth a partial sum
comptime _BLOCKS_AN_SM = 4
comptime _FEWEST_PART_ROWS = 4 * COLUMN_WARPS


struct _Itself(Stage):
    """Maps elements to themselves."""

    comptime terms = 0
    comptime broadcast = False


comptime ColumnSum = Program[_Itself, outputs_=0, columns_=1]
"""From x to the partial sums of its rows."""


def _tiles(width: Int) -> List[Int]:
    """Returns how many loads a thread of a persistent block has of a row, the fewest for which it is short enough."""
    return [1, 2] if width > 1 else [8]


def _blocks(tile: Int) -> Int:
    """Returns how many persistent blocks of PERSISTENT_THREADS the registers of an SM suffice for."""
    return 2 if tile == 1 else 1


def _column_parts(gpu: Gpu, rows: Int, length: Int, width: Int) -> Int:
    """Returns how many parts of the rows `column_kernel` sums."""
    var across = ceildiv(length, WARP_SIZE * width)
    return min(
        ceildiv(_BLOCKS_AN_SM * gpu.processors, across),
        ceildiv(rows, _FEWEST_PART_ROWS),
    )


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
        The number of bytes, a multiple of 16.
    """
    comptime vector = 16 // size_of[dtype]()
    var parts = 0
    comptime for width in [1, vector]:
        parts = max(parts, _column_parts(gpu, rows, length, width))
        comptime if P.outputs > 0:
            comptime for tile in _tiles(width):
                comptime blocks = _blocks(tile)
                var threads = align_up(ceildiv(length, width * tile), WARP_SIZE)
                if threads <= PERSISTENT_THREADS:
                    parts = max(
                        parts,
                        _persistent_blocks(gpu, rows, threads, blocks).blocks,
                    )
    return align_up(
        P.columns * parts * length * size_of[accumulator[dtype]()](), 16
    )


def launch_rows_and_columns[
    P: RowProgram, without_columns: RowProgram, dtype: DType, ftype: DType
](
    gpu: Gpu,
    operands: Operands[accumulator[dtype]()],
    sums: Addresses,
    mut totals: Totals,
) raises:
    """Launches a program with columns.

    Rows whose sums fit the registers of a block are read once. Longer rows are read by two kernels. An
    output may take the place of an input.

    Parameters:
        P: The row program.
        without_columns: The same program, without its columns.
        dtype: The type of inputs and outputs.
        ftype: The type of the features and of the sums.

    Args:
        gpu: Where to run.
        operands: The tensors; `column_sums` points to `column_sums_bytes` bytes.
        sums: Vectors [K] to write; 0 where not wanted.
        totals: Receives what is left to add up.

    Raises:
        If the launch fails.
    """
    comptime vector = 16 // size_of[dtype]()
    var has_outputs = False
    comptime for k in range(P.outputs):
        has_outputs = has_outputs or operands.outputs[k] != 0
    var parts = 0
    if has_outputs and operands.rows > 0 and operands.length > 0:
        if can_vectorize[dtype](operands):
            parts = _launch_persistent[P, dtype, ftype, vector](gpu, operands)
        else:
            parts = _launch_persistent[P, dtype, ftype, 1](gpu, operands)
    if parts > 0:
        _add_totals[P, dtype, ftype](operands, parts, sums, totals)
        return
    # in this order: an output may be written over an input
    launch_columns[P, dtype, ftype](gpu, operands, sums, totals)
    if has_outputs:
        launch_rows[without_columns, dtype, ftype](gpu, operands)


@always_inline
def _launch_persistent[
    P: RowProgram,
    dtype: DType,
    ftype: DType,
    width: Int,
](gpu: Gpu, operands: Operands[accumulator[dtype]()]) raises -> Int:
    """Launches a persistent kernel and returns the number of partial sums; 0 if rows are too long for one."""
    var rows = Int(operands.rows)
    var loads = ceildiv(Int(operands.length), width)
    comptime if width > 1:
        comptime tile = 2
        if loads <= WARP_SIZE * tile:
            comptime threads = PERSISTENT_THREADS // 2
            comptime shape = Shape(width, tile, False, True, True, threads, 1)
            var launch = _persistent_warps(gpu, rows)
            _launch[P, dtype, ftype, shape](
                gpu, operands, launch.blocks, launch.threads
            )
            return launch.blocks
    comptime for tile in _tiles(width):
        comptime blocks = _blocks(tile)
        var threads = align_up(ceildiv(loads, tile), WARP_SIZE)
        if threads <= PERSISTENT_THREADS:
            comptime shape = Shape(
                width, tile, True, True, True, PERSISTENT_THREADS, blocks
            )
            var launch = _persistent_blocks(gpu, rows, threads, blocks)
            _launch[P, dtype, ftype, shape](
                gpu, operands, launch.blocks, launch.threads
            )
            return launch.blocks
    return 0


def launch_columns[
    P: RowProgram, dtype: DType, ftype: DType
](
    gpu: Gpu,
    operands: Operands[accumulator[dtype]()],
    sums: Addresses,
    mut totals: Totals,
) raises:
    """Launches a program for its columns alone.

    Parameters:
        P: The row program.
        dtype: The type of inputs.
        ftype: The type of the features and of the sums.

    Args:
        gpu: Where to run.
        operands: The tensors; `column_sums` points to `column_sums_bytes` bytes.
        sums: Vectors [K] to write; 0 where not wanted.
        totals: Receives what is left to add up.

    Raises:
        If the launch fails.
    """
    comptime vector = 16 // size_of[dtype]()
    var parts = 0
    if operands.rows > 0 and operands.length > 0:
        if can_vectorize[dtype](operands):
            parts = _launch_column_kernel[P, dtype, ftype, vector](
                gpu, operands
            )
        else:
            parts = _launch_column_kernel[P, dtype, ftype, 1](gpu, operands)
    _add_totals[P, dtype, ftype](operands, parts, sums, totals)


@always_inline
def _launch_column_kernel[
    P: RowProgram, dtype: DType, ftype: DType, width: Int
](gpu: Gpu, operands: Operands[accumulator[dtype]()]) raises -> Int:
    comptime threads = COLUMN_WARPS * WARP_SIZE
    comptime shape = Shape(width, 1, True, True, False, threads, 1)
    comptime kernel = column_kernel[P, dtype, ftype, shape]
    var length = Int(operands.length)
    var parts = _column_parts(gpu, Int(operands.rows), length, width)
    var compiled = gpu.context.compile_function[kernel]()
    gpu.stream.enqueue_function(
        compiled,
        operands,
        grid_dim=(ceildiv(length, WARP_SIZE * width), parts),
        block_dim=threads,
    )
    return parts


def _add_totals[
    P: RowProgram, dtype: DType, ftype: DType
](
    operands: Operands[accumulator[dtype]()],
    parts: Int,
    sums: Addresses,
    mut totals: Totals,
):
    """Notes down the sums of a program's columns that are wanted."""
    comptime assert ftype == dtype or ftype == DType.float32
    var length = Int(operands.length)
    comptime for c in range(P.columns):
        var first = c * parts * length * size_of[accumulator[dtype]()]()
        totals.add(
            Total(
                sums[c],
                operands.column_sums + Int64(first),
                Int32(parts),
                Int32(length),
                ftype == DType.float32,
            )
        )


def launch_totals[dtype: DType](gpu: Gpu, totals: Totals) raises:
    """Adds up partial sums; nothing is launched if there are none.

    Parameters:
        dtype: The type of the inputs that were summed.

    Args:
        gpu: Where to run.
        totals: What to add up.

    Raises:
        If the launch fails.
    """
    if totals.longest == 0:
        return
    comptime kernel = total_kernel[accumulator[dtype](), dtype]
    var compiled = gpu.context.compile_function[kernel]()
    gpu.stream.enqueue_function(
        compiled,
        totals,
        grid_dim=(ceildiv(totals.longest, TOTAL_COLUMNS), totals.count),
        block_dim=TOTAL_COLUMNS * TOTAL_LANES,
    )
