"""The op family as PyTorch's machinery sees it: opcheck, gradcheck, compile, export, transforms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import family
import pytest
import torch
from accuracy import as_copies
from compiling import ITS_OWN_WARNINGS, assert_one_compile
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fused_norm as fn
from fused_norm.call.results import Results
from fused_norm.composition import Operands, Spec
from fused_norm.ops import registration

pytestmark = ITS_OWN_WARNINGS

PLAIN: dict[str, Any] = {
    **{"dtype": torch.float32, "op": "norm_linear", "normalization": "rms_norm"},
    **{"gamma": "there", "beta": False, "weight_offset": 0.0, "modulation": None},
    **{"residual": False, "weights": 1, "bias": True, "activation": None, "statistics": False},
    **{"return_sum": False, "return_norm": False, "recompute": False, "residual_out": False},
    "shape": ((2, 3), 8, 6),
}
MLP = PLAIN | {"op": "norm_mlp"}
MEMBERS: dict[str, dict[str, Any]] = {
    "RMSNorm": PLAIN,
    "q, k, v": PLAIN | {"weights": 3, "bias": False, "weight_offset": 1.0},
    "residual": PLAIN | {"residual": True, "return_sum": True, "return_norm": True},
    "AdaLN": PLAIN | {"normalization": "layer_norm", "gamma": "missing", "modulation": "batch"},
    "GELU": PLAIN | {"normalization": "layer_norm", "beta": True, "activation": "gelu"},
    "SwiGLU of a pair": PLAIN | {"weights": 2, "activation": "swiglu", "residual": True},
    "MLP": MLP | {"activation": "gelu_tanh", "residual_out": True},
    "gated MLP": MLP | {"activation": "geglu", "recompute": True, "residual": True},
    "statistics": PLAIN | {"residual": True, "statistics": True, "normalization": "layer_norm"},
}


# What each of the others has is in one of these, too.
FIRST = ("q, k, v", "residual", "AdaLN", "SwiGLU of a pair", "gated MLP")
LONG = [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in MEMBERS]


class Call(nn.Module):
    """A member as a function of its tensors, one by one."""

    def __init__(self, member: str, device: str = "cpu", **changes: Any) -> None:
        super().__init__()
        self.case = MEMBERS[member] | changes
        self.tensors = family.make_tensors(self.case, device)

    @property
    def inputs(self) -> list[Tensor]:
        return list(family.leaves(self.tensors).values())

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.of(family.ours, inputs)

    def eager(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.of(family.eager, inputs)

    def of(self, function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> Any:
        rest = iter(inputs)
        tensors = family.replaced(
            self.tensors, lambda values: [v if v is None else next(rest) for v in values]
        )
        results = function(self.case, tensors)
        return results[0] if len(results) == 1 else tuple(results)


def listed(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def gradients(function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the results and the gradients of a fixed loss."""
    copies = as_copies(list(inputs))
    results = listed(function(*copies))
    sum(r.double().pow(3).sum() for r in results).backward()
    return [*(r.detach() for r in results), *(c.grad for c in copies)]


def assert_all_close(mine: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float) -> None:
    for ours, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("member", LONG)
