"""What tests of the head share: cases, PyTorch's composition, errors against float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fused_norm as fn

Case = tuple[Tensor, Tensor, Tensor, Tensor | None]


def case(
    M: int,
    K: int,
    V: int,
    std: float = 1.0,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Case:
    """Return rows whose logits have a deviation, a weight, labels, and a bias.

    Half of the labels are one class, as no gradient of a class is then small; a tenth is ignored.
    """
    torch.manual_seed(M + K + V)
    x = torch.randn(M, K, device=device).to(dtype)
    weight = (torch.randn(V, K, device=device) * (std / K**0.5)).to(dtype)
    target = torch.randint(0, V, (M,), device=device)
    target[::2] = V // 2
    target[torch.rand(M, device=device) < 0.1] = -100
    return x, weight, target, torch.randn(V, device=device).to(dtype) if bias else None


def composed(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return PyTorch's loss and logarithms, in the dtype of what it gets or float32."""
    z = F.linear(x, weight, bias)
    z = z if z.dtype is torch.float64 else z.float()
    if softcap := options.get("softcap"):
        z = softcap * torch.tanh(z / softcap)
    class_weight = options.get("class_weight")
    if class_weight is not None:
        class_weight = class_weight.to(z.dtype)
    smoothing = options.get("label_smoothing", 0.0)
    losses = F.cross_entropy(z, target, class_weight, label_smoothing=smoothing, reduction="none")
    weights = (target != -100).to(z.dtype)
    losses = losses + options.get("z_loss", 0.0) * z.logsumexp(-1).square() * weights
    if class_weight is not None:
        weights = weights * class_weight[target.clamp(0)]
    if (own := options.get("token_weight")) is not None:
        losses, weights = losses * own, weights * own
    reduction = options.get("reduction", "mean")
    if reduction == "mean":
        losses = losses.sum() / weights.sum()
    return losses.sum() if reduction == "sum" else losses, z.logsumexp(-1)


def ours(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return our loss and logarithms."""
    found: tuple[Tensor, Tensor] = fn.linear_cross_entropy(
        x, weight, target, bias, return_logsumexp=True, **options
    )
    return found


def results(
    function: Any, tensors: Case, upstream: float = 1.0, of_logsumexp: float = 0.0, **options: Any
) -> list[Tensor]:
    """Return the loss, the logarithms, and the gradients of x, the weight and the bias."""
    x, weight, target, bias = tensors
    leaves = [v.detach().requires_grad_() for v in (x, weight, bias) if v is not None]
    loss, lse = function(*leaves[:2], target, leaves[2] if bias is not None else None, **options)
    total = loss.sum() * upstream
    if of_logsumexp:
        total = total + (lse * torch.linspace(-1, 1, len(lse), device=lse.device)).sum()
    return [loss.detach(), lse.detach(), *torch.autograd.grad(total, leaves)]


def error(found: Tensor, exact: Tensor, least: float = 1e-30) -> float:
    """Return the error's norm over that of what is exact, or over the least that counts."""
    return float((found.double() - exact).norm() / exact.norm().clamp(min=least))


def check(
    tensors: Case,
    upstream: float = 1.0,
    of_logsumexp: float = 0.0,
    at_most: float = 2.0,
    function: Any = ours,
    **o: Any,
) -> None:
    """Hold our errors against those of PyTorch in the same dtype.

    Args:
        tensors: Of a case.
        upstream: Gradient of the loss.
        of_logsumexp: Whether the logarithms have one.
        at_most: Errors of ours, in those of PyTorch's.
        function: What is ours.
        o: Options.
    """
    wide: Any = tuple(v.double() if v is not None and v.is_floating_point() else v for v in tensors)
    of_composed = {key: value for key, value in o.items() if key != "chunk_rows"}
    exact = results(composed, wide, upstream, of_logsumexp, **of_composed)
    eager = results(composed, tensors, upstream, of_logsumexp, **of_composed)
    found = results(function, tensors, upstream, of_logsumexp, **o)
    # One rounding of all in float32; in 16 bits an error of eager's may happen to be small.
    dtype = tensors[0].dtype
    tiny = torch.finfo(dtype).eps * (
        16 if dtype.itemsize > 4 else 2 if dtype.itemsize > 2 else 1 / 8
    )
    # A loss is a difference of two numbers: of one class it is 0, and either rounds.
    least = {"loss": float(exact[1].square().mean().sqrt()) / 256}
    for name, a, b, c in zip(
        ("loss", "lse", "dx", "dweight", "dbias"), found, eager, exact, strict=False
    ):
        assert torch.isfinite(a).all(), name
        if name not in least and not c.any():
            # Of one class nothing has a gradient: what is left of exponentials that cancel.
            assert a.abs().max() <= 2**-16, name
            continue
        ours_, others = (error(each, c, least.get(name, 1e-30)) for each in (a, b))
        assert ours_ <= at_most * others + tiny, (name, ours_, others)
