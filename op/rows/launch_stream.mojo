"""Launches row programs whose rows come through shared memory while others are computed."""

from max.gpu import WARP_SIZE
from std.math import align_up, ceildiv
from std.sys import size_of

from ..device import Gpu
from ..pdl import pdl_attributes
from .gpu_stream import stream_kernel
from .launch import can_vectorize, launch_rows
from .operands import Operands, accumulator
from .program import RowProgram
from .shape import Shape

comptime _TILE = 4
comptime _WARP_THREADS = 128
comptime _BLOCK_THREADS = 256
# Of so few rows, none has another one to overlap with.
comptime _FEW_ROWS = 64


def launch_streamed[
    P: RowProgram, dtype: DType, ftype: DType
](gpu: Gpu, operands: Operands[accumulator[dtype]()]) raises:
    """Launches a program without columns that is more work than reading and storing its rows: as many blocks as there is
    room for, each with a row or, of short rows, one for each warp. Few rows, and longer ones, go to `launch_rows`.

    Parameters:
        P: The row program.
        dtype: The type of inputs and outputs.
        ftype: The type of the features.

    Args:
        gpu: Where to run.
        operands: The tensors.

    Raises:
        As `launch_rows`.
    """
    if operands.rows <= _FEW_ROWS or not can_vectorize[dtype](operands):
        launch_rows[P, dtype, ftype](gpu, operands)
        return
    comptime width = 16 // size_of[dtype]()
    # So many threads have 128 registers each, or 168: two streams take more.
    comptime sm_threads = 384 if P.has_residual else 512
    var loads = ceildiv(Int(operands.length), width)
    comptime for tile in range(1, _TILE + 1):
        if loads <= WARP_SIZE * tile:
            comptime of_sm = sm_threads // _WARP_THREADS
            comptime shape = Shape(
                width, tile, False, True, True, _WARP_THREADS, of_sm
            )
            _launch[P, dtype, ftype, shape](
                gpu, operands, _WARP_THREADS // WARP_SIZE, _WARP_THREADS, of_sm
            )
            return
    # Threads that hold a row in four loads, of which some rows need only three. Four of two streams take more registers
    # than there are.
    comptime most = _TILE - 1 if P.has_residual else _TILE
    var threads = align_up(ceildiv(loads, _TILE), WARP_SIZE)
    comptime for tile in range(_TILE - 1, most + 1):
        if threads <= _BLOCK_THREADS and loads <= threads * tile:
            comptime sm_blocks = 512 // _BLOCK_THREADS
            comptime shape = Shape(
                width, tile, True, True, True, _BLOCK_THREADS, sm_blocks
            )
            _launch[P, dtype, ftype, shape](
                gpu, operands, 1, threads, 512 // threads
            )
            return
    launch_rows[P, dtype, ftype](gpu, operands)


def _launch[
    P: RowProgram, dtype: DType, ftype: DType, shape: Shape
](
    gpu: Gpu,
    operands: Operands[accumulator[dtype]()],
    block_rows: Int,
    threads: Int,
    of_sm: Int,
) raises:
    """Launches blocks that have some rows at a time, so many of them on an SM."""
    var blocks = min(
        ceildiv(Int(operands.rows), block_rows),
        max(1, gpu.processors * of_sm // Int(operands.groups)),
    )
    comptime kernel = stream_kernel[P, dtype, ftype, shape]
    var compiled = gpu.context.compile_function[kernel]()
    gpu.stream.enqueue_function(
        compiled,
        operands,
        grid_dim=(blocks, Int(operands.groups)),
        block_dim=threads,
        attributes=pdl_attributes(),
    )
