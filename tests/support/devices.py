"""Devices as parameters of tests, and what tests of one kind are skipped without."""

from __future__ import annotations

import pytest
import torch

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
    ],
)

ON_HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no Hopper GPU on this machine",
)
