"""Fixtures of the benchmark's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks import providers
from benchmarks.provider import Provider


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Compute on one thread: two wait for each other for ages where another process has a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace all providers by eager and those given."""
    eager = [p for p in providers.PROVIDERS.values() if p.name == "eager"]

    def use(*others: Provider) -> None:
        found = {(p.op, p.name): p for p in (*eager, *others)}
        monkeypatch.setattr(providers, "PROVIDERS", found)

    use()
    return use
