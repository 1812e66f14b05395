"""Heads of tests are small, and have to reach what large ones do."""

from __future__ import annotations

import pytest

from fused_norm.ops import head


@pytest.fixture(autouse=True)
def _no_head_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "FEW_LOGITS", 0)
