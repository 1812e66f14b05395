"""What `fn.explain` says of a model: of which call, what is fused, and why the rest is not."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import sys
import termios
from collections import Counter

import pytest
import torch
from small_model import SMALL, Model
from torch import Tensor, nn

import fused_norm as fn

pytestmark = pytest.mark.usefixtures("fresh_backend")


@pytest.mark.as_dispatched
def test_report_is_of_the_call_that_is_asked_about() -> None:
    """Small calls are left before Inductor, and not where options or a mode have them fused."""
    model, x = Model(), torch.randn(2, 9, 32)
    left = fn.explain(model, x)
    assert left.fused == []
    reason = "PyTorch's ops are faster for a call this small"
    assert left.summary() == f"0 of 4 norms fused in 1 graph: {reason} (4 of 4)"
    assert {site.implementation for site in fn.explain(model, x, options=SMALL).sites} == {
        "kernels"
    }
    assert {
        site.implementation for site in fn.explain(model, x, options={"then": "eager"}).sites
    } == {reason}
    assert len(fn.explain(model, x, mode="reduce-overhead").fused) == 4
    sizes = {size for s in fn.explain(model, x, dynamic=True).sites for size in s.shape}
    assert not sizes <= {"2", "9", "32"}
    with pytest.raises(RuntimeError, match="Either mode or options"):
        fn.explain(model, x, options=SMALL, mode="reduce-overhead")


def test_report_fits_its_terminal_and_keeps_every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it had up to 160 columns, which a terminal of 80 broke anywhere."""
    report = fn.explain(Model(), torch.randn(2, 9, 32), options=SMALL)
    wide = str(report)
    controller, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with os.fdopen(controller, "rb"), os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        narrow = str(report)
        monkeypatch.undo()
    assert max(map(len, wide.splitlines())) > 60
    assert max(map(len, narrow.splitlines())) <= 60
    assert report.summary() in wide
    letters = [Counter(re.sub(r"\W", "", text)) for text in (wide, narrow)]
    assert letters[0] == letters[1]


@pytest.mark.as_dispatched
def test_rows_that_come_transposed_are_fused_in_training() -> None:
    """They were left to PyTorch, as calls copied them: Inductor lays them out for calls now."""
    x = torch.randn(2, 20000, 32)
    for given in (x, x.mT.contiguous().mT):
        for options in ({}, SMALL):
            assert len(fn.explain(Model(), given, training=True, options=options).fused) == 4
        with torch.no_grad():
            assert len(fn.explain(Model(), given).fused) == 4


def test_report_tells_training_from_inference() -> None:
    seen = []

    class Watched(Model):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.is_grad_enabled())
            return super().forward(x)

    for training in (False, True):
        torch._dynamo.reset()
        fn.explain(torch.compiler.disable(Watched()), torch.randn(2, 9, 32), training=training)
    assert seen == [False, True]


def test_bfloat16_of_a_cpu_whose_instructions_only_pytorch_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`explain` says what `doctor` says."""
    monkeypatch.setattr(
        "fused_norm.chain.kernels.bfloat16_product", lambda: "avx512_bf16 and sse4a"
    )
    model, x = Model().bfloat16(), torch.randn(2, 9, 32, dtype=torch.bfloat16)
    reason = "PyTorch's products of bfloat16 use avx512_bf16 and sse4a here, and ours do not"
    assert reason in fn.explain(model, x).summary()
    assert {site.implementation for site in fn.explain(model, x, options=SMALL).sites} == {reason}
    with fn.batch_invariant():
        assert {site.implementation for site in fn.explain(model, x, options=SMALL).sites} == {
            "kernels"
        }


def test_report() -> None:
    report = fn.explain(Model(), torch.randn(2, 9, 32), options=SMALL)
    assert [site.path for site in report.sites] == [
        f"blocks.{i}.norm{j}" for i in range(2) for j in (1, 2)
    ]
    assert all(site.fused and site.bytes_saved > 0 for site in report.sites)
    assert all(site.ops_after < site.ops_before for site in report.sites if "mlp" in site.calls[0])
    data = json.loads(report.to_json())
    assert data["graphs"] == 1
    assert data["sites"][1]["calls"] == ["norm_mlp: residual, swiglu"]
    text = str(report)
    assert text.splitlines()[-1].startswith("4 of 4 norms fused in 1 graph: ")
    assert "blocks.0.norm1" in text


def test_report_says_why_not() -> None:
    report = fn.explain(nn.Sequential(nn.LayerNorm(8), nn.Tanh()), torch.randn(2, 8))
    assert report.sites[0].reason == "output read by no Linear: tanh"
    assert "left: output read by no Linear: tanh" in str(report)


def test_fast_path_of_pytorch_has_no_norms() -> None:
    """In inference PyTorch's encoder layer is one op, which can be switched off."""
    layer = nn.TransformerEncoderLayer(32, 2, 48, 0.0, batch_first=True, norm_first=True).eval()
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        expected = layer(x)
        report = fn.explain(layer, x)
        assert report.sites == []
        assert str(report).startswith(
            "0 of 0 norms fused in 1 graph: PyTorch computes 1 encoder layer"
        )
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert len(fn.explain(layer, x, options=SMALL).fused) == 2
            compiled = torch.compile(layer, backend="fused_norm", options={"then": "eager"})
            torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
