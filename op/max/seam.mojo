"""Registers norm + Linear with what comes before and after for MAX: any norm, a residual, a modulation, an activation.

A tensor without elements stands for one that is not there, or not wanted. Several Linear layers on one norm are one
whose weight is theirs below one another; an MLP goes on with a product of MAX's. Shapes are dynamic.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from . import norm_linear_cpu, norm_linear_gpu
from .checks import address, optional, require_dtypes, require_sizes
from ..call import Call
from ..gemm.activation import (
    GATED,
    GELU,
    GELU_TANH,
    NOTHING,
    QUICK_GELU,
    RELU,
    SILU,
)


@register("fused_norm_norm_linear")
struct FusedNormNormLinear:
    """From x [M, K] to y [M, N], x + residual [M, K], mean and rstd [M], and the product before its activation.

    The parameter `normalization` is "layer_norm" or "rms_norm", and `activation` one of `fused_norm.norm_linear`'s or
    "none". Before a gate the weight is [2N, K], the gate first. scale and shift are [groups, K], for groups of
    neighboring rows.
    """

    @doc_hidden
    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        ln_dtype: DType,
        accum: DType,
        normalization: StaticString,
        activation: StaticString,
    ](
        y: OutputTensor[dtype=dtype, rank=2, ...],
        total: OutputTensor[dtype=dtype, rank=2, ...],
        mean: OutputTensor[dtype=accum, rank=1, ...],
        rstd: OutputTensor[dtype=accum, rank=1, ...],
        product: OutputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        residual: InputTensor[dtype=dtype, rank=2, ...],
        ln_weight: InputTensor[dtype=ln_dtype, rank=1, ...],
        ln_bias: InputTensor[dtype=ln_dtype, rank=1, ...],
        scale: InputTensor[dtype=dtype, rank=2, ...],
        shift: InputTensor[dtype=dtype, rank=2, ...],
        linear_weight: InputTensor[dtype=dtype, rank=2, ...],
        linear_bias: InputTensor[dtype=dtype, rank=1, ...],
        eps: Float64,
        weight_offset: Float64,
        ctx: DeviceContext,
    ) raises:
        require_dtypes[target, dtype, ln_dtype, accum]()
        comptime op = "fused_norm_norm_linear"
        comptime kind = _number_of[activation]()
        comptime halves = 2 if kind >= GATED else 1
        comptime assert (
            normalization == "layer_norm" or normalization == "rms_norm"
        ), "normalization must be layer_norm or rms_norm"
        comptime assert kind >= 0, "activation is not known"
        var call = Call()
        var M, K = x.dim_size(0), x.dim_size(1)
        var columns = linear_weight.dim_size(0)
        require_sizes[op](K, columns)
        if columns % halves != 0:
            raise Error(op, ": a gate needs an even number of outputs")
        call.M, call.K, call.N = M, K, columns // halves
        call.eps = eps
        call.weight_offset = weight_offset
        call.normalization = 1 if normalization == "rms_norm" else 0
        call.activation = kind
        call.norm_is_float32 = Int(ln_dtype != dtype)
        call.x = address[op, "x"](x, M, K)
        call.y = address[op, "y"](y, M, call.N)
        call.weight = address[op, "linear_weight"](linear_weight, columns, K)
        call.bias = optional[op, "linear_bias"](linear_bias, columns)
        call.gamma = optional[op, "ln_weight"](ln_weight, K)
        call.beta = optional[op, "ln_bias"](ln_bias, K)
        call.residual = optional[op, "residual"](residual, M, K)
        call.sum = optional[op, "total"](total, M, K)
        if M != 0 and (call.sum == 0) != (call.residual == 0):
            raise Error(
                op, ": total is wanted beside a residual, and only then"
            )
        var groups = max(scale.dim_size(0), shift.dim_size(0))
        call.scale = optional[op, "scale"](scale, groups, K)
        call.shift = optional[op, "shift"](shift, groups, K)
        if (call.scale | call.shift) != 0:
            call.groups = groups
            if M % groups != 0:
                raise Error(op, ": ", M, " rows are no ", groups, " groups")
        call.mean = optional[op, "mean"](mean, M)
        if call.mean != 0 and call.normalization != 0:
            raise Error(op, ": rms_norm has no mean")
        call.rstd = optional[op, "rstd"](rstd, M)
        if kind != 0:
            call.h = optional[op, "product"](product, M, columns)
        if M == 0:
            return
        comptime if target == "cpu":
            norm_linear_cpu.forward[dtype](call)
        else:
            norm_linear_gpu.forward[dtype, ln_dtype, is_family=True](call, ctx)


def _number_of[name: StaticString]() -> Int:
    """Returns the number of an activation, -1 if none has that name."""
    comptime if name == "none":
        return Int(NOTHING)
    elif name == "relu":
        return Int(RELU)
    elif name == "gelu":
        return Int(GELU)
    elif name == "gelu_tanh":
        return Int(GELU_TANH)
    elif name == "quick_gelu":
        return Int(QUICK_GELU)
    elif name == "silu":
        return Int(SILU)
    elif name == "reglu":
        return GATED + Int(RELU)
    elif name == "geglu":
        return GATED + Int(GELU)
    elif name == "geglu_tanh":
        return GATED + Int(GELU_TANH)
    elif name == "swiglu":
        return GATED + Int(SILU)
    else:
        return -1
