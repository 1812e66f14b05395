"""Makes the record of a call from the tensors that all ops of the family for MAX have."""

from extensibility import ManagedTensorSlice

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
from .checks import address, optional, require_sizes


def products(call: Call) -> Int:
    """Returns the columns of the product before its activation.

    Args:
        call: A call of the family.

    Returns:
        How many.
    """
    return call.N * (2 if call.activation >= GATED else 1)


def norm_call[
    op: StaticString, normalization: StaticString, activation: StaticString
](
    x: ManagedTensorSlice,
    ln_weight: ManagedTensorSlice,
    ln_bias: ManagedTensorSlice,
    scale: ManagedTensorSlice,
    shift: ManagedTensorSlice,
    linear_weight: ManagedTensorSlice,
    weight_offset: Float64,
) raises -> Call:
    """Returns a call with its sizes, x, the norm's parameters, modulation and the weight.

    Parameters:
        op: The op's name.
        normalization: The norm's.
        activation: The activation's, or "none".

    Args:
        x: Input [M, K].
        ln_weight: Gamma [K], or nothing.
        ln_bias: Beta [K], or nothing.
        scale: Modulation [groups, K], or nothing.
        shift: The other half of it, or nothing.
        linear_weight: [N, K], before a gate [2N, K].
        weight_offset: Added to gamma.

    Returns:
        The call.

    Raises:
        If tensors disagree.
    """
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
    call.weight_offset = weight_offset
    call.normalization = number_of_norm[normalization]()
    call.activation = kind
    call.norm_is_float32 = Int(ln_weight.dtype != x.dtype)
    call.x = address[op, "x"](x, M, K)
    call.weight = address[op, "linear_weight"](linear_weight, columns, K)
    call.gamma = optional[op, "ln_weight"](ln_weight, K)
    call.beta = optional[op, "ln_bias"](ln_bias, K)
    var groups = max(scale.dim_size(0), shift.dim_size(0))
    call.scale = optional[op, "scale"](scale, groups, K)
    call.shift = optional[op, "shift"](shift, groups, K)
    if (call.scale | call.shift) != 0:
        call.groups = groups
        if M % groups != 0:
            raise Error(op, ": ", M, " rows are no ", groups, " groups")
    return call


def name_norm_results[
    op: StaticString
](
    mut call: Call,
    residual: ManagedTensorSlice,
    total: ManagedTensorSlice,
    mean: ManagedTensorSlice,
    rstd: ManagedTensorSlice,
    product: ManagedTensorSlice,
) raises:
    """Names a residual, and the results of a forward other than y.

    Parameters:
        op: The op's name.

    Args:
        call: Gets them.
        residual: Added to x [M, K], or nothing.
        total: Receives the sum [M, K], nothing without a residual.
        mean: Receives the mean of each row [M], or nothing.
        rstd: Receives the factor of each row [M], or nothing.
        product: Receives the product before its activation, or nothing.

    Raises:
        If tensors disagree.
    """
    call.residual = optional[op, "residual"](residual, call.M, call.K)
    call.sum = optional[op, "total"](total, call.M, call.K)
    if call.M != 0 and (call.sum == 0) != (call.residual == 0):
        raise Error(op, ": total is wanted beside a residual, and only then")
    call.mean = optional[op, "mean"](mean, call.M)
    call.rstd = optional[op, "rstd"](rstd, call.M)
    if call.normalization != 0:
        require_no_mean[op](mean)
    if call.activation != 0:
        call.h = optional[op, "product"](product, call.M, products(call))


def name_norm_gradients[
    op: StaticString
](
    mut call: Call,
    dtotal: ManagedTensorSlice,
    dx: ManagedTensorSlice,
    dln_weight: ManagedTensorSlice,
    dln_bias: ManagedTensorSlice,
    dscale: ManagedTensorSlice,
    dshift: ManagedTensorSlice,
) raises:
    """Names the gradient of the sum, and those of what comes before the product.

    Parameters:
        op: The op's name.

    Args:
        call: Gets them.
        dtotal: The gradient of the sum from what else reads it [M, K], or nothing.
        dx: Receives that of x [M, K], or nothing.
        dln_weight: Receives that of gamma [K], or nothing.
        dln_bias: Receives that of beta [K], or nothing.
        dscale: Receives that of the scale [groups, K], or nothing.
        dshift: Receives that of the shift [groups, K], or nothing.

    Raises:
        If tensors disagree.
    """
    call.dsum = optional[op, "dtotal"](dtotal, call.M, call.K)
    call.dx = optional[op, "dx"](dx, call.M, call.K)
    call.dgamma = optional[op, "dln_weight"](dln_weight, call.K)
    call.dbeta = optional[op, "dln_bias"](dln_bias, call.K)
    call.dscale = optional[op, "dscale"](dscale, call.groups, call.K)
    call.dshift = optional[op, "dshift"](dshift, call.groups, call.K)


def name_statistics[
    op: StaticString
](mut call: Call, mean: ManagedTensorSlice, rstd: ManagedTensorSlice,) raises:
    """Names the statistics of rows, where they are known.

    Parameters:
        op: The op's name.

    Args:
        call: Gets them.
        mean: [M], nothing for a norm that has none.
        rstd: [M].

    Raises:
        If they disagree with the norm.
    """
    call.rstd = address[op, "rstd"](rstd, call.M)
    if call.normalization == 0:
        call.mean = address[op, "mean"](mean, call.M)
    else:
        require_no_mean[op](mean)


def require_no_mean[op: StaticString](mean: ManagedTensorSlice) raises:
    """Refuses a mean with RMSNorm.

    Parameters:
        op: The op's name.

    Args:
        mean: Nothing.

    Raises:
        If it is something.
    """
    if mean.size() != 0:
        raise Error(op, ": rms_norm has no mean")


def number_of_norm[name: StaticString]() -> Int:
    """Returns the number of a norm in the record.

    Parameters:
        name: "layer_norm" or "rms_norm".

    Returns:
        The number.
    """
    return 1 if name == "rms_norm" else 0


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
