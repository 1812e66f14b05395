"""Fixtures of tests that compare who computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fused_norm.ops import node


@pytest.fixture(params=["node", "python"])
def chain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who computes: the node in C++, or Python."""
    if request.param == "node":
        request.getfixturevalue("python_calls")
    else:
        monkeypatch.setattr(node, "module", lambda: None)
    return str(request.param)


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
