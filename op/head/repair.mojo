"""Rows whose sum of exponentials left the safe range, computed again from their largest logit.

The kernels are always queued, so that the host does not have to ask the device, and end at once where no row is bad.
Blocks share the tiles of each bad row: the first kernel computes the largest logit of each tile, the second the
exponentials relative to the largest of all, and their sums. Their products run on CUDA cores: a row costs one read of
the weight.
"""

from max.gpu import barrier, block_idx, grid_dim, thread_idx
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp
from std.math import ceildiv, exp2, max
from std.memory import stack_allocation

from ..device import Gpu
from ..pdl import pdl_attributes, pdl_trigger, pdl_wait
from .call import HeadCall
from .dots import LOWEST, THREADS, WARPS, dot, elements, is_bad
from .exponentials import LOG2E, TILES_WITH_BIAS
from .softcap import capped, slope

comptime _BLOCKS = 2


@always_inline
def _logit(
    x: Int64, weight: Int64, bias: Int64, row: Int, word: Int, k: Int, lane: Int
) -> Float32:
    var z = dot(
        elements[DType.bfloat16](x, row * k),
        elements[DType.bfloat16](weight, word * k),
        k,
        lane,
    )
    if bias != 0:
        z += elements[DType.bfloat16](bias, word)[].cast[DType.float32]()
    return z


@__name(t"fused_norm_head_{'exponentials' if is_second else 'maxima'}_again")
def repair_kernel[
    is_second: Bool
](
    is_any_bad: Int64,
    sums: Int64,
    x: Int64,
    weight: Int64,
    bias: Int64,
    offsets: Int64,
    exponentials: Int64,
    partials: Int64,
    maxima: Int64,
    m: Int32,
    k: Int32,
    v: Int32,
    pitch: Int64,
    columns: Int32,
    softcap: Float32,
):
    """Finds the largest logit of each tile of bad rows; or, with those, their exponentials and sums.

    Grid: a few blocks for each SM. Block: `THREADS` threads, of which each warp has a word at a time.

    Parameters:
        is_second: Which of the two.

    Args:
        is_any_bad: Address of whether there is a bad row [1].
        sums: Address of the sums that tell which [m].
        x: Address of the rows [m, k].
        weight: Address of the weight [v, k].
        bias: Address of the bias [v], or 0.
        offsets: Address of the offsets [m], written by the second.
        exponentials: Address of the exponentials [m, v], written by the second unless 0.
        partials: Address of the sums of each tile [m, tiles], written by the second.
        maxima: Address of the largest logits of each tile [m, tiles], written by the first.
        m: Rows.
        k: Features.
        v: Words.
        pitch: Elements from one row of exponentials to the next.
        columns: Columns of a tile.
        softcap: What tanh limits logits to, 0 for nothing.
    """
    pdl_wait()
    pdl_trigger()
    if elements[DType.int32](is_any_bad, 0)[] == 0:
        return
    var shared = stack_allocation[
        WARPS, Float32, address_space=AddressSpace.SHARED
    ]()
    var lane = Int(thread_idx.x) % 32
    var own_warp = Int(thread_idx.x) // 32
    var tiles = ceildiv(Int(v), Int(columns))
    for row in range(Int(m)):
        if not is_bad(elements[DType.float32](sums, row)[]):
            continue
        var offset = LOWEST
        comptime if is_second:
            for tile in range(lane, tiles, 32):
                offset = max(
                    offset,
                    elements[DType.float32](maxima, row * tiles + tile)[],
                )
            offset = warp.max(offset)
            if block_idx.x == 0 and thread_idx.x == 0:
                elements[DType.float32](offsets, row)[] = offset
        for tile in range(Int(block_idx.x), tiles, Int(grid_dim.x)):
            var first = tile * Int(columns)
            var end = min(first + Int(columns), Int(v))
            var own = Float32(0) if is_second else LOWEST
            for word in range(first + own_warp, end, WARPS):
                var z = _logit(x, weight, bias, row, word, Int(k), lane)
                var its_slope = Float32(1)
                if softcap != 0:
                    its_slope = slope[1](z, softcap)
                    z = capped[1](z, softcap)
                comptime if is_second:
                    var e = exp2((z - offset) * LOG2E)
                    own += e
                    e *= its_slope
                    if exponentials != 0 and lane == 0:
                        elements[DType.bfloat16](
                            exponentials, row * Int(pitch) + word
                        )[] = e.cast[DType.bfloat16]()
                else:
                    own = max(own, z)
            if lane == 0:
                shared.unsafe_offset(own_warp).unsafe_store(own)
            barrier()
            if thread_idx.x == 0:
                var all = Float32(0) if is_second else LOWEST
                comptime for i in range(WARPS):
                    var part = shared.unsafe_offset(i).unsafe_load()
                    comptime if is_second:
                        all += part
                    else:
                        all = max(all, part)
                elements[DType.float32](
                    partials if is_second else maxima, row * tiles + tile
                )[] = all
            barrier()


def launch_repair(gpu: Gpu, call: HeadCall) raises:
    """Queues what computes bad rows again.

    Args:
        gpu: Where to run.
        call: The chunk.

    Raises:
        If the driver refuses.
    """
    comptime for is_second in [False, True]:
        var kernel = gpu.context.compile_function[repair_kernel[is_second]]()
        gpu.stream.enqueue_function(
            kernel,
            Int64(call.is_any_bad),
            Int64(call.sums),
            Int64(call.x),
            Int64(call.weight),
            Int64(call.bias),
            Int64(call.offsets),
            Int64(call.exponentials),
            Int64(call.partials),
            Int64(call.maxima),
            Int32(call.M),
            Int32(call.K),
            Int32(call.V),
            Int64(call.pitch),
            Int32(TILES_WITH_BIAS if call.bias != 0 else call.columns),
            call.softcap.cast[DType.float32](),
            grid_dim=_BLOCKS * gpu.processors,
            block_dim=THREADS,
            attributes=pdl_attributes(),
        )
