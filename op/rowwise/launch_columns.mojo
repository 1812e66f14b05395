"""Launches row programs with sums over rows on a GPU."""

from max.gpu import WARP_SIZE
from std.math import align_up, ceildiv
from std.sys import size_of

from .columns import (
    COLUMN_THREADS,
    FINISH_COLUMNS,
    FINISH_LANES,
    column_kernel,
    finish_columns_kernel,
)
from .gpu_row import Shape
from .launch import (
    PERSISTENT_THREADS,
    Gpu,
    _launch,
    _persistent_blocks,
    _persistent_warps,
    is_wide,
    launch_rows,
)
from .operands import Addresses, Operands, accumulator
from .program import RowProgram


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
        if threads <= PERSISTENT_THREADS:
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
            comptime threads = PERSISTENT_THREADS // 2
            comptime shape = Shape(width, tile, False, True, True, threads, 1)
            var launch = _persistent_warps(gpu, rows)
            _launch[P, dtype, ftype, shape](
                gpu, operands, launch.blocks, launch.threads
            )
            return launch.blocks
    var threads = align_up(ceildiv(loads, block_tile), WARP_SIZE)
    if threads <= PERSISTENT_THREADS:
        comptime shape = Shape(
            width, block_tile, True, True, True, PERSISTENT_THREADS, 1
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
