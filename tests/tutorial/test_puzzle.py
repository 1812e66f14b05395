"""The puzzle's ops through MAX, held to PyTorch in float64.

Each compile takes MAX 20 s or more. So there are few shapes, each with a purpose, all tests of one
shape share it, and a CPU's ops of the first are compiled in one.
"""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from accuracy import NAMES, as_float64, assert_within_budget, eager, make_inputs
from max_together import compile_together
from processes import ROOT
from test_puzzle_driver import GPU_VERDICT
from torch import Tensor

from tutorial.puzzle import driver, max_ops

DOCUMENT = max_ops.Sizes(4, 4, 8, 16)  # the hidden dimension ends inside a tile of the matmul
RAGGED = max_ops.Sizes(3, 5, 33, 19)  # no tile divides anything
TILES = max_ops.Sizes(2, 37, 96, 48)  # several tiles in each direction
# MAX compiles a graph for each, which takes it most of a minute in all.
SIZES = [DOCUMENT, pytest.param(RAGGED, marks=pytest.mark.slow), TILES]
SIZE_NAMES = ["document", "ragged", "tiles"]

# PyTorch warns if the first product of an autograd thread has no CUDA context, and makes one.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")

FACTOR = 4  # The puzzle's kernels sum one after the other where PyTorch sums in parts.


def make_tensors(sizes: max_ops.Sizes, device: str, mean: float = 0.0) -> list[Tensor]:
    """Return x, the four parameters and grad_output."""
    rows = (sizes.batch_size, sizes.seq_len)
    inputs = make_inputs(rows, sizes.hidden_dim, sizes.output_dim, device=device, mean=mean)
    return [*inputs, torch.randn(*rows, sizes.output_dim).to(device)]


def differentiate(tensors: list[Tensor]) -> list[Tensor]:
    """Return PyTorch's gradients of all but the last tensor, which is grad_output."""
    *leaves, grad_output = [tensor.detach().clone() for tensor in tensors]
    for leaf in leaves:
        leaf.requires_grad_()
    return list(torch.autograd.grad(eager(*leaves), leaves, grad_output))


def check_forward(algorithm: max_ops.Algorithm, inputs: list[Tensor]) -> None:
    output = max_ops.layernorm_linear(*inputs, algorithm=algorithm)
    assert output.device == inputs[0].device
    assert_within_budget(algorithm, output, eager(*as_float64(inputs)), eager(*inputs), FACTOR)


def check_backward(tensors: list[Tensor]) -> None:
    *inputs, grad_output = tensors
    gradients = max_ops.layernorm_linear_backward(grad_output, *inputs[:4])
    truths = differentiate(as_float64(tensors))
    bars = differentiate(tensors)
    for name, *values in zip(NAMES, gradients, truths, bars, strict=True):
        assert_within_budget(name, *values, FACTOR)


def skip_tiles_on_cpu(sizes: max_ops.Sizes, device: str) -> None:
    if device == "cpu" and sizes == TILES:
        pytest.skip("a CPU has no tiles")


def forward_of_wrong_parameters() -> Any:
    """Return the registered op for an output dimension that its tensors do not have."""
    wrong = dataclasses.asdict(DOCUMENT) | {"output_dim": 2 * DOCUMENT.output_dim}
    return max_ops.library().layernorm_linear[{"algorithm": "fused", **wrong}]


@pytest.fixture(scope="module")
def compiled() -> None:
    """Have MAX compile what tests run of the document's sizes on a CPU."""
    *inputs, grad_output = make_tensors(DOCUMENT, "cpu")
    compile_together(
        max_ops.library(),
        [
            lambda: max_ops.layernorm_linear(*inputs),
            lambda: max_ops.layernorm_linear(*inputs, algorithm="unfused"),
            lambda: max_ops.layernorm_linear_backward(grad_output, *inputs[:4]),
            lambda: forward_of_wrong_parameters()(torch.empty_like(grad_output), *inputs),
        ],
    )


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("sizes", SIZES, ids=SIZE_NAMES)
@pytest.mark.parametrize("algorithm", ["fused", "unfused"])
def test_forward(algorithm: max_ops.Algorithm, sizes: max_ops.Sizes, device: str) -> None:
    if device == "cpu" and algorithm == "unfused" and sizes != DOCUMENT:
        pytest.skip("compiling takes a minute a size; one shows a CPU's four passes")
    skip_tiles_on_cpu(sizes, device)
    check_forward(algorithm, make_tensors(sizes, device)[:-1])


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("sizes", SIZES, ids=SIZE_NAMES)
def test_backward(sizes: max_ops.Sizes, device: str) -> None:
    skip_tiles_on_cpu(sizes, device)
    check_backward(make_tensors(sizes, device))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("algorithm", ["fused", "unfused"])
