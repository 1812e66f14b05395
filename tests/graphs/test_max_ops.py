"""The production ops in MAX graphs, of every size by one compile, held to PyTorch's entry point.

On a CPU both run the same kernels, so the bits have to agree; where it has tile registers
(AMX), MAX is told to use them, as for PyTorch. What that leaves to PyTorch's products, and
everything on a GPU, errs at most twice as much as PyTorch does.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accuracy import as_float64, assert_within_budget

pytest.importorskip("max")

import max_graphs
from max_calls import (
    CASES,
    KINDS,
    MORE_KINDS,
    QUICK_PARTS,
    Tensors,
    by_native,
    by_pytorch,
    linear_add_by_pytorch,
    make_tensors,
    mlp_by_pytorch,
    package,
    plain_by_native,
    run,
)
from max_graphs import Kind

SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in MORE_KINDS]
PLAIN_KINDS = [
    p for p in (*KINDS, *SLOW_KINDS) if "layer_norm" in (p if isinstance(p, Kind) else p.values[0])
]
ALL_KINDS = pytest.mark.parametrize("kind", [*KINDS, *SLOW_KINDS], ids="-".join)
SIZES = [
    (16, 8, 16),  # the puzzle's
    (37, 50, 66),  # no block divides these
    (1, 1023, 14),
    (300, 257, 130),  # more rows than the few that share packed panels
]
PAGE = Path(__file__).resolve().parents[2] / "docs/max.md"
# PyTorch takes our kernels in bfloat16, too, which PyTorch's may be faster for.
pytestmark = pytest.mark.usefixtures("own_kernels")


@pytest.fixture
def skip_float64(device: str, request: pytest.FixtureRequest) -> None:
    if device == "cuda" and "float64" in request.getfixturevalue("kind"):
        pytest.skip("float64 has no GPU kernel")


def in_float64(tensors: Tensors) -> Tensors:
    return dict(zip(tensors, as_float64(list(tensors.values())), strict=True))


def assert_within(kind: Kind, mine: Tensors, truth: Tensors, bar: Tensors) -> None:
    """Hold each result to twice PyTorch's error."""
    for name, result in mine.items():
        shape = result.shape
        # A mean near zero errs as the values do that it is of, whose size is 1.
        offset = float(name.endswith("mean"))
        low = bar[name].view(shape).to(result.dtype) + offset
        exact = truth[name].view(shape) + offset
        assert_within_budget(f"{kind} {name}", result + offset, exact, low)


def assert_same(kind: Kind, mine: Tensors, others: Tensors) -> None:
    """Hold results to the bits of the same kernels."""
    for name, other in others.items():
        assert torch.equal(mine[name], other.view(mine[name].shape)), (kind, name)


@pytest.mark.usefixtures("skip_float64")
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", PLAIN_KINDS, ids="-".join)
def test_layernorm_linear(kind: Kind, size: tuple[int, int, int], device: str) -> None:
    plain = kind._replace(activation="none")
    t = make_tensors(plain, "plain", device, size)
    mine = run("plain", kind, t)
    assert mine.keys() == set(max_graphs.RESULTS["plain"])
    truth, bar = (by_pytorch(plain, v, offset=0.0) for v in (in_float64(t), t))
    assert_within(kind, mine, truth, bar)
    if device == "cpu":
        assert_same(kind, mine, plain_by_native(t))


