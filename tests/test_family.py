"""norm_linear, norm_mlp and linear_add against PyTorch: values and gradients over all options."""

from __future__ import annotations

from typing import Any

import family
import pytest
import torch

CASES = list(family.pairwise(family.GRID))


def _name(case: dict[str, Any]) -> str:
    return "-".join(str(value).replace("torch.", "") for value in case.values())


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_values_and_gradients(case: dict[str, Any], device: str) -> None:
    if device == "cuda" and case["dtype"] is torch.float64:
        pytest.skip("float64 has no GPU kernel")
    family.check(case, family.make_tensors(case, device))
