"""Runs a model untouched and with fused norms, compares both, and prints what was fused."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fused_norm as fn
from fused_norm.models import backend

TOLERANCE = 1e-4


def output_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the first tensor of what a model returns."""
    result = model(**inputs)
    if isinstance(result, Tensor):
        return result
    return next(v for v in result.values() if isinstance(v, Tensor))


def count_tokens(inputs: dict[str, Any]) -> int:
    """Return how many tokens there are in a call of a language model."""
    return int(inputs["input_ids"].numel())


def step(model: nn.Module, run: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """Return the output and the gradients of the parameters, zeros for those without one."""
    y = output_of(run, inputs)
    dy = torch.linspace(-1, 1, y.numel()).view_as(y)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(y, parameters, dy, allow_unused=True, materialize_grads=True)
    return [y.detach(), *found]


def compare(model: nn.Module, inputs: dict[str, Any]) -> int:
    """Print the report of a model; return 0 if outputs and gradients are those of it untouched.

    Args:
        model: The model.
        inputs: What it is called with.
    """
    twin = copy.deepcopy(model)
    # An example is small: by default its calls would be left to PyTorch's ops.
    options = {"then": "eager", "small": True}
    print(fn.explain(model, options=options, **inputs))
    # Where the package is installed: backend="fused_norm".
    compiled = torch.compile(twin, backend=backend, options=options)
    expected, found = step(model, model, inputs), step(twin, compiled, inputs)
    largest = max(t.abs().max().item() for t in expected)
    worst = max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True)) / largest
    print(f"output and {len(found) - 1} gradients differ by up to {worst:.1e} of the largest value")
    return 0 if worst < TOLERANCE else 1


def main(build: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> None:
    """Compare a model and exit: with 0 if all is the same as without.

    Args:
        build: Returns the model and what it is called with.
    """
    torch.manual_seed(0)
    sys.exit(compare(*build()))
