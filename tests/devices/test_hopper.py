"""How forwards on Hopper go: what was measured, and the model fitted to it. No GPU is asked."""

from __future__ import annotations

import importlib
import json
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from mojo_programs import needs_mojo

import fused_norm as fn
from benchmarks import regret, regret_gpu
from benchmarks.environment import describe
from fused_norm.chain.kernels import is_hopper
from fused_norm.devices import choice, costs, hopper, hopper_fit, machine
from fused_norm.devices.hopper import GpuCall
from fused_norm.tuning import gpu
from fused_norm.tuning.sizes import Size

ROOT = Path(__file__).resolve().parents[2]
MEASURED = sorted((ROOT / "benchmarks/results").glob("gpu-calls-*.json"))


@pytest.fixture
def gpu_calls() -> ModuleType:
    return importlib.import_module("gpu_calls")


def calls_of(path: Path) -> list[GpuCall]:
    return [GpuCall(*each) for each in json.loads(path.read_text())["calls"]]


@needs_mojo
def test_shipped_data_is_what_was_measured(gpu_calls: ModuleType, tmp_path: Path) -> None:
    fitted = gpu_calls.fitted(MEASURED[0].parent, gpu_calls.terms_of)
    assert {path.stem for path in choice.SHIPPED.glob("nvidia-*.json")} == fitted.keys()
    for kind, device in fitted.items():
        costs.save(device, tmp_path / "fitted.json")
        shipped = choice.SHIPPED / f"{kind}.json"
        assert (tmp_path / "fitted.json").read_text() == shipped.read_text(), kind
        assert choice.load(shipped).as_array("bfloat16") == device.as_array("bfloat16")


