"""The LayerNorm + Linear ops as PyTorch knows them: schemas, kernels, fakes, autograd."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fused_norm import _node, _parameters, reference
from fused_norm._dispatch import Way, way
from fused_norm._memory import dense, empty_gradients, empty_statistics
from fused_norm._parameters import Parameters
from fused_norm._registration import (
    are_plain,
    is_forward_mode,
    is_watched,
    register,
    without_none,
)


def _y(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    eps: float,
) -> Tensor:
    (x,) = dense(x)
    parameters = _parameters.of(ln_weight, ln_bias, linear_weight, linear_bias)
    return _way(x, linear_weight, parameters).forward(x, parameters, eps, False)[0]


def _forward(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    (x,) = dense(x)
    parameters = _parameters.of(ln_weight, ln_bias, linear_weight, linear_bias)
    return _way(x, linear_weight, parameters).forward(x, parameters, eps, True)


def _backward(
    grad_output: Tensor,
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    mask: list[bool],
) -> list[Tensor]:
    run = way(x, linear_weight).backward
    gradients = run(grad_output, x, ln_weight, ln_bias, linear_weight, mean, rstd, eps, mask)
    return without_none(gradients, x)


def _fake_y(x: Tensor, ln_weight: Any, ln_bias: Any, linear_weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], linear_weight.shape[0]), dtype=linear_weight.dtype)


def _fake_forward(x: Tensor, *parameters: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_y(x, *parameters), *empty_statistics(x)


def _fake_backward(
    grad_output: Tensor,
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    mask: list[bool],
) -> list[Tensor]:
    return without_none(empty_gradients(x, ln_weight, ln_bias, linear_weight, mask), x)


_INPUTS = "Tensor x, Tensor? ln_weight, Tensor? ln_bias, Tensor linear_weight"
layernorm_linear_inference = register(
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


class LayerNormLinearFunction(torch.autograd.Function):
    """Gradients of the op. Saved for the backward: the input, the parameters, mean and rstd."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, mean and rstd."""
        y, mean, rstd = layernorm_linear_forward(*arguments)
        return y, mean, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what the backward needs."""
        x, ln_weight, ln_bias, linear_weight, _, eps = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, ln_weight, ln_bias, linear_weight, *output[1:])
        ctx.eps = eps

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of the five tensors that require one."""
        if grad_output is None:
            return (None,) * 6
        mask = list(ctx.needs_input_grad[:5])
        return (*_gradients(grad_output, ctx.saved_tensors, ctx.eps, mask), None)


class EagerLayerNormLinear(torch.autograd.Function):
    """The same gradients where nothing watches, and a call is worth microseconds."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ln_weight: Tensor | None,
        ln_bias: Tensor | None,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        eps: float,
        parameters: Parameters,
    ) -> Tensor:
        """Return y."""
        run: Way = _way(x, linear_weight, parameters)
        y, mean, rstd = run.forward(x, parameters, eps, True)
        ctx.way = run
        ctx.save_for_backward(x, ln_weight, ln_bias, linear_weight, mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the five tensors that require one."""
        if grad_output is None:
            return (None,) * 7
        mask = list(ctx.needs_input_grad[:5])
        gradients = _eager_gradients(grad_output, ctx.saved_tensors, ctx.eps, mask, ctx.way)
        return (*gradients, None, None)


def _gradients(
    grad_output: Tensor, saved: Any, eps: float, mask: list[bool]
) -> list[Tensor | None]:
    """Return the gradients that the mask asks for, in sight of whatever watches."""
    x, ln_weight, ln_bias, linear_weight, mean, rstd = saved
    inputs = (grad_output, x, ln_weight, ln_bias, linear_weight)
    if torch.is_grad_enabled() or is_forward_mode():
        # A second derivative is being taken: PyTorch's ops have it, the kernels do not.
        gradients = reference.layernorm_linear_backward(*inputs, eps)
    else:
        gradients = layernorm_linear_backward(*inputs, mean, rstd, eps, mask)
    return [g if wanted else None for g, wanted in zip(gradients, mask, strict=True)]


