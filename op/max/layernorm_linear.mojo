"""Registers LayerNorm + Linear and its gradients for MAX.

Shapes are dynamic: a graph with symbolic dimensions compiles once. Statistics, and the norm's parameters with
bfloat16 and float16, are float32; all else has one dtype. A CPU gives the same bits as in PyTorch.
"""

from extensibility import (
    InputTensor,
    ManagedTensorSlice,
    OutputTensor,
    register,
)
from max.gpu.host import DeviceContext

from .checks import address, clear, require_dtypes, require_sizes
from .device import Device
from .family import backward, forward
from ..call import Call
from ..norms.layer_norm import LayerNorm


@register("fused_norm_layernorm_linear")
struct FusedNormLayerNormLinear:
    """From x [M, K] to y [M, N], and to mean and rstd [M]."""

    @doc_hidden
    @staticmethod
    def execute[
        target: StaticString, dtype: DType, ln_dtype: DType, accum: DType
    ](
        y: OutputTensor[dtype=dtype, rank=2, ...],
        mean: OutputTensor[dtype=accum, rank=1, ...],
        rstd: OutputTensor[dtype=accum, rank=1, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        ln_weight: InputTensor[dtype=ln_dtype, rank=1, ...],
        ln_bias: InputTensor[dtype=ln_dtype, rank=1, ...],
        linear_weight: InputTensor[dtype=dtype, rank=2, ...],
        linear_bias: InputTensor[dtype=dtype, rank=1, ...],
        eps: Float64,
        ctx: DeviceContext,
    ) raises:
        require_dtypes[target, dtype, ln_dtype, accum]()
        comptime op = "fused_norm_layernorm_linear"
        var call = _call[op, dtype, ln_dtype](x, linear_weight, eps)
        var M, K, N = call.M, call.K, call.N
        call.y = address[op, "y"](y, M, N)
        call.mean = address[op, "mean"](mean, M)
        call.rstd = address[op, "rstd"](rstd, M)
        call.gamma = address[op, "ln_weight"](ln_weight, K)
        call.beta = address[op, "ln_bias"](ln_bias, K)
        call.weight = address[op, "linear_weight"](linear_weight, N, K)
        call.bias = address[op, "linear_bias"](linear_bias, N)
        if M == 0:
            return
        forward[target, dtype, LayerNorm](Device[target](ctx), call)


@register("fused_norm_layernorm_linear_backward")
struct FusedNormLayerNormLinearBackward:
    """From dy [M, N], what the forward took and its statistics to the five gradients."""

    @doc_hidden
    @staticmethod
    def execute[
        target: StaticString, dtype: DType, ln_dtype: DType, accum: DType
    ](
        dx: OutputTensor[dtype=dtype, rank=2, ...],
        dln_weight: OutputTensor[dtype=ln_dtype, rank=1, ...],
        dln_bias: OutputTensor[dtype=ln_dtype, rank=1, ...],
        dlinear_weight: OutputTensor[dtype=dtype, rank=2, ...],
        dlinear_bias: OutputTensor[dtype=dtype, rank=1, ...],
        dy: InputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        ln_weight: InputTensor[dtype=ln_dtype, rank=1, ...],
        ln_bias: InputTensor[dtype=ln_dtype, rank=1, ...],
        linear_weight: InputTensor[dtype=dtype, rank=2, ...],
        mean: InputTensor[dtype=accum, rank=1, ...],
        rstd: InputTensor[dtype=accum, rank=1, ...],
        eps: Float64,
        ctx: DeviceContext,
    ) raises:
        require_dtypes[target, dtype, ln_dtype, accum]()
        comptime op = "fused_norm_layernorm_linear_backward"
        var call = _call[op, dtype, ln_dtype](x, linear_weight, eps)
        var M, K, N = call.M, call.K, call.N
        call.dx = address[op, "dx"](dx, M, K)
        call.dgamma = address[op, "dln_weight"](dln_weight, K)
        call.dbeta = address[op, "dln_bias"](dln_bias, K)
        call.dweight = address[op, "dlinear_weight"](dlinear_weight, N, K)
        call.dbias = address[op, "dlinear_bias"](dlinear_bias, N)
        call.dy = address[op, "dy"](dy, M, N)
        call.gamma = address[op, "ln_weight"](ln_weight, K)
        call.beta = address[op, "ln_bias"](ln_bias, K)
        call.weight = address[op, "linear_weight"](linear_weight, N, K)
        call.mean = address[op, "mean"](mean, M)
        call.rstd = address[op, "rstd"](rstd, M)
        if M == 0:
            clear[target](dln_weight, ctx)
            clear[target](dln_bias, ctx)
            clear[target](dlinear_weight, ctx)
            clear[target](dlinear_bias, ctx)
            return
        backward[target, dtype, LayerNorm](Device[target](ctx), call)


def _call[
    op: StaticString, dtype: DType, ln_dtype: DType
](
    x: ManagedTensorSlice, linear_weight: ManagedTensorSlice, eps: Float64
) raises -> Call:
    """Returns a call of the given sizes, which must be such as kernels take."""
    var call = Call()
    call.M = x.dim_size(0)
    call.K = x.dim_size(1)
    call.N = linear_weight.dim_size(0)
    call.eps = eps
    call.x = Int(x.unsafe_ptr())
    call.norm_is_float32 = Int(ln_dtype != dtype)
    require_sizes[op](call.K, call.N)
    return call
