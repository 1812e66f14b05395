"""Hugging Face's ways to a model: Trainer, accelerate, generate, adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from adopters import llama
from torch import nn

import fused_norm as fn

transformers = pytest.importorskip("transformers", reason="uv sync --group models")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_backend")]
EAGER = {"then": "eager"}


def test_generate_gives_the_same_tokens() -> None:
    model = llama().eval()
    ids = torch.randint(3, 97, (2, 5))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    model.forward = torch.compile(model.forward, backend="fused_norm", options=EAGER)
    assert torch.equal(model.generate(ids, **options), expected)


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.arange(index, index + 8) % 97
        return {"input_ids": ids, "labels": ids}


def trainer(model: nn.Module, path: Path, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        str(path), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, **options
    )
    return transformers.Trainer(model=model, args=arguments, train_dataset=Rows())


def trained(model: nn.Module, path: Path) -> list[torch.Tensor]:
    trainer(model, path).train()
    return [p.detach() for p in model.parameters()]


def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="uv sync --group models")
    model = llama()
    twin = copy.deepcopy(model)
    # Names of accelerate's own list alone, so that the model is told.
    with pytest.raises(ValueError, match="'FUSED_NORM' is not a valid DynamoBackend"):
        trainer(model, tmp_path, torch_compile_backend="fused_norm")
    twin.compile(backend="fused_norm", options=EAGER)
    for a, b in zip(trained(model, tmp_path), trained(twin, tmp_path), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate", reason="uv sync --group models")
    model = llama()
    twin = copy.deepcopy(model)
    twin.compile(backend="fused_norm", options=EAGER)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare_model(twin)
    ids = torch.randint(3, 97, (2, 5))
    model(input_ids=ids, labels=ids).loss.backward()
    accelerator.backward(prepared(input_ids=ids, labels=ids).loss)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6)


def test_adapters_are_seen() -> None:
    peft = pytest.importorskip("peft", reason="uv sync --group models")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama(), config).eval()
    ids = torch.randint(3, 97, (2, 5))
    report = fn.explain(model, input_ids=ids, options=EAGER)
    assert report.norms[0].linears == 5
    assert report.fused == report.norms, report
    compiled = torch.compile(model, backend="fused_norm", options=EAGER)
    torch.testing.assert_close(
        compiled(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-5
    )
