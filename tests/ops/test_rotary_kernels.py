"""The kernels of a rotation: for heads of a known size, and for any; and the gradient of gamma."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import GPU
from test_rotary import of_angles
from torch import Tensor

from fused_norm.ops import rotary
from fused_norm.rotation import Heads, Rotation


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def results(two: list[Heads], rotation: Rotation, dys: list[Tensor]) -> list[Tensor]:
    """Return queries and keys rotated at once and one by one, and all gradients."""
    leaves = [
        t._replace(
            x=t.x.detach().requires_grad_(),
            gamma=None if t.gamma is None else t.gamma.detach().requires_grad_(),
        )
        for t in two
    ]
    ys = [rotary.call(t, rotation) for t in leaves]
    inputs = [v for t in leaves for v in (t.x, t.gamma) if v is not None]
    both = rotary.call_both(two[0], two[1], rotation)
    return [*both, *ys, *torch.autograd.grad(ys, inputs, dys)]


# Rows and heads of queries and keys: shares of a row that are not full, blocks that are not, many
# shares for each group of lanes, and a row alone.
SHAPES = [(14, 5, 3), (1, 1, 7), (4100, 6, 2), (700, 32, 8)]


@pytest.mark.parametrize("device", [GPU], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [64, 128])
def test_heads_of_a_known_size(device: str, dtype: torch.dtype, D: int) -> None:
    """The kernel for any heads, which has these if angles are float32, makes the same bits."""
    forms = itertools.product((False, True), (False, True), (None, dtype, torch.float32))
    for (M, *counts), (normalized, half, of_gamma) in itertools.product(SHAPES, forms):
        if of_gamma is not None and not normalized:
            continue
        rotation = Rotation(normalized, 1e-6, 1.0 if half else 0.0, False, half)
        # Parts of longer rows.
        rows = torch.randn(M, sum(counts) + 1, D, dtype=dtype, device=device)
        xs = rows[:, : counts[0]], rows[:, counts[0] : sum(counts)]
        gammas: list[Any] = [None, None]
        if of_gamma is not None:
            gammas = [(torch.rand(D, device=device) + 0.5).to(of_gamma) for _ in xs]
        angles = torch.rand(M, D // 2, dtype=torch.float64, device=device) * 6
        own = of_angles(angles, rotation, dtype)
        dys = [torch.randn(x.shape, dtype=dtype, device=device) for x in xs]
        found = [
            results([Heads(x, g, *turns) for x, g in zip(xs, gammas, strict=True)], rotation, dys)
            for turns in (own, [v.float() for v in own])
        ]
        for mine, other in zip(*found, strict=True):
            assert torch.equal(mine, other), (M, counts, rotation, of_gamma)


@pytest.mark.parametrize("device", [GPU], indirect=True)
def test_kernels_are_two(device: str) -> None:
    """One for angles of the type of x, and one for others."""
    x = torch.randn(16, 8, 128, device=device).bfloat16()
    cos, sin = torch.rand(2, 16, 128, device=device).bfloat16()
    names = set()
    for turns in ((cos, sin), (cos.float(), sin.float())):
        rotary.call(Heads(x, None, *turns), Rotation())
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as log:
            rotary.call(Heads(x, None, *turns), Rotation())
            torch.cuda.synchronize()
        (name,) = (e.key for e in log.key_averages() if "rotary" in e.key)
        names.add(name)
    assert len(names) == 2


@pytest.mark.parametrize("of_gamma", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("D", [64, 96, 128])
def test_the_gradient_of_gamma(device: str, D: int, of_gamma: torch.dtype) -> None:
    """A sum over many parts, compared with that in float64 of the same numbers."""
    M, heads = 4099, 7
    x, dy = (torch.randn(M, heads, D, device=device).bfloat16() for _ in range(2))
    gamma = (torch.rand(D, device=device) + 0.5).to(of_gamma).requires_grad_()
    angles = torch.rand(M, D // 2, dtype=torch.float64, device=device) * 6
    rotation = Rotation(True)
    cos, sin = of_angles(angles, rotation, torch.bfloat16)
    y = rotary.call(Heads(x, gamma, cos, sin), rotation)
    (found,) = torch.autograd.grad(y, gamma, dy, retain_graph=True)
    assert found.dtype is of_gamma
    # dz = dy cos - J(dy sin), and what gamma multiplies.
    wide, c, s = dy.double(), cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    first, second = (wide * s).chunk(2, -1)
    dz = wide * c - torch.cat((-second, first), -1)
    terms = (dz * F.rms_norm(x.double(), (D,), None, rotation.eps)).flatten(0, 1)
    truth = terms.sum(0)
    allowed = terms.abs().sum(0) * 2.0**-18
    if of_gamma is torch.bfloat16:
        allowed += truth.abs() * 2.0**-8
    assert bool(((found.double() - truth).abs() <= allowed).all())
    assert torch.equal(found, torch.autograd.grad(y, gamma, dy)[0])
