"""Registers the LayerNorm + Linear ops with PyTorch: schemas, kernels, fakes, vmap, autograd.

The registered ops are functional and know nothing of gradients; `LayerNormLinearFunction` ties them
together. A call crosses PyTorch's dispatcher once; below it only kernels run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_norm import reference
from fused_norm._dispatch import way
from fused_norm._memory import empty_gradients, empty_statistics

_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, type(None), float, int, bool, list})
_library = torch.library.Library("fused_norm", "DEF")


def _y(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    eps: float,
) -> Tensor:
    run = way(x, linear_weight).forward
    return run(x, ln_weight, ln_bias, linear_weight, linear_bias, eps, False)[0]


def _forward(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    run = way(x, linear_weight).forward
    return run(x, ln_weight, ln_bias, linear_weight, linear_bias, eps, True)


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
    return _without_none(gradients, x)


def _without_none(gradients: list[Tensor | None], like: Tensor) -> list[Tensor]:
    """Return the gradients with an empty tensor for None, which a schema cannot promise."""
    return [like.new_empty(0) if g is None else g for g in gradients]


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
    return _without_none(empty_gradients(x, ln_weight, ln_bias, linear_weight, mask), x)


def _batched(name: str) -> Callable[..., Any]:
    """Return a vmap rule: a batch of inputs alone is more rows, other batches are calls in turn."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        op = getattr(torch.ops.fused_norm, name).default
        batched = [isinstance(dim, int) for dim in in_dims]
        if batched[0] and not any(batched[1:]):
            result = op(arguments[0].movedim(in_dims[0], 0), *arguments[1:])
        else:
            calls = [
                op(
                    *(
                        t.select(dim, i) if isinstance(dim, int) else t
                        for t, dim in zip(arguments, in_dims, strict=True)
                    )
                )
                for i in range(info.batch_size)
            ]
            if isinstance(calls[0], Tensor):
                result = torch.stack(calls)
            else:
                result = tuple(torch.stack(outputs) for outputs in zip(*calls, strict=True))
        return result, 0 if isinstance(result, Tensor) else (0,) * len(result)

    return rule


def _register(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Register an op and return what calls it, bound once so that a call looks nothing up."""
    name = schema[: schema.index("(")]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _library.impl(name, kernel, key)
    torch.library.register_fake(f"fused_norm::{name}", fake, lib=_library)
    torch.library.register_vmap(f"fused_norm::{name}", _batched(name), lib=_library)
    overload: Callable[..., Any] = getattr(torch.ops.fused_norm, name).default

    def call(*arguments: Any) -> Any:
        return (kernel if _are_plain(arguments) else overload)(*arguments)

    return call


def _are_plain(arguments: tuple[Any, ...]) -> bool:
    """Return whether nothing but the kernel would look at a call.

    PyTorch's dispatcher is what lets compilers, transforms, modes and tensor subclasses see a
    call. It costs as much as a small kernel, so a call that none of them watches goes round it.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
        and _PLAIN_TYPES.issuperset(map(type, arguments))
        and not arguments[0].is_meta
        # How autograd batches gradients: a Tensor by its type, but without memory.
        and not torch._C._functorch.is_legacy_batchedtensor(arguments[0])
    )


_INPUTS = "Tensor x, Tensor? ln_weight, Tensor? ln_bias, Tensor linear_weight"
layernorm_linear = _register(
    f"layernorm_linear({_INPUTS}, Tensor? linear_bias, float eps) -> Tensor",
    _y,
    _fake_y,
)
layernorm_linear_forward = _register(
    f"layernorm_linear_forward({_INPUTS}, Tensor? linear_bias, float eps) "
    "-> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
)
layernorm_linear_backward = _register(
    f"layernorm_linear_backward(Tensor grad_output, {_INPUTS}, Tensor mean, Tensor rstd, "
    "float eps, bool[5] mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, ln_weight, ln_bias, linear_weight, _, eps = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, ln_weight, ln_bias, linear_weight, *output[1:])
    ctx.eps = eps


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
        ctx.mark_non_differentiable(*output[1:])
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of the five tensors that require one."""
        if grad_output is None:
            return (None,) * 6
        x, ln_weight, ln_bias, linear_weight, mean, rstd = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:5])
        if torch.is_grad_enabled():
            # A second derivative is being recorded: PyTorch's ops have it, the kernels do not.
            inputs = (grad_output, x, ln_weight, ln_bias, linear_weight)
            gradients = reference.layernorm_linear_backward(*inputs, ctx.eps)
        else:
            gradients = layernorm_linear_backward(
                grad_output, x, ln_weight, ln_bias, linear_weight, mean, rstd, ctx.eps, mask
            )
        return (*(g if wanted else None for g, wanted in zip(gradients, mask, strict=True)), None)


class EagerLayerNormLinearFunction(torch.autograd.Function):
    """The same function without the split into `forward` and `setup_context` that transforms need.

    PyTorch looks up the signature of a `forward` that is split on every call, which takes 20 us.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """Return y, and keep what the backward needs."""
        output: tuple[Tensor, ...] = layernorm_linear_forward(*arguments)
        _keep(ctx, arguments, output)
        return output[0]

    backward = LayerNormLinearFunction.backward


def layernorm_linear_with_gradients(*arguments: Any) -> Tensor:
    """Return y, and have autograd know of it."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        y: Tensor = LayerNormLinearFunction.apply(*arguments)[0]
    else:
        y = EagerLayerNormLinearFunction.apply(*arguments)
    return y
