"""Quantizes rows to 8 bits, normalized or not, on a GPU that has products in 8 bits."""

from std.sys import size_of

from ..call import Call
from ..device import Gpu
from ..rows.launch import launch_rows
from ..rows.launch_stream import launch_streamed
from ..rows.operands import Operands, accumulator
from ..rows.programs.quantize import (
    NormQuantize,
    NormQuantizeBlocks,
    Quantize,
)
from ..rows.scales import POWER_OF_TWO
from ..rows.types import E4M3, E5M2
from .gpu import GpuRunner
from .normalize import affine_operands, fold_modulation


def run_normalize_quantized[
    dtype: DType, ftype: DType
](gpu: Gpu, call: Call) raises:
    """Writes which of sum, mean and rstd are wanted, and z in e4m3 with its scales.

    Parameters:
        dtype: The type of x.
        ftype: The type of the features, as for `run_normalize`.

    Args:
        gpu: Where to run.
        call: The tensors; z is at a multiple of 16 bytes. With scales of blocks, features have the type of x, and rows at
            most 16384 elements, or 8192 with a residual.

    Raises:
        If a launch fails.
    """
    comptime accum = accumulator[dtype]()
    fold_modulation[dtype](GpuRunner[accum](gpu), call)
    var rows = affine_operands[dtype](call)
    rows.number = call.eps.cast[accum]()
    if call.normalization == 0:
        rows.results[0] = Int64(call.mean)
    rows.results[1] = Int64(call.rstd)
    rows.results[2] = Int64(call.z_scale)
    rows.residual = Int64(call.residual)
    rows.sum = Int64(call.sum)
    _name_rows(rows, call)
    if call.block_scales != 0:
        comptime if size_of[ftype]() == size_of[dtype]():
            if call.residual != 0:
                launch_rows[NormQuantizeBlocks[True], dtype, ftype](gpu, rows)
            else:
                launch_rows[NormQuantizeBlocks[], dtype, ftype](gpu, rows)
        else:
            raise Error("norms with scales of blocks take features of x's type")
    elif call.residual != 0:
        launch_streamed[NormQuantize[True], dtype, ftype](gpu, rows)
    else:
        launch_streamed[NormQuantize[], dtype, ftype](gpu, rows)


def run_quantize[dtype: DType](gpu: Gpu, call: Call) raises:
    """Writes x in 8 bits as z, with its scales.

    Parameters:
        dtype: The type of x.

    Args:
        gpu: Where to run.
        call: The tensors; z is at a multiple of 16 bytes.

    Raises:
        If a launch fails.
    """
    var rows = Operands[accumulator[dtype]()](call.M, call.K)
    rows.results[0] = Int64(call.z_scale)
    _name_rows(rows, call)
    comptime for eight_bits in [E4M3, E5M2]:
        if call.eight_bits == Int(eight_bits):
            launch_rows[Quantize[eight_bits], dtype, dtype](gpu, rows)


def _name_rows(mut rows: Operands, call: Call):
    rows.inputs[0] = Int64(call.x)
    rows.outputs[0] = Int64(call.z)
    if call.power_of_two != 0:
        rows.kind |= POWER_OF_TWO
