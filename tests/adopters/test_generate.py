"""transformers' `generate` with a static cache, which compiles each step of decoding by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adopters import EAGER, register

import fused_norm as fn

transformers = pytest.importorskip("transformers", reason="uv sync --group models")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
}


def model_of(kind: str, device: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(device).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Logits that differ enough for rounding not to change a choice.
            parameter.mul_(3 if parameter.dim() == 2 else 1)
    return model


@pytest.mark.parametrize(("kind", "freezes"), [("Llama", True), ("Qwen3", False)])
def test_generate_with_a_static_cache(
    kind: str, freezes: bool, device: str, sites: list[Any]
) -> None:
    torch.use_deterministic_algorithms(False)
    register()
    model = model_of(kind, device)
    prompt = torch.randint(2, 128, (2, 7), device=device)
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(prompt, disable_compile=True, **options)
    if freezes:
        fn.freeze(model)
    # On a GPU, each step is a CUDA graph.
    graphs = device == "cuda"
    compiled = transformers.CompileConfig(
        backend="fused_norm",
        mode="reduce-overhead" if graphs else None,
        options=None if graphs else EAGER,
    )
    compiled._compile_all_devices = True
    for _ in range(2):
        found = model.generate(prompt, compile_config=compiled, **options)
        assert torch.equal(found, expected)
    # Two norms a block and the last one, in the graph of a step.
    assert sum(site.fused for site in sites) == 5
    fn.unfreeze(model)