def test_large_mean(algorithm: max_ops.Algorithm, device: str) -> None:
    """Regression: E[x^2] - E[x]^2 cancels, and is negative where x is about 4096 times its std."""
    tensors = make_tensors(DOCUMENT, device, mean=5000)
    check_forward(algorithm, tensors[:-1])
    check_backward(tensors)


@pytest.mark.usefixtures("compiled")
def test_autograd_uses_the_incoming_gradient(device: str) -> None:
    """Regression: a backward pass that assumes ones is right for `.sum()` and for nothing else."""
    *inputs, grad_output = make_tensors(DOCUMENT, device)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    loss = (max_ops.LayerNormLinearFunction.apply(*leaves, "fused") * grad_output).sum()
    computed = torch.autograd.grad(loss, leaves)
    expected = differentiate([*inputs, grad_output])
    for actual, peer in zip(computed, expected, strict=True):
        torch.testing.assert_close(actual, peer, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("compiled")
def test_strided_tensors(device: str) -> None:
    """Gaps, expanded gradients and lazily negated tensors give what their values say."""
    x, ln_weight, ln_bias, linear_weight, linear_bias, _ = make_tensors(DOCUMENT, device)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    negated = torch._neg_view(linear_bias)
    output = max_ops.layernorm_linear(strided, ln_weight, ln_bias, linear_weight, negated)
    expected = eager(x, ln_weight, ln_bias, linear_weight, -linear_bias)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)

    expanded = torch.ones((), device=device).expand(output.shape)
    gradients = max_ops.layernorm_linear_backward(expanded, x, ln_weight, ln_bias, linear_weight)
    torch.testing.assert_close(gradients[4], torch.full_like(linear_bias, 16.0))


