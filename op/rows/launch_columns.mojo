"""Launches row programs with sums over rows on a GPU.

A launch leaves partial sums in its workspace; `launch_totals` adds up those of several launches.
"""

from max.gpu import WARP_SIZE
from max.gpu.host import Dim
from std.math import align_up, ceildiv
from std.sys import size_of

from ..device import Gpu
from ..pdl import pdl_attributes
from .columns import (
    COLUMN_WARPS,
    TOTAL_COLUMNS,
    TOTAL_NARROW,
    TOTAL_THREADS,
    Total,
    Totals,
    column_kernel,
    panel_kernel,
    total_kernel,
)
from .launch import (
    PERSISTENT_THREADS,
    PersistentGrid,
    can_vectorize,
    launch_long_rows,
    launch_persistent,
    persistent_shape,
)
from .operands import Operands, Sums, accumulator
from .program import RowProgram
from .shape import Shape

# Enough blocks to hide memory's latency, and enough rows for each warp to be worth a partial sum.
comptime _BLOCKS_PER_SM = 4
comptime _FEWEST_PART_ROWS = 4 * COLUMN_WARPS
# Blocks that store have the registers of a third of an SM each. They run in waves of as many as fit: one block beyond a
# wave would take as long as a whole wave.
comptime _STORING_BLOCKS_PER_SM = 3
comptime _WAVES = 2
# Where nothing is summed, parts cost nothing, and small ones end at the same time.
comptime _STORING_PART_ROWS = 8 * COLUMN_WARPS
# A grid has no more blocks in that direction.
comptime _MOST_PARTS = 65535


def _tiles(width: Int) -> List[Int]:
    """Returns how many loads of a row a thread of a persistent block may have, fewest first."""
    return [1, 2] if width > 1 else [8]


def _stores[P: RowProgram]() -> Bool:
    """Returns whether `column_kernel` stores a program's outputs."""
    return P.passes == 0 and P.outputs > 0


