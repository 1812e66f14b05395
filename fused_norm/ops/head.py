"""The head's ops: one for the loss, one for gradients, and one autograd function.

With a mean or a sum, the forward computes the gradients while a chunk's exponentials exist, and the
backward multiplies them by the loss's gradient. The backward recomputes the exponentials if that
gradient has an element for each row, if the logsumexps have a gradient, for second derivatives, and
for float16 under a loss scale that prevents underflow. A compiled backward avoids this, since there
the logsumexps are a function of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fused_norm import cross_entropy
from fused_norm.call.memory import statistics_dtype
from fused_norm.chain import head, head_sm90, kernels
from fused_norm.cross_entropy import Head, Loss
from fused_norm.ops.flops import count_flops
from fused_norm.ops.registration import (
    define_in_python,
    differentiable,
    is_compiling,
    is_forward_mode,
    is_watched,
    may_follow,
    without_none,
)
from fused_norm.ops.validation import Wanted, agree

_TENSORS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, "
    "Tensor? token_weight"
)
_OPTIONS = (
    "str reduction, int ignore_index, float label_smoothing, float z_loss, float softcap, "
    "int chunk_rows, str group, int first, int classes, bool[] wanted"
)
_COUNT = len(Head._fields)
# Up to this many logits, PyTorch's ops are faster on a CPU, on all at once (Zen 5): 16 MiB.
FEW_LOGITS = 1 << 22


def _unpacked(arguments: tuple[Any, ...]) -> tuple[Head, Loss, list[bool]]:
    *others, wanted = arguments
    return Head(*others[:_COUNT]), Loss(*others[_COUNT:]), list(wanted)


def _forward(*arguments: Any) -> list[Tensor]:
    t, loss, wanted = _unpacked(arguments)
    found = head.compute(t, loss, wanted)
    return without_none([found.loss, found.logsumexp, *found.gradients], t.x)


def _fake_forward(*arguments: Any) -> list[Tensor]:
    t, loss, wanted = _unpacked(arguments)
    wide = statistics_dtype(t.x.dtype)
    lse = t.x.new_empty(t.target.shape, dtype=wide)
    result = t.x.new_empty(t.target.shape if loss.reduction == "none" else (), dtype=wide)
    return without_none([result, lse, *_fake_gradients(t, wanted)], t.x)


def _fake_gradients(t: Head, wanted: list[bool]) -> list[Tensor | None]:
    x, weight = t.x, t.weight
    shapes = (x.shape, weight.shape, weight.shape[:1])
    made = zip((x, weight, weight), shapes, wanted, strict=True)
    return [like.new_empty(shape) if w else None for like, shape, w in made]


def _backward(*arguments: Any) -> list[Tensor]:
    t, loss, wanted = _unpacked(_without_grads(arguments))
    grad, grad_logsumexp = arguments[_COUNT : _COUNT + 2]
    if grad is None:
        if not loss.group and _is_zero(grad_logsumexp):
            return [g.zero_() for g in without_none(_fake_gradients(t, wanted), t.x)]
        grad = _no_gradient(t, loss)
    found = head.compute(t, loss, wanted, (grad, grad_logsumexp))
    return without_none(found.gradients, t.x)


def _no_gradient(t: Head, loss: Loss) -> Tensor:
    shape = t.target.shape if loss.reduction == "none" else ()
    return t.x.new_zeros(shape, dtype=statistics_dtype(t.x.dtype))


def _is_zero(gradient: Tensor) -> bool:
    """Return whether a compiler's gradient is zeros; a stream under capture is not synchronized."""
    if gradient.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return not gradient.any()


