"""The head as PyTorch knows it: derivatives, second backwards, compilers, errors, memory."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from heads import case
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import fused_norm as fn
from fused_norm.chain import head as chain
from fused_norm.ops import head as head_ops
from fused_norm.ops import registration


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_gradcheck(reduction: str, softcap: float | None) -> None:
    torch.manual_seed(0)
    double: Any = {"dtype": torch.float64, "requires_grad": True}
    x, weight, bias = (
        torch.randn(5, 4, **double),
        torch.randn(7, 4, **double),
        torch.randn(7, **double),
    )
    target = torch.tensor([0, 6, -100, 3, 3])

    def function(*tensors: Tensor) -> Any:
        return fn.linear_cross_entropy(
            *tensors[:2],
            target,
            tensors[2],
            label_smoothing=0.1,
            z_loss=0.1,
            softcap=softcap,
            reduction=reduction,
            return_logsumexp=True,
            chunk_rows=2,
        )

    assert torch.autograd.gradcheck(function, (x, weight, bias))
    assert torch.autograd.gradgradcheck(function, (x, weight, bias))


def test_opcheck() -> None:
    x, weight, target, bias = case(6, 4, 5, bias=True)
    options = ("mean", -100, 0.1, 0.0, 0.0, 4, "", 0, 0, [True, True, True])
    tensors = (x, weight, bias, target, None, None)
    utilities = ("test_schema", "test_faketensor")
    op: Any = torch.ops.fused_norm
    torch.library.opcheck(
        op.linear_cross_entropy.default, (*tensors, *options), test_utils=utilities
    )
    torch.library.opcheck(
        op.linear_cross_entropy_backward.default,
        (*tensors, torch.tensor(2.0), None, *options),
        test_utils=utilities,
    )


def test_a_second_backward_computes_again_or_raises() -> None:
    x, weight, target, _ = case(20, 8, 11)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    loss = fn.linear_cross_entropy(*leaves, target)
    three = torch.tensor(3.0)
    first = torch.autograd.grad(loss, leaves, three, retain_graph=True)
    again = torch.autograd.grad(loss, leaves, three, retain_graph=True)
    torch.testing.assert_close(first, again)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_forward_computes_the_gradients_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, target, _ = case(20, 8, 11)

    def unexpected(*_: Any) -> Any:
        raise AssertionError("computed again")

    monkeypatch.setattr(head_ops, "_backward_op", unexpected)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    loss, lse = fn.linear_cross_entropy(*leaves, target, return_logsumexp=True)
    (loss / 4).backward()
    loss, lse = fn.linear_cross_entropy(*leaves, target, return_logsumexp=True)
    with pytest.raises(AssertionError, match="computed again"):
        (loss + lse.sum()).backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(reduction: str, dynamic: bool) -> None:
    def function(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = fn.linear_cross_entropy(x, weight, target, reduction=reduction)
        return (loss * 2).sum()

    x, weight, target, _ = case(20, 8, 11)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    found = torch.autograd.grad(compiled(*leaves, target), leaves)
    exact = torch.autograd.grad(function(*leaves, target), leaves)
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize(("logarithms", "count"), [("none", 0), ("detached", 0), ("derived", 1)])
def test_compiled_backward_scales_what_the_forward_computed(logarithms: str, count: int) -> None:
    """Dynamo has zeros for the gradient of the logarithms, where nobody asked for one."""
    names: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    def function(x: Tensor, weight: Tensor, target: Tensor) -> Any:
        if logarithms == "none":
            return fn.linear_cross_entropy(x, weight, target), target
        loss, lse = fn.linear_cross_entropy(x, weight, target, return_logsumexp=True)
        if logarithms == "detached":
            return loss, lse.detach()
        return loss + 0.1 * lse.square().mean(), lse.detach()

    x, weight, target, _ = case(20, 8, 11)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    torch.compiler.reset()
    aot = aot_autograd(fw_compiler=backend)
    loss, lse = torch.compile(function, backend=aot, fullgraph=True)(*leaves, target)
    found = torch.autograd.grad(loss, leaves, torch.tensor(3.0))
    assert names.count("fused_norm.linear_cross_entropy.default") == 1
    assert names.count("fused_norm.linear_cross_entropy_backward.default") == count
    exact, its_lse = function(*leaves, target)
    torch.testing.assert_close((loss, lse), (exact, its_lse))
    torch.testing.assert_close(found, torch.autograd.grad(exact, leaves, torch.tensor(3.0)))


def test_logarithms_whose_gradient_is_zero_compute_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compiled graph that returns them has zeros for a gradient that there is not."""
    calls: list[Any] = []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return compute(*arguments)

    compute = chain.compute
    monkeypatch.setattr(chain, "compute", counted)

    def function(x: Tensor, weight: Tensor, target: Tensor) -> Any:
        return fn.linear_cross_entropy(x, weight, target, return_logsumexp=True)

    x, weight, target, _ = case(20, 8, 11)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    torch.compiler.reset()
    loss, lse = torch.compile(function, backend="aot_eager", fullgraph=True)(*leaves, target)
    exact = function(*leaves, target)
    calls.clear()
    found = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert not calls
    torch.testing.assert_close(found, torch.autograd.grad(exact[0], leaves, retain_graph=True))
    found = torch.autograd.grad((loss, lse.sum()), leaves)
    assert len(calls) == 1
    torch.testing.assert_close(found, torch.autograd.grad((exact[0], exact[1].sum()), leaves))


