"""The row programs as PyTorch's machinery sees them: opcheck, compile, export, func, graphs."""

from __future__ import annotations

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from accuracy import gradients
from compiling import ITS_OWN_WARNINGS, assert_one_compile
from row_ops import OPS, SCALE, Op
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fused_norm as fn

pytestmark = ITS_OWN_WARNINGS


@pytest.fixture(params=OPS)
def op(request: pytest.FixtureRequest) -> Op:
    return OPS[request.param]


SHAPES = {"2-d": (5, 8), "3-d": (2, 3, 8), "1-d": (8,), "empty": (0, 8), "permuted": (3, 2, 8)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(shape: str, dtype: torch.dtype, device: str) -> None:
    def tensor() -> Tensor:
        x = 1 + torch.rand(SHAPES[shape], device=device).to(dtype)
        return x.transpose(0, 1).contiguous().transpose(0, 1) if shape == "permuted" else x

    ops, o = torch.ops.fused_norm, torch.tensor([SCALE], device=device)
    torch.library.opcheck(ops.trainable_eps_layer_norm.default, (tensor(), o))
    torch.library.opcheck(ops.composed_mean.default, (tensor(),))
    torch.library.opcheck(ops.composed_norm.default, (tensor(),))
    torch.library.opcheck(ops.composed_norm_backward.default, (tensor(), tensor()))
    torch.library.opcheck(ops.composed_div.default, (tensor(), tensor()))
    for mask in ([True, True], [True, False], [False, True]):
        torch.library.opcheck(
            ops.trainable_eps_layer_norm_backward.default, (tensor(), tensor(), o, mask)
        )
        torch.library.opcheck(
            ops.composed_div_backward.default, (tensor(), tensor(), tensor(), mask)
        )


def test_gradcheck(op: Op) -> None:
    inputs = op.inputs((4, 5), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        op.call, inputs, check_undefined_grad=True, check_batched_grad=True
    )
    assert torch.autograd.gradgradcheck(op.call, inputs)


def test_compile_full_graph(op: Op, device: str) -> None:
    torch.compiler.reset()
    inputs = op.inputs((3, 7, 24), device=device, requires_grad=True)
    grad_output = torch.randn(3, 7, 24, device=device)
    compiled = torch.compile(op.call, fullgraph=True)
    expected = gradients(op.call, inputs, grad_output)
    for mine, theirs in zip(gradients(compiled, inputs, grad_output), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_one_compile_for_many_sizes(op: Op, device: str) -> None:
    def check(compiled: Any, rows: int) -> None:
        inputs = op.inputs((rows, 24), device=device, requires_grad=True)
        grad_output = torch.randn(rows, 24, device=device)
        expected = gradients(op.call, inputs, grad_output)
        for mine, theirs in zip(gradients(compiled, inputs, grad_output), expected, strict=True):
            assert torch.equal(mine, theirs)

    assert_one_compile(op.call, check)


def test_export(device: str) -> None:
    layer, x = fn.TrainableEpsLayerNorm(device=device), torch.randn(6, 24, device=device)
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: rows},))
    assert "fused_norm.trainable_eps_layer_norm" in program.graph_module.code
    y = torch.randn(19, 24, device=device)
    torch.testing.assert_close(program.module()(y), layer(y))


