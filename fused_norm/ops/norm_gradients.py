"""Gradients of a norm whose rows were written in 8 bits alone, from those of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm import composition
from fused_norm.composition import Operands, Spec
from fused_norm.ops.registration import is_compiling
from fused_norm.reference import widened


def norm_gradients(
    dz: Tensor,
    t: Operands,
    norm: tuple[str, float, float],
    mean: Tensor | None,
    rstd: Any,
    wanted: Sequence[bool],
) -> Sequence[Tensor | None]:
    """Return the gradients of x, gamma and beta, as PyTorch's norm has them.

    Args:
        dz: The gradient of the rows.
        t: What was normalized, gamma and beta.
        norm: Its name, eps and what is added to gamma.
        mean: The mean of each row, or None for a norm that has none.
        rstd: The reciprocal deviation of each row.
        wanted: Which of the three are wanted.
    """
    spec = Spec(norm[0], eps=norm[1], weight_offset=norm[2])
    if t.x.is_cpu and not is_compiling():
        return _by_autograd(dz, t, spec, wanted)
    x, gamma, beta = t.x, t.gamma, t.beta
    is_wide = not composition.is_rounded_once(spec, x, t)
    if is_wide:
        dz, x = widened(dz), widened(x)
        gamma, beta = (None if v is None else widened(v) for v in (gamma, beta))
    if gamma is not None and spec.weight_offset:
        gamma = gamma + spec.weight_offset
    features, aten = [x.shape[-1]], torch.ops.aten
    has_gamma, has_beta = (wanted[i] and t[1 + i] is not None for i in (1, 2))
    if mean is not None:
        masks = [wanted[0], has_gamma, has_beta]
        found = aten.native_layer_norm_backward(dz, x, features, mean, rstd, gamma, beta, masks)
    else:
        masks = [wanted[0], has_gamma]
        found = aten._fused_rms_norm_backward(dz, x, features, rstd, gamma, masks)
        found = (*found, dz.reshape(-1, features[0]).sum(0) if has_beta else None)
    masks = [wanted[0], has_gamma, has_beta]
    pairs = zip(found, masks, strict=True)
    return [None if not has else v.to(t.x.dtype) for v, has in pairs]


def _by_autograd(
    dz: Tensor, t: Operands, spec: Spec, wanted: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Return the same where PyTorch has no op for it: by the norm, computed again."""
    with torch.enable_grad():
        leaves: list[Any] = [
            None if v is None else v.detach().requires_grad_(w)
            for v, w in zip((t.x, t.gamma, t.beta), wanted, strict=True)
        ]
        z = composition.normalized(spec, leaves[0], Operands(leaves[0], None, *leaves[1:]))
    found = iter(torch.autograd.grad(z, [v for v, w in zip(leaves, wanted, strict=True) if w], dz))
    return [next(found) if w else None for w in wanted]
