"""How calls on a CPU run: what was measured, the model fitted to it, and this machine's own."""

from __future__ import annotations

import ctypes
import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import run_python
from strategies import tell_again
from torch import nn

import fused_norm as fn
from fused_norm import tuning
from fused_norm.call.record import AROUND_PRODUCTS, FUSED
from fused_norm.chain import library
from fused_norm.devices import choice, costs, machine
from fused_norm.devices.costs import Measured
from fused_norm.tuning import cpu, sizes
from fused_norm.tuning.sizes import Size

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.as_dispatched


@pytest.fixture(scope="module")
def cpu_calls() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts/measure")
        return importlib.import_module("cpu_calls")


@pytest.fixture(scope="module")
def fitted(cpu_calls: Any) -> dict[str, costs.Device]:
    """Every kind's model, which takes seconds to fit."""
    return cpu_calls.fitted()


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for this machine's measurements; kernels stay where they are."""
    monkeypatch.setattr(choice, "tuned_path", lambda kind: tmp_path / "tuned.json")
    choice.forget()
    tell_again()
    yield tmp_path
    monkeypatch.undo()
    choice.forget()
    tell_again()


def test_shipped_data_is_what_was_measured(fitted: dict[str, costs.Device], tmp_path: Path) -> None:
    shipped = {path.stem for path in choice.SHIPPED.glob("*.json")}
    assert {kind for kind in shipped if not kind.startswith("nvidia-")} == fitted.keys()
    for kind, device in fitted.items():
        costs.save(device, tmp_path / "fitted.json")
        shipped = choice.SHIPPED / f"{kind}.json"
        assert (tmp_path / "fitted.json").read_text() == shipped.read_text(), kind
        assert costs.load(shipped).as_array("float32") == device.as_array("float32")


@pytest.mark.parametrize(("kind", "rows"), [("amd-zen4", 48), ("intel-avx512", 8)])
def test_shipped_data_says_which_few_rows_are_estimates(kind: str, rows: int) -> None:
    """With AMD's AVX-512, the kernel that came after the measurements takes more of them."""
    about = costs.load(choice.SHIPPED / f"{kind}.json").about
    assert "measured" in about
    assert about["estimated"].startswith(f"for calls of up to {rows} rows, ")


