"""Linear layers on operands of 8 bits, with the scales that they were quantized by.

    y = act(row_scale column_scale (rows weight^T) + bias)    h, the input of the activation, is stored as well if asked for
    y = row_scale column_scale (rows weight^T) + bias + residual
    y = act(that) in e4m3, or act(gate) up in e4m3, with one scale that is given
    dh = that of da = row_scale column_scale (rows weight^T), rows of gradients, through the activation; h is loaded
    y_i = row_scale column_scale_i (rows weight_i^T) + bias_i in one launch, where that pays
    dweight = row_scale column_scale (columns rows^T), of the columns of gradients, with sums in float32; of several
        layers on the same rows one after another, in one launch

Rows are e4m3, or e5m2 where they are gradients; the weight is e4m3.
"""

from std.math import ceildiv

from ...call import Call
from ...device import Gpu
from ...gemm.activation import GATED, SmoothCurve
from ...gemm.added import Added
from ...gemm.differentiated import Differentiated
from ...gemm.epilogue import Epilogue
from ...gemm.epilogues import Activated
from ...gemm.row_hook import NoHook
from ...gemm.scaled import Scaled
from ...gemm.scaled_gradient import ScaledGradient
from ...gemm.sm90.activated import launch_activated, launch_with_h
from ...gemm.sm90.config import Config
from ...gemm.sm90.few_rows.launch import launch_few_rows_of_parts
from ...gemm.sm90.launch import launch_product
from ...gemm.sm90.launch_matrix import BAND, launch_parts
from ...gemm.sm90.parts import SIDE_BY_SIDE, STACKED, Matrices
from ...gemm.sm90.product import Product
from ...gemm.sm90.tiling import (
    PROMOTED_SHAPES,
    Tiling,
    is_for_few_rows,
    shared_tiling,
)
from ...rows.types import E5M2
from ..plan import FUSED
from .fold import products
from .parts import part_at, sizes_of
from .grouped import BESIDE, products_pay
from .row_quantized import RowQuantized


def scaled_linear(gpu: Gpu, call: Call) raises:
    """Queues y, and h if it has an address.

    Args:
        gpu: Where to run.
        call: Sizes; z, weight and up in 8 bits with their scales; bias, y and h in bfloat16. K and N are
            multiples of 16, addresses too; the residual [M, N] only without an activation. Its
            strategy is FUSED if z is of a pass queued just before, which waits for
            all before it and writes no weight. With an activation, y_scale [M] and y_one_scale, a power of two that it is
            filled with, y is e4m3, and z too; or the workspace is zeros that become maxima of y, as those of
            `run_maxima`, or the one of all with one_scale. With an address of dh, z is of gradients of the activation's
            result, which is smooth, and h is read: dh [M, N], of a gate [M, 2N], is written, and its maxima to the
            workspace; or of two layers, which part_count says, two matrices [M, N] one after the other, and two maxima.
            With an address of dweight, z is of columns of gradients, and the weight of columns of the rows that were
            multiplied; each part has N of the M rows of the result, a multiple of 16 but for the last, at its y.

    Raises:
        If the driver refuses.
    """
    if call.dh != 0:
        if call.eight_bits == Int(E5M2):
            _launch_gradients[DType.float8_e5m2](gpu, call)
        else:
            _launch_gradients[DType.float8_e4m3fn](gpu, call)
    elif call.dweight != 0:
        if call.eight_bits == Int(E5M2):
            _launch_promoted[DType.float8_e5m2](gpu, call)
        else:
            _launch_promoted[DType.float8_e4m3fn](gpu, call)
    elif call.activation != 0:
        _launch_activated(gpu, call)
    elif call.eight_bits == Int(E5M2):
        _launch_either[DType.float8_e5m2](gpu, call)
    else:
        _launch_either[DType.float8_e4m3fn](gpu, call)


def scaled_linears(gpu: Gpu, call: Call) raises:
    """Queues y of each of several Linear layers on the same rows in e4m3.

    Args:
        gpu: Where to run.
        call: As for `scaled_linear`, its parts with weights in e4m3, scales and y; either all have a bias or none has.

    Raises:
        If the driver refuses.
    """
    var halved = call
    # Two elements take the place of one of 16 bits, everywhere that time is counted.
    halved.K //= 2
    if products_pay[DType.bfloat16](halved, gpu.processors):
        _launch_beside(gpu, call)
        return
    for i in range(call.part_count):
        var part = part_at(call, i)
        var own = call
        own.N = part.N
        own.weight = part.weight
        own.weight_scale = part.scale
        own.bias = part.bias
        own.y = part.y
        _launch_product[DType.float8_e4m3fn](gpu, own, _scaled(own))


