"""Folds in C++: only those of frozen parameters, which Python keeps.

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
from torch import Tensor, nn

import fused_norm as fn
from fused_norm.backends import compiled as backends_compiled
from fused_norm.backends import sm90
from fused_norm.call import frozen, record
from fused_norm.call.frozen import Prepared
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


class Folds:
    """A call by the stand-ins, and what Python did for it."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Tensor]] = []
        self.asked = 0

    def make(self, parameters: Parameters, *_: object) -> Prepared:
        """Make a fold that is its number, from 1 on."""
        number = len(self.made) + 1
        size = parameters.products, parameters.layout.K
        folded = torch.full(size, number, dtype=torch.bfloat16)
        self.made.append(weakref.ref(folded))
        sums = torch.zeros(2, parameters.products)
        addresses = folded.data_ptr(), sums.data_ptr(), sums[1].data_ptr()
        return Prepared((folded, sums), 7, addresses=addresses)

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
def folds(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folds]:
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
    found = Folds()
    monkeypatch.setattr(backends_compiled, "kernels", lambda *_: (str(kernels), 0, 0, "", 0))
    monkeypatch.setattr(backends_compiled, "fold", found.fold)
    monkeypatch.setattr(sm90, "make_fold", found.make)
    monkeypatch.setattr(sm90, "launcher_of", lambda *_: (None, 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    monkeypatch.setattr(compiled, "module", lambda: module)
    listeners = list(frozen._listeners)
    compiled.tell(module)
    yield found
    frozen._listeners[:] = listeners


def make(**options: Any) -> list[Tensor]:
    return make_inputs(M, K, N, dtype=torch.bfloat16, **options)


def owner(inputs: list[Tensor]) -> nn.Module:
    """Return a module in evaluation mode whose parameters are all inputs but the first."""
    module = nn.Module()
    for i, tensor in enumerate(inputs[1:]):
        module.register_parameter(f"p{i}", nn.Parameter(tensor, requires_grad=False))
        inputs[i + 1] = module.get_parameter(f"p{i}")
    return module.eval()


def test_nothing_is_kept_of_parameters_that_are_not_frozen(folds: Folds) -> None:
    inputs = make()
    assert [folds.used(inputs) for _ in range(5)] == [0] * 5
    assert not folds.asked
    other = fn.freeze(owner(make()))
    assert [folds.used(inputs) for _ in range(3)] == [0] * 3
    assert folds.asked == 3
    fn.unfreeze(other)
    assert folds.used(inputs) == 0
    assert folds.asked == 3


def test_made_by_the_first_call_of_frozen_parameters(folds: Folds) -> None:
    inputs = make()
    model = fn.freeze(owner(inputs))
    assert [folds.used(inputs) for _ in range(3)] == [1, 1, 1]
    for rows in (1, 3, 300):
        assert folds.used([torch.randn(rows, K).bfloat16(), *inputs[1:]]) == 1
    fn.unfreeze(model)
    assert folds.used(inputs) == 0
    assert folds.made[0]() is None


def test_parameters_may_be_missing(folds: Folds) -> None:
    inputs = make()
    model = fn.freeze(owner(inputs))
    x, gamma, beta, weight, bias = inputs
    for number, (g, b, c) in enumerate(((None, None, None), (gamma, None, bias)), 1):
        assert [folds.used([x, g, b, weight, c]) for _ in range(2)] == [number, number]
    assert folds.used(inputs) == 3
    # One that is not frozen beside those that are.
    assert folds.used([x, gamma.clone(), beta, weight, bias]) == 0
    fn.unfreeze(model)


@pytest.mark.parametrize("index", [1, 2, 3, 4], ids=["gamma", "beta", "weight", "bias"])
def test_other_data_is_not_frozen(index: int, folds: Folds) -> None:
    inputs = make()
    model = fn.freeze(owner(inputs))
    assert folds.used(inputs) == 1
    inputs[index].data = inputs[index].data.clone()
    assert [folds.used(inputs) for _ in range(3)] == [0] * 3
    fn.freeze(model)
    assert folds.used(inputs) == 2
    del model


def test_other_sizes_and_dtypes_of_the_same_data(folds: Folds) -> None:
    inputs = make()
    model = fn.freeze(owner(inputs))
    x, _, _, weight, _ = inputs
    bare = [x, None, None, weight, None]
    assert folds.used(bare) == 1
    whole = weight.data
    for other in (whole[: N // 2], whole.view(2 * N, K // 2), whole.view(N // 2, 2 * K)):
        weight.data = other
        bare[0] = torch.randn(M, other.shape[1]).bfloat16()
        assert folds.used(bare) == 0
    del model


def test_freed_memory_is_nobody_elses(folds: Folds) -> None:
    """Regression: a freed parameter's successor may have its address, its id and its version."""
    for number in range(1, 20):
        inputs = make()
        inputs[1] = inputs[1] * number
        model = fn.freeze(owner(inputs))
        assert [folds.used(inputs) for _ in range(2)] == [number, number]
        del model, inputs
        gc.collect()
        assert folds.made[-1]() is None
    assert not frozen.is_any()


def test_none_where_a_gradient_follows(folds: Folds) -> None:
    inputs = make()
    model = fn.freeze(owner(inputs))
    inputs[0].requires_grad_()
    assert folds.used(inputs) == 0
    with torch.no_grad():
        assert folds.used(inputs) == 1
    del model


def test_each_norm_and_activation_has_its_own(folds: Folds) -> None:
    inputs = make()
    model = fn.freeze(owner(inputs))
    kinds: list[dict[str, Any]] = [
        {},
        {"normalization": "rms_norm"},
        {"weight_offset": 1.0},
        {"activation": "relu"},
        {"activation": "gelu"},
    ]
    for number, kind in enumerate(kinds, 1):
        assert [folds.used(inputs, **kind) for _ in range(2)] == [number, number]
    del model


def test_float16_is_not_folded(folds: Folds) -> None:
    inputs = [t.half() for t in make()]
    model = fn.freeze(owner(inputs))
    assert [folds.used(inputs) for _ in range(2)] == [0, 0]
    assert not folds.asked
    del model


def test_context(folds: Folds) -> None:
    """What is met once may be made for a call: from the second time on it is frozen."""
    inputs = make()
    for number in (1, 2):
        with fn.frozen_parameters():
            assert folds.used(inputs) == 0
            with fn.frozen_parameters():
                assert folds.used(inputs) == number
            assert folds.used(inputs) == number
        assert folds.used(inputs) == 0
        assert folds.made[-1]() is None
        # Nothing tells of it.
        inputs[3].mul_(2)
    with fn.frozen_parameters():
        for _ in range(20):
            # The memory is that of the one before.
            assert folds.used([*inputs[:3], inputs[3] * 2, inputs[4]]) == 0
    with torch.inference_mode():
        inputs = [t.clone() for t in inputs]
        with fn.frozen_parameters():
            assert [folds.used(inputs) for _ in range(2)] == [0, 3]


def test_fold_that_a_graph_reads(folds: Folds) -> None:
    """It lasts as long as the parameters' memory, but no call uses it."""
    inputs = make()
    model = fn.freeze(owner(inputs))
    assert folds.used(inputs) == 1
    found = frozen.find(inputs[1:])
    assert found is not None
    made = found[0].prepared(("fold", (0, 0.0, 0), found[1]), None)
    assert made is not None
    made.read_on(9, True)
    del found, made
    model.train()
    assert folds.used(inputs) == 0
    gc.collect()
    assert folds.made[0]() is not None
    model.p2.data = torch.zeros(N, K)
    inputs.clear()
    model = None
    gc.collect()
    # Others are looked through when the next are thawed.
    fn.unfreeze(fn.freeze(owner(make())))
    assert folds.made[0]() is None


def test_threads(folds: Folds) -> None:
    every = [make() for _ in range(4)]
    models = [fn.freeze(owner(inputs)) for inputs in every]
    expected = [folds.used(inputs) for inputs in every]

    def run(index: int) -> bool:
        inputs = every[index % 4]
        return all(folds.used(inputs) == expected[index % 4] for _ in range(50))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(32)))
    assert len(folds.made) == 4
    del models


def test_error_of_python_is_raised(folds: Folds, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("no fold today")

    monkeypatch.setattr(backends_compiled, "fold", fail)
    compiled.tell(compiled.module())
    inputs = make()
    model = fn.freeze(owner(inputs))
    with pytest.raises(ArithmeticError, match="no fold today"):
        folds.used(inputs)
    del model


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