def test_model_is_near_what_was_measured(cpu_calls: Any, fitted: dict[str, costs.Device]) -> None:
    for kind, device in fitted.items():
        if "measured" not in device.about:
            continue
        calls = [Measured(*c) for c in json.loads(cpu_calls.file_of(kind).read_text())["calls"]]
        off = [abs(device.us(c, w) / c.us[w] - 1) for c in calls for w in costs.STRATEGIES]
        assert sorted(off)[len(off) // 2] < 0.15, kind
        assert len(device.exceptions) < len(calls) / 6, kind


def _device(name: str, fused: float, around: float, exceptions: list[list[Any]]) -> costs.Device:
    """Return a device on which products cost what is given, and nothing else anything."""
    by_strategy = {"fused": fused, "around": around}
    found = {
        f"float32 {kind} {direction} {strategy}": [[0.0, cost, *[0.0] * (costs.TERMS - 2)]]
        * len(costs.SETS)
        for kind in costs.KINDS
        for direction in costs.DIRECTIONS
        for strategy, cost in by_strategy.items()
    }
    return costs.Device(name, {"measured": "today", "calls": 0}, found, exceptions)


def _goes_around(M: int, K: int, N: int, **options: Any) -> bool:
    """Return whether a call multiplies by PyTorch's product, by the bits of its results."""
    is_training = options.pop("training", False)
    x, weight = torch.randn(M, K), torch.randn(N, K)
    x.requires_grad_(is_training)

    def results() -> list[bytes]:
        y = fn.norm_linear(x, weight, **options)
        dx = torch.autograd.grad(y, x, torch.ones_like(y)) if is_training else ()
        return [t.detach().numpy().tobytes() for t in (y, *dx)]

    found = results()
    with cpu.strategies() as go:
        go(FUSED)
        fused = results()
        go(AROUND_PRODUCTS)
        around = results()
    assert all(a != b for a, b in zip(fused, around, strict=True))
    assert found in (fused, around)
    return found == around


@pytest.mark.parametrize("kind", [{}, {"activation": "gelu"}, {"activation": "swiglu"}])
@pytest.mark.parametrize("training", [False, True])
def test_calls_go_the_cheaper_way(
    own_folder: Path, kind: dict[str, str], training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library.load() is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr("fused_norm.ops.norm_linear.is_host_bound", lambda t: False)
    place = choice.tuned_path(machine.cpu_kind())
    for fused, around, expected in ((1.0, 2.0, False), (2.0, 1.0, True)):
        costs.save(_device("cpu", fused, around, []), place)
        choice.forget()
        tell_again()
        assert _goes_around(300, 640, 96, training=training, **kind) is expected
        name = "gate" if kind.get("activation") == "swiglu" else "activation" if kind else ""
        direction = costs.DIRECTIONS[training]
        other = costs.STRATEGIES[not expected]
        exceptions = [["float32", name, direction, 330, 640, 90, other]]
        # A backward is that of the product alone, whatever follows it.
        exceptions += [["float32", "", "training", 330, 640, 90, other]] if training else []
        costs.save(_device("cpu", fused, around, exceptions), place)
        choice.forget()
        tell_again()
        assert _goes_around(300, 640, 96, training=training, **kind) is not expected
        assert _goes_around(300, 640, 128, training=training, **kind) is expected


def test_chosen_by_the_model_in_both_languages(own_folder: Path) -> None:
    """Sizes drawn take the strategy that the model of Python chooses."""
    chain = library.load()
    if chain is None:
        pytest.skip("there is no C++ compiler")
    chain.chain_fastest.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 5, ctypes.c_int]
    chain.chain_fastest.restype = ctypes.c_int64
    device = choice.device(machine.cpu_kind())
    if device is None:
        pytest.skip("nothing like this CPU was measured")
    tried = set()
    for size in sizes.draw(300, 7, ["float32"]):
        if size.kind:
            continue
        call = Measured("float32", "", "forward", torch.get_num_threads(), *size[2:], {})
        by_model = [device.us(call, strategy) or 0.0 for strategy in costs.STRATEGIES]
        is_near = any(
            e[:3] == ["float32", "", "forward"]
            and all(max(a / b, b / a) < 1.3 for a, b in zip(e[3:6], size[2:], strict=True))
            for e in device.exceptions
        )
        if is_near or abs(by_model[0] / by_model[1] - 1) < 1e-3:
            continue
        expected = by_model[1] < by_model[0]
        costs_ = ctypes.c_void_p(choice.address(machine.cpu_kind(), "float32"))
        strategy = chain.chain_fastest(costs_, 0, *size[2:], call.threads, 0)
        assert (strategy == AROUND_PRODUCTS) is expected, size
        tried.add(expected)
    assert tried == {True, False}


def test_tune_measures_and_is_used(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if library.load() is None:
        pytest.skip("there is no C++ compiler")
    shipped = choice.path(machine.cpu_kind())
    model = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 40))
    seen = []
    measure = tuning.measure
    monkeypatch.setattr(
        tuning, "measure", lambda size, *rest: seen.append(size) or measure(size, *rest)
    )
    path = fn.tune(model, torch.randn(5, 24), seconds=2.0, sizes=[(3, 16, 8)])
    assert path == choice.path(machine.cpu_kind()) == own_folder / "tuned.json"
    assert Size("float32", "", 5, 24, 40) in seen
    assert {Size(dtype, "", 3, 16, 8) for dtype in sizes.DTYPES} <= set(seen)
    device = choice.device(machine.cpu_kind())
    assert device is not None
    assert device.about["calls"] == len(seen)
    fn.norm_linear(torch.randn(5, 24), torch.randn(40, 24))
    monkeypatch.setenv(choice.SWITCH, "0")
    choice.forget()
    assert choice.path(machine.cpu_kind()) == shipped