def _column_parts[
    P: RowProgram
](gpu: Gpu, operands: Operands, width: Int) -> Int:
    """Returns how many parts `column_kernel` or `panel_kernel` makes of the rows of a group."""
    var rows = Int(operands.rows)
    var across = ceildiv(Int(operands.length), WARP_SIZE * width) * Int(
        operands.groups
    )
    comptime if not _stores[P]():
        return min(
            ceildiv(_BLOCKS_PER_SM * gpu.processors, across),
            ceildiv(rows, _FEWEST_PART_ROWS),
        )
    comptime if P.columns == 0:
        # Few rows are shared by all SMs, one for each warp at least.
        var parts = max(
            ceildiv(rows, _STORING_PART_ROWS),
            ceildiv(_STORING_BLOCKS_PER_SM * gpu.processors, across),
        )
        return min(parts, ceildiv(rows, COLUMN_WARPS), _MOST_PARTS)
    var waves = _WAVES * _STORING_BLOCKS_PER_SM * gpu.processors
    return max(1, min(waves // across, ceildiv(rows, _FEWEST_PART_ROWS)))


def column_sums_bytes[
    P: RowProgram, dtype: DType
](gpu: Gpu, rows: Int, length: Int, groups: Int = 1) -> Int:
    """Returns the size of the workspace for a program's sums over rows.

    Parameters:
        P: The row program.
        dtype: The type of inputs and outputs.

    Args:
        gpu: Where to run.
        rows: The number of rows M.
        length: The number of elements K of a row.
        groups: The number of groups.

    Returns:
        The number of bytes, a multiple of 16.
    """
    var shape = Operands[accumulator[dtype]()](rows, length, groups)
    comptime vector = 16 // size_of[dtype]()
    var parts = 0
    comptime for width in [1, vector]:
        parts = max(parts, _column_parts[P](gpu, shape, width))
        comptime if P.outputs > 0 and P.passes > 0:
            comptime for tile in _tiles(width):
                if ceildiv(length, width * tile) <= PERSISTENT_THREADS:
                    comptime kernel = persistent_shape[dtype](width, tile)
                    parts = max(
                        parts, PersistentGrid(gpu, shape, kernel).blocks
                    )
    return align_up(
        P.columns * groups * parts * length * size_of[accumulator[dtype]()](),
        16,
    )


def launch_rows_and_columns[
    P: RowProgram, without_columns: RowProgram, dtype: DType, ftype: DType
](
    gpu: Gpu,
    operands: Operands[accumulator[dtype]()],
    sums: Sums,
    mut totals: Totals,
) raises:
    """Launches a program with columns, even if none is wanted.

    Rows whose sums fit into the registers of a block are read once. Longer rows are read by two kernels. An
    output may take the place of an input.

    Parameters:
        P: The row program.
        without_columns: The same program, without its columns.
        dtype: The type of inputs and outputs.
        ftype: The type of the features.

    Args:
        gpu: Where to run.
        operands: The tensors; `column_sums` points to `column_sums_bytes` bytes, or is 0 if no sum is wanted.
        sums: What to write.
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
        _add_totals[P](operands, parts, sums, totals)
        return
    # in this order: an output may be written over an input
    if sums.any():
        launch_columns[P, dtype, ftype](gpu, operands, sums, totals)
    if has_outputs:
        launch_long_rows[without_columns, dtype, ftype](gpu, operands)


@always_inline
def _launch_persistent[
    P: RowProgram,
    dtype: DType,
    ftype: DType,
    width: Int,
](gpu: Gpu, operands: Operands[accumulator[dtype]()]) raises -> Int:
    """Launches a persistent kernel and returns the number of partial sums; 0 if rows are too long for one."""
    comptime for tile in _tiles(width):
        if ceildiv(Int(operands.length), width * tile) <= PERSISTENT_THREADS:
            return launch_persistent[P, dtype, ftype, width, tile](
                gpu, operands
            )
    return 0


def launch_columns[
    P: RowProgram, dtype: DType, ftype: DType
](
    gpu: Gpu,
    operands: Operands[accumulator[dtype]()],
    sums: Sums,
    mut totals: Totals,
) raises:
    """Launches a program for its columns, and for its outputs if nothing is reduced over a row.

    Parameters:
        P: The row program.
        dtype: The type of inputs.
        ftype: The type of the features.

    Args:
        gpu: Where to run.
        operands: The tensors; `column_sums` points to `column_sums_bytes` bytes, if there are columns.
        sums: What to write.
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
    _add_totals[P](operands, parts, sums, totals)


@always_inline
def _launch_column_kernel[
    P: RowProgram, dtype: DType, ftype: DType, width: Int
](gpu: Gpu, operands: Operands[accumulator[dtype]()]) raises -> Int:
    comptime threads = COLUMN_WARPS * WARP_SIZE
    var parts = _column_parts[P](gpu, operands, width)
    var grid = Dim(
        ceildiv(Int(operands.length), WARP_SIZE * width),
        parts,
        Int(operands.groups),
    )
    comptime blocks = _STORING_BLOCKS_PER_SM
    comptime shape = Shape(width, 1, True, True, False, threads, blocks)
    comptime if _stores[P]():
        comptime kernel = panel_kernel[P, dtype, ftype, shape]
        var compiled = gpu.context.compile_function[kernel]()
        gpu.stream.enqueue_function(
            compiled,
            operands,
            grid_dim=grid,
            block_dim=threads,
            attributes=pdl_attributes(),
        )
    else:
        comptime kernel = column_kernel[P, dtype, ftype, shape]
        var compiled = gpu.context.compile_function[kernel]()
        gpu.stream.enqueue_function(
            compiled,
            operands,
            grid_dim=grid,
            block_dim=threads,
            attributes=pdl_attributes(),
        )
    return parts


def _add_totals[
    accum: DType, //, P: RowProgram
](operands: Operands[accum], parts: Int, sums: Sums, mut totals: Totals):
    """Notes the sums of a program's columns that are wanted."""
    var column = Int(operands.groups) * parts * Int(operands.length)
    comptime for c in range(P.columns):
        totals.add(
            Total(
                sums.outputs[c],
                operands.column_sums + Int64(c * column * size_of[accum]()),
                Int32(parts),
                operands.length,
                operands.groups,
                sums.type,
            )
        )


def launch_totals[accum: DType](gpu: Gpu, totals: Totals) raises:
    """Adds up partial sums; nothing is launched if there are none.

    Parameters:
        accum: The type of the partial sums.

    Args:
        gpu: Where to run.
        totals: What to add up.

    Raises:
        If the launch fails.
    """
    var blocks = totals.blocks(TOTAL_COLUMNS) * totals.count
    if blocks == 0:
        return
    comptime for is_narrow in [False, True]:
        comptime columns = TOTAL_NARROW if is_narrow else TOTAL_COLUMNS
        if (blocks < gpu.processors) == is_narrow:
            comptime kernel = total_kernel[accum, columns]
            var compiled = gpu.context.compile_function[kernel]()
            gpu.stream.enqueue_function(
                compiled,
                totals,
                grid_dim=(totals.blocks(columns), totals.count),
                block_dim=TOTAL_THREADS,
                attributes=pdl_attributes(),
            )