def _eager_gradients(
    grad_output: Tensor, saved: Any, eps: float, mask: list[bool], run: Way | None = None
) -> list[Tensor | None]:
    """Return the same at the least cost, where nothing watched the forward."""
    if torch.is_grad_enabled() or is_watched() or not are_plain((grad_output, *saved)):
        return _gradients(grad_output, saved, eps, mask)
    chosen: Any = run or way(saved[0], saved[3])
    gradients: list[Tensor | None] = chosen.backward(grad_output, *saved, eps, mask)
    return gradients


@functools.cache
def _compiled() -> Any:
    """Return the module in C++, None where that is not built."""
    node = _node.load()
    if node is not None:
        node.set_python_backward(_eager_gradients)
    return node


def run_compiled(
    x: Any, ln_weight: Any, ln_bias: Any, linear_weight: Any, linear_bias: Any, eps: Any
) -> Tensor | None:
    """Compute a call with gradients that nothing watches in C++, layouts checked there.

    None where that is not built, where the parameters are new or none requires a gradient, and
    where the kernels do not take the tensors as they are.
    """
    node = _compiled()
    if node is None:
        return None
    parameters = _parameters.met(ln_weight, ln_bias, linear_weight, linear_bias)
    if (
        parameters is None
        or parameters.way is None
        or type(x) is not Tensor
        or x.dtype is not parameters.dtype
        or x.device != parameters.device
        or type(eps) is not float
    ):
        return None
    functions = parameters.way.functions(x, parameters)
    y: Tensor | None = node.forward(
        x, ln_weight, ln_bias, linear_weight, linear_bias, eps, functions
    )
    return y


# What `apply` comes down to where no transform is active, 3 us sooner.
_apply = super(torch.autograd.Function, EagerLayerNormLinear).apply


def layernorm_linear(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Compute a valid call, in sight of whatever watches it."""
    parameters = (ln_weight, ln_bias, linear_weight, linear_bias)
    inputs = (x, *parameters)
    wants_gradients = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in inputs
    )
    if not is_watched() and are_plain((*inputs, eps)):
        (ready,) = dense(x)
        # The backward keeps x itself, not a copy of it.
        if ready is x or not wants_gradients:
            return run(ready, *parameters, eps, _parameters.of(*parameters))
    if wants_gradients:
        y: Tensor = LayerNormLinearFunction.apply(*inputs, eps)[0]
    else:
        y = layernorm_linear_inference(*inputs, eps)
    return y


def run(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    eps: float,
    parameters: Parameters,
) -> Tensor:
    """Compute a valid call that nothing watches, on a dense x."""
    if not torch.is_grad_enabled() or not (
        x.requires_grad
        or linear_weight.requires_grad
        or (linear_bias is not None and linear_bias.requires_grad)
        or (ln_weight is not None and ln_weight.requires_grad)
        or (ln_bias is not None and ln_bias.requires_grad)
    ):
        return _way(x, linear_weight, parameters).forward(x, parameters, eps, False)[0]
    node = _compiled()
    if node is None:
        y: Tensor = _apply(x, ln_weight, ln_bias, linear_weight, linear_bias, eps, parameters)
        return y
    chosen = _way(x, linear_weight, parameters)
    torch._C._set_grad_enabled(False)
    try:
        y, mean, rstd = chosen.forward(x, parameters, eps, True)
    finally:
        torch._C._set_grad_enabled(True)
    inputs = (x, ln_weight, ln_bias, linear_weight, linear_bias)
    result: Tensor = node.attach(y, *inputs, mean, rstd, eps, chosen.functions(x, parameters))
    return result


def _way(x: Tensor, linear_weight: Tensor, parameters: Parameters) -> Way:
    if x.dtype is not parameters.dtype or not x.numel():
        return way(x, linear_weight)
    if parameters.way is None:
        parameters.way = way(x, linear_weight)
    chosen: Way = parameters.way
    return chosen
