"""Folds in C++: those that Python keeps are found again, and none that is out of date.

Only Hopper folds. Here a CPU does, by kernels that stand in: they write which fold they are given.
"""

from __future__ import annotations

import gc
import shutil
import subprocess
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from accuracy import make_inputs
from torch import Tensor

import fused_norm as fn
from fused_norm.backends import compiled as backends_compiled
from fused_norm.backends import sm90
from fused_norm.call import folds, record
from fused_norm.call import parameters as known_parameters
from fused_norm.call.folds import Fold
from fused_norm.call.parameters import Parameters
from fused_norm.native import node
from fused_norm.ops import compiled, seam

M, K, N = 6, 16, 8
# y is the first element of the fold, or 0 where there is none.
KERNELS = """
#include <stdint.h>
int64_t norm_linear_plan_forward(int64_t* call) {
  call[WAY] = call[MAY_KEEP] ? KEPT_FOLD : FUSED;
  call[WORKSPACE_BYTES] = 8 * call[M];
  return 0;
}
int64_t norm_linear_forward(int64_t* call) {
  uint16_t *y = (uint16_t*)call[Y], *fold = (uint16_t*)call[FOLD_WEIGHT];
  for (int64_t i = 0; i < call[M] * call[N]; ++i) y[i] = call[WAY] == KEPT_FOLD ? *fold : 0;
  ((int64_t*)call[WORKSPACE])[call[M] - 1] = 1;
  return 0;
}
"""


class Kept:
    """A call by the stand-ins, and what Python did for it."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Tensor]] = []
        self.asked = 0

    def make(self, fold: Fold, parameters: Parameters, *_: object) -> None:
        """Make a fold that is its number, from 1 on."""
        number = len(self.made) + 1
        folded = torch.full((parameters.products, parameters.K), number, dtype=torch.bfloat16)
        self.made.append(weakref.ref(folded))
        fold.tensors = folded, torch.zeros(2, parameters.products)

    def fold(self, *arguments: Any) -> Any:
        """Return what Python keeps."""
        self.asked += 1
        return python_fold(*arguments)

    def used(self, inputs: list[Tensor], **options: Any) -> int:
        """Return the number of the fold that a call uses, 0 for none."""
        x, gamma, beta, weight, bias = inputs
        y = fn.norm_linear(x, weight, bias, norm_weight=gamma, norm_bias=beta, **options)
        assert (y == y.flatten()[0]).all()
        return int(y.flatten()[0])


python_fold = backends_compiled.fold


@pytest.fixture
def kept(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    source, kernels = tmp_path / "kernels.c", tmp_path / "kernels.so"
    fields = [name for name, _ in record.Call._fields_]
    numbers = {name.upper(): index for index, name in enumerate(fields)}
    numbers |= {name: getattr(record, name) for name in ("FUSED", "KEPT_FOLD")}
    defines = "".join(f"#define {name} {number}\n" for name, number in numbers.items())
    source.write_text(defines + KERNELS)
    compiler = node.compiler()
    assert compiler is not None
    command = [compiler, "-x", "c", "-shared", "-fPIC", str(source), "-o", str(kernels)]
    subprocess.run(command, check=True)
    torch.ops.load_library(str(kernels))
    # A copy of the node has found no kernels yet.
    module = node.import_from(Path(shutil.copy(library, tmp_path / "node.so")))
    found = Kept()
    monkeypatch.setattr(backends_compiled, "kernels", lambda *_: (str(kernels), 0, 0, "", 0))
    monkeypatch.setattr(backends_compiled, "fold", found.fold)
    monkeypatch.setattr(sm90, "_make", found.make)
    monkeypatch.setattr(sm90, "launcher_of", lambda *_: (None, 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    monkeypatch.setattr(compiled, "module", lambda: module)
    compiled.tell(module)
    known_parameters._kept.clear()
    yield found
    known_parameters._kept.clear()


def make(**options: Any) -> list[Tensor]:
    return make_inputs(M, K, N, dtype=torch.bfloat16, **options)


def test_python_is_asked_twice(kept: Kept) -> None:
    """At first sight nothing is kept; then Python makes the fold, and is not asked again."""
    inputs = make()
    assert [kept.used(inputs) for _ in range(5)] == [0, 1, 1, 1, 1]
    assert kept.asked == 2
    others = make()
    assert [kept.used(others) for _ in range(3)] == [0, 2, 2]
    assert kept.used(inputs) == 1
    assert kept.asked == 4


@pytest.mark.parametrize("rows", [1, 3, 300])
def test_any_rows_share_a_fold(rows: int, kept: Kept) -> None:
    inputs = make()
    assert [kept.used(inputs) for _ in range(2)] == [0, 1]
    x = torch.randn(rows, K).bfloat16()
    assert kept.used([x, *inputs[1:]]) == 1


def test_parameters_may_be_missing(kept: Kept) -> None:
    x, gamma, beta, weight, bias = make()
    for number, (g, b, c) in enumerate(((None, None, None), (gamma, None, bias)), 1):
        inputs = [x, g, b, weight, c]
        assert [kept.used(inputs) for _ in range(3)] == [0, number, number]
    # Known by the weight, but with others beside it.
    assert [kept.used([x, gamma, beta, weight, bias]) for _ in range(2)] == [0, 3]


@pytest.mark.parametrize("index", [1, 2, 3, 4], ids=["gamma", "beta", "weight", "bias"])
def test_change_in_place(index: int, kept: Kept) -> None:
    inputs = make()
    assert [kept.used(inputs) for _ in range(3)] == [0, 1, 1]
    inputs[index].mul_(2)
    assert [kept.used(inputs) for _ in range(3)] == [0, 2, 2]
    inputs[index][:1].fill_(0)
    assert [kept.used(inputs) for _ in range(3)] == [0, 3, 3]


@pytest.mark.parametrize("index", [1, 2, 3, 4], ids=["gamma", "beta", "weight", "bias"])
def test_other_data(index: int, kept: Kept) -> None:
    inputs = make()
    assert [kept.used(inputs) for _ in range(3)] == [0, 1, 1]
    inputs[index].data = inputs[index].data.clone()
    assert [kept.used(inputs) for _ in range(3)] == [0, 2, 2]


@pytest.mark.parametrize("by_python", [False, True])
def test_other_data_at_the_same_address(by_python: bool, kept: Kept) -> None:
    """Regression: data that replaced other data may lie where the first lay, in its version."""
    inputs = make()
    weight = inputs[3]
    memory = bytearray(weight.numel() * weight.element_size())

    def replace() -> None:
        weight.data = torch.frombuffer(memory, dtype=torch.bfloat16).view(N, K)

    def used() -> bool:
        if not by_python:
            return kept.used(inputs) > 0
        found = known_parameters.of(*inputs[1:])
        return sm90.kept_fold(found) is not None

    replace()
    before = weight._version, weight.data_ptr()
    assert [used() for _ in range(3)] == [False, True, True]
    replace()
    assert (weight._version, weight.data_ptr()) == before
    assert [used() for _ in range(2)] == [False, True]
    assert len(kept.made) == 2


def test_other_sizes_of_the_same_data(kept: Kept) -> None:
    x, _, _, weight, _ = make()
    inputs = [x, None, None, weight, None]
    assert [kept.used(inputs) for _ in range(3)] == [0, 1, 1]
    whole = weight.data
    for other in (whole[: N // 2], whole.view(2 * N, K // 2), whole.view(N // 2, 2 * K)):
        weight.data = other
        inputs[0] = torch.randn(M, other.shape[1]).bfloat16()
        assert kept.used(inputs) == 0


def test_other_dtype_of_the_same_data(kept: Kept) -> None:
    """Of gamma's bytes, whose first half may be as many elements of float32 as before."""
    inputs = make()
    double = torch.randn(2 * K).bfloat16()
    inputs[1].data = double[:K]
    assert [kept.used(inputs) for _ in range(3)] == [0, 1, 1]
    inputs[1].data = double.view(torch.float32)
    inputs[2].data = inputs[2].data.float()
    assert kept.used(inputs) == 0


