"""LayerNorm + Linear as PyTorch knows it: schemas, fakes, one autograd function, and its calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.profiler import record_function

from fused_norm import backends, reference
from fused_norm.backends import cpu
from fused_norm.call import parameters as known_parameters
from fused_norm.call.memory import LOW_PRECISION, dense, empty_statistics, lies_transposed
from fused_norm.call.parameters import Parameters
from fused_norm.composition import Operands, Seam
from fused_norm.ops import compiled, seam
from fused_norm.ops.flops import count_flops
from fused_norm.ops.invariance import is_batch_invariant
from fused_norm.ops.main_grad import stand_in
from fused_norm.ops.registration import (
    are_plain,
    differentiable,
    is_forward_mode,
    is_profiled,
    is_watched,
    may_follow,
    register,
    without_none,
)
from fused_norm.ops.sharding import has_dtensor, over_shards
from fused_norm.ops.validation import (
    by_pytorch,
    has_kernel,
    is_slower_here,
    straight_by_pytorch,
)

_Results = tuple[Tensor, Tensor, Tensor]
# Gamma, beta, the weight and the bias.
_Parameters = tuple[Any, Any, Any, Any]


def _y(x: Tensor, *arguments: Any) -> Tensor:
    *tensors, eps = arguments
    return backends.forward(dense(x)[0], known_parameters.of(*tensors), eps, False)[0]


def _forward(x: Tensor, *arguments: Any) -> _Results:
    *tensors, eps = arguments
    return backends.forward(dense(x)[0], known_parameters.of(*tensors), eps, True)


def _backward(grad_output: Tensor, *arguments: Any) -> list[Tensor]:
    *saved, eps, wanted = arguments
    return without_none(_by_backends(grad_output, saved, eps, wanted, None), saved[0])


def _fake_y(x: Tensor, gamma: Any, beta: Any, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=weight.dtype)


def _fake_forward(x: Tensor, *arguments: Any) -> _Results:
    mean, rstd = empty_statistics(x)
    assert mean is not None
    return _fake_y(x, *arguments), mean, rstd


def _fake_backward(
    grad_output: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    *others: Any,
) -> list[Tensor]:
    norm = next((t for t in (gamma, beta) if t is not None), x)
    N, K = weight.shape
    sizes = ((x, x.shape), (norm, (K,)), (norm, (K,)), (weight, (N, K)), (weight, (N,)))
    wanted = zip(sizes, others[-1], strict=True)
    return without_none([like.new_empty(size) if w else None for (like, size), w in wanted], x)


_INPUTS = "Tensor x, Tensor? ln_weight, Tensor? ln_bias, Tensor linear_weight"
layernorm_linear = register(
    f"layernorm_linear({_INPUTS}, Tensor? linear_bias, float eps) -> Tensor",
    _y,
    _fake_y,
    rows=1,
)
layernorm_linear_forward = register(
    f"layernorm_linear_forward({_INPUTS}, Tensor? linear_bias, float eps) "
    "-> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    rows=1,
)
layernorm_linear_backward = register(
    f"layernorm_linear_backward(Tensor grad_output, {_INPUTS}, Tensor mean, Tensor rstd, "
    "float eps, bool[5] mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)


def _forward_flops(x: Tensor, gamma: Any, beta: Any, weight: Tensor, *_: Any) -> int:
    return 2 * x.numel() * weight.shape[0]


def _backward_flops(grad_output: Tensor, x: Tensor, *others: Any) -> int:
    wanted = others[-1]
    products: int = any(wanted[:3]) + wanted[3]
    return 2 * x.numel() * grad_output.shape[-1] * products


count_flops("layernorm_linear", _forward_flops)
count_flops("layernorm_linear_forward", _forward_flops)
count_flops("layernorm_linear_backward", _backward_flops)


class LayerNormLinear(torch.autograd.Function):
    """Gradients of the op. The forward saves the input, the parameters, mean and rstd, as C++ does.

    The last two arguments are None or: the Parameter whose `main_grad` is added to in place of a
    gradient for the weight; and what is known of the parameters where nothing watches the call.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> _Results:
        """Return y, mean and rstd."""
        x, *tensors, eps, _, parameters = arguments
        if parameters is not None:
            return backends.forward(x, parameters, eps, True)
        y, mean, rstd = layernorm_linear_forward(x, *tensors, eps)
        return y, mean, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what the backward needs."""
        x, gamma, beta, weight, _, eps, owner, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, gamma, beta, *output[1:], weight, owner)
        ctx.eps = eps

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensors that require one."""
        if grad_output is None:
            return (None,) * 8
        saved, owner = _saved(ctx)
        wanted = list(ctx.needs_input_grad[:5])
        if owner is None:
            return (*gradients(grad_output, saved, ctx.eps, wanted), None, None, None)
        return _accumulate(ctx, grad_output)


