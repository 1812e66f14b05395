"""From exponentials to losses, and to the operands of two plain products that compute the gradients: a warp a row.

With S the sum of a row's exponentials E, s the gradient of its loss and t its label, the gradient of its logits is

    a E / S - b onehot(t) - c class_weight        a = s ((1 - e) w_t + e sum(w) / V + 2 z lse) + s_lse
                                                  b = s (1 - e) w_t        c = s e / V

for label smoothing e, class weights w, and the factor z of lse^2 in the loss. So E[t] becomes exp(z_t - offset) -
b S / a, the row's factor is a / S, and the factor times x is stored; the caller adds the term in c, of rank one. With
a softcap all of it is multiplied by the slope of tanh, as E already is; the term in c then has no rank of one and is not
served.
"""

from max.gpu import block_idx, thread_idx
from max.gpu.primitives import warp
from std.math import ceildiv, exp2, log, min

from ..device import Gpu
from ..pdl import pdl_attributes, pdl_trigger, pdl_wait
from .call import HeadCall
from .dots import THREADS, WARPS, WIDTH, dot, elements, is_bad
from .exponentials import LARGEST, LOG2E
from .softcap import capped, slope

# The least that the gradient of a row's sum is to that of its label; far below the roundings of bfloat16.
comptime _LEAST_FACTOR = Float32(1.0 / (1 << 20))


@always_inline
def _total(partials: Int64, row: Int, tiles: Int, lane: Int) -> Float32:
    """Adds up the sums of a row's tiles in a fixed order."""
    var sum = Float32(0)
    for tile in range(lane, tiles, 32):
        sum += elements[DType.float32](partials, row * tiles + tile)[]
    return warp.sum(sum)


@__name("fused_norm_head_sums")
def sums_kernel(
    partials: Int64, sums: Int64, is_any_bad: Int64, m: Int32, tiles: Int32
):
    """Adds up the sums of each row's tiles, and tells whether one is bad.

    Grid: rows / WARPS. Block: `THREADS` threads, a warp a row.

    Args:
        partials: Address of the sums of each tile [m, tiles].
        sums: Address of the sums of each row [m], written.
        is_any_bad: Address of whether a sum is bad [1], set to 1 if so.
        m: Rows.
        tiles: Tiles of a row.
    """
    pdl_wait()
    pdl_trigger()
    var lane = Int(thread_idx.x) % 32
    var row = Int(block_idx.x) * WARPS + Int(thread_idx.x) // 32
    if row >= Int(m):
        return
    var sum = _total(partials, row, Int(tiles), lane)
    if lane == 0:
        elements[DType.float32](sums, row)[] = sum
        if is_bad(sum):
            elements[DType.int32](is_any_bad, 0)[] = 1


def launch_sums(gpu: Gpu, call: HeadCall) raises:
    """Queues the sums of a chunk's rows.

    Args:
        gpu: Where to run.
        call: The chunk.

    Raises:
        If the driver refuses.
    """
    var kernel = gpu.context.compile_function[sums_kernel]()
    gpu.stream.enqueue_function(
        kernel,
        Int64(call.partials),
        Int64(call.sums),
        Int64(call.is_any_bad),
        Int32(call.M),
        Int32(call.tiles),
        grid_dim=ceildiv(call.M, WARPS),
        block_dim=THREADS,
        attributes=pdl_attributes(),
    )