def test_other_parameters_in_the_same_memory(kept: Kept) -> None:
    """Regression: a freed parameter's successor may have its address, its id and its version."""
    x, gamma, beta, weight, bias = make()
    for number in range(1, 20):
        inputs = [x, gamma * number, beta, weight, bias]
        assert [kept.used(inputs) for _ in range(3)] == [0, number, number]


def test_kept_by_python_alone(kept: Kept) -> None:
    inputs = make()
    assert [kept.used(inputs) for _ in range(3)] == [0, 1, 1]
    (made,) = kept.made
    assert made() is not None
    # PyTorch swaps the tensors of modules after this.
    known_parameters._kept.clear()
    gc.collect()
    assert made() is None
    assert [kept.used(inputs) for _ in range(3)] == [0, 2, 2]
    del inputs[3]
    gc.collect()
    assert kept.made[1]() is None


def test_fold_is_there_once_it_is_queued(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: another thread could read a fold that no kernel had been queued to write."""
    monkeypatch.undo()
    _, *tensors = make()
    parameters = known_parameters.of(*tensors)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    seen: list[tuple[Tensor, ...]] = []

    class Kernels:
        def fold(self, _: int) -> None:
            seen.append(parameters.folds[7].tensors)

    monkeypatch.setattr(sm90, "launcher_of", lambda *_: (Kernels(), 0))
    assert sm90.kept_fold(parameters) is None
    assert sm90.kept_fold(parameters) is not None
    assert seen == [()]


def test_fold_that_a_graph_reads(kept: Kept) -> None:
    """It outlives a change, but no call uses it."""
    inputs = make()
    assert [kept.used(inputs) for _ in range(2)] == [0, 1]
    parameters = known_parameters.known(*inputs[1:])
    assert parameters is not None
    with fn.frozen_parameters():
        assert folds.kept(parameters, 9, True) is parameters.folds[7]
    inputs[3].mul_(2)
    assert [kept.used(inputs) for _ in range(3)] == [0, 2, 2]
    assert kept.made[0]() is not None


def test_none_where_a_gradient_follows(kept: Kept) -> None:
    inputs = make(requires_grad=True)
    assert [kept.used(inputs) for _ in range(3)] == [0, 0, 0]
    assert not kept.asked
    with torch.no_grad():
        assert [kept.used(inputs) for _ in range(3)] == [0, 1, 1]
    assert kept.used(inputs) == 0


@pytest.mark.parametrize("index", [1, 2, 3, 4], ids=["gamma", "beta", "weight", "bias"])
def test_inference_tensors_have_no_version(index: int, kept: Kept) -> None:
    inputs = make()
    with torch.inference_mode():
        assert [kept.used(inputs) for _ in range(3)] == [0, 1, 1]
        inputs[index] = inputs[index].clone()
        assert [kept.used(inputs) for _ in range(3)] == [0, 0, 0]
    assert [kept.used(inputs) for _ in range(3)] == [0, 0, 0]
    assert kept.asked == 2


def test_promise_stands_for_a_version(kept: Kept) -> None:
    """As long as it holds: nothing tells what happens to inference tensors between two."""
    with torch.inference_mode():
        inputs = make()
    parameters = known_parameters.of(*inputs[1:])
    assert sm90.kept_fold(parameters) is None
    assert sm90.kept_fold(parameters) is None
    for number in (1, 2):
        with fn.frozen_parameters():
            assert sm90.kept_fold(parameters) is None
            with fn.frozen_parameters():
                assert sm90.kept_fold(parameters) is not None
            assert sm90.kept_fold(parameters) is not None
            assert len(kept.made) == number
        assert folds.promise() == 0


def test_each_norm_and_activation_has_its_own(kept: Kept) -> None:
    inputs = make()
    kinds: list[dict[str, Any]] = [
        {},
        {"normalization": "rms_norm"},
        {"weight_offset": 1.0},
        {"activation": "relu"},
        {"activation": "gelu"},
    ]
    for number, kind in enumerate(kinds, 1):
        assert [kept.used(inputs, **kind) for _ in range(3)] == [0, number, number]


def test_float16_is_not_folded(kept: Kept) -> None:
    inputs = [t.half() for t in make()]
    assert [kept.used(inputs) for _ in range(3)] == [0, 0, 0]
    assert not kept.asked


def test_threads(kept: Kept) -> None:
    every = [make() for _ in range(4)]
    expected = [[kept.used(inputs) for _ in range(2)][1] for inputs in every]

    def run(index: int) -> bool:
        inputs = every[index % 4]
        return all(kept.used(inputs) == expected[index % 4] for _ in range(50))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(32)))
    assert kept.asked == 8


def test_error_of_python_is_raised(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("no fold today")

    monkeypatch.setattr(backends_compiled, "fold", fail)
    compiled.tell(compiled.module())
    with pytest.raises(ArithmeticError, match="no fold today"):
        kept.used(make())


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "RMSNorm": {"normalization": "rms_norm"},
    "activation": {"activation": "gelu"},
    "gate": {"activation": "swiglu"},
    "residual": {"residual": True, "return_sum": True},
    "norm returned": {"return_norm": True},
}
HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="no Hopper GPU on this machine",
    ),
]


class TestOnHopper:
    """Of inference, Python has the first call of a thread, and those that a graph captures."""

    pytestmark = HOPPER

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("rows", [50, 400, 5000])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "tf32"])
    def test_same_bits_as_python(
        self,
        kind: str,
        rows: int,
        dtype: str,
        watch: Callable[..., list[Any]],
        python_calls: list[Tensor],
    ) -> None:
        options = dict(KINDS[kind])
        if "residual" in options:
            options["residual"] = torch.randn(rows, 256, device="cuda", dtype=precision(dtype))
        x, gamma, beta, weight, bias = make_inputs(
            rows, 256, 128, dtype=precision(dtype), device="cuda"
        )

        def run() -> Any:
            return fn.norm_linear(x, weight, bias, norm_weight=gamma, norm_bias=beta, **options)

        setting = torch.backends.cuda.matmul
        before = setting.fp32_precision
        setting.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
        try:
            for _ in range(2):
                run()
            calls = [watch(seam, "call"), watch(sm90, "product")]
            with torch.no_grad():
                mine = run()
            assert run()[0].shape == mine[0].shape
            assert calls == [[], []]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(compiled, "module", lambda: None)
                other = run()
        finally:
            setting.fp32_precision = before
        for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (mine, other)), strict=True):
            assert torch.equal(a, b)

    def test_graphs_are_pythons(
        self, watch: Callable[..., list[Any]], python_calls: list[Tensor]
    ) -> None:
        inputs = make_inputs(50, 256, 128, dtype=torch.bfloat16, device="cuda")
        for _ in range(3):
            fn.fused_layernorm_linear(*inputs)
        calls = watch(sm90, "product")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn.fused_layernorm_linear(*inputs)
        assert len(calls) == 1
        fn.fused_layernorm_linear(*inputs)
        assert len(calls) == 1


def precision(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, "float32" if name == "tf32" else name)
    return found
