"""What goes wrong in models of others: their initializers, and other kinds of modules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accuracy import make_inputs
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import fused_norm as fn
from fused_norm.native import build, cpu_features
from fused_norm.ops import norm_linear

K, N = 24, 10


class ScaledLayerNorm(nn.LayerNorm):
    """Another forward under a familiar name."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class LowRankLinear(nn.Linear):
    """An adapter as a subclass."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class OwnName(nn.Linear):
    """A subclass that changes nothing."""


def patched(module: nn.Module) -> nn.Module:
    """What accelerate does to modules that it moves between devices."""
    old = module.forward
    module.forward = lambda *args: old(*args)  # type: ignore[method-assign]
    return module


def hooked(module: nn.Module, register: str) -> nn.Module:
    getattr(module, register)(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("ln", "linear", "error", "words"),
    [
        (nn.Linear(K, N), nn.LayerNorm(K), TypeError, "ln must be an nn.LayerNorm, got Linear"),
        (nn.GroupNorm(1, K), nn.Linear(K, N), TypeError, "ln must be an nn.LayerNorm, got Group"),
        (nn.LayerNorm(K), nn.Identity(), TypeError, "linear must be an nn.Linear, got Identity"),
        (ScaledLayerNorm(K), nn.Linear(K, N), TypeError, "got ScaledLayerNorm, which computes"),
        (nn.LayerNorm(K), LowRankLinear(K, N), TypeError, "got LowRankLinear, which computes"),
        (nn.LayerNorm(K), patched(nn.Linear(K, N)), TypeError, "with its own forward"),
        (
            hooked(nn.LayerNorm(K), "register_forward_hook"),
            nn.Linear(K, N),
            ValueError,
            "ln has hooks",
        ),
        (
            nn.LayerNorm(K),
            hooked(nn.Linear(K, N), "register_full_backward_hook"),
            ValueError,
            "linear has hooks",
        ),
        (
            nn.LayerNorm(K),
            prune.random_unstructured(nn.Linear(K, N), "weight", 0.5),
            ValueError,
            "linear has hooks",
        ),
        (
            nn.LayerNorm(K),
            parametrizations.weight_norm(nn.Linear(K, N)),
            ValueError,
            "linear has parametrizations",
        ),
    ],
)
def test_from_modules_refuses_what_it_would_drop(
    ln: Any, linear: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        fn.LayerNormLinear.from_modules(ln, linear)


def test_from_modules_takes_subclasses_that_change_nothing() -> None:
    ln, linear = nn.LayerNorm(K), OwnName(K, N)
    x = torch.randn(5, K)
    layer = fn.LayerNormLinear.from_modules(ln, linear)
    torch.testing.assert_close(layer(x), linear(ln(x)))


def test_transformers_leaves_the_weight_alone() -> None:
    """It initializes by the class's name, and filled the weight of a LayerNormLinear with ones."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layer = fn.LayerNormLinear(K, N)
            self.post_init()

    layer = Model(transformers.PretrainedConfig()).layer
    assert 0.5 < layer.weight.abs().max() * K**0.5 <= 1
    assert layer.weight.std() > 0.05
    assert (layer.layer_norm_weight == 1).all()


def test_transformers_initializes_what_a_checkpoint_lacks(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layer = fn.LayerNormLinear(K, N)
            self.post_init()

    model = Model(transformers.PretrainedConfig())
    nn.init.normal_(model.layer.layer_norm_weight)
    nn.init.normal_(model.layer.weight)
    state = model.state_dict()
    lacking = {name: value for name, value in state.items() if name != "layer.weight"}
    model.save_pretrained(tmp_path, state_dict=lacking)
    layer = Model.from_pretrained(tmp_path).layer
    assert torch.equal(layer.layer_norm_weight, model.layer.layer_norm_weight)
    assert 0.5 < layer.weight.abs().max() * K**0.5 <= 1
    assert layer.weight.std() > 0.05


@pytest.mark.parametrize(
    ("flags", "is_left"),
    [
        ({"amx_bf16", "avx2"}, True),
        ({"avx512_bf16"}, True),
        ({"avx2", "avx512f"}, False),
        ({"amx_tile", "amx_bf16", "avx512_bf16"}, False),
    ],
    ids=str,
)
def test_bfloat16_goes_where_it_is_faster(
    flags: set[str], is_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the CPU's flags: its model's name may be masked as an older one's."""
    # Whatever the flags, the kernels of this machine run.
    features = build.Extension("norm_linear_cpu", "bfloat16").features
    monkeypatch.setattr(build, "compiler_features", lambda name: features)
    monkeypatch.setattr(cpu_features, "flags", lambda: frozenset(flags))
    monkeypatch.setattr(cpu_features, "_permits_tiles", lambda: True)
    monkeypatch.delenv(cpu_features.CPU_VARIABLE, raising=False)
    caches = cpu_features._first_flag, cpu_features.has_tiles
    for cache in caches:
        cache.cache_clear()
    ran = []
    straight = norm_linear.straight_by_pytorch
    monkeypatch.setattr(
        norm_linear, "straight_by_pytorch", lambda *args: ran.append(1) or straight(*args)
    )
    try:
        x, gamma, beta, weight, bias = make_inputs((5,), K, N, dtype=torch.bfloat16)
        y = fn.fused_layernorm_linear(x, gamma, beta, weight, bias)
    finally:
        monkeypatch.undo()
        for cache in caches:
            cache.cache_clear()
    assert len(ran) == is_left
    expected = F.linear(F.layer_norm(x, (K,), gamma, beta), weight, bias)
    torch.testing.assert_close(y, expected, rtol=1.6e-2, atol=1e-2)


def test_flags_are_those_of_the_machine() -> None:
    flags = cpu_features.flags()
    path = Path("/proc/cpuinfo")
    assert bool(flags) == path.exists()
    if flags:
        text = path.read_text()
        assert all(f" {flag}" in text for flag in flags)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compilers_take_the_choice_for_granted(backend: str) -> None:
    """Regression: tracing went on into the reading of the CPU's flags."""
    layer = fn.LayerNormLinear(K, N, dtype=torch.bfloat16)
    x = torch.randn(5, K, dtype=torch.bfloat16, requires_grad=True)
    y = torch.compile(layer, fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(y, layer(x))
    y.float().sum().backward()
    assert x.grad is not None
