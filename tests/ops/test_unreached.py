"""Where PyTorch leaves a gradient None, so do we, and an optimizer leaves the parameter alone."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import family
import pytest
import torch
from accuracy import as_copies
from family import PLAIN
from torch import Tensor

MEMBERS: dict[str, dict[str, Any]] = {
    "q, k, v": {"weights": 3},
    "activated": {"weights": 3, "activation": "gelu"},
    "RMSNorm with all": {
        "normalization": "rms_norm",
        **{"weights": 2, "residual": True, "return_sum": True, "return_norm": True},
    },
    "modulated": {"weights": 2, "modulation": "batch", "residual": True, "return_sum": True},
    "one": {"return_norm": True, "residual": True, "return_sum": True},
    "gate of two": {"weights": 2, "activation": "swiglu", "return_norm": True},
    "MLP": {
        "op": "norm_mlp",
        "activation": "gelu",
        **{"residual": True, "residual_out": True, "return_sum": True, "return_norm": True},
    },
    "recomputed gate": {
        "op": "norm_mlp",
        "activation": "geglu",
        **{"weights": 2, "residual": True, "recompute": True, "return_sum": True},
    },
}


def choices(case: dict[str, Any]) -> list[tuple[int, ...]]:
    """Return which results a loss may read."""
    gated = case["activation"] in family.GATES
    outputs = 1 if case["op"] == "norm_mlp" or gated else case["weights"]
    count = outputs + case["return_sum"] + case["return_norm"]
    return [c for n in range(1, count + 1) for c in itertools.combinations(range(count), n)]


def member(name: str, **others: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    case = PLAIN | {"shape": ((3, 4), 24, 16)} | MEMBERS[name] | others
    return case, family.make_tensors(case, others.get("device", "cpu"))


@pytest.mark.usefixtures("chain")
@pytest.mark.parametrize("name", MEMBERS)
def test_adamw(name: str, device: str) -> None:
    """Parameters that a loss does not reach got zeros, by which AdamW decayed them."""
    case, tensors = member(name, device=device)
    for chosen in choices(case):
        trained = []
        for run in (family.ours, family.eager):
            copies = family.replaced(tensors, as_copies)
            leaves = family.leaves(copies)
            optimizer = torch.optim.AdamW(leaves.values(), lr=1e-2, weight_decay=0.5)
            for _ in range(3):
                results = run(case, copies)
                optimizer.zero_grad()
                sum(results[i].square().mean() for i in chosen).backward()
                optimizer.step()
            trained.append(leaves)
        mine, theirs = trained
        nones = [[key for key, v in each.items() if v.grad is None] for each in trained]
        assert nones[0] == nones[1], chosen
        for key, leaf in mine.items():
            # What Adam divides by is near its eps where a gradient is.
            torch.testing.assert_close(
                leaf, theirs[key], rtol=1e-3, atol=2e-3, msg=f"{chosen} {key}"
            )
            if leaf.grad is None:
                assert torch.equal(leaf, family.leaves(tensors)[key])


@pytest.mark.usefixtures("chain")
def test_sum_alone_is_passed_on() -> None:
    """Its gradient is that of x, whatever the norm's statistics are."""
    case, tensors = member("one")
    with torch.no_grad():
        tensors["x"].fill_(float("inf"))
    total = family.ours(case, tensors)[1]
    grad = torch.randn_like(total)
    found = torch.autograd.grad(total, [tensors["x"], tensors["residual"]], grad)
    assert all(torch.equal(g, grad) for g in found)


# What the pass makes of a graph is the same by Python, of which one model is enough.
@pytest.mark.parametrize(
    ("chain", "name"),
    [
        *(("node", name) for name in ("q, k, v", "one", "MLP")),
        ("python", "one"),
        *(pytest.param("python", n, marks=pytest.mark.slow) for n in ("q, k, v", "MLP")),
    ],
    indirect=["chain"],
)
@pytest.mark.usefixtures("chain")
def test_whole_model(name: str) -> None:
    """A model that is fused leaves None what it leaves None compiled by itself.

    That is settled where AOTAutograd traces the graph: what compiles it afterward has no say.
    """
    for chosen in choices(member(name)[0]):
        options = {"small": True, "then": "aot_eager"}
        found = left_none(name, chosen, backend="fused_norm", options=options)
        assert found == left_none_by_pytorch(name, chosen), chosen


def left_none(name: str, chosen: tuple[int, ...], **how: Any) -> list[str]:
    """Return which leaves get no gradient from some results of a model that is compiled."""
    case, tensors = member(name)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, **how)
    def loss(tensors: dict[str, Any]) -> Tensor:
        results = family.eager(case, tensors)
        total: Tensor = sum(results[i].square().mean() for i in chosen)
        return total

    loss(tensors).backward()
    return [key for key, leaf in family.leaves(tensors).items() if leaf.grad is None]


@functools.cache
def left_none_by_pytorch(name: str, chosen: tuple[int, ...]) -> list[str]:
    return left_none(name, chosen, backend="aot_eager")
