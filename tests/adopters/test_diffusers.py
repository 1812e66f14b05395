"""diffusers' regional compilation: each repeated block once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from adopters import EAGER, register

pytestmark = pytest.mark.filterwarnings("ignore")


def test_repeated_blocks_are_compiled_once(sites: list[Any]) -> None:
    diffusers = pytest.importorskip("diffusers", reason="uv sync --group models")
    torch.use_deterministic_algorithms(False)
    register()
    torch.manual_seed(0)
    own = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
    ).eval()
    ours = copy.deepcopy(own)
    ours.compile_repeated_blocks(backend="fused_norm", options=EAGER, fullgraph=True)
    inputs = {
        "hidden_states": torch.randn(1, 16, 16),
        "encoder_hidden_states": torch.randn(1, 5, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([1.0]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }
    with torch.no_grad():
        torch.testing.assert_close(
            ours(**inputs).sample, own(**inputs).sample, rtol=1e-4, atol=1e-5
        )
    # Two kinds of blocks, however many: of two streams with two norms each, and of one,
    # which is compiled once more for streams of other sizes.
    assert 5 <= len(sites) <= 6
    assert all(site.fused for site in sites)
