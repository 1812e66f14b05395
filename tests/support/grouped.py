"""Several Linear layers on the same rows, with their equivalent in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from accuracy import as_copies, as_float64, assert_within_budget
from torch import Tensor

import fused_norm as fn


def make(
    shape: tuple[int, int, list[int]],
    biases: str,
    *,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    residual: bool = False,
) -> list[Tensor | None]:
    """Return x, residual, gamma, beta, and the weights and biases, `b` for one and `-` for none."""
    M, K, sizes = shape
    some = lambda *s: torch.randn(*s, dtype=torch.float64)  # noqa: E731
    tensors = [some(M, K) + 0.5, some(M, K) if residual else None]
    tensors += [1 + 0.2 * some(K), 0.2 * some(K)]
    tensors += [some(n, K) / K**0.5 for n in sizes]
    tensors += [0.2 * some(n) if b == "b" else None for n, b in zip(sizes, biases, strict=True)]
    return [None if t is None else t.to(device, dtype).requires_grad_() for t in tensors]


def plain(tensors: list[Any], activation: str | None = None, norm: str = "layer_norm") -> list[Any]:
    """Return what PyTorch's ops compute."""
    x, residual, gamma, beta, *linears = tensors
    weights, biases = linears[: len(linears) // 2], linears[len(linears) // 2 :]
    x = x if residual is None else x + residual
    if norm == "layer_norm":
        z = F.layer_norm(x, x.shape[-1:], gamma, beta, 1e-5)
    else:
        z = F.rms_norm(x, x.shape[-1:], gamma, 1e-5) + beta
    products = [F.linear(z, w, b) for w, b in zip(weights, biases, strict=True)]
    return products if activation is None else [F.silu(products[0]) * products[1]]


def ours(tensors: list[Any], activation: str | None = None, norm: str = "layer_norm") -> list[Any]:
    """Return what the library computes."""
    x, residual, gamma, beta, *linears = tensors
    weights, biases = linears[: len(linears) // 2], linears[len(linears) // 2 :]
    y = fn.norm_linear(
        x,
        weights,
        biases,
        norm_weight=gamma,
        norm_bias=beta,
        residual=residual,
        normalization=norm,
        activation=activation,
    )
    return [y] if isinstance(y, Tensor) else list(y)


def check(inputs: list[Tensor | None], *, used: set[int] | None = None, **options: Any) -> None:
    """Compare results and gradients with float64; a gradient reaches those outputs in `used`."""
    found = []
    for function, copies in (
        (ours, as_copies(inputs)),
        (plain, as_copies(inputs)),
        (plain, as_float64(inputs)),
    ):
        outputs = function(copies, **options)
        torch.manual_seed(3)
        total = 0
        for i, y in enumerate(outputs):
            dy = torch.randn(y.shape, dtype=torch.float64, device=y.device)
            if used is None or i in used:
                total = total + (y * dy.to(inputs[0].dtype).to(y.dtype)).sum(dtype=torch.float64)
        leaves = [t for t in copies if t is not None and t.requires_grad]
        gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
        found.append([*(y.detach() for y in outputs), *gradients])
    for i, (mine, low, high) in enumerate(zip(*found, strict=True)):
        assert_within_budget(f"{i}", mine, high, low)
