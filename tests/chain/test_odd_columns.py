"""Gradients with an odd number of columns, as of a vocabulary of 50,257 tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from devices import ON_HOPPER
from launches import names
from torch import Tensor

import fused_norm as fn

M, K = 2048, 768
# cuBLAS's name for kernels that load single elements.
SLOW = "align1"


def leaves(N: int, dtype: torch.dtype, transposed: bool) -> list[Tensor]:
    made = [torch.randn(M, K), torch.randn(N, K) * K**-0.5, torch.randn(N), torch.ones(K)]
    made = [t.to("cuda", dtype) for t in made]
    if transposed:
        made[1] = made[1].t().contiguous().t()
    return [t.requires_grad_() for t in made]


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counts", [(1001,), (4097, 1003)])
def test_gradients(dtype: torch.dtype, transposed: bool, counts: tuple[int, ...]) -> None:
    """Regression: both products of a backward took six times as long as from aligned rows."""
    given = [leaves(N, dtype, transposed) for N in counts]
    x, gamma = given[0][0], given[0][3]
    weights, biases = [g[1] for g in given], [g[2] for g in given]
    tensors = [x, gamma, *weights, *biases]
    dys = [torch.randn(M, N, device="cuda", dtype=dtype) for N in counts]

    y = fn.norm_linear(x, tuple(weights), tuple(biases), norm_weight=gamma, norm_bias=None)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, tensors, dys, retain_graph=True)

    found = backward()
    exact = [t.detach().double().requires_grad_() for t in tensors]
    z = F.layer_norm(exact[0], (K,), exact[1])
    ys = [F.linear(z, w, b) for w, b in zip(exact[2:], exact[2 + len(counts) :], strict=False)]
    expected = torch.autograd.grad(ys, exact, [dy.double() for dy in dys])
    for ours, theirs in zip(found, expected, strict=True):
        off = (ours.double() - theirs).norm() / theirs.norm()
        assert off < 8 * torch.finfo(dtype).eps, (ours.shape, off)
    # A weight stored by columns has such rows itself.
    assert transposed or SLOW not in names(backward)
