"""What all of them look at: which norms were fused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fused_norm.models import Site
from fused_norm.norms import NORMS


@pytest.fixture
def sites(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Site]]:
    """Receive what became of each norm that the backend sees a Linear layer read."""
    module: Any = sys.modules["fused_norm.models.backend"]
    found: list[Site] = []
    own = module.fuse

    def watched(*args: Any, **kwargs: Any) -> list[Site]:
        seen: list[Site] = own(*args, **kwargs)
        found.extend(site for site in seen if site.linears and site.kind in NORMS)
        return seen

    monkeypatch.setattr(module, "fuse", watched)
    yield found
    torch._dynamo.reset()
