"""The end of a language model: norm, product with the vocabulary, cross entropy."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
from torch import Tensor

from fused_norm import cross_entropy
from fused_norm.composition import Operands, Spec
from fused_norm.cross_entropy import REDUCTIONS, Head, Loss
from fused_norm.ops import head as head_ops
from fused_norm.ops.autocast import cast, dtype_of_products
from fused_norm.ops.family import checked_eps
from fused_norm.ops.head_shards import over_shards
from fused_norm.ops.normalize import normalized
from fused_norm.ops.sharding import has_dtensor

# Rows of a chunk if memory is scarce: an H100 takes 2 to 8 % longer.
SMALL_ROWS = 2048


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    return_logsumexp: bool = False,
    chunk_rows: int | str | None = None,
) -> Any:
    """Apply a Linear layer and return the cross entropy of its logits, without storing them all.

        z = x W^T + b;  z = softcap tanh(z / softcap);  lse = log sum exp z
        loss = token_weight (cross_entropy(z, target) + z_loss lse^2)

    Equivalent to `F.cross_entropy(F.linear(x, weight, bias).float(), target, ...)`. With a mean or
    a sum, the forward also computes the gradients, if any is required, and the backward multiplies
    them by that of the loss, on the device. With `"none"`, with a gradient of the log-sum-exp, and
    in float16, where a loss scale keeps gradients from underflow, the backward computes the logits
    again. Sums run in a fixed order, so every run gives the same bits.

    On Hopper GPUs in bfloat16, kernels store exponentials instead of logits, and no logit is
    rounded (quack's scaled exponentials, with a row's offset known before the product). They also
    apply a softcap, but not together with label smoothing. Elsewhere, PyTorch's ops compute chunks
    of rows. On a CPU, up to 16 MiB of logits are computed at once, which is faster there.

    Processes may share the vocabulary: a weight (and bias) that is a DTensor sharded on dim 0, with
    an x that is a DTensor. The results are then DTensors that every process has.

    Args:
        x: Rows of shape `[..., K]`.
        weight: Shape `[V, K]`, in the dtype of `x`.
        target: Labels of shape `[...]`, or flat in the order of the rows, int64, from 0 to V - 1 or
            `ignore_index`.
        bias: Shape `[V]`, or None.
        ignore_index: Label of rows that have neither loss nor gradient.
        label_smoothing: As in `F.cross_entropy`, from 0 to 1.
        reduction: `"mean"`, `"sum"` or `"none"`. The mean divides by the sum of the weights of the
            rows that are not ignored; it is NaN if all are.
        z_loss: Factor of the squared logarithm of each row's sum of exponentials.
        softcap: Limit of the logits, applied by tanh, or None.
        class_weight: Weight of each class, shape `[V]`, or None, without a gradient.
        token_weight: Weight of each row, of the shape of `target`, or None, without a gradient.
        return_logsumexp: Whether to return the logarithm of each row's sum of exponentials as well.
        chunk_rows: The most rows that are computed at once; `"small"` for 2048, which saves
            memory on GPUs; None for what suits the device.

    Returns:
        The loss in float32 (float64 for float64): a number, with `"none"` of the shape of
        `target`. With `return_logsumexp`, a pair of that and a tensor of the shape of `target`.

    Raises:
        IndexError: As in PyTorch, if a label is out of range on a CPU; on a GPU it is an assertion
            on the device.
        ValueError: As in PyTorch, if the reduction is unknown or the shapes disagree.
        RuntimeError: As in PyTorch, if shapes, dtypes or devices disagree, or if a weight of the
            loss requires a gradient.
        TypeError: As in PyTorch, if an argument is not a tensor.
    """
    loss = _checked(reduction, ignore_index, label_smoothing, z_loss, softcap, _rows(chunk_rows))
    if (dtype := dtype_of_products(x)) is not None:
        x, weight, bias = cast(dtype, x, weight, bias)
    t = Head(x, weight, bias, target, class_weight, token_weight)
    _check_tensors(t)
    fits = head_ops.fits(t) and not head_ops.is_transformed()
    is_sharded = has_dtensor(t)
    is_small = fits and not is_sharded and head_ops.is_small(t)
    if is_small and cross_entropy.is_plain(t, loss) and not return_logsumexp:
        return cross_entropy.plain(t, loss)
    if is_small or not fits:
        result, logsumexp = cross_entropy.by_pytorch(t, loss)
    elif is_sharded:
        result, logsumexp = _over_shards(t, loss, return_logsumexp)
    else:
        result, logsumexp = head_ops.call(t, loss, return_logsumexp)
    return (result, logsumexp) if return_logsumexp else result


def norm_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    normalization: str = "layer_norm",
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float | None = 1e-5,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    **loss: Any,
) -> Any:
    """Apply a norm, then a Linear layer, and return the cross entropy of its logits.

    Equivalent to `linear_cross_entropy(norm(x + residual), weight, target, bias, ...)` with the
    norm of `norm_linear`. The backward saves x (or the residual sum) and the normalized rows.

    Args:
        x: Input of shape `[..., K]`.
        weight: Shape `[V, K]`, in the dtype of `x`.
        target: Labels of shape `[...]`, int64.
        bias: Shape `[V]`, or None.
        normalization: `"layer_norm"` or `"rms_norm"`.
        norm_weight: Gamma, shape `[K]`, or None for ones.
        norm_bias: Beta, shape `[K]`, or None for zeros.
        eps: Added to the variance, or to the mean square for RMSNorm. None, for RMSNorm only,
            means PyTorch's own.
        weight_offset: Added to `norm_weight`: 1.0 for a gamma that is kept around zero.
        residual: Added to `x` before the norm; of its shape.
        loss: The other options of `linear_cross_entropy`.

    Returns:
        As `linear_cross_entropy`.

    Raises:
        ValueError: If the normalization is unknown, and as `linear_cross_entropy`.
        IndexError: As `linear_cross_entropy`.
        RuntimeError: As in PyTorch's ops, if shapes, dtypes or devices disagree.
        TypeError: As in PyTorch, if an argument is not a tensor.
    """
    exact = checked_eps(normalization, None, eps, x)
    spec = Spec(normalization, eps=exact, weight_offset=float(weight_offset))
    t = Operands(x, residual, norm_weight, norm_bias, weights=[weight])
    z = normalized(spec, t)
    return linear_cross_entropy(z, weight, target, bias, **loss)


def _over_shards(t: Head, loss: Loss, return_logsumexp: bool) -> tuple[Tensor, Tensor]:
    call = functools.partial(head_ops.call, returns_logsumexp=return_logsumexp)
    found = over_shards(call, t, loss)
    return cross_entropy.by_pytorch(t, loss) if found is None else found


def _rows(chunk_rows: int | str | None) -> int:
    if chunk_rows is None:
        return 0
    if chunk_rows == "small":
        return SMALL_ROWS
    if isinstance(chunk_rows, str) or chunk_rows < 1:
        raise ValueError(f'chunk_rows must be None, "small" or positive, got {chunk_rows!r}')
    return _integer("chunk_rows", chunk_rows)


def _integer(name: str, value: Any) -> int:
    if type(value) is int:
        return value
    try:
        return operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(
            f"linear_cross_entropy(): argument '{name}' must be int, not {kind}"
        ) from None


def _check_tensors(t: Head) -> None:
    """Raise if labels or weights of the loss are not those of the rows, or need a gradient."""
    for name in ("class_weight", "token_weight"):
        value = getattr(t, name)
        if value is None:
            continue
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise TypeError(f"linear_cross_entropy(): argument '{name}' must be Tensor, not {kind}")
        if value.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "The function 'linear_cross_entropy' is not differentiable with respect to "
                f"argument '{name}'. This input cannot have requires_grad True."
            )
    if not isinstance(t.x, Tensor) or not isinstance(t.target, Tensor) or t.x.is_nested:
        return
    rows, own = t.x.shape[:-1], t.token_weight
    # Flat labels are those of the rows in order. PyTorch's op raises the error of one dimension.
    is_flat = t.target.dim() == 1 and (len(rows) == 1 or t.target.numel() == rows.numel())
    if t.target.shape != rows and not is_flat:
        raise ValueError(f"Expected target size {list(rows)}, got {list(t.target.shape)}")
    if own is not None and own.shape != t.target.shape:
        raise ValueError(
            f"Expected token_weight size {list(t.target.shape)}, got {list(own.shape)}"
        )


def _checked(
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    chunk_rows: int,
) -> Loss:
    if reduction not in REDUCTIONS:
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if not 0 <= label_smoothing <= 1:
        raise RuntimeError(
            f"label_smoothing must be between 0.0 and 1.0. Got: {float(label_smoothing)}"
        )
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be None or positive and finite, got {softcap}")
    ignore_index = _integer("ignore_index", ignore_index)
    numbers = (float(label_smoothing), float(z_loss), float(softcap or 0))
    return Loss(reduction, ignore_index, *numbers, chunk_rows)