@pytest.mark.usefixtures("skip_float64")
@pytest.mark.parametrize("derives", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", [case for case in CASES if case != "plain"])
@ALL_KINDS
def test_family(kind: Kind, case: str, derives: bool, device: str) -> None:
    t = make_tensors(kind, case, device)
    forward = mine = run("forward", kind, t)
    if derives:
        saved = t | forward | {"x": forward.get("total", t["x"])}
        mine = forward | run("backward", kind, saved)
    truth, bar = (
        by_pytorch(kind, v)
        | linear_add_by_pytorch(kind, v)
        | (mlp_by_pytorch(kind, v) if kind.activation != "none" else {})
        for v in (in_float64(t), t)
    )
    truth["known_y"], bar["known_y"] = truth["y"], bar["y"]
    results = set(max_graphs.RESULTS["forward"])
    assert mine.keys() == (truth.keys() if derives else truth.keys() & results)
    assert_within(kind, mine, truth, bar)
    if device == "cpu":
        same = by_native(kind, t)
        if "scale" in t or "shift" in t or not derives:
            # The backward of a modulation goes around PyTorch's products.
            same = {name: v for name, v in same.items() if name in forward}
        assert_same(kind, mine, same)


@pytest.mark.parametrize("part", [*QUICK_PARTS, pytest.param("backward", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_no_rows(kind: Kind, part: str, device: str) -> None:
    """Nothing comes out, and sums over no rows are zero."""
    t = make_tensors(kind, "residual", device, (0, 50, 34))
    t["product"] = t["x"].new_empty(0, 34)
    t |= make_tensors(kind, "plain", device, (0, 50, 34))
    for _ in range(300):  # a graph on a CPU does not wait for what an op queues
        found = run(part, kind, t)
        assert bool(found) == (part != "forward")
        assert not any(result.any() for result in found.values())


@pytest.mark.parametrize(
    ("part", "op", "name", "shape", "message"),
    [
        ("plain", "layernorm_linear", "norm_weight", (9,), "0 of ln_weight must be 50, got 9"),
        ("plain", "layernorm_linear", "norm_bias", (7,), "0 of ln_bias must be 50, got 7"),
        ("plain", "layernorm_linear", "weight", (4, 9), "1 of linear_weight must be 50, got 9"),
        ("plain", "layernorm_linear", "bias", (5,), "0 of linear_bias must be 34, got 5"),
        ("plain", "layernorm_linear_backward", "dy", (3, 34), "0 of dy must be 33, got 3"),
        ("plain", "layernorm_linear_backward", "dy", (33, 5), "1 of dy must be 34, got 5"),
        ("forward", "norm_linear", "norm_weight", (9,), "0 of ln_weight must be 50, got 9"),
        ("forward", "norm_linear", "weight", (34, 9), "1 of linear_weight must be 50, got 9"),
        ("forward", "norm_linear", "bias", (5,), "0 of linear_bias must be 34, got 5"),
        ("forward", "norm_linear", "scale", (2, 50), "0 of scale must be 3, got 2"),
        ("forward", "norm_linear", "residual", (7, 50), "0 of residual must be 33, got 7"),
        ("forward", "linear_add", "out_weight", (31, 9), "1 of linear_weight must be 34, got 9"),
        ("forward", "linear_add", "out_residual", (33, 9), "1 of residual must be 31, got 9"),
        *(
            pytest.param("backward", *wrong, marks=pytest.mark.slow)
            for wrong in (
                ("norm_linear_backward", "dtotal", (7, 50), "0 of dtotal must be 33, got 7"),
                ("norm_linear_backward", "dy", (33, 7), "1 of dy must be 34, got 7"),
                ("norm_linear_backward", "product", (33, 7), "1 of product must be 34, got 7"),
                ("norm_linear", "rstd", (7,), "0 of rstd must be 33, got 7"),
                ("linear_add_backward", "a", (33, 7), "1 of dx must be 34, got 7"),
            )
        ),
    ],
)
def test_refuses_shapes_that_disagree(
    part: str, op: str, name: str, shape: tuple[int, ...], message: str, device: str
) -> None:
    kind = KINDS[0]
    t = make_tensors(kind, "all", device)
    t |= run("forward", kind, t)
    t[name] = t["x"].new_zeros(shape)
    with pytest.raises(ValueError, match=f"fused_norm_{op}.*: dimension {message}"):
        run(part, kind, t)


def test_refuses_a_weight_without_rows(device: str) -> None:
    t = make_tensors(KINDS[0], "all", device)
    t["weight"] = t["weight"][:0]
    with pytest.raises(ValueError, match="linear_weight must have at least 1 row and 1 column"):
        run("plain", KINDS[0], t)


def test_page_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of docs/max.md; whether it computes is the other tests' business."""
    # Precompiled: MAX reads the sources for half a minute.
    precompiled = package()
    monkeypatch.setattr(max_graphs.graphs, "sources", lambda: precompiled)
    block = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    code, compiles = block[1].rsplit("model = ", 1)
    assert compiles.endswith(".load(graph)\n")
    names: dict[str, Any] = {}
    exec(code, names)
    assert [str(dim) for dim in names["y"].shape] == ["M", "K"]


@pytest.mark.slow  # minutes
def test_cross_compiles(tmp_path: Path) -> None:
    """For an H100 or H200, on machines without one."""
    path = tmp_path / "model.mef"
    process = subprocess.run(
        [sys.executable, max_graphs.__file__, str(path), str(package())],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    said = process.stdout
    assert process.returncode == 0, said
    assert "warning" not in said
    # What the assembler leaves in each kernel.
    assert path.read_bytes().count(b"-arch sm_90") > 20
