"""Rows that begin transposed stay dense between calls, and lie as the model's for all others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from fused_norm.models import backend, layouts
from fused_norm.models.calls import CALLS
from fused_norm.models.fuse import Options, fuse
from fused_norm.models.laid_out import lay_out, memory_order
from fused_norm.models.values import value

K = 24
COPIES = ("clone", "contiguous", "lay_out")


def compiled(function: Callable[..., Any], *arguments: Any) -> list[GraphModule]:
    """Hold a function against itself rewritten, layouts included; return the graphs."""
    torch._dynamo.reset()
    graphs: list[GraphModule] = []

    def rewritten(module: GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        assert all(site.fused for site in fuse(module, Options()) if site.linears)
        graphs.append(module)
        return module.forward

    expected = function(*(a.clone() for a in arguments))
    found = torch.compile(function, backend=rewritten)(*arguments)
    for mine, other in zip(found, expected, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (other.dtype, other.shape, other.stride())
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-5)
    return graphs


def copies(graphs: list[GraphModule]) -> int:
    """Return how many copies the pass has added to graphs: the model itself has none."""
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    return sum(getattr(node.target, "__name__", node.target) in COPIES for node in nodes)


def reads_dense_rows(graphs: list[GraphModule]) -> bool:
    """Return whether all rows that calls read are dense."""
    calls = [n for graph in graphs for n in graph.graph.nodes if n.target in CALLS]
    read = [node for call in calls for node in layouts._rows(call)]
    assert read
    return all(value(node).stride(-1) == 1 for node in read)


def blocks(x: Tensor, w: Tensor, o: Tensor, count: int = 3) -> list[Tensor]:
    """Return the residual sums of a transformer without attention."""
    sums = [x]
    for _ in range(count):
        x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (K,)), w)), o)
        sums.append(x)
    return sums


def operands() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(2, K, 7).transpose(1, 2)
    return x, torch.randn(2 * K, K) / 5, torch.randn(K, 2 * K) / 7


@torch.no_grad()
def test_copies_do_not_grow_with_depth() -> None:
    found = [
        copies(compiled(lambda *t, n=n: F.layer_norm(blocks(*t, n)[-1], (K,))[None], *operands()))
        for n in (2, 4)
    ]
    # The first sum is made dense, the last is laid out as the model's.
    assert found == [2, 2]


@torch.no_grad()
def test_visible_sums_lie_as_the_model_has_them() -> None:
    compiled(blocks, *operands())


@torch.no_grad()
def test_sums_that_are_written() -> None:
    def function(x: Tensor, w: Tensor, o: Tensor) -> list[Tensor]:
        sums = blocks(x, w, o, 2)
        sums[1].view(2, 7, K).mul_(2) if sums[1].is_contiguous() else sums[1].mul_(2)
        return [*sums, *blocks(sums[1], w, o, 2)]

    compiled(function, *operands())


@torch.no_grad()
def test_rows_that_are_written_after_a_call() -> None:
    def function(x: Tensor, w: Tensor, o: Tensor) -> list[Tensor]:
        sums = blocks(x, w, o, 1)
        x.add_(1)
        return [*sums, *blocks(x, w, o, 1)]

    compiled(function, *operands())


@torch.no_grad()
def test_views_of_sums() -> None:
    def function(x: Tensor, w: Tensor, o: Tensor) -> list[Tensor]:
        sums = blocks(x, w, o, 2)
        # A view that dense rows do not allow.
        return [*blocks(sums[1], w, o, 1), sums[1].transpose(1, 2).view(2 * K, 7), sums[2]]

    compiled(function, *operands())


def test_sums_with_gradients_keep_their_layout() -> None:
    x, w, o = operands()
    compiled(lambda *t: blocks(*t, 2), x.requires_grad_(), w, o)


@pytest.mark.parametrize("then", ["eager", "aot_eager", "inductor"])
def test_trained_rows_are_dense_between_calls(then: str) -> None:
    """Every call copied its rows and their gradient: an eighth of SigLIP's training on an H200."""

    def function(x: Tensor, w: Tensor, o: Tensor, count: int) -> list[Tensor]:
        # Rows that another op reads as well.
        sums = blocks(x * 2, w, o, count)
        return [sums[-1], sums[1].transpose(1, 2).view(2 * K, 7).sum(0)]

    counts = []
    for count in (3, 5):
        tensors = [t.requires_grad_() for t in operands()]
        graphs = compiled(lambda *t, n=count: function(*t, n), *tensors)
        assert reads_dense_rows(graphs)
        counts.append(copies(graphs))
        torch._dynamo.reset()
        options = {"then": then, "small": True}
        ours = torch.compile(function, backend=backend, options=options)
        gradients = [
            torch.autograd.grad([y.cos().sum() for y in f(*tensors, count)], tensors)
            for f in (ours, function)
        ]
        for mine, other in zip(*gradients, strict=True):
            assert mine.stride() == other.stride()
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    assert counts[0] == counts[1]


