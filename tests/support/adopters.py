"""What tests of other people's trainers and models share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

EAGER = {"then": "eager", "small": True}


def register() -> None:
    """Register the backend by its name where the checkout is not installed."""
    from torch._dynamo.backends.registry import _COMPILER_FNS, lookup_backend, register_backend

    from fused_norm.models import backend

    torch._dynamo.reset()
    if _COMPILER_FNS.get("fused_norm") is not backend:
        _COMPILER_FNS.pop("fused_norm", None)
        register_backend(backend, name="fused_norm")
    assert lookup_backend("fused_norm") is backend


def llama(**options: Any) -> nn.Module:
    """Return a LLaMA of one narrow layer."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **options))


def assert_same_parameters(model: nn.Module, own: nn.Module) -> None:
    """Compare parameters by their names, after steps of the same training."""
    ours = dict(model.named_parameters())
    expected = dict(own.named_parameters())
    assert ours.keys() == expected.keys()
    for name, p in expected.items():
        torch.testing.assert_close(ours[name], p, rtol=1e-4, atol=1e-5, msg=name)
