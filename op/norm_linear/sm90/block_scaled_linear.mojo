"""A Linear layer on operands of 8 bits that were quantized by blocks.

    y = bias + sum over blocks of K of their scales (rows weight^T)    plus a residual, if there is one
    y, y_scale = act(that) in e4m3, or act(gate) up in e4m3

Rows have a scale for each 128 elements, the weight for each 128 by 128, and so has y in 8 bits.
"""

from ...call import SCALE_BLOCK, Call
from ...device import Gpu
from ...gemm.activation import GATED
from ...gemm.added import Added
from ...gemm.block_scaled import BlockScaled
from ...gemm.epilogue import Epilogue
from ...gemm.row_hook import NoHook
from ...gemm.sm90.config import Config
from ...gemm.sm90.launch_matrix import BAND, launch_parts
from ...gemm.sm90.parts import IN_TURN, WHOLE, Matrices
from ...gemm.sm90.product import Product
from ...gemm.sm90.tiling import BLOCK_SCALED_SHAPES, shared_tiling
from .block_quantized import BlockQuantized

comptime _E4M3 = DType.float8_e4m3fn


def block_scaled_linear(gpu: Gpu, call: Call) raises:
    """Queues y.

    Args:
        gpu: Where to run.
        call: Sizes; z in e4m3 with z_scale [M, ceil(K / 128)], weight in e4m3 with weight_scale [ceil(N / 128), ceil(K /
            128)]; bias, residual [M, N] and y in bfloat16, the pitch of y. K and N are multiples of 16, addresses too. With y_scale [M,
            ceil(N / 128)], y is e4m3 without a pitch and activated; a gate's other half is up, with up_scale and
            up_bias as the weight's.

    Raises:
        If the driver refuses.
    """
    if call.y_scale != 0:
        _launch_quantized(gpu, call)
        return
    if call.residual != 0:
        _launch_product(
            gpu,
            call,
            Added[BlockScaled[DType.bfloat16], True](
                _first(call), Int64(call.residual)
            ),
        )
    else:
        _launch_product(gpu, call, _first(call))


def _launch_product[E: Epilogue, //](gpu: Gpu, call: Call, epilogue: E) raises:
    var tiling = shared_tiling[BLOCK_SCALED_SHAPES](
        call.M, call.N, call.K, gpu.processors
    )
    var product = Product(call.M, call.N, call.K, epilogue, NoHook())
    product.band = BAND
    var y = Matrices(call.y)
    y.pitch = call.pitch
    comptime for shape in BLOCK_SCALED_SHAPES:
        comptime config = Config.of(shape.columns)
        if tiling.columns == config.columns:
            launch_parts[_E4M3, config](
                gpu, y, Matrices(call.z), Matrices(call.weight), product
            )


def _first(call: Call) -> BlockScaled[DType.bfloat16]:
    return {Int64(call.z_scale), Int64(call.weight_scale), Int64(call.bias)}


def _launch_quantized(gpu: Gpu, call: Call) raises:
    var second = BlockScaled[DType.bfloat16](
        Int64(call.z_scale), Int64(call.up_scale), Int64(call.up_bias)
    )
    var weights = Matrices(call.weight)
    weights.addresses[1] = call.up
    comptime for gates in [False, True]:
        # A tile has the columns of a scale.
        comptime config = Config.of(
            SCALE_BLOCK, parts=IN_TURN if gates else WHOLE
        )
        if (call.activation >= GATED) == gates:
            var epilogue = BlockQuantized[gates](
                _first(call),
                second,
                Int64(call.y_scale),
                Int32(call.activation % GATED),
                Int32(call.power_of_two),
            )
            var product = Product(call.M, call.N, call.K, epilogue, NoHook())
            product.band = BAND
            launch_parts[_E4M3, config](
                gpu, Matrices(call.y), Matrices(call.z), weights, product
            )
