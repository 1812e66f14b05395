"""torchao's weights that FSDP2 gathers in FP8, as a compiled model has them, in one process.

What two processes do is in tests/support/distributed_gathered.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from float8_models import K, OneLayer, compiled, report, rows
from torch import nn

float8: Any = pytest.importorskip("torchao.float8")
training_tensor: Any = pytest.importorskip("torchao.float8.float8_training_tensor")
pytestmark = pytest.mark.usefixtures("narrow_fp8")


def converted(recipe: str = "tensorwise", **changes: Any) -> Any:
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=True, **changes)
    return float8.convert_to_float8_training(OneLayer().bfloat16(), config=config)


def gather(model: Any, scale: torch.Tensor) -> Any:
    layer = model.linear
    q = (layer.weight.detach().float() * scale).to(torch.float8_e4m3fn)
    role = training_tensor.GemmInputRole.WEIGHT
    how = (torch.bfloat16, layer.linear_mm_config, role, None if scale.dim() == 0 else -1)
    layer.weight = nn.Parameter(training_tensor.Float8TrainingTensor(q, scale, *how))
    return model


@pytest.mark.parametrize("then", ["eager", "inductor"])
def test_one_scale_is_fused(then: str) -> None:
    model = gather(converted(), torch.tensor(1000.0))
    assert report(model, rows()) == {"norm": "FP8 tensorwise"}
    found = compiled(model, then=then)(rows())
    torch.testing.assert_close(found, model(rows()), rtol=0.02, atol=0.02)


def test_reasons() -> None:
    of_rows = (
        "left to torchao: a weight that is gathered in FP8 with one scale, and not for rowwise"
    )
    scales = f"left to torchao: weight is gathered as torch.float8_e4m3fn with {K} scales"
    alone = "left to torchao: a weight for FSDP2 to gather in FP8, of a model that is not sharded"
    cases = {
        of_rows: gather(converted("rowwise"), torch.tensor(1000.0)),
        scales: gather(converted(), torch.full((K, 1), 1000.0)),
        alone: converted(enable_fsdp_float8_all_gather=True),
    }
    for words, model in cases.items():
        found = report(model, rows())
        assert found["linear"] == words
        assert "output read by no Linear" in found["norm"] or "subclass" in found["norm"]