def test_opcheck(member: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the very arguments with which the library calls its ops."""
    from fused_norm.ops import node, norm_linear_ops, statistics

    # The node calls none of them.
    monkeypatch.setattr(node, "module", lambda: None)
    calls: list[tuple[Any, tuple[Any, ...]]] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append((getattr(torch.ops.fused_norm, name).default, arguments))
            return function(*arguments)

        return call

    for name in ("forward", "backward"):
        op = noted(f"norm_linear_{name}", getattr(norm_linear_ops, name))
        monkeypatch.setattr(norm_linear_ops, name, op)
    monkeypatch.setattr(statistics, "_op", noted("add_statistics", statistics._op))
    call = Call(member, device)
    gradients(call, call.inputs)
    with torch.no_grad():
        call(*call.inputs)
    assert len(calls) >= 3
    monkeypatch.undo()
    for op, arguments in calls:
        # Autograd is above these ops, which see no tensor that requires a gradient.
        detached = torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, arguments)
        torch.library.opcheck(op, detached)


def test_given_statistics_are_no_results() -> None:
    """Regression: they were returned instead of h."""
    x, w, width = torch.randn(5, 8), torch.randn(6, 8), torch.ones(5)
    t = Operands(x, mean=width, rstd=width, weights=[w], biases=[None])
    spec = Spec(activation="gelu")
    found = torch.ops.fused_norm.norm_linear_forward(*t, *spec, True)
    results = Results.unflat(found, spec, t, True)
    assert results.mean is None
    assert results.rstd is None
    torch.testing.assert_close(results.products[0], (x - 1) @ w.t())


@pytest.mark.parametrize("member", LONG)
def test_gradcheck(member: str) -> None:
    call = Call(member, dtype=torch.float64, shape=((3,), 4, 2))
    assert torch.autograd.gradcheck(call, call.inputs, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, call.inputs)


@pytest.mark.parametrize("member", ["q, k, v", "SwiGLU of a pair", "gated MLP", "statistics"])
def test_compile_full_graph(member: str, device: str) -> None:
    torch.compiler.reset()
    call = Call(member, device)
    compiled = torch.compile(call, fullgraph=True)
    assert_all_close(gradients(compiled, call.inputs), gradients(call, call.inputs), 1e-5)
    with torch.no_grad():
        assert_all_close(listed(compiled(*call.inputs)), listed(call(*call.inputs)), 1e-5)


@pytest.mark.parametrize("member", ["MLP", "AdaLN"])
def test_one_compile_for_many_sizes(member: str, device: str) -> None:
    def check(compiled: Any, rows: int) -> None:
        call = Call(member, device, shape=((3, rows), 8, 6))
        results = gradients(lambda *i: compiled(call, family.ours, i), call.inputs)
        assert_all_close(results, gradients(call, call.inputs), 1e-5)

    assert_one_compile(Call.of, check)


@pytest.mark.parametrize("member", ["residual", "AdaLN", "gated MLP"])
def test_export(member: str, device: str) -> None:
    call = Call(member, device)
    inputs = tuple(t.detach() for t in call.inputs)
    program = torch.export.export(call, inputs)
    assert "fused_norm.norm_linear_forward" in program.graph_module.code
    assert_all_close(listed(program.module()(*inputs)), listed(call(*inputs)), 1e-5)


@pytest.mark.parametrize("member", LONG)
def test_functional_transforms(member: str, device: str) -> None:
    call = Call(member, device)
    inputs = [t.detach() for t in call.inputs]
    every = tuple(range(len(inputs)))

    def loss(function: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda *a: sum(r.square().sum() for r in listed(function(*a)))

    mine = torch.func.grad(loss(call), every)(*inputs)
    assert_all_close(mine, torch.func.grad(loss(call.eager), every)(*inputs), 1e-4)
    stacked = torch.stack([inputs[0], inputs[0] + 1])
    batched = torch.vmap(call, (0, *(None,) * (len(inputs) - 1)))(stacked, *inputs[1:])
    for i in range(2):
        expected = call.eager(stacked[i], *inputs[1:])
        assert_all_close([b[i] for b in listed(batched)], listed(expected), 1e-4)
    tangents = [torch.randn_like(t) for t in inputs]
    _, mine = torch.func.jvp(call, tuple(inputs), tuple(tangents))
    _, other = torch.func.jvp(call.eager, tuple(inputs), tuple(tangents))
    assert_all_close(listed(mine), listed(other), 1e-4)


@pytest.mark.parametrize("member", LONG)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(member: str, reentrant: bool, device: str) -> None:
    call = Call(member, device)
    results = gradients(lambda *a: checkpoint(call, *a, use_reentrant=reentrant), call.inputs)
    for mine, theirs in zip(results, gradients(call, call.inputs), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(member: str, dtype: torch.dtype, device: str) -> None:
    call = Call(member, device, dtype=dtype, shape=((2, 30), 64, 20))

    def results(function: Callable[..., Any]) -> list[Tensor]:
        with torch.autocast(device, torch.bfloat16):
            found = listed(function(*call.inputs))
        return found

    for mine, other in zip(results(call), results(call.eager), strict=True):
        assert mine.dtype is other.dtype
        torch.testing.assert_close(mine, other, rtol=0.05, atol=0.05)
    sum(r.float().sum() for r in results(call)).backward()
    assert all(t.grad is not None and t.grad.dtype is t.dtype for t in call.inputs)


@pytest.mark.parametrize("member", MEMBERS)
def test_inference_mode_and_meta_tensors(member: str, device: str) -> None:
    call = Call(member, device)
    with torch.inference_mode():
        results = listed(call(*call.inputs))
        assert all(r.is_inference() for r in results)
        assert_all_close(results, listed(call.eager(*call.inputs)), 1e-4)
    shapes = [r.shape for r in listed(call(*(t.to("meta") for t in call.inputs)))]
    assert shapes == [r.shape for r in results]


@pytest.mark.parametrize("member", MEMBERS)
def test_flops_are_counted(member: str) -> None:
    """As many as PyTorch's ops take, once each backward has what it needs."""
    call = Call(member, recompute=False)

    def counted(function: Callable[..., Any]) -> int:
        with FlopCounterMode(display=False) as counter:
            sum(r.sum() for r in listed(function(*call.inputs))).backward()
        return counter.get_total_flops()

    if not call.case["statistics"]:  # whose Linear layer is not in the other one
        assert counted(call) == counted(call.eager) > 0


def test_flops_of_the_first_op_are_counted() -> None:
    layer = fn.LayerNormLinear(8, 6)
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(5, 8, requires_grad=True)).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 5 * 8 * 6


def test_symbolic_trace_records_the_calls() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = fn.LayerNormLinear(8, 8, normalization="RMSNorm")
            self.second = fn.LayerNormMLP(8, 16)
            self.weight = nn.Parameter(torch.randn(6, 8))

        def forward(self, x: Tensor) -> Tensor:
            h = self.second(self.first(x))
            return fn.norm_linear(h, self.weight) + fn.fused_layernorm_linear(
                h, None, None, self.weight
            )

    model = Model()
    traced = torch.fx.symbolic_trace(model)
    called = {node.target for node in traced.graph.nodes if node.op == "call_function"}
    assert {fn.norm_linear, fn.fused_layernorm_linear} <= called
    x = torch.randn(5, 8)
    assert torch.equal(traced(x), model(x))


def test_profiler_names_the_ops() -> None:
    layer = fn.LayerNormLinear(8, 6)
    x = torch.randn(5, 8, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x).sum().backward()
        fn.norm_linear(x, layer.weight, normalization="rms_norm").sum().backward()
        with torch.no_grad():
            layer(x)
    names = {event.key for event in profile.key_averages() if event.count == 3}
    assert "fused_norm::norm_linear" in names


def test_float64_leaves_autocast_alone() -> None:
    x, weight = torch.randn(5, 8, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")
        y = fn.norm_linear(x, weight, normalization="rms_norm")
    assert y.dtype is torch.float64


def test_a_compiler_that_says_it_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: in Dynamo of PyTorch 2.11, all it compiles does, and gradients were lost."""
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert registration.may_follow()
    with torch.no_grad():
        assert not registration.may_follow()
