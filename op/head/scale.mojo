"""A tensor times a number on the device, in place: gradients times that of the loss, which is nearly always 1."""

from max.gpu import block_idx, grid_dim, thread_idx

from ..device import Gpu
from ..pdl import pdl_attributes, pdl_trigger, pdl_wait
from .call import HeadCall
from .dots import THREADS, WIDTH, elements

comptime _BLOCKS = 8


@__name(t"fused_norm_head_scale_{dtype}")
def scale_kernel[dtype: DType](tensor: Int64, count: Int64, scale: Int64):
    """Multiplies a tensor, unless by 1: then nothing is read.

    Grid: some blocks for each SM. Block: `THREADS` threads.

    Parameters:
        dtype: Type of the tensor.

    Args:
        tensor: Address of the tensor [count], a multiple of 16.
        count: Its elements.
        scale: Address of the number [1], float32.
    """
    pdl_wait()
    pdl_trigger()
    var factor = elements[DType.float32](scale, 0)[]
    if factor == 1:
        return
    var index = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    var step = Int(grid_dim.x) * THREADS
    var whole = Int(count) // WIDTH
    for i in range(index, whole, step):
        var at = elements[dtype](tensor, i * WIDTH)
        var values = at.unsafe_load[width=WIDTH, alignment=16]()
        at.unsafe_store[alignment=16](
            (values.cast[DType.float32]() * factor).cast[dtype]()
        )
    for i in range(whole * WIDTH + index, Int(count), step):
        var at = elements[dtype](tensor, i)
        at[] = (at[].cast[DType.float32]() * factor).cast[dtype]()


def launch_scale(gpu: Gpu, call: HeadCall) raises:
    """Queues the product of a tensor and a number.

    Args:
        gpu: Where to run.
        call: Its tensor, count, is_float32 and scale.

    Raises:
        If the driver refuses.
    """
    comptime for is_float32 in [False, True]:
        if (call.is_float32 != 0) == is_float32:
            comptime dtype = DType.float32 if is_float32 else DType.bfloat16
            var kernel = gpu.context.compile_function[scale_kernel[dtype]]()
            gpu.stream.enqueue_function(
                kernel,
                Int64(call.tensor),
                Int64(call.count),
                Int64(call.scale),
                grid_dim=_BLOCKS * gpu.processors,
                block_dim=THREADS,
                attributes=pdl_attributes(),
            )
