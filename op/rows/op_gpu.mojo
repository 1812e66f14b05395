"""Launches an op on a GPU: its program, then the sum that is the gradient of its parameter."""

from max.gpu import barrier, thread_idx
from max.gpu.memory import AddressSpace
from std.memory import stack_allocation

from ..device import Gpu
from ..pdl import pdl_attributes, pdl_trigger, pdl_wait
from .gpu_elements import GlobalPointer
from .launch import launch_rows
from .op import RowCall, RowOp
from .operands import accumulator

comptime ADD_UP_THREADS = 1024
"""Threads of `add_up_kernel`."""


def launch_op[Op: RowOp, dtype: DType](gpu: Gpu, call: RowCall) raises:
    """Launches an op.

    Parameters:
        Op: The op.
        dtype: The type of its tensors.

    Args:
        gpu: Where to run.
        call: The tensors.

    Raises:
        If a launch fails.
    """
    launch_rows[Op.Rows, dtype, dtype](gpu, call.operands[Op, dtype]())
    comptime if Op.has_parameter_gradient:
        if call.parameter_gradient != 0:
            if call.parameter_is_float32 != 0:
                _launch_add_up[accumulator[dtype](), DType.float32](gpu, call)
            else:
                _launch_add_up[accumulator[dtype](), dtype](gpu, call)


def _launch_add_up[accum: DType, dtype: DType](gpu: Gpu, call: RowCall) raises:
    """Sums the rows' shares of the parameter's gradient in a fixed order."""
    comptime kernel = add_up_kernel[accum, dtype]
    var compiled = gpu.context.compile_function[kernel]()
    gpu.stream.enqueue_function(
        compiled,
        Int64(call.workspace),
        Int64(call.shares()),
        Int64(call.parameter_gradient),
        Int32(call.accumulate),
        grid_dim=1,
        block_dim=ADD_UP_THREADS,
        attributes=pdl_attributes(),
    )


def add_up_kernel[
    accum: DType, dtype: DType
](terms: Int64, count: Int64, output: Int64, accumulate: Int32):
    """Sums a vector in a fixed order.

    Grid: one block. Block: ADD_UP_THREADS threads.

    Parameters:
        accum: The type of the terms.
        dtype: The type of the sum.

    Args:
        terms: Address of the vector.
        count: The number of its elements.
        output: Address of the sum.
        accumulate: Not 0 to add to what is there.
    """
    pdl_wait()
    pdl_trigger()
    var shared = stack_allocation[
        ADD_UP_THREADS, Scalar[accum], address_space=AddressSpace.SHARED
    ]()
    var sum = Scalar[accum](0)
    comptime UNROLL = 4
    for first in range(thread_idx.x, Int(count), ADD_UP_THREADS * UNROLL):
        var part = SIMD[accum, UNROLL](0)
        comptime for u in range(UNROLL):
            var i = first + u * ADD_UP_THREADS
            if i < Int(count):
                part[u] = (
                    GlobalPointer[accum](unsafe_from_address=Int(terms))
                    .unsafe_offset(i)
                    .unsafe_load()
                )
        sum += part.reduce_add()
    shared.unsafe_offset(thread_idx.x).unsafe_store(sum)
    barrier()
    comptime for level in range(10):
        comptime half = ADD_UP_THREADS >> (level + 1)
        if thread_idx.x < half:
            sum += shared.unsafe_offset(thread_idx.x + half).unsafe_load()
            shared.unsafe_offset(thread_idx.x).unsafe_store(sum)
        barrier()
    if thread_idx.x == 0:
        var place = GlobalPointer[dtype](unsafe_from_address=Int(output))
        if accumulate != 0:
            sum += place.unsafe_load().cast[accum]()
        place.unsafe_store(sum.cast[dtype]())
