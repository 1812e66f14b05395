"""The head's gradients on a GPU by products and passes of our own, against float64."""

from __future__ import annotations

from typing import Any

import heads
import pytest
import torch
from heads import check, ours, results
from torch import Tensor

import fused_norm as fn
from fused_norm import composition
from fused_norm.chain import head_sm90, head_tiles, normalize
from fused_norm.chain.kernels import is_hopper
from fused_norm.composition import Operands, Spec
from fused_norm.ops import normalize as ops_normalize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not is_hopper(0), reason="needs a Hopper GPU"
    ),
]


def case(M: int, K: int, V: int, bias: bool = False) -> heads.Case:
    return heads.case(M, K, V, 1.0, bias, torch.bfloat16, "cuda")


@pytest.fixture
def own_dx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have our product compute the gradient of x."""
    monkeypatch.setattr(head_sm90, "OWN_DX", True)


@pytest.mark.usefixtures("own_dx")
@pytest.mark.parametrize("tile", head_tiles.TILES, ids=lambda t: f"{t.columns}-{t.is_split}")
# Tiles that rows, features and words fill in part; two words of a block; some waves.
@pytest.mark.parametrize(
    ("M", "K", "V"),
    [(1, 64, 66), (77, 72, 1000), (300, 256, 32001), (513, 776, 50257), (5000, 1032, 1000)],
)
def test_gradient_of_x(
    M: int, K: int, V: int, tile: head_tiles.Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_tiles, "best_tile", lambda *_: tile)
    monkeypatch.setattr(head_tiles, "rows_of_chunk", lambda M, K, V, most, _: min(M, most))
    tensors = case(M, K, V)
    check(tensors, 0.5, at_most=2.5)
    first = results(ours, tensors, chunk_rows=192)
    assert all(map(torch.equal, first, results(ours, tensors, chunk_rows=192)))
    # The same sums as PyTorch's product, but for their order.
    monkeypatch.setattr(head_sm90, "OWN_DX", False)
    dx, others = first[2], results(ours, tensors, chunk_rows=192)[2]
    torch.testing.assert_close(dx, others, rtol=2**-7, atol=float(others.abs().max()) * 2**-9)


@pytest.mark.usefixtures("own_dx")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"z_loss": 1e-3}], ids=str)
def test_gradient_of_x_with_options(options: dict[str, Any], bias: bool) -> None:
    check(case(1000, 256, 5000, bias=bias), 0.25, at_most=4, chunk_rows=128, **options)
    check(case(300, 256, 4001), of_logsumexp=1.0, at_most=2.5, reduction="none", **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalization", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("M", "K", "wide"), [(1, 64, False), (777, 768, True), (2000, 1001, False)]
)
def test_norm_by_passes(
    M: int,
    K: int,
    wide: bool,
    residual: bool,
    normalization: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(normalize, "OWN_NORM", True)
    torch.manual_seed(0)
    spec = Spec(normalization, eps=1e-5, weight_offset=1.0)
    of_features = torch.float32 if wide else dtype
    given = [torch.randn(M, K, device="cuda").to(dtype) for _ in range(2 if residual else 1)]
    given += [torch.randn(K, device="cuda").to(of_features) for _ in range(2)]
    dz = torch.randn(M, K, device="cuda").to(dtype)

    def found(run: Any, scale: Any) -> list[Tensor]:
        leaves = [scale(v).detach().requires_grad_() for v in given]
        x, *added, gamma, beta = leaves
        z = run(spec, Operands(x, added[0] if added else None, gamma, beta))
        return [z.detach(), *torch.autograd.grad(z, leaves, scale(dz))]

    def by_pytorch(spec: Spec, t: Operands) -> Tensor:
        return composition.normalized(spec, composition.summed(t), t)

    assert normalize.serves(Operands(given[0], None, *given[-2:]))
    exact, eager = found(by_pytorch, torch.Tensor.double), found(by_pytorch, lambda v: v)
    ours_ = found(ops_normalize.normalized, lambda v: v)
    for a, b, c in zip(ours_, eager, exact, strict=True):
        assert a.dtype is b.dtype
        assert heads.error(a, c) <= 2 * heads.error(b, c) + torch.finfo(a.dtype).eps / 8
    assert all(map(torch.equal, ours_, found(ops_normalize.normalized, lambda v: v)))


def test_norm_and_head_in_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalize, "OWN_NORM", True)
    monkeypatch.setattr(head_sm90, "OWN_DX", True)
    x, weight, target, _ = case(700, 256, 5000)
    gamma = torch.rand(256, device="cuda").bfloat16()
    leaves = [v.detach().clone().requires_grad_() for v in (x, weight, gamma)]

    def step() -> list[Tensor]:
        loss = fn.norm_linear_cross_entropy(
            *leaves[:2], target, normalization="rms_norm", norm_weight=leaves[2], chunk_rows=256
        )
        return [loss.detach(), *torch.autograd.grad(loss / 4, leaves)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = step()
        for v in found:
            v.zero_()
        graph.replay()
        stream.synchronize()
    assert all(map(torch.equal, found, expected))