def _saved(ctx: Any) -> tuple[list[Any], Any]:
    """Return what was kept in the order of the ops' arguments, and the owner of a `main_grad`."""
    x, gamma, beta, mean, rstd, weight, owner = ctx.saved_tensors
    return [x, gamma, beta, weight, mean, rstd], owner


@once_differentiable
def _accumulate(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients; for a Parameter with a `main_grad`, a stand-in for its own."""
    saved, owner = _saved(ctx)
    wanted = [*ctx.needs_input_grad[:3], False, ctx.needs_input_grad[4]]
    if is_watched() or not are_plain((grad_output, *saved)):
        found = gradients(grad_output, saved, ctx.eps, wanted)
        x, gamma, beta, *_ = saved
        with torch.autocast(x.device.type, enabled=False):
            reference.add_weight_gradient(owner.main_grad, grad_output, x, gamma, beta, ctx.eps)
    else:
        wanted[3] = True
        found = _by_backends(grad_output, saved, ctx.eps, wanted, owner.main_grad)
    return (*found[:3], None, found[4], None, stand_in(owner), None)


def _by_backends(
    grad_output: Tensor, saved: Any, eps: float, wanted: list[bool], main_grad: Tensor | None
) -> list[Tensor | None]:
    x, gamma, beta, weight, mean, rstd = saved
    parameters = known_parameters.of(gamma, beta, weight, None)
    return backends.backward(grad_output, x, parameters, mean, rstd, eps, wanted, main_grad)


def gradients(
    grad_output: Tensor, saved: Any, eps: float, wanted: list[bool]
) -> list[Tensor | None]:
    """Return the gradients that are wanted."""
    if torch.is_grad_enabled() or is_forward_mode():
        # A second derivative is being taken: PyTorch's ops have it, the kernels do not.
        x, gamma, beta, weight, *_ = saved
        found = reference.layernorm_linear_backward(grad_output, x, gamma, beta, weight, eps)
    elif is_watched() or not are_plain((grad_output, *saved)):
        found = layernorm_linear_backward(grad_output, *saved, eps, wanted)
    else:
        return _by_backends(grad_output, saved, eps, wanted, None)
    return [g if w else None for g, w in zip(found, wanted, strict=True)]


_with_gradients = differentiable(LayerNormLinear)


def call(x: Any, tensors: _Parameters, eps: Any, owner: Tensor | None = None) -> Tensor:
    """Compute a call of the op; PyTorch's ops take what no kernel serves, wrong calls included.

    Args:
        x: Input of shape `[..., K]`.
        tensors: Gamma, beta, the weight and the bias.
        eps: Added to the variance.
        owner: A Parameter whose `main_grad` gets the gradient of the weight, or None.
    """
    if owner is None:
        y = compiled.layernorm_linear(x, *tensors, eps)
        if y is not None:
            return y
    return by_python(x, tensors, eps, owner)


def by_python(
    x: Any,
    tensors: _Parameters,
    eps: Any,
    owner: Tensor | None = None,
    is_recorded: bool = False,
) -> Tensor:
    """Do the same without C++.

    Args:
        x: Input of shape `[..., K]`.
        tensors: Gamma, beta, the weight and the bias.
        eps: Added to the variance.
        owner: A Parameter whose `main_grad` gets the gradient of the weight, or None.
        is_recorded: Whether a running profiler has been told.
    """
    if not is_recorded and is_profiled():
        with record_function("fused_norm::norm_linear"):
            return by_python(x, tensors, eps, owner, True)
    if is_batch_invariant():
        kind = Seam(eps=float(eps), batch_invariant=True)
        owners = None if owner is None else [owner]
        return seam.call(kind, _operands(x, tensors), owners, is_recorded=True)[0]
    autocast = torch._C._is_any_autocast_enabled()
    if not autocast:
        if owner is None and type(x) is Tensor and x.is_cpu and cpu.is_left_to_pytorch(x):
            return straight_by_pytorch(x, *tensors, eps)
        if not is_watched():
            if owner is None and type(x) is Tensor and x.is_cpu:
                follows = torch.is_grad_enabled() and _wants_gradients(x, tensors)
                if is_slower_here(x, tensors[2], follows):
                    return straight_by_pytorch(x, *tensors, eps)
            parameters = known_parameters.known(*tensors)
            if parameters is not None and parameters.take(x, eps):
                if torch.is_grad_enabled():
                    return _run(x, tensors, eps, owner, parameters)
                return backends.forward(x, parameters, eps, False)[0]
    inputs, cast = tensors, False
    if autocast and _is_autocast(x):
        if x.is_cpu and x.dtype in LOW_PRECISION:
            # As under autocast on a GPU, where a norm computes in float32.
            x = x.float()
        inputs, cast = _autocast(x, tensors)
    if owner is None and isinstance(x, Tensor) and x.is_cpu and (cast or cpu.is_left_to_pytorch(x)):
        return by_pytorch(x, *tensors, eps)
    operands = _operands(x, tensors)
    if has_dtensor(operands):
        return _over_shards(operands, eps, owner)
    if not has_kernel(x, *inputs, eps, cast):
        y = by_pytorch(x, *tensors, eps)
        if owner is None or not _wants_gradients(x, tensors):
            return y
    elif owner is None and lies_transposed(inputs[2]):
        # These kernels would copy the weight in every call, PyTorch's product takes it as it lies.
        return seam.call(Seam(eps=float(eps)), operands, is_recorded=True)[0]
    elif not is_watched() and are_plain((x, *inputs, eps)):
        (ready,) = dense(x)
        # The backward keeps x itself, not a copy of it.
        if ready is x or not _wants_gradients(x, inputs):
            return _run(ready, inputs, eps, owner, known_parameters.of(*inputs))
    return _run(x, inputs, eps, owner, None)


def _operands(x: Any, tensors: _Parameters) -> Operands:
    gamma, beta, weight, bias = tensors
    return Operands(x, gamma=gamma, beta=beta, weights=[weight], biases=[bias])


def _over_shards(t: Operands, eps: Any, owner: Any) -> Tensor:
    """Compute a call on DTensors."""
    if owner is not None:
        raise NotImplementedError("no main_grad is added to beside DTensors")

    def run(_: Seam, local: Operands) -> list[Tensor]:
        return [call(local.x, _tensors(local), eps)]

    found = over_shards(run, Seam(eps=eps), t)
    return by_pytorch(t.x, *_tensors(t), eps) if found is None else found[0]


def _tensors(t: Operands) -> _Parameters:
    return t.gamma, t.beta, t.weights[0], t.biases[0]


def _run(
    x: Tensor, tensors: _Parameters, eps: float, owner: Any, parameters: Parameters | None
) -> Tensor:
    """Compute a valid call; where parameters are given, one that nothing watches."""
    y: Tensor
    if _wants_gradients(x, tensors):
        y = _with_gradients(x, *tensors, eps, owner, parameters)
    elif parameters is not None:
        y = backends.forward(x, parameters, eps, False)[0]
    else:
        y = layernorm_linear(x, *tensors, eps)
    return y


def _wants_gradients(x: Tensor, tensors: _Parameters) -> bool:
    return may_follow() and (
        x.requires_grad or any(getattr(t, "requires_grad", False) for t in tensors)
    )


def _is_autocast(x: Any) -> bool:
    if not isinstance(x, Tensor) or not (x.is_cpu or x.is_cuda):
        return False
    return torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")


def _autocast(x: Tensor, tensors: _Parameters) -> tuple[_Parameters, bool]:
    """Return the Linear parameters in autocast's dtype, as autocast treats a Linear layer."""
    gamma, beta, weight, bias = tensors
    dtype = torch.get_autocast_dtype(x.device.type)
    castable = (torch.float32, torch.bfloat16, torch.float16)
    if not isinstance(weight, Tensor) or weight.dtype not in castable or x.dtype not in castable:
        return tensors, False
    bias = bias.to(dtype) if isinstance(bias, Tensor) else bias
    return (gamma, beta, weight.to(dtype), bias), True
