"""A Linear layer and the cross entropy of its logits, as a composition of PyTorch's ops.

    z = x W^T + b;  z = softcap tanh(z / softcap);  lse = log sum exp z
    loss = token_weight (cross_entropy(z, target) + z_loss lse^2)

The mean divides by the sum of the rows' weights: token_weight times the label's class weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm.reference import widened

REDUCTIONS = ("none", "mean", "sum")


class Loss(NamedTuple):
    """What a call computes, without its tensors.

    Attributes:
        reduction: One of REDUCTIONS.
        ignore_index: Label of rows without a loss.
        label_smoothing: Fraction of the label that is spread evenly over all classes.
        z_loss: Factor of the squared logsumexp.
        softcap: Bound that tanh applies to logits, 0 for none.
        chunk_rows: Rows whose logits exist at once, 0 for the device's default.
        group: Name of the process group that shares the vocabulary, "" if one process has it all.
        first: The first class of this process.
        classes: Classes of the whole vocabulary if processes share it.
    """

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    chunk_rows: int = 0
    group: str = ""
    first: int = 0
    classes: int = 0


class Head(NamedTuple):
    """The tensors of a call, None for absent ones.

    Attributes:
        x: Rows of shape `[..., K]`.
        weight: Of shape `[V, K]`, or this process's rows of it.
        bias: Of shape `[V]`, or this process's part of it.
        target: Labels of shape `[...]`, int64.
        class_weight: Of shape `[V]`, for the whole vocabulary.
        token_weight: Of the shape of `target`.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None = None
    token_weight: Tensor | None = None


def _logits(t: Head, loss: Loss) -> Tensor:
    """Return all logits in float32 or float64, one row each."""
    z = widened(F.linear(t.x, t.weight, t.bias))
    if loss.softcap:
        z = loss.softcap * torch.tanh(z / loss.softcap)
    return z.reshape(-1, z.shape[-1])


def _losses(rows: Tensor, t: Head, loss: Loss, reduction: str) -> Tensor:
    """Return PyTorch's cross entropy of all logits."""
    return F.cross_entropy(
        rows,
        # PyTorch's op raises the error, if it is no tensor.
        t.target.reshape(-1) if isinstance(t.target, Tensor) else t.target,
        None if t.class_weight is None else t.class_weight.to(rows.dtype),
        ignore_index=loss.ignore_index,
        label_smoothing=loss.label_smoothing,
        reduction=reduction,
    )


def is_plain(t: Head, loss: Loss) -> bool:
    """Return whether PyTorch's cross entropy supports all options of a loss.

    Args:
        t: The tensors.
        loss: What to compute.
    """
    return t.token_weight is None and not loss.z_loss


def plain(t: Head, loss: Loss) -> Tensor:
    """Return a plain loss with PyTorch's cross entropy of all logits, in float32 or float64.

    Args:
        t: Tensors that fit together.
        loss: What to compute.
    """
    found = _losses(_logits(t, loss), t, loss, loss.reduction)
    return found.reshape(t.target.shape) if loss.reduction == "none" else found


def by_pytorch(t: Head, loss: Loss) -> tuple[Tensor, Tensor]:
    """Return the loss and the logsumexp of each row, in float32 or float64.

    All logits exist at once. It is differentiable any number of times, and raises the errors of
    PyTorch's ops.

    Args:
        t: The tensors.
        loss: What to compute.
    """
    rows = _logits(t, loss)
    losses = _losses(rows, t, loss, "none")
    lse = torch.logsumexp(rows, -1)
    if loss.z_loss:
        counts = t.target.reshape(-1) != loss.ignore_index
        losses = losses + torch.where(counts, loss.z_loss * lse.square(), 0)
    weights = token_weights(t, rows.dtype)
    if weights is not None:
        losses = losses * weights
    return reduced(losses, t, loss), lse.reshape(t.target.shape)


def token_weights(t: Head, dtype: torch.dtype) -> Tensor | None:
    """Return the rows' token weights, of shape `[M]`."""
    return None if t.token_weight is None else t.token_weight.detach().reshape(-1).to(dtype)


def denominator(t: Head, loss: Loss, dtype: torch.dtype) -> Tensor:
    """Return the divisor of a mean: the sum of the weights of the rows that are not ignored.

    Args:
        t: The tensors.
        loss: Which rows are ignored.
        dtype: The dtype of the result.
    """
    target = t.target.reshape(-1)
    counts = target != loss.ignore_index
    own = token_weights(t, dtype)
    if t.class_weight is not None:
        labels = torch.where(counts, target, 0)
        each = t.class_weight.to(dtype)[labels]
        own = each if own is None else each * own
    return counts.sum(dtype=dtype) if own is None else torch.where(counts, own, 0).sum()


def reduced(losses: Tensor, t: Head, loss: Loss, divisor: Tensor | None = None) -> Tensor:
    """Return the reduction of the weighted losses of all rows.

    Args:
        losses: Of shape `[M]`.
        t: The tensors.
        loss: The reduction.
        divisor: The divisor of a mean, if known.
    """
    if loss.reduction == "none":
        return losses.reshape(t.target.shape)
    total = losses.sum()
    if loss.reduction == "sum":
        return total
    return total / (denominator(t, loss, losses.dtype) if divisor is None else divisor)


def row_scales(
    t: Head, loss: Loss, grad: Tensor | None, dtype: torch.dtype, divisor: Tensor | None
) -> Tensor:
    """Return the gradients of the rows' unweighted losses, of shape `[M]`, 0 for ignored rows.

    Args:
        t: The tensors.
        loss: What was computed.
        grad: Gradient of the loss, None for 1.
        dtype: The dtype of the result.
        divisor: The divisor of a mean, None for other reductions.
    """
    counts = t.target.reshape(-1) != loss.ignore_index
    scales = token_weights(t, dtype)
    if grad is not None:
        grad = grad.to(dtype).reshape(-1)
        scales = grad if scales is None else scales * grad
    if divisor is not None:
        scales = divisor.reciprocal() if scales is None else scales / divisor
    return counts.to(dtype) if scales is None else torch.where(counts, scales, 0)


def gradients(
    t: Head, loss: Loss, grads: tuple[Tensor | None, Tensor | None], wanted: list[bool]
) -> list[Tensor | None]:
    """Return the gradients of x, the weight and the bias, differentiable themselves.

    Args:
        t: The tensors.
        loss: What was computed.
        grads: Gradients of the loss and of the logsumexps, None for zeros.
        wanted: Which of the three are wanted.
    """

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        given = iter(values)
        changed: list[Any] = [next(given) if w else v for v, w in zip(t[:3], wanted, strict=True)]
        x, weight, bias = changed
        results: Any = by_pytorch(t._replace(x=x, weight=weight, bias=bias), loss)
        return tuple(r for r, g in zip(results, grads, strict=True) if g is not None)

    values = [v for v, w in zip(t[:3], wanted, strict=True) if w and v is not None]
    pull = torch.func.vjp(function, *values)[1]
    found = iter(pull(tuple(g for g in grads if g is not None)))
    return [next(found) if w else None for w in wanted]