@__name("fused_norm_head_rows")
def rows_kernel(
    x: Int64,
    weight: Int64,
    bias: Int64,
    target: Int64,
    offsets: Int64,
    exponentials: Int64,
    partials: Int64,
    sums: Int64,
    scales: Int64,
    logsumexp_scales: Int64,
    class_weight: Int64,
    class_weight_sum: Int64,
    mean_weight: Int64,
    mean_bias: Int64,
    losses: Int64,
    logsumexp: Int64,
    factors: Int64,
    scaled: Int64,
    ignore_index: Int64,
    label_smoothing: Float32,
    z_loss: Float32,
    softcap: Float32,
    are_in_range: Int64,
    m: Int32,
    k: Int32,
    v: Int32,
    pitch: Int64,
    tiles: Int32,
):
    """Computes losses; with scales, subtracts the label from the exponentials and stores factors and scaled rows.

    Grid: rows / WARPS. Block: `THREADS` threads, a warp a row.

    Args:
        x: Address of the rows, and so on: the fields of `HeadCall`.
        weight: See there.
        bias: See there.
        target: See there.
        offsets: See there.
        exponentials: See there.
        partials: See there.
        sums: See there.
        scales: See there.
        logsumexp_scales: See there.
        class_weight: See there.
        class_weight_sum: See there.
        mean_weight: See there.
        mean_bias: See there.
        losses: See there.
        logsumexp: See there.
        factors: See there.
        scaled: See there.
        ignore_index: See there.
        label_smoothing: See there.
        z_loss: See there.
        softcap: See there.
        are_in_range: See there.
        m: Rows.
        k: Features.
        v: Words.
        pitch: Elements from one row of exponentials to the next.
        tiles: Tiles of a row.
    """
    pdl_wait()
    pdl_trigger()
    var lane = Int(thread_idx.x) % 32
    var row = Int(block_idx.x) * WARPS + Int(thread_idx.x) // 32
    if row >= Int(m):
        return
    var features = Int(k)
    var sum = elements[DType.float32](sums, row)[]
    if is_bad(sum):
        sum = _total(partials, row, Int(tiles), lane)
    var offset = elements[DType.float32](offsets, row)[]
    var lse = offset + log(sum)
    var label = Int(elements[DType.int64](target, row)[])
    # A label out of range is an error that PyTorch reports; no memory outside is read for it.
    var is_inside = label >= 0 and label < Int(v)
    var counts = label != Int(ignore_index) and is_inside
    if are_in_range != 0 and lane == 0:
        if label != Int(ignore_index) and not is_inside:
            elements[DType.int32](are_in_range, 0)[] = 0
    var own_x = elements[DType.bfloat16](x, row * features)
    var logit = Float32(0)
    var its_slope = Float32(1)
    var own_weight = Float32(1)
    if counts:
        logit = dot(
            own_x,
            elements[DType.bfloat16](weight, label * features),
            features,
            lane,
        )
        if bias != 0:
            logit += elements[DType.bfloat16](bias, label)[].cast[
                DType.float32
            ]()
        if softcap != 0:
            its_slope = slope[1](logit, softcap)
            logit = capped[1](logit, softcap)
        if class_weight != 0:
            own_weight = elements[DType.float32](class_weight, label)[]
    var all_weights = Float32(v)
    if class_weight != 0:
        all_weights = elements[DType.float32](class_weight_sum, 0)[]
    var smooth = label_smoothing / Float32(v)
    var hard = (1 - label_smoothing) * own_weight
    if counts and mean_weight != 0:
        var products = SIMD[DType.float32, WIDTH](0)
        for at in range(lane * WIDTH, features, 32 * WIDTH):
            products = (
                own_x.unsafe_offset(at)
                .unsafe_load[width=WIDTH, alignment=16]()
                .cast[DType.float32]()
                .fma(
                    elements[DType.float32](mean_weight, at).unsafe_load[
                        width=WIDTH, alignment=16
                    ](),
                    products,
                )
            )
        var others = warp.sum(products.reduce_add())
        if mean_bias != 0:
            others += elements[DType.float32](mean_bias, 0)[]
        if lane == 0:
            elements[DType.float32](losses, row)[] = (
                hard * (lse - logit)
                + smooth * (lse * all_weights - others)
                + z_loss * lse * lse
            )
    elif lane == 0:
        elements[DType.float32](losses, row)[] = hard * (
            lse - logit
        ) + z_loss * lse * lse if counts else Float32(0)
    if lane == 0:
        elements[DType.float32](logsumexp, row)[] = lse
    if scales == 0:
        return
    var scale = Float32(0)
    if counts:
        scale = elements[DType.float32](scales, row)[]
    var of_sum = scale * (hard + smooth * all_weights + 2 * z_loss * lse)
    if logsumexp_scales != 0:
        of_sum += elements[DType.float32](logsumexp_scales, row)[]
    # Where the gradient of the sum happens to vanish, that of the label still needs a factor to stand before it.
    var least = abs(scale * hard) * _LEAST_FACTOR
    if abs(of_sum) < least:
        of_sum = least
    var factor = of_sum / sum
    if lane == 0:
        elements[DType.float32](factors, row)[] = factor
        if counts and of_sum != 0:
            var own = exp2(min((logit - offset) * LOG2E, LARGEST))
            elements[DType.bfloat16](
                exponentials, row * Int(pitch) + label
            )[] = ((own - scale * hard / of_sum * sum) * its_slope).cast[
                DType.bfloat16
            ]()
    var own_scaled = elements[DType.bfloat16](scaled, row * features)
    for at in range(lane * WIDTH, features, 32 * WIDTH):
        var values = own_x.unsafe_offset(at).unsafe_load[
            width=WIDTH, alignment=16
        ]()
        own_scaled.unsafe_offset(at).unsafe_store[alignment=16](
            (values.cast[DType.float32]() * factor).cast[DType.bfloat16]()
        )


def launch_rows(gpu: Gpu, call: HeadCall) raises:
    """Queues what becomes of the exponentials of a chunk's rows.

    Args:
        gpu: Where to run.
        call: The chunk.

    Raises:
        If the driver refuses.
    """
    var kernel = gpu.context.compile_function[rows_kernel]()
    gpu.stream.enqueue_function(
        kernel,
        Int64(call.x),
        Int64(call.weight),
        Int64(call.bias),
        Int64(call.target),
        Int64(call.offsets),
        Int64(call.exponentials),
        Int64(call.partials),
        Int64(call.sums),
        Int64(call.scales),
        Int64(call.logsumexp_scales),
        Int64(call.class_weight),
        Int64(call.class_weight_sum),
        Int64(call.mean_weight),
        Int64(call.mean_bias),
        Int64(call.losses),
        Int64(call.logsumexp),
        Int64(call.factors),
        Int64(call.scaled),
        Int64(call.ignore_index),
        call.label_smoothing.cast[DType.float32](),
        call.z_loss.cast[DType.float32](),
        call.softcap.cast[DType.float32](),
        Int64(call.are_in_range),
        Int32(call.M),
        Int32(call.K),
        Int32(call.V),
        Int64(call.pitch),
        Int32(call.tiles),
        grid_dim=ceildiv(call.M, WARPS),
        block_dim=THREADS,
        attributes=pdl_attributes(),
    )
