"""The ops that are row programs as MAX runs them."""

from __future__ import annotations

import pytest
import torch
from test_rowwise import div, every_device, mean, norm, trainable_eps
from torch import Tensor

from fused_norm._max import library

CASES = {
    "trainable_eps_layer_norm": (trainable_eps, ["input", "o"]),
    "composed_mean": (mean, ["input"]),
    "composed_norm": (norm, ["input"]),
    "composed_div": (div, ["input", "input"]),
}


def run(name: str, outputs: list[Tensor], *inputs: Tensor) -> list[Tensor]:
    getattr(library(), name)(*outputs, *inputs)
    return outputs


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward(name, dtype, device):
    function, kinds = CASES[name]
    shapes = {"input": (3, 5, 40), "o": (1,)}
    inputs = [torch.rand(shapes[k], device=device, dtype=dtype) + 0.5 for k in kinds]
    exact = [t.double().requires_grad_() for t in inputs]
    y = function(*exact)
    dy = torch.randn_like(inputs[0])
    tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    (result,) = run(name, [torch.full_like(dy, float("nan"))], *inputs)
    torch.testing.assert_close(result.double(), y, **tolerance)
    gradients = torch.autograd.grad(y, exact, dy.double())
    empty = [torch.full_like(t, float("nan")) for t in inputs]
    if name == "composed_mean":
        results = run(name, empty, dy)
    else:
        results = run(f"{name}_backward", empty, dy, *inputs)
    for ours, best in zip(results, gradients, strict=True):
        torch.testing.assert_close(ours.double(), best, **tolerance)


def test_shapes_must_agree():
    with pytest.raises((ValueError, RuntimeError)):
        run("composed_mean", [torch.empty(3, 5)], torch.empty(5, 3))
