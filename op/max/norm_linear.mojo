"""Registers norm + Linear with what comes before and after for MAX: any norm, a residual, a modulation, an activation.

A tensor without elements stands for one that is not there, or not wanted. For several Linear layers on one norm,
concatenate their weights along N. Shapes are dynamic.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..norms.layer_norm import LayerNorm
from ..norms.rms_norm import RmsNorm
from .checks import address, clear, optional, require_dtypes
from .device import Device
from .family import backward, forward, forward_around_product
from .norm_call import (
    name_norm_gradients,
    name_norm_results,
    name_statistics,
    norm_call,
    products,
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
        var call = norm_call[op, normalization, activation](
            x, ln_weight, ln_bias, scale, shift, linear_weight, weight_offset
        )
        call.eps = eps
        call.y = address[op, "y"](y, call.M, call.N)
        call.bias = optional[op, "linear_bias"](linear_bias, products(call))
        name_norm_results[op](
            call,
            residual,
            total,
            mean,
            rstd,
            product,
        )
        if call.M != 0:
            comptime if normalization == "rms_norm":
                forward[target, dtype, RmsNorm](Device[target](ctx), call)
            else:
                forward[target, dtype, LayerNorm](Device[target](ctx), call)


@register("fused_norm_norm_linear_known")
struct FusedNormNormLinearKnown:
    """From x [M, K] and the statistics of its rows to y [M, N], and the product before its activation.

    The same as `fused_norm_norm_linear`, except that statistics are given: `fused_norm_linear_add` returns them.
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
        product: OutputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        ln_weight: InputTensor[dtype=ln_dtype, rank=1, ...],
        ln_bias: InputTensor[dtype=ln_dtype, rank=1, ...],
        scale: InputTensor[dtype=dtype, rank=2, ...],
        shift: InputTensor[dtype=dtype, rank=2, ...],
        mean: InputTensor[dtype=accum, rank=1, ...],
        rstd: InputTensor[dtype=accum, rank=1, ...],
        linear_weight: InputTensor[dtype=dtype, rank=2, ...],
        linear_bias: InputTensor[dtype=dtype, rank=1, ...],
        weight_offset: Float64,
        ctx: DeviceContext,
    ) raises:
        require_dtypes[target, dtype, ln_dtype, accum]()
        comptime op = "fused_norm_norm_linear_known"
        var call = norm_call[op, normalization, activation](
            x, ln_weight, ln_bias, scale, shift, linear_weight, weight_offset
        )
        name_statistics[op](call, mean, rstd)
        call.has_statistics = 1
        call.y = address[op, "y"](y, call.M, call.N)
        call.bias = optional[op, "linear_bias"](linear_bias, products(call))
        if call.activation != 0:
            call.h = optional[op, "product"](product, call.M, products(call))
        if call.M != 0:
            forward_around_product[target, dtype](Device[target](ctx), call)


@register("fused_norm_norm_linear_backward")
struct FusedNormNormLinearBackward:
    """From dy [M, N], the other gradient of the sum, and the forward's inputs and saved tensors to the gradients.

    The last result is the activation once more, for the gradient of a second Linear layer. x is the sum where there was a residual, whose gradient is dx too. Gradients without elements are not computed.
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
        dx: OutputTensor[dtype=dtype, rank=2, ...],
        dln_weight: OutputTensor[dtype=ln_dtype, rank=1, ...],
        dln_bias: OutputTensor[dtype=ln_dtype, rank=1, ...],
        dscale: OutputTensor[dtype=dtype, rank=2, ...],
        dshift: OutputTensor[dtype=dtype, rank=2, ...],
        dlinear_weight: OutputTensor[dtype=dtype, rank=2, ...],
        dlinear_bias: OutputTensor[dtype=dtype, rank=1, ...],
        activated: OutputTensor[dtype=dtype, rank=2, ...],
        dy: InputTensor[dtype=dtype, rank=2, ...],
        dtotal: InputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        ln_weight: InputTensor[dtype=ln_dtype, rank=1, ...],
        ln_bias: InputTensor[dtype=ln_dtype, rank=1, ...],
        scale: InputTensor[dtype=dtype, rank=2, ...],
        shift: InputTensor[dtype=dtype, rank=2, ...],
        mean: InputTensor[dtype=accum, rank=1, ...],
        rstd: InputTensor[dtype=accum, rank=1, ...],
        linear_weight: InputTensor[dtype=dtype, rank=2, ...],
        product: InputTensor[dtype=dtype, rank=2, ...],
        weight_offset: Float64,
        ctx: DeviceContext,
    ) raises:
        require_dtypes[target, dtype, ln_dtype, accum]()
        comptime op = "fused_norm_norm_linear_backward"
        var call = norm_call[op, normalization, activation](
            x, ln_weight, ln_bias, scale, shift, linear_weight, weight_offset
        )
        call.dy = address[op, "dy"](dy, call.M, call.N)
        name_statistics[op](call, mean, rstd)
        if call.activation != 0:
            call.h = address[op, "product"](product, call.M, products(call))
            call.a = optional[op, "activated"](activated, call.M, call.N)
        name_norm_gradients[op](
            call, dtotal, dx, dln_weight, dln_bias, dscale, dshift
        )
        call.dweight = optional[op, "dlinear_weight"](
            dlinear_weight, products(call), call.K
        )
        call.dbias = optional[op, "dlinear_bias"](dlinear_bias, products(call))
        if call.M == 0:
            clear[target](dln_weight, ctx)
            clear[target](dln_bias, ctx)
            clear[target](dscale, ctx)
            clear[target](dshift, ctx)
            clear[target](dlinear_weight, ctx)
            clear[target](dlinear_bias, ctx)
            return
        comptime if normalization == "rms_norm":
            backward[target, dtype, RmsNorm](Device[target](ctx), call)
        else:
            backward[target, dtype, LayerNorm](Device[target](ctx), call)
