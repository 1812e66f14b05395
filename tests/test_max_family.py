"""The op family in a MAX graph: the same bits on a CPU as behind PyTorch's door.

Not so in bfloat16 on a CPU with tile registers (AMX), which MAX's build leaves alone.

A graph takes MAX 10 to 20 s to compile, so one holds all kinds, and a process beside it compiles
the one for a GPU meanwhile.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accuracy import as_float64, assert_within_budget
from torch import Tensor

from fused_norm import composition
from fused_norm.composition import Operands, Results, Seam
from fused_norm.native.cpu_features import has_tiles
from fused_norm.ops import seam

pytest.importorskip("max")

import max_family

GRAPH = Path(__file__).with_name("max_family.py")
RESULTS = ("y", "sum", "mean", "rstd", "product")
# What is there, and how many groups of rows have a modulation of their own.
CASES: dict[str, tuple[set[str], int]] = {
    "all": ({"residual", "norm_weight", "norm_bias", "scale", "shift", "bias"}, 3),
    "none": (set(), 0),
    "residual": ({"residual", "norm_weight", "bias"}, 0),
    "shift": ({"norm_weight", "shift"}, 1),
}


@pytest.fixture(scope="module")
def cross_compiled(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that compiles the graph for an H100 or H200."""
    path = tmp_path_factory.mktemp("door") / "family.mef"
    process = subprocess.Popen(
        [sys.executable, str(GRAPH), str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield process, path
    process.kill()
    process.communicate()


@functools.cache
def model(device: str) -> Any:
    """Return the compiled graph of every kind for a device."""
    from max.driver import CPU, Accelerator
    from max.engine import InferenceSession
    from max.graph import DeviceRef

    is_gpu = device == "cuda"
    graph = max_family.build(kinds(device), DeviceRef.GPU() if is_gpu else DeviceRef.CPU())
    return InferenceSession(devices=[CPU(), Accelerator()] if is_gpu else [CPU()]).load(graph)


def kinds(device: str) -> list[tuple[str, str, str, str]]:
    """Return the kinds that there are kernels for."""
    return [kind for kind in max_family.KINDS if device == "cpu" or kind[0] != "float64"]


def make_tensors(
    kind: tuple[str, str, str, str], case: str, device: str, rows: int = 33
) -> dict[str, Tensor]:
    """Return the tensors of a call, empty where they are not there."""
    there, groups = CASES[case]
    K, columns = 50, 34
    sizes = {
        **{"x": (rows, K), "residual": (rows, K), "norm_weight": (K,), "norm_bias": (K,)},
        **{"scale": (groups, K), "shift": (groups, K), "weight": (columns, K), "bias": (columns,)},
    }
    found = {}
    for name, shape in sizes.items():
        dtype = getattr(torch, kind[1] if name.startswith("norm") else kind[0])
        is_there = name in there or name in ("x", "weight")
        size = 0.2 if name in ("weight", "norm_weight") else 1.0
        values = size * torch.randn(shape if is_there else (0,) * len(shape), dtype=torch.float64)
        found[name] = values.to(device, dtype)
    return found


def run(device: str, tensors: list[dict[str, Tensor]]) -> list[list[Tensor]]:
    """Return what the graph computes, for each kind."""
    if device == "cuda":
        # MAX has a stream of its own.
        torch.cuda.synchronize()
    results = model(device).execute(*(t for group in tensors for t in group.values()))
    flat = [torch.from_dlpack(result) for result in results]
    if device == "cuda":
        torch.cuda.synchronize()
    return [flat[i : i + len(RESULTS)] for i in range(0, len(flat), len(RESULTS))]


def operands(kind: tuple[str, str, str, str], tensors: dict[str, Tensor]) -> tuple[Seam, Operands]:
    """Return a call as the library has it."""
    t = {name: v if v.numel() else None for name, v in tensors.items()}
    groups = max(tensors["scale"].shape[0], tensors["shift"].shape[0], 1)

    def grouped(name: str) -> Tensor | None:
        v = t[name]
        return v if v is None else v.view(groups, -1, v.shape[-1])

    activation = "" if kind[3] == "none" else kind[3]
    x = grouped("x")
    assert x is not None
    return Seam(kind[2], activation, 1e-5, 1.0), Operands(
        x,
        grouped("residual"),
        t["norm_weight"],
        t["norm_bias"],
        grouped("scale"),
        grouped("shift"),
        weights=[tensors["weight"]],
        biases=[t["bias"]],
    )


@pytest.mark.slow  # MAX compiles for minutes
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_native_door(
    case: str, device: str, cross_compiled: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For bfloat16, too, which PyTorch's product may be faster for.
    monkeypatch.setattr("fused_norm.backends.cpu.bfloat16_product", lambda: None)
    tensors = [make_tensors(kind, case, device) for kind in kinds(device)]
    for kind, group, mine in zip(kinds(device), tensors, run(device, tensors), strict=True):
        what, t = operands(kind, group)
        flat = seam._forward(*t, *what, True)
        other = Results.unflat(flat, what, t, True)
        expected = [
            other.outputs[0],
            other.sum,
            other.mean,
            other.rstd,
            other.products[0] if other.products else None,
        ]
        exact = as_float64([v for v in composition.flat(t) if v is not None])
        rest = iter(v.detach() for v in exact)
        truth = composition.seam(
            what, composition.unflat([v if v is None else next(rest) for v in composition.flat(t)])
        )[0]
        bar = composition.seam(what, t)[0]
        is_same = device == "cpu" and not (kind[0] == "bfloat16" and has_tiles())
        assert_within_budget(f"{kind} y", mine[0].view(bar.shape), truth, bar)
        for name, ours, theirs in zip(RESULTS, mine, expected, strict=True):
            if theirs is None:
                # There is a place for the product, and no activation.
                assert name == "product" or not ours.numel(), (kind, name)
            elif is_same or (device == "cpu" and name == "sum"):
                assert torch.equal(ours.view(theirs.shape), theirs), (kind, name)
            else:
                torch.testing.assert_close(ours.view(theirs.shape), theirs, rtol=0.02, atol=0.02)


def test_no_rows(device: str) -> None:
    tensors = [make_tensors(kind, "residual", device, rows=0) for kind in kinds(device)]
    for kind, results in zip(kinds(device), run(device, tensors), strict=True):
        outputs = 17 if kind[3] in max_family.GATES else 34
        assert [tuple(t.shape) for t in results[:2]] == [(0, outputs), (0, 50)]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("norm_weight", (9,), "dimension 0 of ln_weight must be 50, got 9"),
        ("weight", (34, 9), "dimension 1 of linear_weight must be 50, got 9"),
        ("bias", (5,), "dimension 0 of linear_bias must be 34, got 5"),
        (
            "scale",
            (2, 50),
            "dimension 0 of scale must be 3, got 2",
        ),
        ("residual", (7, 50), "dimension 0 of residual must be 33, got 7"),
    ],
)
def test_refuses_shapes_that_disagree(
    name: str, shape: tuple[int, ...], message: str, device: str
) -> None:
    tensors = [make_tensors(kind, "all", device) for kind in kinds(device)]
    for group in tensors:
        group[name] = group[name].new_zeros(shape)
    with pytest.raises(ValueError, match=f"fused_norm_norm_linear.*: ({message})"):
        run(device, tensors)


def test_cross_compiles(cross_compiled: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = cross_compiled
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "warning" not in said
    # What the assembler leaves in each kernel.
    assert path.read_bytes().count(b"-arch sm_90") > 5