def _without_grads(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return arguments[:_COUNT] + arguments[_COUNT + 2 :]


def _fake_backward(*arguments: Any) -> list[Tensor]:
    t, _, wanted = _unpacked(_without_grads(arguments))
    return without_none(_fake_gradients(t, wanted), t.x)


_forward_op = define_in_python(
    f"linear_cross_entropy({_TENSORS}, {_OPTIONS}) -> Tensor[]", _forward, _fake_forward
)
_backward_op = define_in_python(
    f"linear_cross_entropy_backward({_TENSORS}, Tensor? grad, Tensor? grad_logsumexp, {_OPTIONS}) "
    "-> Tensor[]",
    _backward,
    _fake_backward,
)


def _flops(products: int, arguments: tuple[Any, ...]) -> int:
    t, _, wanted = _unpacked(arguments)
    return 2 * t.x.numel() * t.weight.shape[0] * (products + wanted[0] + wanted[1])


count_flops("linear_cross_entropy", lambda *arguments: _flops(1, arguments))
count_flops(
    "linear_cross_entropy_backward", lambda *arguments: _flops(1, _without_grads(arguments))
)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The loss, the rows' logsumexps, and gradients that the backward has to scale."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        """Return the loss, the logsumexps and the gradients."""
        return tuple(_forward_op(*arguments[:-1]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep the tensors, and the gradients if computed."""
        *options, returns_logsumexp = inputs[_COUNT:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2 if returns_logsumexp else 1 :])
        ctx.save_for_backward(*inputs[:_COUNT], *output[2:])
        ctx.options, ctx.returns_logsumexp, ctx.is_spent = options, returns_logsumexp, False

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_logsumexp: Tensor | None, *_: Any) -> Any:
        """Return the gradients that are required."""
        *saved, dx, dweight, dbias = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        rest = (None,) * (_COUNT - 3 + len(ctx.options) + 1)
        if not ctx.returns_logsumexp:
            # Compilers pass zeros here, which would cause a recomputation of everything.
            grad_logsumexp = None
        if grad is None and grad_logsumexp is None:
            return (None, None, None, *rest)
        *options, computed = ctx.options
        if torch.is_grad_enabled() or _is_transformed(grad, grad_logsumexp):
            t, loss = Head(*saved), Loss(*options)
            if loss.group:
                raise RuntimeError("a head whose vocabulary is sharded has no second derivatives")
            return (*cross_entropy.gradients(t, loss, (grad, grad_logsumexp), wanted), *rest)
        is_scaled = any(computed) and grad_logsumexp is None and not ctx.is_spent
        if is_scaled and grad is not None:
            in_place = not is_watched()
            if in_place:
                ctx.is_spent = True
            found = [
                _scaled(g, grad, in_place) if w else None
                for g, w in zip((dx, dweight, dbias), wanted, strict=True)
            ]
        else:
            if grad is None:
                grad = _no_gradient(Head(*saved), Loss(*options))
            gradients = _backward_op(*saved, grad, grad_logsumexp, *options, wanted)
            found = [g if w else None for g, w in zip(gradients, wanted, strict=True)]
        return (*found, *rest)


_apply = differentiable(LinearCrossEntropyFunction, 2)


class LogsumexpFunction(torch.autograd.Function):
    """The logsumexps, already computed; their gradients are recomputed.

    For compilers: a function of both results would get zeros for a gradient of the logsumexps that
    is not wanted, and recompute everything.
    """

    @staticmethod
    def forward(logsumexp: Tensor, *_: Any) -> Tensor:
        """Return the logsumexps."""
        return logsumexp.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the tensors."""
        _, *tensors_and_options = inputs
        ctx.save_for_backward(*tensors_and_options[:_COUNT])
        ctx.options = tensors_and_options[_COUNT:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients that are required."""
        wanted = list(ctx.needs_input_grad[1:4])
        gradients = _backward_op(*ctx.saved_tensors, None, grad, *ctx.options, wanted)
        found = [g if w else None for g, w in zip(gradients, wanted, strict=True)]
        return (None, *found, *((None,) * (_COUNT - 3 + len(ctx.options))))


def _scaled(gradient: Tensor, scale: Tensor, in_place: bool) -> Tensor:
    """Return a gradient times that of the loss; on GPUs without synchronizing."""
    if not in_place:
        return gradient * scale
    # Autograd must not see this write to a saved tensor: another backward recomputes it.
    gradient = gradient.data
    if gradient.is_cpu:
        return gradient if scale.item() == 1 else gradient.mul_(scale)
    if gradient.dtype in (torch.bfloat16, torch.float32) and _has_kernel(gradient):
        head_sm90.scale_in_place(gradient, scale)
        return gradient
    return gradient.mul_(scale)


def _has_kernel(tensor: Tensor) -> bool:
    is_hopper = tensor.is_cuda and kernels.is_hopper(tensor.device.index or 0)
    return is_hopper and tensor.is_contiguous() and head_sm90.is_built()


def call(t: Head, loss: Loss, returns_logsumexp: bool = True) -> tuple[Tensor, Tensor]:
    """Return the loss and the rows' logsumexps.

    Args:
        t: Tensors that `fits` takes.
        loss: What to compute.
        returns_logsumexp: Whether the logsumexps may have a gradient.
    """
    in_forward = loss.reduction != "none" and t.x.dtype is not torch.float16
    computed = [
        in_forward and may_follow() and tensor is not None and tensor.requires_grad
        for tensor in (t.x, t.weight, t.bias)
    ]
    separates = returns_logsumexp and any(computed) and is_compiling()
    result: Tensor
    result, logsumexp = _apply(*t, *loss, computed, returns_logsumexp and not separates)
    if separates:
        logsumexp = LogsumexpFunction.apply(logsumexp.detach(), *t, *loss)
    return result, logsumexp


def is_transformed() -> bool:
    """Return whether anything but gradients is computed of calls, such as batches and tangents."""
    if torch._C._are_functorch_transforms_active():
        return _has_others_than_gradients()
    return not is_dynamo_compiling() and is_forward_mode()


def _has_others_than_gradients() -> bool:
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(each.key() != torch._C._functorch.TransformType.Grad for each in stack)


# For PyTorch's compiler, which cannot trace it.
_has_others_than_gradients.__dict__["_dynamo_marked_constant"] = True


def _is_transformed(*gradients: Tensor | None) -> bool:
    """Return whether a backward runs for many gradients at once, or with tangents."""
    if is_compiling():
        return False
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    return is_transformed() or any(g is not None and is_batched(g) for g in gradients)


def is_small(t: Head) -> bool:
    """Return whether PyTorch's ops are faster for a call, and its logits take little memory.

    Args:
        t: Tensors that `fits` takes.
    """
    return t.x.is_cpu and not is_watched() and t.target.numel() * len(t.weight) <= FEW_LOGITS


def fits(t: Head) -> bool:
    """Return whether tensors fit together, so that PyTorch's ops would raise no error.

    Args:
        t: Whatever a user passed.
    """
    if not all(isinstance(v, Tensor) or v is None for v in t):
        return False
    x, weight, bias, target = t[:4]
    if any(v is None or v.layout is not torch.strided or v.is_nested for v in (x, weight, target)):
        return False
    if x.dim() < 1 or weight.dim() != 2 or not x.dtype.is_floating_point:
        return False
    rows, classes = x.shape[:-1], weight.shape[:1]
    wanted: list[Wanted] = [
        (weight, (*classes, x.shape[-1]), x.dtype),
        (bias, classes, x.dtype),
        (target, rows, torch.int64),
        (t.class_weight, classes, None),
        (t.token_weight, rows, None),
    ]
    return (
        x.device.type in ("cpu", "cuda", "meta")
        and all(v is None or v.device == x.device for v in t)
        and weight.shape[0] > 0
        and agree(wanted)
    )
