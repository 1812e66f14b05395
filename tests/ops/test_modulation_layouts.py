"""Scale and shift are read where they are: models take them from wider rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fused_norm as fn
from fused_norm.ops.operands import at_every_size

B, S, K, N = 3, 5, 16, 8
Modulation = tuple[Tensor | None, Tensor | None]


def _parts(*sizes: int) -> Callable[[str], Tensor]:
    """Return what makes a wider tensor."""
    return lambda device: torch.randn(sizes, device=device)


def _chunks(whole: Tensor) -> Modulation:
    shift, scale = whole.chunk(6, -1)[1:3]
    return scale[:, None], shift[:, None]


# Each takes a wider tensor to a scale and a shift.
LAYOUTS: dict[str, tuple[Callable[[str], Tensor], Callable[[Tensor], Modulation]]] = {
    "parts of a row": (_parts(B, 6 * K), _chunks),
    "scale alone": (_parts(B, 6 * K), lambda w: (_chunks(w)[0], None)),
    "shift alone": (_parts(B, 6 * K), lambda w: (None, _chunks(w)[1])),
    "one group": (_parts(1, 6 * K), _chunks),
    "for each row": (
        _parts(B, S, 2 * K),
        lambda w: (w[..., :K], w[..., K:]),
    ),
    "rows between samples": (
        _parts(B, S + 1, 2 * K),
        lambda w: (w[:, :S, :K], w[:, 1:, K:]),
    ),
    "rows that are not one after another": (
        _parts(B, 2 * S, 2 * K),
        lambda w: (w[:, ::2, :K], w[:, ::2, K:]),
    ),
    "of the whole batch": (_parts(6 * K), lambda w: (w[:K], w[K : 2 * K])),
    "repeated": (
        _parts(1, 1, 2 * K),
        lambda w: (w[..., :K].expand(B, 1, K), w[..., K:].expand(B, 1, K)),
    ),
    "one for each row, one for each sample": (
        _parts(B, S, 2 * K),
        lambda w: (w[..., :K], w[:, :1, K:]),
    ),
    "one for each place, one for each sample": (
        _parts(B, S, 2 * K),
        lambda w: (w[:1, :, :K], w[:, :1, K:]),
    ),
    "unlike each other": (
        _parts(B, 4 * K),
        lambda w: (w[:, None, :K], w.reshape(2 * B, 2 * K)[:B, None, K:]),
    ),
    "one dense": (
        _parts(2 * B, 2 * K),
        lambda w: (w[:B, None, :K], w.flatten()[: B * K].view(B, 1, K)),
    ),
    "at odd places": (
        _parts(B, 2 * K + 3),
        lambda w: (w[:, None, 1 : K + 1], w[:, None, K + 2 : -1]),
    ),
    "each second element": (_parts(B, 4 * K), lambda w: (w[:, None, : 2 * K : 2], w[:, None, ::4])),
    "transposed": (_parts(2 * K, B), lambda w: (w.t()[:, None, :K], w.t()[:, None, K:])),
    "turned round": (_parts(B, 2 * K), lambda w: (w.flip(0)[:, None, :K], w[:, None, K:])),
    "of few dimensions": (_parts(B * S, 3 * K), lambda w: (w[:1, :K], w[:1, K : 2 * K])),
}


def _call(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, p: dict[str, Tensor], how: str
) -> Tensor:
    options: dict[str, Any] = {"scale": scale, "shift": shift}
    if how != "alone":
        options["norm_weight"] = p["gamma"]
    if how == "mlp":
        options |= {"activation": "gelu"}
        y: Tensor = fn.norm_mlp(x, p["weight"], p["bias"], p["out"], None, **options)
    else:
        y = fn.norm_linear(x, p["weight"], p["bias"], **options)
    return y


def _results(
    layout: str, how: str, device: str, dtype: torch.dtype, dense: bool
) -> list[Tensor | None]:
    """Return y and all gradients, of a modulation as it is or of dense copies."""
    torch.manual_seed(0)
    make, take = LAYOUTS[layout]
    given = {
        "x": torch.randn(B, S, K, device=device),
        "gamma": torch.randn(K, device=device),
        "weight": torch.randn(N, K, device=device),
        "bias": torch.randn(N, device=device),
        "out": torch.randn(K, N, device=device),
        "whole": make(device),
    }
    p = {name: v.to(dtype).requires_grad_() for name, v in given.items()}
    modulation = take(p["whole"])
    if dense:
        modulation = tuple(
            None if v is None else v.clone(memory_format=torch.contiguous_format)
            for v in modulation
        )  # type: ignore[assignment]
    y = _call(p["x"], *modulation, p, how)
    found = torch.autograd.grad(y, list(p.values()), torch.ones_like(y), allow_unused=True)
    return [y, *found]


@pytest.mark.usefixtures("chain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["alone", "affine", "mlp"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_bits_of_dense_ones(
    layout: str, how: str, dtype: torch.dtype, device: str
) -> None:
    with at_every_size():
        found = _results(layout, how, device, dtype, dense=False)
        expected = _results(layout, how, device, dtype, dense=True)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["alone", "affine", "mlp"])
def test_parts_of_rows_are_not_copied(how: str, device: str) -> None:
    """Neither in a graph's forward nor in its backward: a copy is a launch for each of them."""
    torch.manual_seed(0)
    dtype = torch.bfloat16
    p = {
        "x": torch.randn(B, S, K, device=device, dtype=dtype, requires_grad=True),
        "whole": torch.randn(B, 6 * K, device=device, dtype=dtype, requires_grad=True),
        "gamma": torch.randn(K, device=device, dtype=dtype, requires_grad=True),
        "weight": torch.randn(N, K, device=device, dtype=dtype, requires_grad=True),
        "bias": torch.randn(N, device=device, dtype=dtype, requires_grad=True),
        "out": torch.randn(K, N, device=device, dtype=dtype, requires_grad=True),
    }

    def run(x: Tensor, whole: Tensor) -> Tensor:
        return _call(x, *_chunks(whole), p, how)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)

    def step() -> None:
        y = compiled(p["x"], p["whole"])
        torch.autograd.grad(y, list(p.values()), torch.ones_like(y), allow_unused=True)

    with at_every_size():
        step()
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as run_profile:
            step()
    events = run_profile.events()
    assert events is not None
    names = [event.name for event in events]
    assert any(name.startswith("fused_norm::norm_linear") for name in names)
    inside = [
        event
        for event in events
        if event.name in ("aten::copy_", "aten::clone")
        and event.cpu_parent is not None
        and event.cpu_parent.name.startswith("fused_norm::")
    ]
    assert not inside
