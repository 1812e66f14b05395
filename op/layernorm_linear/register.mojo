"""Registers the production op and its gradients for MAX graphs.

Shapes are dynamic: a graph with symbolic dimensions compiles once. Statistics, and LayerNorm's parameters
beside bfloat16 and float16, are float32; all else has one dtype. A CPU runs the kernels that PyTorch's front
door runs, on Mojo's threads, and gives the same bits.
"""

from extensibility import (
    InputTensor,
    ManagedTensorSlice,
    OutputTensor,
    register,
)
from max.gpu.host import DeviceBuffer, DeviceContext
from std.runtime import parallelism_level

from ..call import Call, CallPointer
from ..norm_linear.cpu.backward import backward
from ..norm_linear.cpu.forward import forward
from ..norm_linear.cpu.plan import plan_backward, plan_forward
from ..rows.operands import accumulator
from .composed import Composed


@register("fused_norm_layernorm_linear")
struct FusedLayerNormLinear:
    """LayerNorm followed by a Linear layer."""

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
        """Computes `linear(layer_norm(x))` and the rows' statistics.

        Parameters:
            target: `"cpu"` or `"gpu"`.
            dtype: Element type of the tensors.
            ln_dtype: That type, or float32 beside bfloat16 and float16.
            accum: The type of statistics, float64 beside float64 and else float32.

        Args:
            y: Output, `[M, N]`.
            mean: Row means, `[M]`.
            rstd: Reciprocal standard deviations, `[M]`.
            x: Input, `[M, K]`.
            ln_weight: LayerNorm's weight, `[K]`.
            ln_bias: LayerNorm's bias, `[K]`.
            linear_weight: The Linear layer's weight, `[N, K]`.
            linear_bias: The Linear layer's bias, `[N]`.
            eps: Added to the variance before the square root.
            ctx: The device.

        Raises:
            If shapes disagree, K or N is 0, or a launch fails.
        """
        _require_dtypes[target, dtype, ln_dtype, accum]()
        comptime op = "fused_norm_layernorm_linear"
        var M = x.dim_size(0)
        var K = x.dim_size(1)
        var N = linear_weight.dim_size(0)
        _require_sizes[op](K, N)
        _require_shape[op, "y"](y, M, N)
        _require_shape[op, "mean"](mean, M)
        _require_shape[op, "rstd"](rstd, M)
        _require_shape[op, "ln_weight"](ln_weight, K)
        _require_shape[op, "ln_bias"](ln_bias, K)
        _require_shape[op, "linear_weight"](linear_weight, N, K)
        _require_shape[op, "linear_bias"](linear_bias, N)
        if M == 0:
            return
        comptime if target == "cpu":
            var call = Call()
            call.M = M
            call.K = K
            call.N = N
            call.eps = eps
            call.threads = parallelism_level()
            call.norm_is_float32 = Int(ln_dtype == DType.float32)
            call.y = Int(y.unsafe_ptr())
            call.mean = Int(mean.unsafe_ptr())
            call.rstd = Int(rstd.unsafe_ptr())
            call.x = Int(x.unsafe_ptr())
            call.gamma = Int(ln_weight.unsafe_ptr())
            call.beta = Int(ln_bias.unsafe_ptr())
            call.weight = Int(linear_weight.unsafe_ptr())
            call.bias = Int(linear_bias.unsafe_ptr())
            _run[plan_forward[dtype], forward[dtype]](call)
        else:
            Composed[dtype, ln_dtype](
                M,
                K,
                N,
                Int(x.unsafe_ptr()),
                Int(ln_weight.unsafe_ptr()),
                Int(ln_bias.unsafe_ptr()),
                Int(linear_weight.unsafe_ptr()),
                eps,
            ).forward(
                ctx,
                Int(y.unsafe_ptr()),
                Int(mean.unsafe_ptr()),
                Int(rstd.unsafe_ptr()),
                Int(linear_bias.unsafe_ptr()),
            )


