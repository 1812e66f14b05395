"""What tests of models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from adopters import register
from float8_models import K

from fused_norm.models import precision


@pytest.fixture
def narrow_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have layers be in FP8 that are not wide enough to gain by it: a CPU is slow at wide ones."""
    monkeypatch.setattr(precision, "SMALLEST", K)


@pytest.fixture
def fresh_backend() -> Iterator[None]:
    """Register the backend where the checkout is not installed, and forget what was compiled."""
    register()
    yield
    torch._dynamo.reset()
