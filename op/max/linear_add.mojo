"""Registers Linear + residual, with the statistics for the norm after it, for MAX.

A tensor without elements stands for one that is not there, or not wanted. Shapes are dynamic.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..call import Call
from ..rows.operands import accumulator
from .checks import address, clear, optional, require_dtypes, require_sizes
from .device import Device
from .family import linear_add, linear_add_backward
from .norm_call import number_of_norm, require_no_mean


@register("fused_norm_linear_add")
struct FusedNormLinearAdd:
    """From x [M, K] to its Linear layer plus residual [M, N], and that sum's mean and rstd [M].

    Also the second Linear layer of an MLP, and nothing more without a residual and statistics. The parameter `normalization` is that of the norm that follows, "layer_norm" or "rms_norm", and eps its eps.
    """

    @doc_hidden
    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        accum: DType,
        normalization: StaticString,
    ](
        total: OutputTensor[dtype=dtype, rank=2, ...],
        mean: OutputTensor[dtype=accum, rank=1, ...],
        rstd: OutputTensor[dtype=accum, rank=1, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        linear_weight: InputTensor[dtype=dtype, rank=2, ...],
        linear_bias: InputTensor[dtype=dtype, rank=1, ...],
        residual: InputTensor[dtype=dtype, rank=2, ...],
        eps: Float64,
        ctx: DeviceContext,
    ) raises:
        require_dtypes[target, dtype, dtype, accum]()
        comptime op = "fused_norm_linear_add"
        var call = Call()
        var M, K, N = x.dim_size(0), x.dim_size(1), linear_weight.dim_size(0)
        require_sizes[op](K, N)
        call.M, call.K, call.N = M, K, N
        call.eps = eps
        call.normalization = number_of_norm[normalization]()
        call.x = address[op, "x"](x, M, K)
        call.weight = address[op, "linear_weight"](linear_weight, N, K)
        call.bias = optional[op, "linear_bias"](linear_bias, N)
        call.residual = optional[op, "residual"](residual, M, N)
        call.y = address[op, "total"](total, M, N)
        call.mean = optional[op, "mean"](mean, M)
        call.rstd = optional[op, "rstd"](rstd, M)
        if call.normalization != 0:
            require_no_mean[op](mean)
        if M != 0:
            linear_add[target, dtype](Device[target](ctx), call)


@register("fused_norm_linear_add_backward")
struct FusedNormLinearAddBackward:
    """From dy [M, N], x and the weight to dx, dlinear_weight and dlinear_bias; the residual's gradient is dy.

    Gradients without elements are not computed; x is needed for that of the weight alone.
    """

    @doc_hidden
    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        dx: OutputTensor[dtype=dtype, rank=2, ...],
        dlinear_weight: OutputTensor[dtype=dtype, rank=2, ...],
        dlinear_bias: OutputTensor[dtype=dtype, rank=1, ...],
        dy: InputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        linear_weight: InputTensor[dtype=dtype, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        require_dtypes[target, dtype, dtype, accumulator[dtype]()]()
        comptime op = "fused_norm_linear_add_backward"
        var call = Call()
        var M = dy.dim_size(0)
        var N, K = linear_weight.dim_size(0), linear_weight.dim_size(1)
        require_sizes[op](K, N)
        call.M, call.K, call.N = M, K, N
        call.weight = address[op, "linear_weight"](linear_weight, N, K)
        call.dy = address[op, "dy"](dy, M, N)
        call.dx = optional[op, "dx"](dx, M, K)
        call.dweight = optional[op, "dlinear_weight"](dlinear_weight, N, K)
        if call.dweight != 0:
            call.x = address[op, "x"](x, M, K)
        call.dbias = optional[op, "dlinear_bias"](dlinear_bias, N)
        if M == 0:
            clear[target](dlinear_weight, ctx)
            clear[target](dlinear_bias, ctx)
        else:
            linear_add_backward[target, dtype](Device[target](ctx), call)