def test_nothing_is_written_where_nothing_is_measured(own_folder: Path) -> None:
    with pytest.raises(RuntimeError, match="nothing was measured in 0 s"):
        fn.tune(seconds=0.0)
    for wrong in ({"seconds": float("inf")}, {"seconds": 1.0, "device": "cuda:0"}):
        with pytest.raises(ValueError, match="must be"):
            fn.tune(**wrong)
    assert not list(own_folder.glob("*.json"))


def _damaged() -> dict[str, Any]:
    """Return files that an interrupted, an older or another program may have left."""
    whole = _device("cpu", 1.0, 2.0, [["float32", "", "forward", 3, 4, 5, "around"]])._asdict()
    costs_ = whole["costs"]
    first = next(iter(costs_))
    return {
        "something else": {"name": "cpu"},
        "a list": [1],
        "costs of other terms": whole | {"version": costs.VERSION - 1},
        "no version": {name: each for name, each in whole.items() if name != "version"},
        "no costs at all": whole | {"costs": {}, "exceptions": []},
        "no costs of a strategy": whole | {"costs": dict(list(costs_.items())[1:])},
        "a model of fewer terms": whole
        | {"costs": {name: [each[1:] for each in cost] for name, cost in costs_.items()}},
        "fewer sets of rows": whole | {"costs": costs_ | {first: costs_[first][1:]}},
        "a cost that is no number": whole
        | {"costs": costs_ | {first: [[math.nan] * costs.TERMS] * len(costs.SETS)}},
        "an exception without a strategy": whole
        | {"exceptions": [["float32", "", "forward", 3, 4, 5]]},
        "an exception of no size": whole
        | {"exceptions": [["float32", "", "forward", 0, 4, 5, "fused"]]},
        "another dtype": whole | {"costs": {f"int8{n[7:]}": c for n, c in costs_.items()}},
    }


@pytest.mark.parametrize("name", [*_damaged(), "half a file"])
def test_damaged_measurements_are_not_used(name: str, own_folder: Path) -> None:
    """Calls use the shipped ones and say so: the chain reads its input unchecked."""
    shipped, tuned = choice.path(machine.cpu_kind()), own_folder / "tuned.json"
    text = '{"name": ' if name == "half a file" else json.dumps(_damaged()[name])
    tuned.write_text(text)
    with pytest.raises(ValueError, match="holds no measurements of a device"):
        costs.load(tuned)
    choice.forget()
    tell_again()
    with pytest.warns(UserWarning, match="uses the shipped measurements"):
        found = choice.path(machine.cpu_kind())
    assert found == shipped
    x, weight = torch.randn(30, 24), torch.randn(40, 24)
    expected = F.linear(F.layer_norm(x, (24,)), weight)
    torch.testing.assert_close(fn.norm_linear(x, weight), expected)


FLAGS = {
    "amd-zen3": "avx avx2 fma sse4a",
    "amd-zen4": "avx avx2 fma sse4a avx512f avx512_bf16",
    "intel-avx2": "avx avx2 fma",
    "intel-avx512": "avx avx2 fma avx512f",
    None: "sse2",
}


@pytest.mark.parametrize("kind", FLAGS)
def test_kind_of_a_cpu(kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "flags", lambda: frozenset(FLAGS[kind].split()))
    monkeypatch.setattr(machine, "has_tiles", lambda: False)
    monkeypatch.setattr(machine, "_family", lambda: 25)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert machine.cpu_kind.__wrapped__() == kind
    assert kind is None or (choice.SHIPPED / f"{kind}.json").is_file()


def test_command_line(tmp_path: Path) -> None:
    wrong = run_python("-m", "fused_norm", "tune", "--sizes", "1,2")
    assert wrong.returncode == 2
    assert "a size is M,K,N, three positive integers: got '1,2'" in " ".join(wrong.stderr.split())
