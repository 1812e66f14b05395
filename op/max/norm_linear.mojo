"""Registers norm + Linear and its gradients for MAX.

Shapes are dynamic: a graph with symbolic dimensions compiles once. Statistics, and the norm's parameters beside
bfloat16 and float16, are float32; all else has one dtype. A CPU gives the same bits as behind PyTorch's door.
"""

from extensibility import (
    InputTensor,
    ManagedTensorSlice,
    OutputTensor,
    register,
)
from max.gpu.host import DeviceBuffer, DeviceContext

from . import norm_linear_cpu, norm_linear_gpu
from ..call import Call
from ..rows.operands import accumulator


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
        _require_dtypes[target, dtype, ln_dtype, accum]()
        comptime op = "fused_norm_layernorm_linear"
        var call = _call[op, dtype, ln_dtype](x, linear_weight, eps)
        var M, K, N = call.M, call.K, call.N
        call.y = _address[op, "y"](y, M, N)
        call.mean = _address[op, "mean"](mean, M)
        call.rstd = _address[op, "rstd"](rstd, M)
        call.gamma = _address[op, "ln_weight"](ln_weight, K)
        call.beta = _address[op, "ln_bias"](ln_bias, K)
        call.weight = _address[op, "linear_weight"](linear_weight, N, K)
        call.bias = _address[op, "linear_bias"](linear_bias, N)
        if M == 0:
            return
        comptime if target == "cpu":
            norm_linear_cpu.forward[dtype](call)
        else:
            norm_linear_gpu.forward[dtype, ln_dtype](call, ctx)


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
        _require_dtypes[target, dtype, ln_dtype, accum]()
        comptime op = "fused_norm_layernorm_linear_backward"
        var call = _call[op, dtype, ln_dtype](x, linear_weight, eps)
        var M, K, N = call.M, call.K, call.N
        call.dx = _address[op, "dx"](dx, M, K)
        call.dgamma = _address[op, "dln_weight"](dln_weight, K)
        call.dbeta = _address[op, "dln_bias"](dln_bias, K)
        call.dweight = _address[op, "dlinear_weight"](dlinear_weight, N, K)
        call.dbias = _address[op, "dlinear_bias"](dlinear_bias, N)
        call.dy = _address[op, "dy"](dy, M, N)
        call.gamma = _address[op, "ln_weight"](ln_weight, K)
        call.beta = _address[op, "ln_bias"](ln_bias, K)
        call.weight = _address[op, "linear_weight"](linear_weight, N, K)
        call.mean = _address[op, "mean"](mean, M)
        call.rstd = _address[op, "rstd"](rstd, M)
        if M == 0:
            _clear(dln_weight, ctx)
            _clear(dln_bias, ctx)
            _clear(dlinear_weight, ctx)
            _clear(dlinear_bias, ctx)
            return
        comptime if target == "cpu":
            norm_linear_cpu.backward[dtype](call)
        else:
            norm_linear_gpu.backward[dtype, ln_dtype](call, ctx)


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
    _require_sizes[op](call.K, call.N)
    return call


def _clear(tensor: ManagedTensorSlice, ctx: DeviceContext) raises:
    """Writes the zeros that a sum over no rows is."""
    ctx.enqueue_memset(
        DeviceBuffer[tensor.dtype](
            ctx, tensor.unsafe_ptr(), tensor.size(), owning=False
        ),
        Scalar[tensor.dtype](0),
    )


def _require_dtypes[
    target: StaticString, dtype: DType, ln_dtype: DType, accum: DType
]():
    comptime is_low = dtype == DType.bfloat16 or dtype == DType.float16
    comptime assert (
        is_low or dtype == DType.float32 or dtype == DType.float64
    ), "x must be float32, bfloat16, float16 or float64"
    comptime assert (
        target == "cpu" or dtype != DType.float64
    ), "float64 has no GPU kernel"
    comptime assert ln_dtype == dtype or (
        is_low and ln_dtype == DType.float32
    ), (
        "LayerNorm's parameters must have the dtype of x, or be float32 beside"
        " bfloat16 and float16"
    )
    comptime assert (
        accum == accumulator[dtype]()
    ), "mean and rstd must be float32, and float64 beside float64"


def _require_sizes[op: StaticString](K: Int, N: Int) raises:
    if K == 0 or N == 0:
        raise Error(
            op,
            ": linear_weight must have at least 1 row and 1 column, got ",
            N,
            " x ",
            K,
        )


def _address[
    op: StaticString, name: StaticString
](tensor: ManagedTensorSlice, *expected: Int) raises -> Int:
    """Returns the address of a tensor, which has to have the given shape."""
    for i in range(tensor.rank):
        if tensor.dim_size(i) != expected[i]:
            raise Error(
                op,
                ": dimension ",
                i,
                " of ",
                name,
                " must be ",
                expected[i],
                ", got ",
                tensor.dim_size(i),
            )
    return Int(tensor.unsafe_ptr())