@pytest.mark.usefixtures("compiled")
def test_driver_prints_what_the_document_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels are those of these tests: in a process of its own, MAX compiles them again."""
    # What it times is not the point.
    monkeypatch.setattr(driver, "TURNS", 1)
    main = runpy.run_path(str(ROOT / "solutions/p22/p22.py"), run_name="imported")["main"]
    assert main(["--fused"]) == 0
    said = capsys.readouterr()
    for line in (
        r"Testing with dimensions: \[4, 4, 8\] -> \[4, 4, 16\]",
        r"OK Loaded Mojo operations library",
        r"   Puzzle 22: FUSED Algorithm Test & Benchmark",
        r"OK Using Mojo fused kernel \(CPU\)",
        r"   Max difference: \d\.\d\de-\d\d",
        r"   - Reference: +OK CORRECT",
        r"   - CPU: +OK CORRECT",
        rf"   - GPU fused: +{GPU_VERDICT}",
        r"   Overall Correctness: OK ALL CORRECT",
        r"   .*CPU: \d+\.\d\dms \(50 iterations(, from \d+)?\)",
        r"FUSED Algorithm Test Completed!",
        r"   16x8x16: \d+\.\d\dx (fast|slow)er than PyTorch eager \(.*, eager .*\)",
        r"   2048x768x3072: \d+\.\d\dx (fast|slow)er than PyTorch eager \(.*, eager .*\)",
    ):
        assert re.search(f"^{line}$", said.out, re.MULTILINE), line
    assert max(map(len, said.out.splitlines())) <= 80
    # Not a terminal, so plain lines say what was compiled and for how long.
    assert "Compiling fused kernel for the CPU" in said.err
    assert re.search(r"^  \d+\.\d s$", said.err, re.MULTILINE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_side_stream() -> None:
    """MAX orders its work after PyTorch's default stream only; the wrapper sees to the others."""
    *inputs, _ = make_tensors(DOCUMENT, "cuda")
    expected = eager(*inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        x = torch.full_like(inputs[0], float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            x.copy_(inputs[0])
            output = max_ops.layernorm_linear(x, *inputs[1:]) * 1
        stream.synchronize()
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


REFUSALS = {
    "hidden dimension over a block": (
        {"x": (1, 1, 1025), "ln_weight": (1025,), "ln_bias": (1025,), "linear_weight": (16, 1025)},
        {},
        "hidden_dim must be from 1 to 1024, got 1025",
    ),
    "output dimension over a block": (
        {"linear_weight": (1025, 8), "linear_bias": (1025,), "grad_output": (4, 4, 1025)},
        {},
        "output_dim must be from 1 to 1024, got 1025",
    ),
    "sequence over a grid": (
        {"x": (1, 65536, 8), "grad_output": (1, 65536, 16)},
        {},
        "seq_len must be from 1 to 65535, got 65536",
    ),
    "empty batch": (
        {"x": (0, 4, 8), "grad_output": (0, 4, 16)},
        {},
        "batch_size must be from 1 to 2147483647, got 0",
    ),
    "rank of x": ({"x": (4, 8)}, {}, r"x must have 3 dimensions, got shape \(4, 8\)"),
    "rank of the matrix": (
        {"linear_weight": (16,)},
        {},
        r"linear_weight must have 2 dimensions, got shape \(16,\)",
    ),
    "scale": ({"ln_weight": (7,)}, {}, r"ln_weight must have shape \(8,\), got \(7,\)"),
    "shift": ({"ln_bias": (1, 8)}, {}, r"ln_bias must have shape \(8,\), got \(1, 8\)"),
    "matrix": ({"linear_weight": (16, 9)}, {}, r"linear_weight must have shape \(16, 8\)"),
    "batch parameter": ({}, {"batch_size": 5}, r"must have shape \(5, 4, (8|16)\), got \(4, 4, "),
    "sequence parameter": ({}, {"seq_len": 3}, r"must have shape \(4, 3, (8|16)\), got \(4, 4, "),
    "hidden parameter": ({}, {"hidden_dim": 16}, r"must have shape"),
    "output parameter": ({}, {"output_dim": 32}, r"must have shape \(.*32.*\), got"),
}


@pytest.mark.parametrize("case", REFUSALS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_refusals(case: str, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels cannot serve is refused before MAX sees it."""

    def launched() -> None:
        raise AssertionError("reached MAX")

    monkeypatch.setattr(max_ops, "library", launched)
    shapes, parameters, message = REFUSALS[case]
    names = ["x", "ln_weight", "ln_bias", "linear_weight", "linear_bias", "grad_output"]
    tensors = dict(zip(names, make_tensors(DOCUMENT, "cpu"), strict=True))
    tensors |= {name: torch.zeros(shape) for name, shape in shapes.items()}
    sizes = dataclasses.replace(DOCUMENT, **parameters) if parameters else None
    unused = "grad_output" if direction == "forward" else "linear_bias"
    del tensors[unused]
    function = {
        "forward": max_ops.layernorm_linear,
        "backward": max_ops.layernorm_linear_backward,
    }[direction]
    with pytest.raises(ValueError, match=message):
        function(**tensors, sizes=sizes)


def test_refuses_other_dtypes_devices_and_algorithms() -> None:
    *inputs, _ = make_tensors(DOCUMENT, "cpu")
    with pytest.raises(ValueError, match=r"ln_bias must be float32, got torch\.bfloat16"):
        max_ops.layernorm_linear(*inputs[:2], inputs[2].bfloat16(), *inputs[3:])
    with pytest.raises(ValueError, match="linear_weight must be on cpu like x, got meta"):
        max_ops.layernorm_linear(*inputs[:3], inputs[3].to("meta"), inputs[4])
    with pytest.raises(ValueError, match="x must be on a CPU or a GPU, got device meta"):
        max_ops.layernorm_linear(*(tensor.to("meta") for tensor in inputs))
    with pytest.raises(ValueError, match="algorithm must be 'fused' or 'unfused', got 'both'"):
        max_ops.layernorm_linear(*inputs, algorithm="both")  # type: ignore[arg-type]


@pytest.mark.usefixtures("compiled")
def test_op_refuses_wrong_parameters() -> None:
    """The registered op itself holds its parameters to the tensors, for who calls it directly."""
    *inputs, _ = make_tensors(DOCUMENT, "cpu")
    with pytest.raises(ValueError, match=r"dimension 2 is 16, but the op's parameters say 32"):
        forward_of_wrong_parameters()(torch.empty(4, 4, 16), *inputs)


def test_one_library_a_process(tmp_path: Path) -> None:
    """Two libraries that register one name replace each other's kernels unseen."""
    library = max_ops.library()
    assert max_ops.library(max_ops.OP_DIRECTORY) is library
    with pytest.raises(RuntimeError, match="already uses the ops of"):
        max_ops.library(tmp_path)
