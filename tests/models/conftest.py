"""What tests of models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fused_norm.models import backend


@pytest.fixture
def fresh_backend() -> Iterator[None]:
    """Register the backend where the checkout is not installed, and forget what was compiled."""
    from torch._dynamo.backends.registry import _COMPILER_FNS, lookup_backend, register_backend

    torch._dynamo.reset()
    if _COMPILER_FNS.get("fused_norm") is not backend:
        _COMPILER_FNS.pop("fused_norm", None)
        register_backend(backend, name="fused_norm")
    assert lookup_backend("fused_norm") is backend
    yield
    torch._dynamo.reset()
