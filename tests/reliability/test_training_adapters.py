"""PEFT's LoRA: trained, merged into the weights and taken out of them again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accuracy import assert_within_budget
from compiling import ITS_OWN_WARNINGS
from torch import Tensor, nn
from training import Subject, check_training, subject
from training_net import Net

peft = pytest.importorskip("peft", reason="peft is not installed: uv sync")
pytestmark = [*ITS_OWN_WARNINGS, pytest.mark.usefixtures("own_kernels")]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
of_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def with_adapters(net: nn.Module) -> nn.Module:
    """Return PEFT's model of a net, every Linear layer on a norm with an adapter."""
    names = ["q", "k", "v", "fc1", "wide", "head"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=names, init_lora_weights=False)
    torch.manual_seed(4)
    return peft.get_peft_model(net, config, autocast_adapter_dtype=False)


def evaluate(seen: Subject) -> Tensor:
    """Hold two evaluations against PyTorch's with this very module, and return one."""
    x, _ = seen.data.batch(-1)
    own = copy.deepcopy(seen.module).eval()
    for each in own.modules():
        if isinstance(each, Net):
            each.is_fused = False
    seen.module.eval()
    with torch.no_grad():
        results = [seen.call(x).clone() for _ in range(2)]
        bar, truth = own(x), own.double()(x.double())
    for y in results:
        assert_within_budget("evaluation", y, truth, bar)
    return truth


def training(trained: Subject) -> Callable[[int], Tensor]:
    """Adapters are trained, and every few steps merged for an evaluation."""
    own = [p for p in trained.module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=0.01, eps=1e-4, fused=True)
    adapted: Any = trained.module

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        loss = trained.loss(i)
        loss.backward()
        optimizer.step()
        if i % 5 == 4:
            adapted.merge_adapter()
            evaluate(trained)
            adapted.unmerge_adapter()
            trained.module.train()
        return loss

    return step


@of_dtypes
def test_adapters_train(dtype: torch.dtype, device: str) -> None:
    check_training(training, "backend", device, dtype, with_adapters)


@of_dtypes
@pytest.mark.parametrize("kind", ["functions", "backend"])
def test_merge_and_unmerge(kind: str, dtype: torch.dtype, device: str) -> None:
    """Regression: the results of the weights before, which PEFT changes through `.data`."""
    torch.compiler.reset()
    seen = subject(kind, device, dtype, change=with_adapters)
    adapted: Any = seen.module
    # Functions take the weights alone, in which the adapters are while they are merged.
    adapted.merge_adapter()
    merged = evaluate(seen)
    for factor in (1.5, -1.0, 0.5):
        adapted.unmerge_adapter()
        if kind == "backend":
            evaluate(seen)
        with torch.no_grad():
            for name, p in seen.module.named_parameters():
                if "lora_B" in name:
                    p.mul_(factor)
        adapted.merge_adapter()
        again = evaluate(seen)
        assert (again - merged).norm() > 0.05 * again.norm()
        merged = again
