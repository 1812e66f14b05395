"""vLLM's ways to a backend: a name that Dynamo lists, or where a function is.

`--compilation-config '{"mode": "STOCK_TORCH_COMPILE", "backend": "fused_norm"}'` looks the backend
up as here; vLLM itself runs on no machine of the tests.
"""

from __future__ import annotations

import importlib

import torch
from adopters import register
from torch import nn


def test_a_backend_by_either_name() -> None:
    register()
    from torch._dynamo.backends.registry import list_backends

    assert "fused_norm" in list_backends(exclude_tags=())
    module, _, name = "fused_norm.models.backend".rpartition(".")
    function = getattr(importlib.import_module(module), name)
    net, x = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 48)), torch.randn(4, 32)
    with torch.inference_mode():
        for backend in ("fused_norm", function):
            torch._dynamo.reset()
            compiled = torch.compile(
                net, backend=backend, options={"then": "eager"}, fullgraph=True
            )
            torch.testing.assert_close(compiled(x), net(x), rtol=1e-5, atol=1e-5)
