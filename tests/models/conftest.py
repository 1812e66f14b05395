"""What tests of models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from adopters import register


@pytest.fixture
def fresh_backend() -> Iterator[None]:
    """Register the backend where the checkout is not installed, and forget what was compiled."""
    register()
    yield
    torch._dynamo.reset()
