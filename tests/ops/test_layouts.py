"""Results and gradients lie in memory as PyTorch's composition has them, whatever the inputs do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

import fused_norm as fn

SHAPES = [(2, 3, 4, 8), (1, 3, 4, 8), (2, 3, 1, 8), (1, 1, 1, 8)]
# How the dimensions lie in memory: dense, channels first, others in turn, all turned round.
ORDERS = [(0, 1, 2, 3), (0, 3, 1, 2), (1, 0, 2, 3), (3, 2, 1, 0)]
K, N = 8, 6


def laid(shape: tuple[int, ...], order: tuple[int, ...], device: str) -> Tensor:
    """Return a tensor whose dimensions lie in an order."""
    t = torch.randn([shape[i] for i in order], device=device)
    return t.permute([order.index(i) for i in range(len(shape))])


def ours(x: Tensor, r: Tensor | None, p: dict[str, Tensor], kind: str) -> Any:
    options: dict[str, Any] = {"normalization": kind, "norm_weight": p["gamma"]}
    if r is None:
        return fn.norm_linear(x, p["weight"], p["bias"], **options), x
    return fn.norm_linear(x, p["weight"], p["bias"], residual=r, return_sum=True, **options)


def plain(x: Tensor, r: Tensor | None, p: dict[str, Tensor], kind: str) -> Any:
    total = x if r is None else x + r
    norm = F.layer_norm if kind == "layer_norm" else F.rms_norm
    return F.linear(norm(total, (K,), p["gamma"]), p["weight"], p["bias"]), total


def parameters(device: str) -> dict[str, Tensor]:
    found = {"gamma": torch.randn(K), "weight": torch.randn(N, K), "bias": torch.randn(N)}
    return {name: t.to(device).requires_grad_() for name, t in found.items()}


def layouts(
    run: Any, kind: str, given: tuple[Any, ...], p: dict[str, Tensor], how: str
) -> list[tuple[int, ...]]:
    """Return strides of the results, and of the gradients as the ops before get them."""
    x, r, dtotal = given
    seen: list[tuple[int, ...]] = []
    leaves = [v.detach().requires_grad_() for v in (x, r) if v is not None]
    inner = [leaf.view_as(leaf) for leaf in leaves]
    y, total = run(*(inner if r is not None else (*inner, None)), p, kind)
    for each in inner:
        each.register_hook(lambda g: seen.append(g.stride()))
    if how == "stream":
        # As a block does it: the sum goes on, and the branch is added at the end.
        out = total + F.linear(y, p["weight"].t())
        out.backward(dtotal)
    elif how == "both":
        torch.autograd.backward([y, total], [torch.randn_like(y), dtotal])
    else:
        y.backward(torch.randn_like(y))
    return [y.stride(), total.stride(), *seen]


@pytest.mark.usefixtures("chain")
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("how", ["stream", "both", "y alone"])
@pytest.mark.parametrize("has_residual", [True, False], ids=["residual", "no residual"])
def test_strides(how: str, kind: str, has_residual: bool, device: str) -> None:
    """The gradient of x was always contiguous, and so was the sum."""
    p = parameters(device)
    wrong = []
    for shape, first, second in itertools.product(SHAPES, ORDERS, ORDERS):
        for third in ORDERS if how != "y alone" and has_residual else ORDERS[:1]:
            x, r = laid(shape, first, device), laid(shape, second, device)
            given = (x, r if has_residual else None, laid(shape, third, device))
            mine, other = (layouts(run, kind, given, p, how) for run in (ours, plain))
            if mine != other:
                wrong.append((shape, first, second, third, mine, other))
    assert not wrong, (len(wrong), wrong[:6])


@pytest.mark.usefixtures("chain")
def test_gradient_of_a_sum_that_is_expanded(device: str) -> None:
    p = parameters(device)
    given = (torch.randn(2, 3, 4, K), torch.randn(2, 3, 4, K), torch.ones(1).expand(2, 3, 4, K))
    given = tuple(v.to(device) for v in given)
    mine, other = (layouts(run, "layer_norm", given, p, "both") for run in (ours, plain))
    assert mine == other


class ConvBlock(nn.Module):
    """A convolution with a BatchNorm, an MLP on the transposed rows, and a convolution again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, K, 3, padding=1), nn.BatchNorm2d(K)
        self.ln = nn.ModuleList([nn.LayerNorm(K), nn.LayerNorm(K)])
        self.up = nn.ModuleList([nn.Linear(K, 2 * K), nn.Linear(K, 2 * K)])
        self.down = nn.ModuleList([nn.Linear(2 * K, K), nn.Linear(2 * K, K)])
        self.last, self.last_norm = nn.Conv2d(K, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).permute(0, 2, 3, 1)
        for ln, up, down in zip(self.ln, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(ln(x))))
        result: Tensor = self.last_norm(self.last(x.permute(0, 3, 1, 2)))
        return result


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("batch", [1, 2])
def test_between_convolutions(batch: int, backend: str, device: str) -> None:
    """MaxViT in little: at batch 1, PyTorch's BatchNorm took the gradient for another layout's."""
    model = ConvBlock().to(device)
    x = torch.randn(batch, 3, 6, 6, device=device)
    torch._dynamo.reset()
    options = {"then": backend, "small": True}
    found = []
    for run in (torch.compile(model, backend="fused_norm", options=options), model):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.square().mean().backward()
        found.append([y, leaf.grad, *(p.grad.clone() for p in model.parameters())])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
        assert mine.stride() == other.stride()


