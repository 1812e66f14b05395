"""`explain`: that it tells what the call with the same arguments does, and times it."""

from __future__ import annotations

import functools
import sys
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fused_norm as fn
from fused_norm.models import Report, Site, backend

pytestmark = [
    pytest.mark.as_dispatched,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    # PyTorch's compiler, where a graph breaks.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
SMALL = {"then": "eager", "small": True}


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.attention = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


class Broken(Block):
    """Looks at a number between a norm and its Linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm1(x)
        if z.sum().item() > 1e9:
            z = z * 2
        return self.attention(z)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    ("options", "mode"),
    [
        (None, None),
        ({"small": True}, None),
        (None, "reduce-overhead"),
        (None, "max-autotune-no-cudagraphs"),
        ({"triton.cudagraphs": True}, None),
        ({"rounding": "model", "then": "eager"}, None),
        (SMALL, None),
        ({"then": "eager", "small": False}, None),
        ({"then": "aot_eager"}, None),
    ],
)
def test_tells_what_the_call_does(
    options: dict[str, Any] | None,
    mode: str | None,
    dynamic: bool | None,
    training: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Site by site, what the backend itself records for the same call."""
    # What Inductor makes of a graph is not looked at.
    module = sys.modules["fused_norm.models.backend"]
    monkeypatch.setattr(module, "compiled_next", lambda module, *_: module.forward)
    x = torch.randn(2, 9, 32)
    dtype = torch.bfloat16 if options and "rounding" in options else torch.float32
    model, x = Block().to(dtype), x.to(dtype)
    torch._dynamo.reset()
    told = fn.explain(
        model, x, options=options, mode=mode, dynamic=dynamic, training=training
    ).sites
    torch._dynamo.reset()
    done: list[Site] = []
    # `torch.compile` passes both on to a backend of this kind.
    ours = functools.partial(backend, sites=done, options=options, mode=mode)
    with torch.set_grad_enabled(training):
        torch.compile(model, backend=ours, dynamic=dynamic)(x)
    assert len(told) == 2
    assert list(map(asdict, told)) == list(map(asdict, done))


@pytest.mark.parametrize("options", [SMALL, {"then": "aot_eager"}], ids=["eager", "aot_eager"])
@pytest.mark.parametrize("training", [False, True])
def test_times_each_site(options: dict[str, Any], training: bool) -> None:
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 9, 32)
    report = fn.explain(model, x, options=options, training=training, time=True)
    assert len(report.fused) == 4
    assert all(site.seconds_before > 0 and site.seconds_after > 0 for site in report.fused)
    assert "before → after" in str(report)
    assert "µs" in str(report)
    assert "µs" not in str(fn.explain(model, x, options=options))


def test_times_under_autocast_and_with_dynamic_sizes() -> None:
    block = Block()

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return block(x)

    x = torch.randn(2, 9, 32)
    report = fn.explain(function, x, options=SMALL, dynamic=True, time=True)
    assert len(report.fused) == 2
    assert all(site.seconds_after > 0 for site in report.fused)


def test_what_is_timed_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("fused_norm.models.report.measure", lambda each, _: seen.append(each))
    fn.explain(Block(), torch.randn(2, 9, 32), options=SMALL, time=True)
    assert len(seen) == 2
    for each in seen:
        inputs = [torch.randn(like.shape) for like in each.inputs]
        before, after = each.before(*inputs), each.after(*inputs)
        assert len(before) == len(after) > 0
        for own, ours in zip(before, after, strict=True):
            torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


def test_says_that_a_graph_break_cuts_a_norm_off() -> None:
    report = fn.explain(Broken(), torch.randn(2, 9, 32), options=SMALL)
    assert report.graphs == 2
    assert "1 norm read beyond a break (" in report.summary()
    assert "item" in report.breaks[0]


def test_layers_that_are_alike_share_a_line_and_no_column_is_empty() -> None:
    sites = [Site(f"layers.{i}.norm", "layer_norm", ("8", "64"), "float32") for i in range(3)]
    lines = str(Report(sites, 1)).splitlines()
    assert lines[3].startswith("│ 3 x layers.*.norm │ layer_norm │ 8 x 64 float32 │")
    assert all(title.strip() for title in lines[1].strip("┃").split("┃"))