def test_gradients_of_rows_lie_as_the_rows() -> None:
    x = torch.randn(2, 3, 5, 7).permute(0, 3, 1, 2).requires_grad_()
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        y = lay_out(x, order)
        assert memory_order(y) == order
        assert torch.equal(y, x)
        for dy in (torch.randn(2, 7, 3, 5), torch.randn(5, 3, 7, 2).permute(3, 2, 1, 0)):
            (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
            assert dx.stride() == x.stride()
            assert torch.equal(dx, dy)


@torch.no_grad()
def test_encoder_of_whisper() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    def encoder(layers: int) -> Any:
        config = transformers.WhisperConfig(
            **{"d_model": 64, "encoder_layers": layers, "encoder_attention_heads": 4},
            **{"encoder_ffn_dim": 128, "num_mel_bins": 16, "max_source_positions": 30},
        )
        return WhisperEncoder(config).eval()

    sounds = torch.randn(2, 16, 60)
    counts = []
    for layers in (1, 3):
        model = encoder(layers)
        graphs = compiled(lambda x, model=model: [model(x).last_hidden_state], sounds)
        # Attention's own, which makes its heads contiguous.
        counts.append(copies(graphs) - 5 * layers)
        assert reads_dense_rows(graphs)
    assert counts[0] == counts[1]


class Sum(torch.nn.Module):
    """TinyViT after its convolutions: an MLP whose residual rows are stored by channels."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.norm = torch.nn.BatchNorm2d(32), torch.nn.LayerNorm(32)
        self.fc1, self.fc2 = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(x).reshape(1, 32, 196).transpose(1, 2)
        return x + self.fc2(torch.nn.functional.gelu(self.fc1(self.norm(x))))


def pooled(y: torch.Tensor) -> torch.Tensor:
    """Return the result of TinyViT's head: the gradient of its rows is stored by channels."""
    y = y.view(1, 14, 14, 32).permute(0, 3, 1, 2)
    return torch.nn.functional.adaptive_avg_pool2d(y, 1)


@pytest.mark.parametrize("head", [torch.square, pooled])
def test_a_sum_lies_as_pytorchs_own_does(head: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Regression, of TinyViT: the sum of a residual had contiguous rows whatever the residual's.

    So had its gradient, with which PyTorch's own BatchNorm goes wrong for one sample.
    """
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()
    own = Sum()
    ours = copy.deepcopy(own)
    x = torch.randn(1, 32, 14, 14)
    results = [own(x), torch.compile(ours, backend=backend, options={"then": "eager"})(x)]
    for y in results:
        head(y).sum().backward()
    assert results[1].stride() == results[0].stride()
    for (name, a), b in zip(own.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-3, msg=name)


# Dynamo asks each input for its gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("then", ["eager", "aot_eager"])
@pytest.mark.parametrize("samples", [1, 2])
def test_gradients_of_rows_that_another_graph_normalizes(then: str, samples: int) -> None:
    """PyTorch's BatchNorm goes wrong for one sample if the gradient has another layout."""
    torch.compiler.reset()
    own = Sum()
    ours = copy.deepcopy(own)
    x = torch.randn(samples, 32, 14, 14)

    def behind(model: Sum, rows: Tensor) -> Tensor:
        return rows + model.fc2(F.gelu(model.fc1(model.norm(rows))))

    options = {"then": then, "small": True}
    compiled = torch.compile(behind, backend=backend, options=options)
    for model, function in ((own, behind), (ours, compiled)):
        rows = model.bn(x).reshape(samples, 32, 196).transpose(1, 2)
        function(model, rows).square().sum().backward()
    for (name, a), b in zip(own.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-3, msg=name)
