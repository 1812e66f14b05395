"""What a forward saves: the same tensors in the same order, whoever computes; and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import family
import pytest
import torch
from accuracy import make_inputs
from devices import GPU
from family import PLAIN
from processes import ROOT, run_script
from torch import Tensor, nn
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


class Block(nn.Module):
    """A block of a transformer without its attention."""

    def __init__(self, normalization: str) -> None:
        super().__init__()
        self.qkv = fn.LayerNormLinear(
            32, 96, normalization=normalization, parameters_split=["q", "k", "v"]
        )
        self.out = nn.Linear(96, 32)
        self.plain = fn.LayerNormLinear(32, 32)
        self.mlp = fn.LayerNormMLP(32, 64, normalization=normalization, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.qkv(x))
        x = x + self.plain(x)
        result: Tensor = x + self.mlp(x)
        return result


def _selective() -> Any:
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        saves = op in (
            torch.ops.aten.addmm.default,
            torch.ops.fused_norm.norm_linear_forward.default,
        )
        kinds = checkpoints.CheckpointPolicy
        return kinds.MUST_SAVE if saves else kinds.PREFER_RECOMPUTE

    return checkpoints.create_selective_checkpoint_contexts(policy)


HOWS: dict[str, dict[str, Any]] = {
    "whole": {},
    "selective": {"context_fn": _selective},
    "no early stop": {"early_stop": False},
}


def trained(how: str, device: str, dtype: torch.dtype) -> None:
    """Compare three checkpointed blocks with plain ones, from the first call of a process on."""
    torch.manual_seed(0)
    blocks = nn.ModuleList([Block(n) for n in ("LayerNorm", "RMSNorm", "LayerNorm")])
    blocks = blocks.to(device, dtype)
    x = torch.randn(3, 7, 32, device=device, dtype=dtype, requires_grad=True)
    options = dict(HOWS[how])
    stop = options.pop("early_stop", True)
    found = []
    for is_checkpointed in (True, False):
        y = x
        for block in blocks:
            with checkpoints.set_checkpoint_early_stop(stop):
                y = (
                    checkpoints.checkpoint(block, y, use_reentrant=False, **options)
                    if is_checkpointed
                    else block(y)
                )
        leaves = [x, *blocks.parameters()]
        found.append(torch.autograd.grad(y.float().square().mean(), leaves))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("chain", ["node", "python"])
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_checkpoint_in_a_fresh_process(how: str, chain: str, device: str, library: Any) -> None:
    """The first call of a thread was Python's, and C++ computed it again: CheckpointError."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    program = (
        f"import torch, test_saved_tensors as t; t.trained({how!r}, {device!r}, torch.{dtype})"
    )
    environment = {"FUSED_NORM_AUTOGRAD": "python"} if chain == "python" else {}
    path = os.pathsep.join(str(ROOT / "tests" / folder) for folder in ("support", "chain"))
    result = run_script("-c", program, PYTHONPATH=path, **environment)
    assert result.returncode == 0, result.stderr


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
