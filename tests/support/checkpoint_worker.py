"""Checkpointed blocks, each in a process that has called nothing: checkpoint_worker.py FOLDER CASES

CASES are a list in JSON, of how, by whose chain, and the device. What went wrong is written to the
folder, to a file for each.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
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
