"""What a forward saves: the same tensors in the same order in C++ and Python; and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import family
import pytest
import torch
from accuracy import make_inputs
from checkpoint_worker import HOWS, Block
from devices import GPU
from family import PLAIN
from processes import run_forks
from torch import Tensor
from torch.utils import checkpoint as checkpoints

import fused_norm as fn
from fused_norm.ops import node

MEMBERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False, "gamma": "missing", "beta": False},
    "RMSNorm": {"normalization": "rms_norm", "beta": False},
    "residual": {"residual": True, "return_sum": True},
    "sum not returned": {"residual": True, "activation": "gelu", "return_norm": True},
    "statistics": {"residual": True, "statistics": True},
    "modulated": {"modulation": "batch", "gamma": "missing", "beta": False},
    "q, k, v": {"weights": 3},
    "activated": {"weights": 3, "activation": "silu"},
    "gate of two": {"weights": 2, "activation": "swiglu"},
    "MLP": {"op": "norm_mlp", "activation": "gelu", "residual": True, "residual_out": True},
    "gated MLP": {"op": "norm_mlp", "activation": "geglu", "weights": 2, "modulation": "batch"},
    "recomputed": {"op": "norm_mlp", "activation": "silu", "recompute": True},
}


def saved(run: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """Return shape, stride, dtype and values of what a forward saves."""
    packed: list[tuple[Any, ...]] = []

    def pack(t: Tensor) -> Tensor:
        packed.append((t.shape, t.stride(), t.dtype, t.detach().clone()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return packed


@pytest.mark.parametrize("name", MEMBERS)
def test_the_same_in_both_languages(name: str, python_calls: list[Tensor]) -> None:
    """In another order, a checkpoint cannot be computed by the one and again by the other."""
    case = PLAIN | {"shape": ((3, 4), 24, 16)} | MEMBERS[name]
    tensors = family.make_tensors(case)
    if case["statistics"]:
        values = family._given_statistics(case, tensors["x"], tensors.pop("residual"))
        tensors |= {"x": values[0].detach().requires_grad_(), "statistics": [values[2]]}
        tensors["statistics"] = values[2]
        case["statistics"] = False
    mine = saved(lambda: family.ours(case, tensors))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "module", lambda: None)
        others = saved(lambda: family.ours(case, tensors))
    assert [m[:-1] for m in mine] == [o[:-1] for o in others]
    assert all(torch.equal(m[-1], o[-1]) for m, o in zip(mine, others, strict=True))


def test_layernorm_linear(python_calls: list[Tensor]) -> None:
    """The function of this name has an autograd function of its own."""
    inputs = make_inputs((3, 4), 24, 16, requires_grad=True)
    mine = saved(lambda: fn.fused_layernorm_linear(*inputs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "module", lambda: None)
        others = saved(lambda: fn.fused_layernorm_linear(*inputs))
    assert [m[:-1] for m in mine] == [o[:-1] for o in others]
    assert all(torch.equal(m[-1], o[-1]) for m, o in zip(mine, others, strict=True))


@pytest.fixture(scope="session")
def said(
    request: pytest.FixtureRequest, library: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a folder with what went wrong in each case, each in a process of its own."""
    folder = tmp_path_factory.mktemp("checkpoints")
    cases = [
        tuple(item.callspec.params[name] for name in ("how", "chain", "device"))
        for item in request.session.items
        if getattr(item, "originalname", "") == test_checkpoint_in_a_fresh_process.__name__
        and not (item.callspec.params["device"] == "cuda" and not torch.cuda.is_available())
    ]
    run_forks("checkpoint_worker.py", str(folder), json.dumps(cases))
    return folder


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("chain", ["node", "python"])
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_checkpoint_in_a_fresh_process(how: str, chain: str, device: str, said: Path) -> None:
    """The first call of a thread was Python's, and C++ computed it again: CheckpointError."""
    assert (said / f"{how}-{chain}-{device}").read_text() == ""


@pytest.mark.parametrize("how", HOWS)
def test_either_language_computes_again(how: str, python_calls: list[Tensor]) -> None:
    """One computes the forward, and the other computes it again."""
    found = node.module()
    x = torch.randn(3, 7, 32, requires_grad=True)
    for order in ((found, None), (None, found)):
        block = Block("RMSNorm")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(node, "module", lambda order=order: order[0])
            options = {k: v for k, v in HOWS[how].items() if k != "early_stop"}
            with checkpoints.set_checkpoint_early_stop(HOWS[how].get("early_stop", True)):
                y = checkpoints.checkpoint(block, x, use_reentrant=False, **options)
            patch.setattr(node, "module", lambda order=order: order[1])
            leaves = [x, *block.parameters()]
            mine = torch.autograd.grad(y.square().sum(), leaves)
        others = torch.autograd.grad(block(x).square().sum(), leaves)
        torch.testing.assert_close(mine, others)
