"""Chooses the shape of a GPU kernel for a row program and launches it."""

from max.gpu import WARP_SIZE
from std.math import align_up, ceildiv
from std.sys import size_of

from ..device import Gpu
from ..grids import beside_earlier
from .gpu import row_kernel
from .gpu_row import Shape
from .operands import MAX_TENSORS, Addresses, Operands, accumulator
from .program import RowProgram

comptime _WARP_THREADS = 128
comptime _LONG_THREADS = 512
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
    """Launches so many blocks for each group."""
    comptime kernel = row_kernel[P, dtype, ftype, shape]
    var compiled = gpu.context.compile_function[kernel]()
    gpu.stream.enqueue_function(
        compiled,
        operands,
        grid_dim=(blocks, Int(operands.groups)),
        block_dim=threads,
        attributes=beside_earlier(),
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
        # one such block fills an SM, so it has to load ahead
        if loads <= PERSISTENT_THREADS * tile:
            comptime shape = Shape(
                width, tile, True, True, True, PERSISTENT_THREADS, 1
            )
            var launch = _persistent_blocks(
                gpu, operands, align_up(ceildiv(loads, tile), WARP_SIZE), 1
            )
            _launch[P, dtype, ftype, shape](
                gpu, operands, launch.blocks, launch.threads
            )
            return
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
    comptime shape = Shape(width, tile, True, False, False, _LONG_THREADS, 2)
    _launch[P, dtype, ftype, shape](
        gpu, operands, Int(operands.rows), _LONG_THREADS
    )


@fieldwise_init
struct _Persistent(TrivialRegisterPassable):
    """The launch of a persistent kernel."""

    var blocks: Int
    var threads: Int


def _persistent_warps(gpu: Gpu, operands: Operands) -> _Persistent:
    comptime threads = PERSISTENT_THREADS // 2
    return {
        min(
            ceildiv(gpu.processors, Int(operands.groups)),
            ceildiv(Int(operands.rows), threads // WARP_SIZE),
        ),
        threads,
    }


def _persistent_blocks(
    gpu: Gpu, operands: Operands, threads: Int, blocks: Int
) -> _Persistent:
    """Shares the blocks that the GPU has room for among the groups."""
    var together = gpu.processors * (blocks * PERSISTENT_THREADS // threads)
    return {
        min(Int(operands.rows), ceildiv(together, Int(operands.groups))),
        threads,
    }