@register("fused_norm_layernorm_linear_backward")
struct FusedLayerNormLinearBackward:
    """The gradients of LayerNorm followed by a Linear layer."""

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
        """Computes the gradients for an incoming gradient.

        Parameters:
            target: `"cpu"` or `"gpu"`.
            dtype: Element type of the tensors.
            ln_dtype: That type, or float32 beside bfloat16 and float16.
            accum: The type of statistics, float64 beside float64 and else float32.

        Args:
            dx: Gradient of `x`, `[M, K]`.
            dln_weight: Gradient of `ln_weight`, `[K]`.
            dln_bias: Gradient of `ln_bias`, `[K]`.
            dlinear_weight: Gradient of `linear_weight`, `[N, K]`.
            dlinear_bias: Gradient of the linear bias, `[N]`.
            dy: Incoming gradient, `[M, N]`.
            x: Input of the forward pass, `[M, K]`.
            ln_weight: LayerNorm's weight, `[K]`.
            ln_bias: LayerNorm's bias, `[K]`.
            linear_weight: The Linear layer's weight, `[N, K]`.
            mean: Row means of the forward pass, `[M]`.
            rstd: Its reciprocal standard deviations, `[M]`.
            eps: That of the forward pass.
            ctx: The device.

        Raises:
            If shapes disagree, K or N is 0, or a launch fails.
        """
        _require_dtypes[target, dtype, ln_dtype, accum]()
        comptime op = "fused_norm_layernorm_linear_backward"
        var M = x.dim_size(0)
        var K = x.dim_size(1)
        var N = linear_weight.dim_size(0)
        _require_sizes[op](K, N)
        _require_shape[op, "dx"](dx, M, K)
        _require_shape[op, "dln_weight"](dln_weight, K)
        _require_shape[op, "dln_bias"](dln_bias, K)
        _require_shape[op, "dlinear_weight"](dlinear_weight, N, K)
        _require_shape[op, "dlinear_bias"](dlinear_bias, N)
        _require_shape[op, "dy"](dy, M, N)
        _require_shape[op, "ln_weight"](ln_weight, K)
        _require_shape[op, "ln_bias"](ln_bias, K)
        _require_shape[op, "linear_weight"](linear_weight, N, K)
        _require_shape[op, "mean"](mean, M)
        _require_shape[op, "rstd"](rstd, M)
        if M == 0:
            _clear(dln_weight, ctx)
            _clear(dln_bias, ctx)
            _clear(dlinear_weight, ctx)
            _clear(dlinear_bias, ctx)
            return
        comptime if target == "cpu":
            var call = Call()
            call.M = M
            call.K = K
            call.N = N
            call.threads = parallelism_level()
            call.norm_is_float32 = Int(ln_dtype == DType.float32)
            call.dx = Int(dx.unsafe_ptr())
            call.dgamma = Int(dln_weight.unsafe_ptr())
            call.dbeta = Int(dln_bias.unsafe_ptr())
            call.dweight = Int(dlinear_weight.unsafe_ptr())
            call.dbias = Int(dlinear_bias.unsafe_ptr())
            call.dy = Int(dy.unsafe_ptr())
            call.x = Int(x.unsafe_ptr())
            call.mean = Int(mean.unsafe_ptr())
            call.rstd = Int(rstd.unsafe_ptr())
            call.gamma = Int(ln_weight.unsafe_ptr())
            call.beta = Int(ln_bias.unsafe_ptr())
            call.weight = Int(linear_weight.unsafe_ptr())
            _run[plan_backward[dtype], backward[dtype]](call)
        else:
            Composed[dtype, ln_dtype](
                M,
                K,
                N,
                Int(x.unsafe_ptr()),
                Int(ln_weight.unsafe_ptr()),
                Int(ln_bias.unsafe_ptr()),
                Int(linear_weight.unsafe_ptr()),
                eps,
            ).backward(
                ctx,
                Int(dx.unsafe_ptr()),
                Int(dln_weight.unsafe_ptr()),
                Int(dln_bias.unsafe_ptr()),
                Int(dlinear_weight.unsafe_ptr()),
                Int(dlinear_bias.unsafe_ptr()),
                Int(dy.unsafe_ptr()),
                Int(mean.unsafe_ptr()),
                Int(rstd.unsafe_ptr()),
            )


def _clear(tensor: ManagedTensorSlice, ctx: DeviceContext) raises:
    """Writes the zeros that a sum over no rows is."""
    ctx.enqueue_memset(
        DeviceBuffer[tensor.dtype](
            ctx, tensor.unsafe_ptr(), tensor.size(), owning=False
        ),
        Scalar[tensor.dtype](0),
    )


def _run[
    plan: def(CallPointer) thin -> None, pass_: def(CallPointer) thin -> None
](mut call: Call):
    """Runs a pass on a CPU, in a workspace of its own."""
    var at = CallPointer(unsafe_from_address=Int(Pointer(to=call)))
    plan(at)
    var workspace = List[UInt8](unsafe_uninit_length=call.workspace_bytes)
    if call.workspace_bytes > 0:
        call.workspace = Int(workspace.unsafe_ptr())
    pass_(at)
    _ = workspace^


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


def _require_shape[
    op: StaticString, name: StaticString
](tensor: ManagedTensorSlice, *expected: Int) raises:
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
