"""A Linear layer on operands of 8 bits that were quantized by blocks.

    y = bias + sum over blocks of K of their scales (rows weight^T)

Rows have a scale for each 128 elements, the weight for each 128 by 128.
"""

from ...call import Call
from ...device import Gpu
from ...gemm.block_scaled import BlockScaled
from ...gemm.row_hook import NoHook
from ...gemm.sm90.config import Config
from ...gemm.sm90.launch_matrix import BAND, launch_parts
from ...gemm.sm90.parts import Matrices
from ...gemm.sm90.product import Product
from ...gemm.sm90.tiling import (
    BLOCK_SCALED_SHAPES,
    SHAPES,
    block_scaled_tiling,
)


def block_scaled_linear(gpu: Gpu, call: Call) raises:
    """Queues y.

    Args:
        gpu: Where to run.
        call: Sizes; z in e4m3 with z_scale [M, ceil(K / 128)], weight in e4m3 with weight_scale [ceil(N / 128), ceil(K /
            128)]; bias and y in bfloat16, the pitch of y. K and N are multiples of 16, addresses too.

    Raises:
        If the driver refuses.
    """
    comptime dtype = DType.float8_e4m3fn
    var tiling = block_scaled_tiling(call.M, call.N, call.K, gpu.processors)
    var epilogue = BlockScaled[DType.bfloat16](
        Int64(call.z_scale), Int64(call.weight_scale), Int64(call.bias)
    )
    var product = Product(call.M, call.N, call.K, epilogue, NoHook())
    product.band = BAND
    var y = Matrices(call.y)
    y.pitch = call.pitch
    comptime for i in BLOCK_SCALED_SHAPES:
        comptime config = Config.of(SHAPES[i].columns)
        if tiling.columns == config.columns:
            launch_parts[dtype, config](
                gpu, y, Matrices(call.z), Matrices(call.weight), product
            )
