"""The op as PyTorch's machinery sees it: opcheck, compile, export, func, checkpoint, autocast."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from accuracy import (
    NAMES,
    as_copies,
    as_float64,
    assert_within_budget,
    eager,
    gradients,
    make_inputs,
)
from compiling import ITS_OWN_WARNINGS, assert_one_compile
from processes import assert_is_captured
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fused_norm as fn

pytestmark = ITS_OWN_WARNINGS
INPUT_SETS = {
    "all": lambda device: make_inputs(5, 8, 6, device=device),
    "plain": lambda device: [
        t if i in (0, 3) else None for i, t in enumerate(make_inputs(5, 8, 6, device=device))
    ],
    "3-d bf16": lambda device: make_inputs((2, 3), 8, 6, dtype=torch.bfloat16, device=device),
    "permuted": lambda device: [
        make_inputs((2, 3), 8, 6, device=device)[0].transpose(0, 1).contiguous().transpose(0, 1),
        *make_inputs(1, 8, 6, device=device)[1:],
    ],
    "empty": lambda device: make_inputs(0, 8, 6, device=device),
}


@pytest.mark.parametrize("inputs", INPUT_SETS)
def test_opcheck(inputs: str, device: str) -> None:
    x, gamma, beta, weight, bias = INPUT_SETS[inputs](device)
    ops = torch.ops.fused_norm
    kind = ("layer_norm", "", 1e-5, 0.0, False, False, False, False, False)

    def tensors(bias: Tensor | None, *statistics: Tensor | None) -> tuple[Any, ...]:
        norm = (None, gamma, beta, None, None, *statistics)
        return (x, *norm, None, None, None, [weight], [bias], *kind)

    for keeps in (False, True):
        arguments = (*tensors(bias, None, None), keeps)
        torch.library.opcheck(ops.norm_linear_forward.default, arguments)
    y, mean, rstd = ops.norm_linear_forward(*arguments)
    there = [place for place, t in enumerate((x, None, gamma, beta)) if t is not None]
    # The gradients of empty tensors are PyTorch's, by a transform that the check does not see.
    for wanted in ([*there, 11, 12], [0, 11]) if x.numel() else ():
        given = (*tensors(None, mean, rstd), [], [torch.randn_like(y)], wanted)
        torch.library.opcheck(ops.norm_linear_backward.default, given)


def test_gradcheck() -> None:
    inputs = make_inputs(4, 5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        fn.fused_layernorm_linear, inputs, check_undefined_grad=True, check_batched_grad=True
    )
    assert torch.autograd.gradgradcheck(fn.fused_layernorm_linear, inputs)


def test_compile_full_graph(device: str) -> None:
    inputs = make_inputs((3, 7), 24, 10, device=device, requires_grad=True)
    grad_output = torch.randn(3, 7, 10, device=device)
    compiled = torch.compile(fn.fused_layernorm_linear, fullgraph=True)
    expected = gradients(fn.fused_layernorm_linear, inputs, grad_output)
    for mine, theirs in zip(gradients(compiled, inputs, grad_output), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_one_compile_for_many_sizes(device: str) -> None:
    def check(compiled: Any, rows: int) -> None:
        inputs = make_inputs(rows, 24, 10, device=device, requires_grad=True)
        grad_output = torch.randn(rows, 10, device=device)
        expected = gradients(fn.fused_layernorm_linear, inputs, grad_output)
        for mine, theirs in zip(gradients(compiled, inputs, grad_output), expected, strict=True):
            assert torch.equal(mine, theirs)

    assert_one_compile(fn.fused_layernorm_linear, check)


def test_export(device: str) -> None:
    layer = fn.LayerNormLinear(24, 10, device=device)
    x = torch.randn(6, 24, device=device)
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: rows},))
    assert "fused_norm.norm_linear_forward" in program.graph_module.code
    y = torch.randn(19, 24, device=device)
    torch.testing.assert_close(program.module()(y), layer(y))


def test_functional_transforms(device: str) -> None:
    inputs = make_inputs(6, 8, 5, device=device)

    def loss(function: object, *arguments: Tensor) -> Tensor:
        return function(*arguments).square().sum()

    every = tuple(range(5))
    ours = torch.func.grad(lambda *a: loss(fn.fused_layernorm_linear, *a), every)(*inputs)
    theirs = torch.func.grad(lambda *a: loss(eager, *a), every)(*inputs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_vmap(device: str) -> None:
    x, gamma, beta, weight, bias = make_inputs((4, 3), 8, 5, device=device)
    batched = torch.vmap(fn.fused_layernorm_linear, (0, None, None, None, None))
    torch.testing.assert_close(
        batched(x, gamma, beta, weight, bias), eager(x, gamma, beta, weight, bias)
    )
    weights = torch.randn(4, 5, 8, device=device)
    per_weight = torch.vmap(fn.fused_layernorm_linear, (0, None, None, 0, None))
    expected = torch.stack([eager(x[i], gamma, beta, weights[i], bias) for i in range(4)])
    torch.testing.assert_close(per_weight(x, gamma, beta, weights, bias), expected)


def test_per_sample_gradients(device: str) -> None:
    x, gamma, beta, weight, bias = make_inputs(6, 8, 5, device=device)

    def loss(function: object, weight: Tensor, row: Tensor) -> Tensor:
        return function(row, gamma, beta, weight, bias).square().sum()

    def per_sample(function: object) -> Tensor:
        gradient = torch.func.grad(lambda w, row: loss(function, w, row))
        return torch.vmap(gradient, (None, 0))(weight, x)

    torch.testing.assert_close(
        per_sample(fn.fused_layernorm_linear), per_sample(eager), rtol=1e-4, atol=1e-4
    )


def test_hessian_vector_product(device: str) -> None:
    inputs = make_inputs(3, 6, 4, device=device, requires_grad=True)

    def second(function: object) -> list[Tensor]:
        copies = as_copies(inputs)
        first = torch.autograd.grad(function(*copies).pow(3).sum(), copies, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), copies)

    for name, mine, other in zip(
        NAMES, second(fn.fused_layernorm_linear), second(eager), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("outer", ["jacfwd", "jacrev"])
@pytest.mark.parametrize("inner", ["jacfwd", "jacrev"])
def test_hessians(outer: str, inner: str, device: str) -> None:
    """Regression: a jvp of the op was zero, and a Hessian of it an error."""
    x, gamma, beta, weight, bias = make_inputs(2, 5, 3, device=device)

    def hessian(function: object) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            return function(x, gamma, beta, weight, bias).pow(3).sum()

        return getattr(torch.func, outer)(getattr(torch.func, inner)(loss))(x)

    mine, other = hessian(fn.fused_layernorm_linear), hessian(eager)
    assert other.abs().max() > 0.1
    torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)


OPS = {
    "layernorm_linear": lambda x, w: fn.fused_layernorm_linear(x, None, None, w),
    "trainable_eps": lambda x, w: fn.trainable_eps_layer_norm(x, w[0, :1]),
    "mean": lambda x, w: fn.composed.mean(x),
    "norm": lambda x, w: fn.composed.norm(x),
    "div": lambda x, w: fn.composed.div(x, w[:1].expand_as(x)),
}


@pytest.mark.parametrize("name", OPS)
def test_tangents_of_gradients(name: str) -> None:
    """Regression: a backward inside forward mode lost the tangent of its grad_output."""
    x, w = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    x.requires_grad_()
    w.requires_grad_()
    y = OPS[name](x, w)
    grad_output, tangent = torch.randn_like(y), torch.randn_like(y)
    # Gradients are linear in grad_output, so the tangent goes through as grad_output does.
    expected = torch.autograd.grad(y, (x, w), tangent, retain_graph=True, allow_unused=True)
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(grad_output, tangent)
        gradients = torch.autograd.grad(y, (x, w), dual, allow_unused=True)
        tangents = [g if g is None else forward_ad.unpack_dual(g).tangent for g in gradients]
    for mine, other in zip(tangents, expected, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("name", OPS)
def test_batched_gradients(name: str, device: str) -> None:
    """Each of a batch of grad_outputs gives the gradients that it gives alone."""
    x, w = torch.randn(3, 4, device=device), torch.randn(5, 4, device=device)
    x.requires_grad_()
    w.requires_grad_()
    y = OPS[name](x, w)
    grad_outputs = torch.randn(6, *y.shape, device=device)

    def gradients(grad_output: Tensor, **options: bool) -> tuple[Tensor | None, ...]:
        options |= {"retain_graph": True, "allow_unused": True}
        return torch.autograd.grad(y, (x, w), grad_output, **options)

    batched = gradients(grad_outputs, is_grads_batched=True)
    for index, grad_output in enumerate(grad_outputs):
        for mine, other in zip(batched, gradients(grad_output), strict=True):
            if other is not None:
                torch.testing.assert_close(mine[index], other)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, device: str) -> None:
    inputs = make_inputs(6, 8, 5, device=device, requires_grad=True)
    grad_output = torch.randn(6, 5, device=device)
    expected = gradients(fn.fused_layernorm_linear, inputs, grad_output)
    results = gradients(
        lambda *a: checkpoint(fn.fused_layernorm_linear, *a, use_reentrant=reentrant),
        inputs,
        grad_output,
    )
    for mine, theirs in zip(results, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(x_dtype: torch.dtype, autocast_dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(30, 64, 20, device=device, requires_grad=True)
    inputs[0] = inputs[0].detach().to(x_dtype).requires_grad_()
    truth = as_float64(inputs)
    exact = eager(*truth)
    grad_output = torch.randn_like(exact).to(autocast_dtype)
    exact.backward(grad_output.double())

    def under_autocast(function: object) -> tuple[Tensor, list[Tensor]]:
        copies = as_copies(inputs)
        with torch.autocast(device, autocast_dtype):
            y = function(*copies)
        y.backward(grad_output)
        return y, copies

    def pytorch(x: Tensor, *parameters: Tensor) -> Tensor:
        gamma, beta, weight, bias = parameters
        z = torch.nn.functional.layer_norm(x.float(), (64,), gamma, beta)
        return torch.nn.functional.linear(z, weight, bias)

    y, ours = under_autocast(fn.fused_layernorm_linear)
    bar, theirs = under_autocast(pytorch)
    assert y.dtype is autocast_dtype
    assert_within_budget("y", y, exact, bar)
    for name, mine, other, high in zip(NAMES, ours, theirs, truth, strict=True):
        assert mine.grad.dtype == mine.dtype
        assert_within_budget(f"grad_{name}", mine.grad, high.grad, other.grad)


@pytest.mark.parametrize("shape", [(700, 1024, 512), (33, 769, 65), (8, 5000, 24)], ids=str)
def test_autocast_of_a_wide_input_in_other_shapes(shape: tuple[int, ...], device: str) -> None:
    M, K, N = shape
    inputs = make_inputs(M, K, N, device=device, requires_grad=True, mean=3.0)
    with torch.autocast(device, torch.bfloat16):
        y = fn.fused_layernorm_linear(*inputs)
    grad_output = torch.randn_like(y)
    y.backward(grad_output)
    truth, peers = as_float64(inputs), as_copies(inputs)
    exact = eager(*truth)
    exact.backward(grad_output.double())
    with torch.autocast(device, torch.bfloat16):
        bar = eager(*peers)
    bar.backward(grad_output)
    assert_within_budget("y", y, exact, bar)
    for name, mine, other, high in zip(NAMES, inputs, peers, truth, strict=True):
        assert_within_budget(f"grad_{name}", mine.grad, high.grad, other.grad)


def test_autocast_leaves_float64_alone() -> None:
    inputs = make_inputs(30, 64, 20, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        y = fn.fused_layernorm_linear(*inputs)
    assert y.dtype is torch.float64


def test_inference_mode(device: str) -> None:
    inputs = make_inputs(6, 8, 5, device=device)
    with torch.inference_mode():
        y = fn.fused_layernorm_linear(*inputs)
    assert y.is_inference()
    torch.testing.assert_close(y, eager(*inputs))


def test_meta_tensors() -> None:
    inputs = [t.to("meta") for t in make_inputs((2, 3), 8, 5)]
    y = fn.fused_layernorm_linear(*inputs)
    assert y.shape == (2, 3, 5)
    assert y.device.type == "meta"


def _sequential(**kwargs: object) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 10, **kwargs))


def test_module_is_initialized_as_pytorchs() -> None:
    ln, linear = _sequential()
    torch.manual_seed(3)
    layer = fn.LayerNormLinear(24, 10)
    assert torch.equal(layer.weight, linear.weight)
    assert torch.equal(layer.bias, linear.bias)
    assert torch.equal(layer.layer_norm_weight, ln.weight)
    assert list(layer.state_dict()) == ["layer_norm_weight", "layer_norm_bias", "weight", "bias"]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_modules_there_and_back(affine: bool, bias: bool) -> None:
    ln, linear = nn.LayerNorm(24, 1e-3, elementwise_affine=affine), nn.Linear(24, 10, bias=bias)
    layer = fn.LayerNormLinear.from_modules(ln, linear)
    assert layer.weight is linear.weight
    assert layer.layer_norm_weight is ln.weight
    assert layer.layer_norm_bias is ln.bias
    assert layer.bias is linear.bias
    x = torch.randn(5, 24)
    torch.testing.assert_close(layer(x), linear(ln(x)))
    ln2, linear2 = layer.to_modules()
    assert linear2.weight is linear.weight
    assert ln2.weight is ln.weight
    assert (ln2.eps, ln2.elementwise_affine) == (ln.eps, affine)
    torch.testing.assert_close(layer(x), linear2(ln2(x)))


def test_from_modules_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match="ln must normalize the shape"):
        fn.LayerNormLinear.from_modules(nn.LayerNorm((2, 24)), nn.Linear(24, 10))


def test_module_copies_pickles_and_moves() -> None:
    layer = fn.LayerNormLinear(24, 10)
    x = torch.randn(5, 24)
    expected = layer(x)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    loaded = fn.LayerNormLinear(24, 10, device="meta").to_empty(device="cpu")
    loaded.load_state_dict(torch.load(buffer))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert torch.equal(other(x), expected)
    assert layer.to(torch.float64)(x.double()).dtype is torch.float64
    assert "in_features=24, out_features=10" in repr(layer)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
class TestStreams:
    # Of the leaves, which first met gradients on the side stream.
    @pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
    def test_cuda_graph(self) -> None:
        layer = fn.LayerNormLinear(256, 128, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad_output = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                layer.zero_grad(set_to_none=True)
                x.grad = None
                layer(x).backward(grad_output)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        layer.zero_grad(set_to_none=True)
        x.grad = None
        with torch.cuda.graph(graph, stream=side):
            y = layer(x)
            y.backward(grad_output)
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        captured = [y.clone(), x.grad.clone(), *(p.grad.clone() for p in layer.parameters())]
        del y  # and with it the nodes that accumulate gradients on the side stream
        layer.zero_grad(set_to_none=True)
        x.grad = None
        y = layer(x)
        y.backward(grad_output)
        for mine, other in zip(
            captured, [y, x.grad, *(p.grad for p in layer.parameters())], strict=True
        ):
            assert torch.equal(mine, other)

    def test_side_stream_follows_its_producer(self) -> None:
        inputs = make_inputs(512, 256, 128, device="cuda")
        expected = fn.fused_layernorm_linear(*inputs)
        source = inputs[0].clone()
        inputs[0].zero_()
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            inputs[0].copy_(source)
            y = fn.fused_layernorm_linear(*inputs)
        side.synchronize()
        assert torch.equal(y, expected)

    # PyTorch captures an empty graph of its own to begin with.
    @pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
    def test_cuda_graph_of_nothing_else(self) -> None:
        """Warmed up as PyTorch asks, in a process without another product of matrices."""
        assert_is_captured('fn.LayerNormLinear(256, 128, device="cuda", dtype=torch.bfloat16)')

    # Of the graph that PyTorch captures to have a memory pool.
    @pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
    def test_reduce_overhead(self) -> None:
        layer = fn.LayerNormLinear(256, 128, device="cuda")
        compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
        for _ in range(4):
            x = torch.randn(64, 256, device="cuda")
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), layer(x))