def _launch_beside(gpu: Gpu, call: Call) raises:
    var weights = Matrices(0)
    var scales = Matrices(0)
    var biases = Matrices(0)
    var outputs = Matrices(0)
    for i in range(call.part_count):
        var part = part_at(call, i)
        weights.addresses[i] = part.weight
        scales.addresses[i] = part.scale
        biases.addresses[i] = part.bias
        outputs.addresses[i] = part.y
    var epilogue = Scaled[DType.bfloat16](
        Int64(call.z_scale),
        Int64(scales.addresses[0]),
        Int64(biases.addresses[0]),
        Int64(scales.addresses[1]),
        Int64(biases.addresses[1]),
        Int64(scales.addresses[2]),
        Int64(biases.addresses[2]),
    )
    var product = Product(call.M, call.N, call.K, epilogue, NoHook())
    product.band = BAND
    product.b_is_older = Int32(call.strategy == FUSED)
    product.a_is_new = 1
    product.sizes = sizes_of(call)
    comptime dtype = DType.float8_e4m3fn
    if is_for_few_rows(call.M, call.K // 2):
        launch_few_rows_of_parts[dtype, False, SIDE_BY_SIDE](
            gpu, outputs, call.z, weights, product
        )
        return
    launch_parts[dtype, BESIDE](
        gpu, outputs, Matrices(call.z), weights, product
    )


def _scaled(call: Call) -> Scaled[DType.bfloat16]:
    return {
        Int64(call.z_scale),
        Int64(call.weight_scale),
        Int64(call.bias),
        Int64(call.up_scale),
        Int64(call.up_bias),
        0,
        0,
    }


def _launch_either[dtype: DType](gpu: Gpu, call: Call) raises:
    """Launches a product with or without a residual."""
    if call.residual != 0:
        _launch_product[dtype](
            gpu,
            call,
            Added[Scaled[DType.bfloat16], True](
                _scaled(call), Int64(call.residual)
            ),
        )
    else:
        _launch_product[dtype](gpu, call, _scaled(call))


def _launch_product[
    E: Epilogue, //, dtype: DType
](gpu: Gpu, call: Call, epilogue: E) raises:
    # Two elements take the place of one of 16 bits, everywhere that time is counted. With a residual, consumers that share
    # tiles were faster wherever that was measured (docs/hopper-log.md).
    var tiling = Tiling.best(
        call.M,
        call.N,
        call.K // 2,
        gpu.processors,
        invariant=call.invariant != 0,
        shared=E.adds_last,
    )
    launch_product[dtype](
        gpu,
        tiling,
        call.y,
        call.z,
        call.weight,
        call.M,
        call.N,
        call.K,
        epilogue,
        b_is_older=call.strategy == FUSED,
        a_is_new=True,
    )


def _launch_promoted[dtype: DType](gpu: Gpu, call: Call) raises:
    var tiling = shared_tiling[PROMOTED_SHAPES](
        call.M, call.N, call.K, gpu.processors
    )
    var product = Product(call.M, call.N, call.K, _scaled(call), NoHook())
    product.band = BAND
    product.a_is_new = 1
    product.sizes = sizes_of(call)
    var outputs = Matrices(0)
    for i in range(call.part_count):
        outputs.addresses[i] = part_at(call, i).y
    comptime for shape in PROMOTED_SHAPES:
        if tiling.columns == shape.columns:
            launch_parts[
                dtype,
                Config.of(shape.columns, parts=STACKED, promotes=True),
            ](
                gpu,
                outputs,
                Matrices(call.z),
                Matrices(call.weight),
                product,
            )


def _launch_gradients[dtype: DType](gpu: Gpu, call: Call) raises:
    comptime for gates in [False, True]:
        if (call.activation >= GATED) == gates:
            var second = 0
            var second_kept = 0
            comptime if gates:
                if call.part_count == 2:
                    second = call.dh + 2 * call.M * call.N
                    var count = 1 if call.one_scale != 0 else call.M + call.N
                    second_kept = call.workspace + 16 * ceildiv(count, 4)
            launch_with_h[dtype, False](
                gpu,
                call.dh,
                call.z,
                call.weight,
                call.M,
                call.N,
                call.K,
                ScaledGradient[gates](
                    Int64(call.z_scale),
                    Int64(call.weight_scale),
                    Differentiated[gates](
                        Int64(call.h),
                        0,
                        SmoothCurve.of(call.activation % GATED),
                    ),
                    Int64(call.workspace),
                    Int64(second_kept),
                    Int32(call.one_scale != 0),
                ),
                second=second,
                b_is_older=call.strategy == FUSED,
            )


def _launch_activated(gpu: Gpu, call: Call) raises:
    var kind = Int32(call.activation % GATED)
    comptime for gates in [False, True]:
        if (call.activation >= GATED) == gates:
            if call.y_scale != 0:
                _launch_epilogue(
                    gpu,
                    call,
                    RowQuantized[gates](
                        _scaled(call),
                        Int64(call.y_scale),
                        Float32(call.y_one_scale),
                        kind,
                    ),
                )
            else:
                _launch_epilogue(
                    gpu,
                    call,
                    Activated[Scaled[DType.bfloat16], gates, True](
                        _scaled(call),
                        Int64(call.h),
                        kind,
                        Int64(call.workspace),
                        call.one_scale != 0,
                    ),
                )


def _launch_epilogue[E: Epilogue, //](gpu: Gpu, call: Call, epilogue: E) raises:
    launch_activated[DType.float8_e4m3fn](
        gpu,
        call.y,
        call.z,
        call.weight,
        call.up,
        call.M,
        products(call),
        call.K,
        epilogue,
        a_is_new=True,
        b_is_older=call.strategy == FUSED,
    )
