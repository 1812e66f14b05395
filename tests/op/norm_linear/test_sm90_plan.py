"""What the forward on Hopper chooses its strategy by, and the plan; no GPU is asked."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from mojo_programs import h100_costs, needs_mojo, printed

from fused_norm.call import record
from fused_norm.chain import kernels
from fused_norm.devices import choice, hopper
from fused_norm.devices.hopper import GpuCall
from fused_norm.tuning.sizes import draw_for_gpu

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks/results"
H100 = json.loads((RESULTS / "gpu-calls-nvidia-h100.json").read_text())
SIZES = [tuple(size[2:]) for size in draw_for_gpu(150, 11, ["bfloat16"])]
# Those that were measured, and threads that store y where TMA cannot.
SIZES += [(call[1], call[2], call[3]) for call in H100["calls"][::7]]
SIZES += [(8192, 768, 50257), (40, 768, 50257), (300, 1024, 1001), (1, 8, 8)]


@pytest.fixture
def gpu_calls() -> ModuleType:
    return importlib.import_module("gpu_calls")


def planned(files: Sequence[Path], cases: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return what tests/mojo/sm90_plan.mojo prints for cases."""
    lines = [tuple(map(int, line.split())) for line in printed("sm90_plan", files, cases)]
    assert len(lines) == len(cases)
    return lines


@needs_mojo
def test_plan_goes_by_what_was_measured(tmp_path: Path, gpu_calls: ModuleType) -> None:
    """Both languages choose alike, by the model and by its exceptions."""
    device = hopper.load(choice.SHIPPED / "nvidia-h100.json")
    files = h100_costs(tmp_path, "bfloat16", "float16", "float32")
    cases = [(*size, *flags) for size, flags in product(SIZES, product((0, 1), repeat=2))]
    calls = {size: GpuCall("bfloat16", *size, {}, {}) for size in SIZES}
    terms = gpu_calls.terms_of(list(calls.values()))
    seen = Counter[int]()
    for case, found in zip(cases, planned(files, cases), strict=True):
        *size, in_graph, may_keep = case
        strategies: list[list[int]] = []
        for dtype in ("bfloat16", "float16", "float32"):
            call = calls[tuple(size)]._replace(dtype=dtype)
            chosen = nearest(device, call) or device.chosen(call, terms)
            strategies.append([hopper.STRATEGIES[strategy] for strategy in chosen])
        kept, anew = (strategies[0][2 * in_graph + (not keeps)] for keeps in (True, False))
        rows, features, outputs = size
        # PyTorch's product takes six times as long where rows of y are not aligned.
        if outputs % 8:
            kept, anew = (strategy or record.FUSED for strategy in (kept, anew))
        # What cannot be folded is normalized before our own product.
        unfolded = record.FUSED if anew == record.NEW_FOLD else anew
        bare = kept if may_keep or rows > 64 else anew
        if rows > 64 and bare == record.KEPT_FOLD:
            # A weight that is its own fold is not kept, but for few rows.
            bare = record.NEW_FOLD
        others = [dtype_strategies[2 * in_graph + 1] for dtype_strategies in strategies[1:]]
        if outputs * 2 % 16:
            others[0] = others[0] or record.FUSED
        expected = [kept if may_keep else anew, *others, unfolded, record.DECLINED, bare]
        if outputs * 4 % 16 or features * 4 % 16:
            # Of float32, there are no kernels.
            expected[2] = found[2]
        assert list(found[:6]) == expected, case
        is_ours = [dtype_strategies[-1] == record.FUSED for dtype_strategies in strategies[:2]]
        assert [bool(each) for each in found[6:]] == is_ours, case
        seen.update(found[:1])
    assert seen.keys() == {record.FUSED, record.KEPT_FOLD, record.DECLINED, record.NEW_FOLD}


def nearest(device: hopper.Hopper, call: GpuCall) -> list[str] | None:
    """Return the strategies of the nearest exception whose sizes are alike."""
    found, least = None, 1.05**3
    for dtype, *sizes, a, b, c, d, e in device.exceptions:
        if dtype != call.dtype:
            continue
        ratios = [max(x / y, y / x) for x, y in zip(sizes, call[1:4], strict=True)]
        if max(ratios) <= 1.05 and math.prod(ratios) < least:
            found, least = [a, b, c, d, e], math.prod(ratios)
    return found


@needs_mojo
def test_without_measurements(tmp_path: Path) -> None:
    """A Hopper that nobody has measured uses our product, on a fold if one is kept."""
    nothing = tmp_path / "nothing"
    nothing.touch()
    cases = [(2048, 1024, 1024, in_graph, may_keep) for in_graph in (0, 1) for may_keep in (0, 1)]
    strategies = [line[0] for line in planned([nothing] * 3, cases)]
    assert strategies == [record.FUSED, record.KEPT_FOLD] * 2


@pytest.mark.filterwarnings("ignore:Please use the new API")
def test_both_settings_for_tf32_are_read() -> None:
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    try:
        for precision, allowed in (("high", True), ("highest", False), ("medium", True)):
            torch.set_float32_matmul_precision(precision)
            assert kernels.may_use_tf32() == allowed
        for allowed in (False, True):
            setting.allow_tf32 = allowed
            assert kernels.may_use_tf32() == allowed
        for precision, allowed in (("ieee", False), ("tf32", True)):
            setting.fp32_precision = precision
            assert kernels.may_use_tf32() == allowed
    finally:
        torch.set_float32_matmul_precision("highest")
        setting.fp32_precision = before


# What kernels read and write number by number, or find aligned because it is theirs.
BY_NUMBER = {"mean", "rstd", "dgamma", "dbeta", "dbias"}
# What passes alone read and write.
MODULATION = {"scale", "shift", "dscale", "dshift"}
OF_KERNELS = {"workspace", "fold_sums", "fold_constants", "parts"}
# Of FP8, which no plan is asked about: operands that its ops have made themselves.
OF_KERNELS |= {"z_scale", "y_scale", "zt", "zt_scale", "weight_scale", "up_scale"}
# Read by the norm's pass alone, where a forward has one before its product.
OF_PASS = {"x", "residual", "sum", "gamma", "beta"}


@needs_mojo
def test_no_kernel_is_given_a_tensor_that_lies_elsewhere() -> None:
    """Regression: a gate's second weight was not checked. Every tensor of the record is."""
    declared = re.findall(r"void ([^;]+);", (ROOT / "fused_norm/chain/call.h").read_text())
    pointers = set(re.findall(r"\*(\w+)", " ".join(declared))) - {"WANTED", "context"}
    fields = [*record.CALL_FIELDS, *record.PARAMETER_FIELDS]
    names = [name for name in fields if name in pointers - OF_KERNELS]
    lines = printed("sm90_alignment", [], [(-1, *map(fields.index, names))])
    aligned, *shifted = [tuple(map(int, line.split())) for line in lines]
    fold, fused = record.NEW_FOLD, record.FUSED
    assert aligned == (fold, fold, fused, 1, 1, 1, 1)
    assert {"up", "up_bias", "weight", "bias", "x", "dsum", "dweight", "residual"} <= set(names)
    declined = record.DECLINED
    for name, planned in zip(names, shifted, strict=True):
        if name in BY_NUMBER | MODULATION:
            assert planned == aligned, name
            continue
        # A gate without an epilogue that finishes the norm is made by the passes.
        expected = (fused, declined, fused) if name in OF_PASS else (declined,) * 3
        assert planned == (*expected, 0, 0, 0, 0), name
