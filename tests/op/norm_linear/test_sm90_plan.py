"""The table by which the forward on Hopper chooses its way, and the plan; no GPU is asked."""

from __future__ import annotations

import json
import math
import re
import subprocess
from functools import cache
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fused_norm.call import record
from fused_norm.chain import kernels

ROOT = Path(__file__).resolve().parents[3]
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "h200-dispatch.json").read_text())[
    "forward"
]
SIZES = [(measured["M"], measured["K"], measured["N"]) for measured in MEASURED]
# Some between those that were measured and beyond; rows right between two of them.
SIZES += [
    (1576, 768, 3072),
    (1576, 768, 2304),
    (20000, 1024, 1280),
    (1, 8, 8),
    (4, 1024, 1024),
    (32, 4096, 4096),
]
# Threads store y where TMA cannot.
SIZES += [(8192, 768, 50257), (40, 768, 50257), (300, 1024, 1001)]
SIZES += [(100_000, 16384, 16384), (300, 2048, 2048), (3000, 776, 1032)]


@cache
def dispatch() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts/measure")
        import dispatch
    return dispatch


def nearest(rows: int, features: int, outputs: int, in_graph: bool, may_keep: bool) -> int:
    """Return the way that was fastest at the measured sizes next to these."""

    def far(measured: dict[str, int]) -> tuple[float, float]:
        off = {name: abs(math.log(measured[name] / size)) for name, size in sizes.items()}
        return round(off["K"] + off["N"], 9), round(off["M"], 9)

    sizes = {"M": rows, "K": features, "N": outputs}
    times = min(MEASURED, key=far)["us"]
    way = dispatch().fastest(times)[2 * in_graph + (not may_keep)]
    return getattr(record, dispatch().NAMES[way])


needs_mojo = pytest.mark.skipif(
    not subprocess.run(["which", "mojo"], capture_output=True, check=False).stdout,
    reason="no Mojo compiler on this machine",
)


@needs_mojo
def test_plan_follows_the_table() -> None:
    cases = [(*size, *flags) for size, flags in product(SIZES, product((False, True), repeat=2))]
    run = subprocess.run(
        ["mojo", "run", "-I", ".", "tests/mojo/sm90_plan.mojo"]
        + [str(int(number)) for case in cases for number in case],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    planned = [tuple(map(int, line.split())) for line in run.stdout.splitlines()]
    assert len(planned) == len(cases)
    for case, (*found, used) in zip(cases, planned, strict=True):
        *size, in_graph, may_keep = case
        rows, features, outputs = size
        # Of many rows, the table has only such whose tiles use most of the device's time.
        idle = rows > 512 and used < 86
        assert not idle or tuple(size) not in SIZES[: len(MEASURED)], case
        kept, anew = (
            record.DECLINED if idle else nearest(*size, in_graph, keeps) for keeps in (True, False)
        )
        # What cannot be folded is normalized before our own product.
        unfolded = record.FUSED if anew == record.NEW_FOLD else anew
        stores = features <= 1024 and rows * outputs >= 2**24
        # A weight that is its own fold is not kept, but for few rows.
        bare = kept if may_keep or rows > 64 else anew
        if rows > 64 and bare == record.KEPT_FOLD:
            bare = record.NEW_FOLD
        expected = [
            kept if may_keep else anew,
            unfolded,
            record.DECLINED if stores else record.FUSED,
            # x is not aligned as TMA reads it, and then the weight.
            unfolded,
            record.DECLINED,
            bare,
        ]
        assert found == expected, case
    # Tiles use 75 and 84 % of their waves: 22 us for 17 around PyTorch's product, 15.5 for 14.
    of_idle = [found[0] for case, found in zip(cases, planned, strict=True) if case[0] == 1576]
    assert of_idle == [record.DECLINED] * 8


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
OF_KERNELS |= {"z_scale", "zt", "zt_scale", "weight_scale", "up_scale"}
# Read by the norm's pass alone, where a forward has one before its product.
OF_PASS = {"x", "residual", "sum", "gamma", "beta"}


@needs_mojo
def test_no_kernel_is_given_a_tensor_that_lies_elsewhere() -> None:
    """Regression: nobody asked where a gate's second weight lies. Every tensor of the record is."""
    declared = re.findall(r"void ([^;]+);", (ROOT / "fused_norm/chain/call.h").read_text())
    pointers = set(re.findall(r"\*(\w+)", " ".join(declared))) - {"WANTED", "context"}
    fields = [*record.CALL_FIELDS, *record.PARAMETER_FIELDS]
    names = [name for name in fields if name in pointers - OF_KERNELS]
    run = subprocess.run(
        ["mojo", "run", "-I", ".", "tests/mojo/sm90_alignment.mojo", "-1"]
        + [str(fields.index(name)) for name in names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    aligned, *shifted = [tuple(map(int, line.split())) for line in run.stdout.splitlines()]
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
