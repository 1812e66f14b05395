"""Checkpointed blocks, each in a process that has called nothing: checkpoint_worker.py FOLDER CASES

CASES are a list in JSON, of how, by whose chain, and the device. What went wrong is written to the
folder, to a file for each.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from processes import in_forks
from torch import Tensor, nn
from torch.utils import checkpoint as checkpoints

import fused_norm as fn
from fused_norm.ops import node


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


def gradients(blocks: nn.ModuleList, x: Tensor, call: Callable[..., Tensor]) -> list[Tensor]:
    """Return the gradients of x and of all parameters."""
    y = x
    for block in blocks:
        y = call(block, y)
    return [*torch.autograd.grad(y.double().square().mean(), [x, *blocks.parameters()])]


def trained(how: str, device: str, dtype: torch.dtype) -> None:
    """Compare three checkpointed blocks with plain ones, from the first call of a process on."""
    torch.manual_seed(0)
    blocks = nn.ModuleList([Block(n) for n in ("LayerNorm", "RMSNorm", "LayerNorm")])
    blocks = blocks.to(device, dtype)
    x = torch.randn(3, 7, 32, device=device, dtype=dtype, requires_grad=True)
    options = dict(HOWS[how])
    stop = options.pop("early_stop", True)

    def checkpointed(block: nn.Module, y: Tensor) -> Tensor:
        with checkpoints.set_checkpoint_early_stop(stop):
            result: Tensor = checkpoints.checkpoint(block, y, use_reentrant=False, **options)
        return result

    def plain(block: nn.Module, y: Tensor) -> Tensor:
        result: Tensor = block(y)
        return result

    mine, others = gradients(blocks, x, checkpointed), gradients(blocks, x, plain)
    if dtype is torch.float32:
        torch.testing.assert_close(mine, others)
        return
    # What nothing watches is left to PyTorch's ops where it is small, which round elsewhere.
    wide = x.detach().double().requires_grad_()
    exact = gradients(copy.deepcopy(blocks).double(), wide, plain)
    errors = [
        statistics.mean(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))
        for found in (mine, others)
    ]
    assert errors[0] <= 1.25 * errors[1], errors


def trained_anew(how: str, chain: str, device: str, folder: Path) -> None:
    """Do so in a process that has called nothing, and write what went wrong to the folder."""
    if chain == "python":
        os.environ["FUSED_NORM_AUTOGRAD"] = "python"
    wrong = ""
    try:
        trained(how, device, torch.bfloat16 if device == "cuda" else torch.float32)
        assert (node.module() is None) == (chain == "python")
    except Exception:
        # Told to the test, whatever it is.
        wrong = traceback.format_exc()
    (folder / f"{how}-{chain}-{device}").write_text(wrong)


if __name__ == "__main__":
    # Imports the compiler, once for all.
    torch.compiler.reset()
    where, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    sys.exit(any(in_forks(functools.partial(trained_anew, *case, where) for case in cases)))
