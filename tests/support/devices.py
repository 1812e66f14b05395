"""Devices as parameters of tests."""

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
