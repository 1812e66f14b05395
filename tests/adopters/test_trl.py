"""TRL's SFTTrainer, around a model that is compiled in place, with and without PEFT's adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from adopters import EAGER, assert_same_parameters, llama, register

pytestmark = pytest.mark.filterwarnings("ignore")


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, 97)}}
    own = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


@pytest.mark.slow
@pytest.mark.parametrize("adapts", [False, True], ids=["whole", "LoRA"])
def test_supervised_tuning(adapts: bool, tmp_path: Path, sites: list[Any]) -> None:
    trl = pytest.importorskip("trl", reason="uv sync --group adopters")
    datasets = pytest.importorskip("datasets", reason="uv sync --group adopters")
    torch.use_deterministic_algorithms(False)
    register()
    own = llama(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    if adapts:
        peft = pytest.importorskip("peft", reason="peft is not installed: uv sync")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        own = peft.get_peft_model(own, config)
    ours = copy.deepcopy(own)
    ours.compile(backend="fused_norm", options=EAGER)
    rows = [{"input_ids": (torch.arange(i, i + 8) % 90 + 3).tolist()} for i in range(4)]
    for model in (own, ours):
        arguments = trl.SFTConfig(
            str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=2,
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_length=8,
        )
        trl.SFTTrainer(
            model,
            arguments,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer(),
        ).train()
    assert_same_parameters(ours, own)
    # TRL multiplies by the head itself, in chunks, where the last norm is out of sight.
    assert len(sites) >= 2
    assert all(site.fused for site in sites)
