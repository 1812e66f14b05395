"""What is taken off a row's logits: some more than the largest of those of a few classes, found before all others.

Exponentials may be as small as the offset is too large, and overflow where it is too small.
"""

from max.gpu import block_idx, thread_idx
from max.gpu.primitives import warp
from std.math import ceildiv, max

from ..device import Gpu
from ..pdl import pdl_attributes, pdl_trigger, pdl_wait
from .call import HeadCall
from .dots import LOWEST, THREADS, WARPS, elements
from .softcap import capped

comptime _MARGIN = Float32(40)


@__name("fused_norm_head_offsets")
def offsets_kernel(
    samples: Int64,
    bias: Int64,
    offsets: Int64,
    is_any_bad: Int64,
    softcap: Float32,
    m: Int32,
    count: Int32,
    step: Int32,
):
    """Finds the offset of each row.

    Grid: rows / WARPS. Block: `THREADS` threads, a warp a row.

    Args:
        samples: Address of the logits of some classes, without their bias [m, count].
        bias: Address of the bias of all classes, or 0.
        offsets: Address of the offsets [m], written.
        is_any_bad: Address of whether a sum is bad [1], reset.
        softcap: What tanh limits logits to, 0 for nothing.
        m: Rows.
        count: Classes whose logits there are.
        step: Classes from one of them to the next.
    """
    pdl_wait()
    pdl_trigger()
    var lane = Int(thread_idx.x) % 32
    var row = Int(block_idx.x) * WARPS + Int(thread_idx.x) // 32
    if row >= Int(m):
        return
    var most = LOWEST
    for i in range(lane, Int(count), 32):
        var z = elements[DType.bfloat16](samples, row * Int(count) + i)[].cast[
            DType.float32
        ]()
        if bias != 0:
            z += elements[DType.bfloat16](bias, i * Int(step))[].cast[
                DType.float32
            ]()
        most = max(most, z)
    most = warp.max(most)
    if lane == 0:
        if softcap != 0:
            most = capped[1](most, softcap)
        elements[DType.float32](offsets, row)[] = most + _MARGIN
        if row == 0:
            elements[DType.int32](is_any_bad, 0)[] = 0


def launch_offsets(gpu: Gpu, call: HeadCall) raises:
    """Queues the offsets of a chunk's rows.

    Args:
        gpu: Where to run.
        call: The chunk.

    Raises:
        If the driver refuses.
    """
    var kernel = gpu.context.compile_function[offsets_kernel]()
    gpu.stream.enqueue_function(
        kernel,
        Int64(call.samples),
        Int64(call.bias),
        Int64(call.offsets),
        Int64(call.is_any_bad),
        call.softcap.cast[DType.float32](),
        Int32(call.M),
        Int32(call.sample_count),
        Int32(call.sample_step),
        grid_dim=ceildiv(call.M, WARPS),
        block_dim=THREADS,
        attributes=pdl_attributes(),
    )