def test_sizes_of_a_file_are_added(
    gpu_calls: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size that was measured before is replaced; the file says what was added, and where."""
    listed = tmp_path / "sizes.txt"
    listed.write_text("bfloat16 3 8 16\nfloat16 5 8 16\n")
    sizes = gpu_calls.sizes_of(listed)
    assert sizes == [Size("bfloat16", "", 3, 8, 16), Size("float16", "", 5, 8, 16)]
    listed.write_text("bfloat 3 8 16\n")
    with pytest.raises(ValueError, match="bfloat is none of float32"):
        gpu_calls.sizes_of(listed)
    environment = describe(torch.device("cpu"), "abc")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu_calls.environment, "describe", lambda device, commit: environment)
    old, new = ({"eager": us, "composed": us, "around": us} for us in (1.0, 2.0))
    path = tmp_path / "calls.json"
    before = [GpuCall("bfloat16", M, 8, 16, old, old) for M in (2, 3)]
    gpu_calls.write(path, None, before, {})
    content = json.loads(path.read_text())
    assert "added" not in content
    gpu_calls.write(
        path, None, [GpuCall(*size[:1], *size[2:], new, new) for size in sizes], content
    )
    assert [(call.dtype, call.M, call.graph["eager"]) for call in calls_of(path)] == [
        ("bfloat16", 2, 1.0),
        ("bfloat16", 3, 2.0),
        ("float16", 5, 2.0),
    ]
    added = json.loads(path.read_text())["added"]
    assert [(each["calls"], each["environment"]["commit"]) for each in added] == [(2, "abc")]


@needs_mojo
@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_model_is_near_what_was_measured(path: Path, gpu_calls: ModuleType) -> None:
    calls = calls_of(path)
    terms = gpu_calls.terms_of(calls)
    device = hopper.load(choice.SHIPPED / f"{path.stem.removeprefix('gpu-calls-')}.json")
    off = [
        abs(device.us(call, strategy, terms) / us - 1)
        for call in calls
        for strategy, us in call.graph.items()
        if strategy in hopper.STRATEGIES
    ]
    assert sorted(off)[len(off) // 2] < 0.08
    own = {call.dtype for call in calls}
    assert sum(each[0] in own for each in device.exceptions) < len(calls) / 2


@needs_mojo
@pytest.mark.parametrize("kind", sorted({path.stem[len("gpu-calls-") :] for path in MEASURED}))
def test_model_chooses_well_at_sizes_it_was_not_fitted_to(kind: str, gpu_calls: ModuleType) -> None:
    (fitted_path,) = [path for path in MEASURED if path.stem.endswith(kind)]
    fitted_to = {call[:4] for call in calls_of(fitted_path)}
    paths = sorted(fitted_path.parent.glob(f"gpu-regret-{kind}*.json"))
    assert paths
    seeds = [[call for call in calls_of(path) if call[:4] not in fitted_to] for path in paths]
    if "left_out" in json.loads(fitted_path.read_text()):
        seeds = [list(filter(_has_the_kernel_it_had, calls)) for calls in seeds]
    terms = gpu_calls.terms_of([call for calls in seeds for call in calls])
    device = hopper.load(choice.SHIPPED / f"{kind}.json")
    for is_launched, place in ((True, 1), (False, 3)):
        ratios = [
            [
                regret_gpu.regret(call._replace(graph=us, launched=us), "chosen", is_launched)
                for call in calls
                for us in [call.taken(is_launched)]
                for us in [us | {"chosen": us[device.chosen(call, terms)[place]]}]
            ]
            for calls in seeds
        ]
        assert all(statistics.median(each) <= 1.01 for each in ratios)
        assert statistics.mean(ratio for each in ratios for ratio in each) < 1.01


def _has_the_kernel_it_had(call: GpuCall) -> bool:
    """Return whether a call has few rows, or whole tiles, of which more than half of 132 SMs."""
    is_whole = call.M % 128 == 0 and call.N % 64 == 0
    return hopper.place(call) < 2 or (is_whole and call.M // 128 * call.N // 64 > 66)


def _timed(dtype: str, M: int, composed: float, around: float, launched: float) -> GpuCall:
    us = {"composed": composed, "around": around}
    return GpuCall(dtype, M, 128, 8, us, dict.fromkeys(us, launched))


def _alike(M: int, K: int, N: int) -> list[list[int]]:
    """Return terms of a model by which time grows with the rows alone."""
    return [[M] * hopper.TERMS] * len(hopper.PRODUCTS)


def test_sixteen_bits_take_the_same_time_in_both_dtypes() -> None:
    """Each is fitted to the calls of both, and its own count where both were measured."""
    sizes = [(M, 2.0 * M, 3.0 * M) for M in (1, 2, 4, 100, 200, 400)]
    calls = [_timed("bfloat16", *size, 900.0) for size in sizes]
    # Slower by our kernels in float16, where bfloat16 was not measured, and where it was.
    calls += [_timed("float16", 8, 48.0, 24.0, 900.0), _timed("float16", 4, 12.0, 8.0, 900.0)]
    calls += [_timed("float16", 300, 600.0, 900.0, 900.0)]
    fitted = hopper_fit.fit("nvidia-h100", {}, calls, _alike)
    assert {name.split(" ")[0] for name in fitted.costs} == {"bfloat16", "float16"}
    assert [each[:3] for each in fitted.exceptions] == [
        ["bfloat16", 8, 128],
        ["float16", 8, 128],
        ["float16", 4, 128],
    ]
    assert all(each[4:] == ["around"] * 5 for each in fitted.exceptions)


def test_time_of_the_host() -> None:
    """The lowest quarter of calls that it bounds is below it; without one, the fastest call."""
    calls = [_timed("bfloat16", M, 10.0, 10.0, 20.0 + M) for M in range(1, 100)]
    slow = [_timed("bfloat16", 100 + M, 19.0, 19.0, 20.0) for M in range(100)]
    assert hopper_fit.fit("", {}, [*calls, *slow], _alike).host["around"] == 45.0
    assert hopper_fit.fit("", {}, slow, _alike).host["around"] == 20.0


def test_device_and_host_both_count_where_they_are_near_each_other() -> None:
    """Hosts differ: a device that is almost as slow as its own may be the slower one elsewhere."""
    host = dict(zip(hopper.STRATEGIES, (27.0, 35.0, 32.0, 51.0), strict=True))
    for composed, launched in ((20.0, "composed"), (49.0, "around")):
        us = {"composed": composed, "around": 28.0}
        (_, (strategies, times), *_) = hopper.choices(us, host)
        assert min(strategies, key=times.__getitem__) == launched


def test_a_fold_made_anew_gains_more_than_a_pass_that_reads_the_cache() -> None:
    def call(M: int, anew: float) -> GpuCall:
        us = {"composed": 1.0 * M, "around": 2.0 * M, "kept": 0.9 * M, "anew": anew * M}
        return GpuCall("bfloat16", M, 128, 8, us, dict.fromkeys(us, 900.0))

    for anew, chosen in ((0.99, "composed"), (0.97, "anew")):
        device = hopper_fit.fit("", {}, [call(M, anew) for M in (1, 2, 100, 200)], _alike)
        *_, in_graph, _ = device.chosen(call(150, anew), _alike)
        assert (in_graph, device.exceptions) == (chosen, []), anew


def test_few_calls_are_no_exceptions() -> None:
    """Without calls of more than 64 rows, there are no costs that they could differ from."""
    calls = [_timed("bfloat16", M, 10.0, 20.0, 20.0) for M in (1, 2)]
    calls.append(_timed("float32", 3, 20.0, 10.0, 20.0))
    fitted = hopper_fit.fit("", {}, calls, _alike)
    assert (fitted.costs, fitted.exceptions) == ({}, [])


SETS = len(hopper.ROWS)


def test_each_kernel_has_costs_of_its_own() -> None:
    """Sums of one k block run in tiles, however few rows there are."""
    sizes = {(16, 72): 0, (17, 72): 1, (64, 72): 1, (65, 72): 2, (1, 64): 2}
    for (M, K), place in sizes.items():
        assert hopper.place(GpuCall("bfloat16", M, K, 8, {}, {})) == place, (M, K)


def test_few_calls_of_a_kernel_for_few_rows() -> None:
    """Costs of 17 to 64 rows are those of all few rows until there are calls enough."""
    calls = [_timed("bfloat16", M, 2.0 * M, 9.0 * M, 900.0) for M in (*range(1, 17), 100, 200)]
    few = [_timed("bfloat16", M, 4.0 * M, 9.0 * M, 900.0) for M in range(20, 36)]
    assert len(few) == hopper_fit.ENOUGH
    for found, slower in ((few[:1], False), (few, True)):
        costs_ = hopper_fit.fit("", {}, [*calls, *found], _alike).costs["bfloat16 composed"]
        assert (sum(costs_[1]) > 3 * sum(costs_[2]) / 2) == slower


def _device(**changed: Any) -> dict[str, Any]:
    strategies = {
        f"bfloat16 {strategy}": [[1.0] * hopper.TERMS] * SETS for strategy in hopper.STRATEGIES
    }
    host = dict.fromkeys(hopper.STRATEGIES, 10.0)
    exception = ["bfloat16", 8, 8, 8, *["composed"] * 5]
    whole = {"name": "nvidia-h100", "about": {}, "costs": strategies, "host": host}
    whole["version"] = hopper.VERSION
    return whole | {"exceptions": [exception]} | changed


DAMAGED = {
    "no costs of a strategy": {"costs": {"bfloat16 composed": [[1.0] * hopper.TERMS] * SETS}},
    "fewer terms": {
        "costs": {f"bfloat16 {strategy}": [[1.0]] * SETS for strategy in hopper.STRATEGIES}
    },
    "negative": {
        "costs": {f"bfloat16 {w}": [[-1.0] * hopper.TERMS] * SETS for w in hopper.STRATEGIES}
    },
    "no host": {"host": {}},
    "costs of other terms": {"version": hopper.VERSION - 1},
    "an exception of fewer strategies": {"exceptions": [["bfloat16", 8, 8, 8, "composed"]]},
    "an exception of another strategy": {"exceptions": [["bfloat16", 8, 8, 8, *["fused"] * 5]]},
    "an exception of no size": {"exceptions": [["bfloat16", 0, 8, 8, *["around"] * 5]]},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_measurements_are_refused(name: str, tmp_path: Path) -> None:
    """Kernels read what they are given unchecked."""
    path = tmp_path / "tuned-nvidia-h100.json"
    path.write_text(json.dumps(_device()))
    assert len(choice.load(path).as_array("bfloat16")) == 6 + SETS * 4 * hopper.TERMS + 8
    path.write_text(json.dumps(_device(**DAMAGED[name])))
    with pytest.raises(ValueError, match="holds no measurements of a device"):
        choice.load(path)


NAMES = {
    "NVIDIA H100 80GB HBM3": "nvidia-h100",
    "NVIDIA H200": "nvidia-h200",
    "NVIDIA GH200 480GB": "nvidia-h200",
    "NVIDIA H20": "nvidia-h100",
}


@pytest.mark.parametrize("name", NAMES)
def test_kind_of_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert machine.hopper_kind.__wrapped__(0) == NAMES[name]


def test_other_gpus_have_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="unless it is a Hopper"):
        fn.tune(device="cuda")
    with pytest.raises(RuntimeError, match="unless it is a Hopper"):
        regret_gpu.measured(1, 1, 0.1, ["bfloat16"])


def test_ratios_and_what_is_shown(tmp_path: Path) -> None:
    graph = {"eager": 10.0, "composed": 8.0, "around": 9.0, "kept": 4.0, "anew": 12.0}
    chosen = {"chosen": 9.0, "chosen frozen": 6.0}
    slower = {name: 2 * us for name, us in (graph | chosen).items()}
    call = GpuCall("bfloat16", 3, 8, 16, graph | chosen, slower)
    assert regret_gpu.regret(call, "chosen", False) == 9 / 8
    assert regret_gpu.regret(call, "chosen frozen", True) == 6 / 4
    assert regret_gpu.of_eager(call, "chosen", False) == 0.9
    saved = tmp_path / "regret.json"
    document = {"environment": {"device": "cuda"}, "calls": [list(call)]}
    saved.write_text(json.dumps(document))
    drawn = tmp_path / "regret.svg"
    assert regret.main(["--from-json", str(saved), "--plot", str(drawn)]) == 0
    assert "</svg>" in drawn.read_text()


def test_training_has_nothing_frozen() -> None:
    us = {"eager": 10.0, "composed": 8.0, "around": 9.0, "anew": 12.0, "chosen": 9.0}
    call = GpuCall("bfloat16", 3, 8, 16, us, us)
    assert regret_gpu.chosen(call) == ["chosen"]
    assert regret_gpu.regret(call, "chosen", False) == 9 / 8
    assert regret_gpu.table([call]).row_count == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("normalization", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("trains", [False, True])
def test_a_call_is_measured(trains: bool, normalization: str) -> None:
    if not is_hopper(0):
        pytest.skip("its choices are those of Hoppers")
    size = Size("bfloat16", "", 256, 512, 768)
    how: Any = {"trains": trains, "normalization": normalization}
    call = gpu.measure(size, 0.001, regret_gpu.CHOSEN, **how)
    assert "kept" in call.graph or trains
    assert regret_gpu.chosen(call) == (["chosen"] if trains else list(regret_gpu.CHOSEN))
    assert all(us > 0 for found in (call.graph, call.launched) for us in found.values())
    assert call.graph.keys() == call.launched.keys()
