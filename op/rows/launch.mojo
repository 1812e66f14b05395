"""Chooses the shape of a GPU kernel for a row program and launches it."""

from max.gpu import WARP_SIZE
from std.math import align_up, ceildiv
from std.sys import size_of

from ..device import Gpu
from ..pdl import pdl_attributes
from .gpu import row_kernel
from .operands import MAX_TENSORS, Addresses, Operands, accumulator
from .program import RowProgram
from .shape import Shape

comptime _WARP_THREADS = 128
comptime _LONG_THREADS = 512
# Of few rows, a persistent block takes at least as many. Each leaves partial sums as long as a row, so one row for each
# block means that as much is written in float32 for every sum over rows as the rows have, and read again by `total_kernel`.
comptime _FEWEST_BLOCK_ROWS = 1
comptime PERSISTENT_THREADS = 512
"""The most threads of a persistent block."""


def _low_bits(addresses: Addresses) -> Int64:
    var bits = Int64(0)
    comptime for i in range(MAX_TENSORS):
        bits |= addresses[i]
    return bits


def can_vectorize[dtype: DType](operands: Operands) -> Bool:
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
        | operands.residual
        | operands.sum
        | operands.addend
        | Int64(Int(operands.length) * size_of[dtype]())
    )
    if operands.groups > 1:
        # Features are no narrower than inputs.
        bits |= operands.feature_pitch * Int64(size_of[dtype]())
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
    """Launches a number of blocks for each group."""
    comptime kernel = row_kernel[P, dtype, ftype, shape]
    var compiled = gpu.context.compile_function[kernel]()
    gpu.stream.enqueue_function(
        compiled,
        operands,
        grid_dim=(blocks, Int(operands.groups)),
        block_dim=threads,
        attributes=pdl_attributes(),
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
    comptime vector = 16 // size_of[dtype]()
    if can_vectorize[dtype](operands):
        _launch_rows[P, dtype, ftype, vector, 4](gpu, operands)
        return
    comptime if P.eight_bits != 0:
        raise Error("rows in 8 bits start at multiples of 16 bytes")
    else:
        _launch_rows[P, dtype, ftype, 1, 8](gpu, operands)


@always_inline
def _launch_rows[
    P: RowProgram, dtype: DType, ftype: DType, width: Int, tile: Int
](gpu: Gpu, operands: Operands[accumulator[dtype]()]) raises:
    """Takes the smallest shape that holds a row: a warp, a block, a larger block, or a row read in parts."""
    # what a thread holds of several inputs has to fit into the same registers
    comptime block_tile = tile if P.inputs == 1 else tile // 2
    comptime threads = 256 if P.inputs == 1 else 512
    # features wider than the inputs take twice the registers, a residual some, and fewer blocks are better than
    # spilled registers
    comptime is_wide = P.features > 0 and size_of[ftype]() > size_of[dtype]()
    comptime spare = 1 if is_wide or P.has_residual else 0
    var rows = Int(operands.rows)
    var loads = ceildiv(Int(operands.length), width)
    comptime for warp_tile in [tile // 2, tile]:
        if loads <= WARP_SIZE * warp_tile:
            comptime blocks = (6 if P.inputs == 1 else 4) - 2 * spare
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
        comptime blocks = 3 - spare if P.inputs == 1 else 2
        comptime shape = Shape(
            width, block_tile, True, True, False, threads, blocks
        )
        _launch[P, dtype, ftype, shape](
            gpu, operands, rows, align_up(ceildiv(loads, block_tile), WARP_SIZE)
        )
        return
    comptime if P.inputs == 1 and not P.has_residual:
        if loads <= PERSISTENT_THREADS * tile:
            _ = launch_persistent[P, dtype, ftype, width, tile](gpu, operands)
            return
    comptime if P.block_scales:
        # Lanes leave the loop over a long row at different times, and cannot compare what they have.
        raise Error("rows with scales of blocks are too long for registers")
    else:
        _launch_long_rows[P, dtype, ftype, width, tile](gpu, operands)


def launch_long_rows[
    P: RowProgram, dtype: DType, ftype: DType
](gpu: Gpu, operands: Operands[accumulator[dtype]()]) raises:
    """Launches a program without columns on rows too long for registers, which are read in each pass.

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
    comptime vector = 16 // size_of[dtype]()
    if can_vectorize[dtype](operands):
        _launch_long_rows[P, dtype, ftype, vector, 4](gpu, operands)
    else:
        _launch_long_rows[P, dtype, ftype, 1, 8](gpu, operands)


@always_inline
def _launch_long_rows[
    P: RowProgram, dtype: DType, ftype: DType, width: Int, tile: Int
](gpu: Gpu, operands: Operands[accumulator[dtype]()]) raises:
    # The stages before 8 bits need more registers than half of those.
    comptime blocks = 2 if P.eight_bits == 0 else 1
    comptime shape = Shape(
        width, tile, True, False, False, _LONG_THREADS, blocks
    )
    _launch[P, dtype, ftype, shape](
        gpu, operands, Int(operands.rows), _LONG_THREADS
    )


def persistent_shape[dtype: DType](width: Int, tile: Int) -> Shape:
    """Returns the shape of a persistent kernel.

    Parameters:
        dtype: The type of inputs and outputs.

    Args:
        width: Elements of one load.
        tile: Loads of a row that a thread has.

    Returns:
        The shape.
    """
    # Loads of 4-byte elements keep memory busy with twice the threads and half the registers; 16 bytes of
    # smaller ones are too many sums for those.
    var blocks = 2 if tile == 1 and size_of[dtype]() > 2 else 1
    return Shape(width, tile, True, True, True, PERSISTENT_THREADS, blocks)


struct PersistentGrid(TrivialRegisterPassable):
    """The launch of a persistent kernel."""

    var blocks: Int
    """Blocks for each group."""
    var threads: Int
    """Threads of a block."""

    def __init__(out self, gpu: Gpu, operands: Operands, shape: Shape):
        """Shares the blocks that the GPU has room for among the groups.

        Args:
            gpu: Where to run.
            operands: The sizes.
            shape: Of the kernel.
        """
        self.threads = align_up(
            ceildiv(Int(operands.length), shape.width * shape.tile), WARP_SIZE
        )
        var of_sm = shape.blocks * shape.threads // self.threads
        self.blocks = min(
            ceildiv(Int(operands.rows), _FEWEST_BLOCK_ROWS),
            max(1, gpu.processors * of_sm // Int(operands.groups)),
        )


def launch_persistent[
    P: RowProgram, dtype: DType, ftype: DType, width: Int, tile: Int
](gpu: Gpu, operands: Operands[accumulator[dtype]()]) raises -> Int:
    """Launches a program whose rows stay in registers and whose blocks go on to further rows.

    Parameters:
        P: The row program.
        dtype: The type of inputs and outputs.
        ftype: The type of the features.
        width: Elements of one load.
        tile: Loads of a row that a thread has.

    Args:
        gpu: Where to run.
        operands: The tensors; a row has at most `PERSISTENT_THREADS * tile` loads.

    Returns:
        How many blocks each group has.

    Raises:
        If the launch fails.
    """
    comptime shape = persistent_shape[dtype](width, tile)
    var grid = PersistentGrid(gpu, operands, shape)
    _launch[P, dtype, ftype, shape](gpu, operands, grid.blocks, grid.threads)
    return grid.blocks