def test_functional_transforms(op: Op, device: str) -> None:
    inputs, every = op.inputs((6, 8), device=device), tuple(range(len(op.names)))

    def gradients(function: object) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda *a: function(*a).pow(3).sum(), every)(*inputs)

    for mine, other in zip(gradients(op.call), gradients(op.formula), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", ["first", "all", "last"])
def test_vmap(op: Op, which: str, device: str) -> None:
    last = len(op.names) - 1
    dims = [0 if which == "all" or i == (0 if which == "first" else last) else None
            for i in range(last + 1)]  # fmt: skip
    inputs = []
    for i, dim in enumerate(dims):
        samples = [op.inputs((3, 8), device=device)[i] for _ in range(4)]
        inputs.append(
            samples[0] if dim is None else torch.stack(samples) + torch.rand_like(samples[0])
        )
    results = torch.vmap(op.call, tuple(dims))(*inputs)
    for k in range(4):
        picked = [t if dim is None else t[k] for t, dim in zip(inputs, dims, strict=True)]
        torch.testing.assert_close(results[k], op.formula(*picked))


def test_batched_gradients(op: Op, device: str) -> None:
    """Regression: a batch of incoming gradients alone is no batch of rows."""
    inputs = op.inputs((5, 8), device=device, requires_grad=True)
    y, expected = op.call(*inputs), op.formula(*inputs)
    grad_outputs = torch.randn(3, 5, 8, device=device)

    def pulled_back(output: Tensor) -> tuple[Tensor, ...]:
        return torch.vmap(lambda v: torch.autograd.grad(output, inputs, v, retain_graph=True))(
            grad_outputs
        )

    for mine, other in zip(pulled_back(y), pulled_back(expected), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_per_sample_gradients(device: str) -> None:
    x, o = OPS["trainable_eps"].inputs((6, 8), device=device)

    def per_sample(op: object) -> Tensor:
        gradient = torch.func.grad(lambda o, row: op(row, o).pow(3).sum())
        return torch.vmap(gradient, (None, 0))(o, x)

    ours, theirs = per_sample(fn.trainable_eps_layer_norm), per_sample(OPS["trainable_eps"].formula)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, device: str) -> None:
    inputs = OPS["trainable_eps"].inputs((6, 8), device=device, requires_grad=True)
    grad_output = torch.randn(6, 8, device=device)
    function = fn.trainable_eps_layer_norm
    results = gradients(
        lambda *a: checkpoint(function, *a, use_reentrant=reentrant), inputs, grad_output
    )
    for mine, theirs in zip(results, gradients(function, inputs, grad_output), strict=True):
        assert torch.equal(mine, theirs)


def test_inference_mode_and_meta(op: Op, device: str) -> None:
    inputs = op.inputs((6, 8), device=device)
    with torch.inference_mode():
        y = op.call(*inputs)
    assert y.is_inference()
    torch.testing.assert_close(y, op.formula(*inputs))
    y = op.call(*(t.to("meta") for t in inputs))
    assert (y.shape, y.device.type) == ((6, 8), "meta")


def test_module() -> None:
    layer = fn.TrainableEpsLayerNorm()
    assert list(layer.state_dict()) == ["o"]
    assert torch.equal(layer.o, torch.zeros(1))
    x = torch.randn(5, 24)
    torch.testing.assert_close(layer(x), torch.nn.functional.layer_norm(x, (24,), eps=0.0))
    torch.nn.init.constant_(layer.o, 0.5)
    layer(x).pow(3).sum().backward()
    assert layer.o.grad.abs() > 0
    expected, buffer = layer(x), io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    loaded = fn.TrainableEpsLayerNorm(device="meta").to_empty(device="cpu")
    loaded.load_state_dict(torch.load(buffer))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert torch.equal(other(x), expected)
    # A float32 o serves narrower inputs.
    assert layer(x.bfloat16()).dtype is torch.bfloat16
    assert fn.TrainableEpsLayerNorm(dtype=torch.float64).o.dtype is torch.float64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_cuda_graph(op: Op) -> None:
    inputs = op.inputs((64, 256), dtype=torch.bfloat16, device="cuda", requires_grad=True)
    grad_output = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)

    def step() -> list[Tensor]:
        y = op.call(*inputs)
        gradients = torch.autograd.grad(y, inputs, grad_output)
        # Not y, which keeps the nodes that accumulate gradients on a stream.
        return [y.detach(), *gradients]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for tensor in inputs:
            tensor.copy_(1 + torch.rand_like(tensor))
    graph.replay()
    for mine, other in zip(captured, step(), strict=True):
        assert torch.equal(mine, other)


def test_calls_in_many_threads(op: Op) -> None:
    """No call writes on the record of another thread's, which runs without the lock when long."""
    every = [op.inputs((500, 300)) for _ in range(8)]
    expected = [op.call(*inputs) for inputs in every]

    def run(index: int) -> bool:
        return all(torch.equal(op.call(*every[index]), expected[index]) for _ in range(30))

    with ThreadPoolExecutor(len(every)) as pool:
        assert all(pool.map(run, range(len(every))))