@pytest.mark.usefixtures("chain")
def test_fakes_lie_as_results_do(device: str) -> None:
    """What compiled graphs know of the ops' results before they run."""
    p = {name: t.detach() for name, t in parameters(device).items()}
    kind = ("layer_norm", "", 1e-5, 0.0, False, True, False, False, False)
    forward = torch.ops.fused_norm.norm_linear_forward.default
    backward = torch.ops.fused_norm.norm_linear_backward.default
    for shape, first, second in itertools.product(SHAPES, ORDERS, ORDERS):
        x, r = laid(shape, first, device), laid(shape, second, device)
        dy = torch.randn(*shape[:-1], N, device=device)
        given = [x, r, p["gamma"], *[None] * 8, [p["weight"]], [p["bias"]], *kind]
        results = forward(*given, True)
        _, total, mean, rstd = results
        saved = [total, None, p["gamma"], None, None, None, mean, rstd, *[None] * 3]
        wanted = [0, 2, 11, 12]
        given_back = [*saved, [p["weight"]], [None], *kind, [], [dy, r], wanted]
        found = [*results, *backward(*given_back)]
        with FakeTensorMode() as mode:
            fake = [tree_map_only(Tensor, mode.from_tensor, g) for g in (given, given_back)]
            expected = [*forward(*fake[0], True), *backward(*fake[1])]
        assert [(v.shape, v.stride(), v.dtype) for v in found] == [
            (v.shape, v.stride(), v.dtype) for v in expected
        ], (shape, first, second)


class ColumnsBlock(nn.Module):
    """GPT-2's MLP, whose weights are stored by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(K)
        self.up, self.down = (nn.Parameter(torch.randn(*s)) for s in ((K, 4 * K), (4 * K, K)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.gelu(self.ln(x) @ self.up) @ self.down
        return y


def test_compiled_gradients_of_weights_by_columns(device: str) -> None:
    """Regression: the second weight's gradient was taken for that of one stored by rows."""
    model, x = ColumnsBlock().to(device), torch.randn(6, K, device=device)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="fused_norm", options={"small": True})
    assert str(fn.explain(model, x, training=True, options={"small": True})).count("norm_mlp") == 1
    found = [
        torch.autograd.grad(run(x).square().sum(), model.parameters()) for run in (compiled, model)
    ]
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)
        assert mine.stride() == other.stride()


@pytest.mark.filterwarnings("ignore:.*[Nn]ested [Tt]ensor:UserWarning")
@pytest.mark.parametrize("options", [{}, {"weight_offset": 1.0}, {"scale": 0.5}], ids=str)
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_nested_rows_have_the_norm_that_is_asked_for(kind: str, options: dict[str, Any]) -> None:
    """Regression: they had a LayerNorm, whatever the norm, without an offset, scale or shift."""
    parts = [torch.randn(rows, K) + 1 for rows in (3, 5)]
    gamma, weight = torch.randn(K), torch.randn(N, K)

    def call(x: Tensor) -> Tensor:
        return fn.norm_linear(x, weight, normalization=kind, norm_weight=gamma, **options)

    found = call(torch.nested.nested_tensor(parts, layout=torch.jagged))
    for own, rows in zip(found.unbind(), parts, strict=True):
        torch.testing.assert_close(own, call(rows))


@pytest.mark.parametrize("name", ["x", "norm_weight", "eps"])
def test_errors_are_those_of_the_norm(name: str) -> None:
    arguments: dict[str, Any] = {"x": torch.randn(2, K), "weight": torch.randn(N, K)}
    with pytest.raises(TypeError, match=r"^rms_norm\(\): argument"):
        fn.norm_linear(**arguments | {name: [1.0] * K}, normalization="rms_norm")
