"""Products on tile registers (AMX): who gets them, their edges, and what they leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accuracy import make_inputs
from test_cpu_kernels import Kernels, check

import fused_norm as fn
from fused_norm.native import build, cpu_features

ROOT = Path(__file__).resolve().parents[3]
BF16 = torch.bfloat16
GATED = 8
TILE_FLAGS = frozenset({"amx_tile", "amx_bf16", "avx512_bf16"})

needs_tiles = pytest.mark.skipif(
    not cpu_features.has_tiles(), reason="no tile registers, or no permission to use them"
)


@pytest.fixture
def features(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Allow flags and the permission to be replaced."""
    monkeypatch.delenv(cpu_features.CPU_VARIABLE, raising=False)
    monkeypatch.setattr(cpu_features, "has_tiles", lambda: cpu_features.without_tiles() is None)
    return monkeypatch


@pytest.mark.parametrize("missing", sorted(TILE_FLAGS))
def test_builds_for_tiles_need_every_flag(missing: str, features: pytest.MonkeyPatch) -> None:
    features.setattr(cpu_features, "_permits_tiles", lambda: True)
    features.setattr(cpu_features, "flags", lambda: TILE_FLAGS)
    product = build.Extension("norm_linear_cpu", "bfloat16")
    assert set(product.features) == {"amx-tile", "amx-bf16", "avx512bf16"}
    assert not build.Extension("passes_cpu", "bfloat16").features
    with_tiles = product.path
    features.setattr(cpu_features, "flags", lambda: TILE_FLAGS - {missing})
    assert not product.features
    assert product.path != with_tiles
    assert missing in (cpu_features.without_tiles() or "")


def test_a_refused_permission_is_respected(features: pytest.MonkeyPatch) -> None:
    features.setattr(cpu_features, "flags", lambda: TILE_FLAGS)
    features.setattr(cpu_features, "_permits_tiles", lambda: False)
    assert not build.Extension("norm_linear_cpu", "bfloat16").features
    assert "Linux" in (cpu_features.without_tiles() or "")


def test_a_chosen_target_has_no_features_of_this_machine(features: pytest.MonkeyPatch) -> None:
    features.setattr(cpu_features, "flags", lambda: TILE_FLAGS)
    features.setattr(cpu_features, "_permits_tiles", lambda: True)
    features.setenv(cpu_features.CPU_VARIABLE, "x86-64-v3")
    assert not build.Extension("norm_linear_cpu", "bfloat16").features


@needs_tiles
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 33, 193, 530])
def test_every_edge_of_a_tile(rows: int) -> None:
    for features, outputs in ((31, 17), (33, 32), (64, 33), (545, 16)):
        check(Kernels(BF16, offset=1), make_inputs(rows, features, outputs, dtype=BF16))


@needs_tiles
@pytest.mark.parametrize("rows", [40, 600])
def test_nan_stays_in_its_row_and_column(rows: int) -> None:
    """Tiles of the weight reach into its next row where features end within a step."""
    ours = Kernels(BF16)
    inputs = make_inputs(rows, 70, 50, dtype=BF16)
    clean, _, _ = ours.forward(inputs)
    inputs[0][7, 3] = float("nan")
    inputs[3][9, 69] = float("inf")
    inputs[3][11, 0] = float("nan")
    y, _, _ = ours.forward(inputs, may_be_nan=True)
    is_bad = torch.zeros(rows, 50, dtype=torch.bool)
    is_bad[7], is_bad[:, 9], is_bad[:, 11] = True, True, True
    assert torch.equal(y[~is_bad], clean[~is_bad])
    assert not y[is_bad].isfinite().any()


@needs_tiles
def test_few_and_many_rows_give_the_same_bits() -> None:
    """Either operand may be the weight."""
    ours = Kernels(BF16)
    inputs = make_inputs(1400, 1030, 333, dtype=BF16)
    y, _, _ = ours.forward(inputs)
    some, _, _ = ours.forward([inputs[0][900:917], *inputs[1:]])
    assert torch.equal(some, y[900:917])
    # Enough for a block of their columns to meet all of the weight's in sequence.
    some, _, _ = ours.forward([inputs[0][600:1100], *inputs[1:]])
    assert torch.equal(some, y[600:1100])


@needs_tiles
def test_products_of_pytorch_are_not_disturbed() -> None:
    """PyTorch's products configure the same registers of the same threads."""
    x, gamma, beta, weight, bias = make_inputs(300, 256, 200, dtype=BF16)
    before = F.linear(x, weight, bias)
    for rows in (1, 17, 300, 600):
        fn.fused_layernorm_linear(x.repeat(2, 1)[:rows], gamma, beta, weight, bias)
        assert torch.equal(F.linear(x, weight, bias), before)
