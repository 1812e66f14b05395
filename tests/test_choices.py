"""The table by which the forward on Hopper chooses its way."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accuracy import make_inputs
from fused_norm._parameters import Parameters

import fused_norm as fn
from fused_norm import _choices, _sm90

ROOT = Path(__file__).parent.parent


def test_table_is_what_was_measured() -> None:
    spec = importlib.util.spec_from_file_location("dispatch", ROOT / "scripts" / "dispatch.py")
    assert spec
    assert spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    measured = json.loads((ROOT / "benchmarks" / "h200-dispatch.json").read_text())
    assert script.table(measured["forward"]) == _choices.FASTEST
    assert script.ROWS == _choices.ROWS


@pytest.mark.parametrize(
    ("shape", "in_graph", "has_fold", "way"),
    [
        # Sizes that were measured, then some between them and beyond.
        ((8192, 4096, 4096), False, True, "k"),
        ((64, 4096, 12288), True, True, "t"),
        ((1024, 768, 2304), True, False, "t"),
        ((1576, 768, 3072), True, True, "t"),
        ((20000, 1024, 1280), True, False, "a"),
        ((1, 8, 8), False, False, "c"),
    ],
)
def test_nearest_measurement_counts(
    shape: tuple[int, int, int], in_graph: bool, has_fold: bool, way: str
) -> None:
    assert _choices.fastest(*shape, in_graph, has_fold) == way


def test_forward_goes_the_chosen_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice needs no GPU, so it is held to here with stand-ins for all that does."""
    x, gamma, beta, weight, bias = make_inputs(8, 64, 32, dtype=torch.bfloat16)
    parameters = Parameters(gamma, beta, weight, bias)
    gone: list[str] = []

    def going(way: str) -> Callable[..., None]:
        return lambda *_: gone.append(way)

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    captured = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured[0])
    for way in ("folded", "composed"):
        monkeypatch.setattr(_sm90, way, going(way))
    monkeypatch.setattr(_sm90, "_prepare_products", lambda *_: None)
    monkeypatch.setattr(_sm90._gpu, "forward", going("torch"))
    monkeypatch.setattr(_sm90, "_make", going("fold"))

    def forward(answers: str, *, statistics: bool = False) -> list[str]:
        """Run with the answers that the table gives to a fold, then without one."""
        gone.clear()
        monkeypatch.setattr(_sm90, "fastest", lambda *a: answers[not a[-1]])
        _sm90.forward(x, parameters, 1e-5, statistics)
        return list(gone)

    assert forward("cc") == ["composed"]
    assert forward("ct") == ["torch"]
    assert forward("ta") == ["fold", "folded"]
    # At first sight nothing is kept; then the fold is made, and later only used.
    assert forward("kc") == ["composed"]
    assert forward("kc") == ["fold", "folded"]
    parameters.folds[7].tensors = (x,)
    assert forward("kc") == ["folded"]
    assert forward("kc", statistics=True) == ["composed"]
    captured[0] = True
    assert forward("kt") == ["torch"]
    with fn.frozen_parameters():
        assert forward("kt") == ["folded"]
    weight.add_(1)
    with fn.frozen_parameters():
        assert forward("kt") == ["torch"]
    captured[0] = False
    assert forward("kc") == ["composed"]
    monkeypatch.setattr(parameters, "dtype", torch.float16)
    assert forward("ka") == ["composed"]
    monkeypatch.setattr(parameters, "dtype", torch.float32)
    for allowed in (True, False, True):
        monkeypatch.setattr(_sm90, "_may_use_tf32", lambda answer=allowed: answer)
        assert forward("ka") == ["composed" if allowed else "torch"]


@pytest.mark.parametrize(
    ("shape", "way"),
    [((8192, 4096, 4096), "c"), ((16384, 1024, 1024), "t"), ((1024, 768, 2304), "c")],
)
def test_choice_in_tf32(shape: tuple[int, int, int], way: str) -> None:
    assert _choices.fastest_in_tf32(*shape) == way


@pytest.mark.filterwarnings("ignore:Please use the new API")
def test_both_settings_for_tf32_are_read() -> None:
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    try:
        for precision, allowed in (("high", True), ("highest", False), ("medium", True)):
            torch.set_float32_matmul_precision(precision)
            assert _sm90._may_use_tf32() == allowed
        for allowed in (False, True):
            setting.allow_tf32 = allowed
            assert _sm90._may_use_tf32() == allowed
        for precision, allowed in (("ieee", False), ("tf32", True)):
            setting.fp32_precision = precision
            assert _sm90._may_use_tf32() == allowed
    finally:
        torch.set_float32_matmul_precision("highest")
        setting.fp32_precision = before