class Names(TorchDispatchMode):
    """Notes the ops that run below it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), more: Any = None) -> Any:
        self.names.append(str(op))
        return op(*arguments, **(more or {}))


def test_whoever_watches_sees_the_op() -> None:
    x, weight, target, _ = case(20, 8, 11)
    with Names() as seen:
        fn.linear_cross_entropy(x, weight, target)
    assert seen.names.count("fused_norm.linear_cross_entropy.default") == 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fn.linear_cross_entropy(x, weight, target)
    assert [e.name for e in profile.events()].count("fused_norm::linear_cross_entropy") == 1
    meta = fn.linear_cross_entropy(x.to("meta"), weight.to("meta"), target.to("meta"))
    assert meta.is_meta


def test_values_that_are_not_in_memory() -> None:
    """The dispatcher makes them, which other calls bypass."""
    x, weight, target, _ = case(20, 8, 11)
    for lazy in (torch._neg_view(x), torch._efficientzerotensor(20, 8)):
        assert not registration._is_plain(lazy)
        found = fn.linear_cross_entropy(lazy, weight, target)
        exact = F.cross_entropy(F.linear(lazy.clone(), weight), target)
        torch.testing.assert_close(found, exact)
    subclass = x.as_subclass(type("Named", (Tensor,), {}))
    assert not registration._is_plain(subclass)
    assert all(map(registration._is_plain, (x, torch.nn.Parameter(x), None, 1)))


def test_exports() -> None:
    class Model(torch.nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight)

        def forward(self, x: Tensor, target: Tensor) -> Any:
            return fn.linear_cross_entropy(x, self.weight, target)

    x, weight, target, _ = case(20, 8, 11)
    program = torch.export.export(Model(weight), (x, target))
    names = [str(node.target) for node in program.graph.nodes]
    assert "fused_norm.linear_cross_entropy.default" in names
    torch.testing.assert_close(program.module()(x, target), Model(weight)(x, target))


X, WEIGHT, TARGET = torch.randn(6, 4), torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 4, 0])
WRONG: list[tuple[Any, Any, Any]] = [
    (X, WEIGHT[:, :3], TARGET),
    (X, WEIGHT, TARGET[:3]),
    (X, WEIGHT, TARGET.float()),
    (X, WEIGHT, TARGET.int()),
    (X, WEIGHT, TARGET + 1),
    (X, WEIGHT, TARGET - 1),
    (X, WEIGHT.double(), TARGET),
    (X, WEIGHT, None),
    (X, None, TARGET),
    (None, WEIGHT, TARGET),
]


@pytest.mark.parametrize("arguments", WRONG, ids=range(len(WRONG)))
def test_errors_are_pytorch_s(arguments: tuple[Any, Any, Any]) -> None:
    x, weight, target = arguments
    with pytest.raises(Exception) as expected:  # noqa: PT011
        F.cross_entropy(F.linear(x, weight), target)
    with pytest.raises(expected.type, match=re.escape(str(expected.value))):
        fn.linear_cross_entropy(x, weight, target)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"reduction": "both"}, ValueError),
        ({"label_smoothing": 1.5}, RuntimeError),
        ({"softcap": -1.0}, ValueError),
        ({"chunk_rows": 0}, ValueError),
        ({"chunk_rows": "tiny"}, ValueError),
        ({"class_weight": torch.ones(3)}, RuntimeError),
        ({"class_weight": [1.0] * 5}, TypeError),
        ({"class_weight": torch.ones(5, requires_grad=True)}, RuntimeError),
        ({"token_weight": 1.0}, TypeError),
        ({"token_weight": torch.ones(1)}, ValueError),
        ({"token_weight": torch.ones(6, requires_grad=True)}, RuntimeError),
        ({"ignore_index": 1.5}, TypeError),
        ({"ignore_index": None}, TypeError),
        ({"chunk_rows": 1.5}, TypeError),
        ({"softcap": float("inf")}, ValueError),
    ],
    ids=str,
)
@pytest.mark.parametrize("few", [0, head_ops.FEW_LOGITS])
def test_wrong_options(
    option: dict[str, Any], error: type[Exception], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_ops, "FEW_LOGITS", few)
    with pytest.raises(error):
        fn.linear_cross_entropy(X, WEIGHT, TARGET, **option)


@pytest.mark.parametrize("shape", [(3, 2), (5,), (2, 3, 1), (1, 2, 3)], ids=str)
def test_labels_of_other_rows_are_an_error(shape: tuple[int, ...]) -> None:
    """As many labels as rows, but in another order or of another shape."""
    with pytest.raises(ValueError, match=r"Expected target size \[2, 3\], got"):
        fn.linear_cross_entropy(X.view(2, 3, 4), WEIGHT, TARGET[: math.prod(shape)].view(shape))


@pytest.mark.parametrize("few", [0, head_ops.FEW_LOGITS])
def test_flat_labels_are_those_of_the_rows_in_order(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_ops, "FEW_LOGITS", few)
    loss = fn.linear_cross_entropy(X.view(2, 3, 4), WEIGHT, TARGET, reduction="none")
    torch.testing.assert_close(loss, fn.linear_cross_entropy(X, WEIGHT, TARGET, reduction="none"))


_PEAK = """
import resource, sys, torch, torch.nn.functional as F
import fused_norm as fn
from fused_norm.chain import head
torch.set_num_threads(1)
dtype = getattr(torch, sys.argv[2])
x = torch.randn({M}, 64).to(dtype).requires_grad_()
weight = (torch.randn({V}, 64) / 8).to(dtype).requires_grad_()
target = torch.randint(0, {V}, ({M},))
fn.linear_cross_entropy(x[:64], weight, target[:64]).backward()
F.cross_entropy(F.linear(x[:64], weight).float(), target[:64]).backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.argv[1] == "ours":
    fn.linear_cross_entropy(x, weight, target).backward()
else:
    F.cross_entropy(F.linear(x, weight).float(), target).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_needs_a_quarter_of_the_memory(dtype: str) -> None:
    program = _PEAK.format(M=512, V=32000)

    def peak(which: str) -> int:
        command = [sys.executable, "-c", program, which, dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert peak("ours") <= peak("eager") / 4
