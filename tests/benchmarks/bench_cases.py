"""What tests of the benchmark share: plans, providers right and wrong, runs of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case
from benchmarks.ops import OPS
from benchmarks.plan import Listener, Plan
from benchmarks.provider import Bound, Provider
from benchmarks.runner import Runner
from benchmarks.runs import Run
from benchmarks.shapes import Shape
from benchmarks.timing import Budget
from fused_norm import reference

BRIEF = Budget(seconds=0.01, warm_up=0.001, fewest=3, most=5)
SHAPE = Shape(24, 32, 40)


def plan(*some_shapes: Shape, modes: tuple[str, ...] = ("forward", "train"), **kw: Any) -> Plan:
    device = torch.device(kw.pop("device", "cpu"))
    dtype = kw.pop("dtype", torch.float32)
    op = OPS[kw.pop("op", "layernorm_linear")]
    cases = [Case(op, shape, dtype, device) for shape in some_shapes or (SHAPE,)]
    return Plan(cases, modes, device, budget=kw.pop("budget", BRIEF), **kw)


def provider(name: str, function: Callable[..., Tensor], **kw: Any) -> Provider:
    """A provider made of a function of the op's inputs, of LayerNorm + Linear unless told."""
    return Provider(
        name,
        kw.pop("op", "layernorm_linear"),
        kw.pop("role", "peer"),
        "a test's",
        lambda: function,
        lambda function, case: lambda inputs: Bound(lambda: function(*inputs), inputs),
        **kw,
    )


def run_of(*others: Provider, registry: Callable[..., None], **kw: Any) -> Run:
    registry(*others)
    return Runner(plan(*kw.pop("shapes", ()), **kw), Listener()).execute()


right = reference.layernorm_linear


def without_bias(x: Tensor, g: Tensor, b: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return right(x, g, b, w, None) + 0 * c


def without_gradient_of_gamma(x: Tensor, g: Tensor, b: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return right(x, g.detach(), b, w, c) + 0 * g.sum()


def not_a_number(x: Tensor, g: Tensor, b: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return right(x, g, b, w, c) * float("nan")


def in_float64(x: Tensor, g: Tensor, b: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return right(*(t.double() for t in (x, g, b, w, c)))


def in_bfloat16(x: Tensor, g: Tensor, b: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return right(*(t.bfloat16() for t in (x, g, b, w, c))).float()
