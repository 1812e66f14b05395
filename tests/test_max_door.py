"""The production op in a MAX graph: one compile for every size, held to PyTorch's front door.

On a CPU both doors run the same kernels, so the bits have to agree; not so in bfloat16 on one with
tile registers (AMX), which MAX's build leaves alone. A graph takes MAX 10 to 20 s to compile, so
one holds every dtype, and a process beside it compiles the one for a GPU meanwhile.
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
from accuracy import as_float64, assert_within_budget, eager, make_inputs
from torch import Tensor

from fused_norm.native.cpu_features import has_tiles
from fused_norm.ops import norm_linear

pytest.importorskip("max")

GRAPH = Path(__file__).with_name("max_graph.py")
FORWARD = ("y", "mean", "rstd")
NAMES = (*FORWARD, "dx", "dln_weight", "dln_bias", "dlinear_weight", "dlinear_bias")

# Dtype of the tensors, dtype of LayerNorm's parameters.
DTYPES = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("bfloat16", "float32"),
    ("float64", "float64"),
]
SIZES = [
    (16, 8, 16),  # the puzzle's
    (37, 50, 65),  # nothing divides
    (1, 1023, 7),
    (300, 257, 129),  # more rows than the few that share packed panels
]


@pytest.fixture(scope="module")
def cross_compiled(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that compiles the graph for an H100 or H200."""
    path = tmp_path_factory.mktemp("door") / "door.mef"
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
    """Return the compiled graph of every dtype for a device."""
    import max_graph
    from max.driver import CPU, Accelerator
    from max.engine import InferenceSession
    from max.graph import DeviceRef

    is_gpu = device == "cuda"
    graph = max_graph.build(dtypes(device), DeviceRef.GPU() if is_gpu else DeviceRef.CPU())
    return InferenceSession(devices=[CPU(), Accelerator()] if is_gpu else [CPU()]).load(graph)


def dtypes(device: str) -> list[tuple[str, str]]:
    """Return the dtypes that there are kernels for."""
    return [pair for pair in DTYPES if device == "cpu" or pair[0] != "float64"]


def make_tensors(size: tuple[int, int, int], device: str, *pair: str) -> list[Tensor]:
    """Return x, the four parameters and dy."""
    dtype, affine_dtype = (getattr(torch, name) for name in pair)
    inputs = make_inputs(*size, dtype=dtype, affine_dtype=affine_dtype, device=device)
    return [*inputs, torch.randn(size[0], size[2]).to(device, dtype)]


def run(device: str, tensors: list[list[Tensor]]) -> list[list[Tensor]]:
    """Return what the graph computes, for each dtype."""
    if device == "cuda":
        # MAX has a stream of its own.
        torch.cuda.synchronize()
    results = model(device).execute(*(t for group in tensors for t in group))
    flat = [torch.from_dlpack(result) for result in results]
    if device == "cuda":
        torch.cuda.synchronize()
    return [flat[i : i + len(NAMES)] for i in range(0, len(flat), len(NAMES))]


def by_native_door(tensors: list[Tensor]) -> list[Tensor]:
    *inputs, dy = tensors
    forward = norm_linear.layernorm_linear_forward(*inputs, 1e-5)
    backward = norm_linear.layernorm_linear_backward(
        dy, *inputs[:4], *forward[1:], 1e-5, [True] * 5
    )
    return [*forward, *backward]


def by_pytorch(tensors: list[Tensor]) -> list[Tensor]:
    """Return y and the gradients by PyTorch."""
    *leaves, dy = tensors
    for leaf in leaves:
        leaf.requires_grad_()
    y = eager(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_agrees_with_the_native_door(
    size: tuple[int, int, int], device: str, cross_compiled: object
) -> None:
    tensors = [make_tensors(size, device, *pair) for pair in dtypes(device)]
    for pair, group, results in zip(dtypes(device), tensors, run(device, tensors), strict=True):
        expected = by_native_door(group)
        if device == "cpu" and not (pair[0] == "bfloat16" and has_tiles()):
            for name, mine, other in zip(NAMES, results, expected, strict=True):
                assert torch.equal(mine, other), (pair, name)
            continue
        for name, mine, other in zip(FORWARD[1:], results[1:3], expected[1:3], strict=True):
            torch.testing.assert_close(mine, other, msg=f"{pair} {name}")
        truth = by_pytorch([t.detach() for t in as_float64(group)])
        # PyTorch's layer norm wants one dtype for its gradients.
        bar = by_pytorch([t.to(group[0].dtype) for t in group])
        mine = [results[0], *results[3:]]
        for name, a, b, c in zip(("y", *NAMES[3:]), mine, truth, bar, strict=True):
            assert_within_budget(f"{pair} {name}", a, b, c.to(a.dtype))


def test_no_rows(device: str) -> None:
    """Nothing comes out, and sums over no rows are zero."""
    tensors = [make_tensors((0, 8, 4), device, *pair) for pair in dtypes(device)]
    for results in run(device, tensors):
        assert [tuple(t.shape) for t in results[:4]] == [(0, 4), (0,), (0,), (0, 8)]
        for gradient in results[4:]:
            assert gradient.numel()
            assert not gradient.any()


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (1, (9,), "dimension 0 of ln_weight must be 8, got 9"),
        (2, (7,), "dimension 0 of ln_bias must be 8, got 7"),
        (3, (4, 9), "dimension 1 of linear_weight must be 8, got 9"),
        (3, (0, 8), "linear_weight must have at least 1 row and 1 column, got 0 x 8"),
        (4, (5,), "dimension 0 of linear_bias must be 4, got 5"),
        (5, (3, 4), "dimension 0 of dy must be 2, got 3"),
        (5, (2, 5), "dimension 1 of dy must be 4, got 5"),
    ],
)
def test_refuses_shapes_that_disagree(
    index: int, shape: tuple[int, ...], message: str, device: str
) -> None:
    tensors = [make_tensors((2, 8, 4), device, *pair) for pair in dtypes(device)]
    for group in tensors:
        group[index] = group[index].new_zeros(shape)
    with pytest.raises(ValueError, match=f"fused_norm_layernorm_linear.*: {message}"):
        run(device, tensors)


def test_cross_compiles(cross_compiled: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = cross_compiled
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "warning" not in said
    # What the assembler leaves in each kernel.
    assert path.read_bytes().count(b"-arch sm_90") > 5
