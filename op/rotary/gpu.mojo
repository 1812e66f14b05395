"""Launches what normalizes and rotates heads on a GPU, forward and backward."""

from std.math import ceildiv

from ..device import Gpu
from ..pdl import pdl_attributes
from ..rows.columns import Total, Totals
from ..rows.launch_columns import launch_totals
from ..rows.operands import accumulator
from ..rows.types import FLOAT32, code_of
from .caches import CACHE_SHARE, caches_kernel
from .call import RotaryCall
from .dense import Grid, dense_kernel
from .divisor import MOST
from .lanes import THREADS, log_lanes_of
from .way import Way


def launch_rotary[dtype: DType](gpu: Gpu, call: RotaryCall) raises:
    """Launches the forward, or the backward where dy is given, and what adds up a gradient of gamma.

    Parameters:
        dtype: The type of x, y and their gradients.

    Args:
        gpu: Where to run.
        call: The heads.

    Raises:
        If a head is too long for a warp, there are too many heads, or a launch fails.
    """
    var log_lanes = log_lanes_of[dtype](call.D)
    if log_lanes > 5:
        raise Error(t"a head of {call.D} elements does not fit into a warp")
    var most = call.M * max(call.heads, call.second_heads)
    most = max(most, call.pitch, call.second_pitch, call.third_pitch)
    if most > MOST:
        raise Error(
            t"{call.M} rows of {call.heads} heads with a pitch of {call.pitch}"
            t" elements are too many"
        )
    comptime for choice in range(4):
        comptime norm = choice & 1 != 0
        comptime interleaved = choice & 2 != 0
        if (call.is_normalized != 0) == norm and (
            call.is_interleaved != 0
        ) == interleaved:
            if call.dy != 0:
                _choose[dtype, True, norm, interleaved](gpu, call, log_lanes)
            elif call.slots != 0:
                _launch_caches[dtype, norm, interleaved](gpu, call, log_lanes)
            else:
                _choose[dtype, False, norm, interleaved](gpu, call, log_lanes)
    if call.gamma_sum != 0:
        _add_parts[dtype](gpu, call)


def _choose[
    dtype: DType, backward: Bool, norm: Bool, interleaved: Bool
](gpu: Gpu, call: RotaryCall, log_lanes: Int) raises:
    """Launches the kernel for heads of a known size, if there is one, or for any."""
    comptime if not interleaved:
        comptime for D in [64, 128]:
            if (
                call.D == D
                and call.rotary == D
                and call.angles_are_float32 == Int(dtype == DType.float32)
            ):
                _launch[dtype, Way(backward, norm, interleaved, D)](
                    gpu, call, log_lanes
                )
                return
    _launch[dtype, Way(backward, norm, interleaved, 0)](gpu, call, log_lanes)


def _launch[
    dtype: DType, way: Way
](gpu: Gpu, call: RotaryCall, log_lanes: Int) raises:
    var compiled = gpu.context.compile_function[dense_kernel[dtype, way]]()
    var grid = Grid[way](call, log_lanes)
    gpu.stream.enqueue_function(
        compiled,
        call,
        grid,
        grid_dim=grid.all_blocks(call),
        block_dim=THREADS,
        attributes=pdl_attributes(),
    )


def _launch_caches[
    dtype: DType, norm: Bool, interleaved: Bool
](gpu: Gpu, call: RotaryCall, log_lanes: Int) raises:
    comptime kernel = caches_kernel[dtype, norm, interleaved]
    var compiled = gpu.context.compile_function[kernel]()
    var groups = THREADS >> log_lanes
    var blocks = ceildiv(call.M * ceildiv(call.heads, CACHE_SHARE), groups)
    var seconds = ceildiv(
        call.M * ceildiv(call.second_heads, CACHE_SHARE), groups
    )
    var thirds = seconds if call.third_x != 0 else 0
    gpu.stream.enqueue_function(
        compiled,
        call,
        Int32(log_lanes),
        Int32(blocks),
        Int32(seconds),
        grid_dim=blocks + seconds + thirds,
        block_dim=THREADS,
        attributes=pdl_attributes(),
    )


def _add_parts[dtype: DType](gpu: Gpu, call: RotaryCall) raises:
    """Adds up the parts of the gradient of gamma."""
    var totals = Totals()
    totals.add(
        Total(
            Int64(call.gamma_sum),
            Int64(call.dgamma),
            Int32(call.parts),
            Int32(call.D),
            1,
            FLOAT32 if call.gamma_is_float32 != 0 else code_of[dtype](),
        )
    )
    launch_totals[accumulator[dtype]()](gpu, totals)
