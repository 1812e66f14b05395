"""Norm + Linear whose output comes in parts: values, gradients, and what no kernel serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fused_norm as fn
from fused_norm.ops.operands import adds_up_gradients, at_every_size
from fused_norm.ops.output_parts import norm_linear_in_parts

K, SIZES = 24, (16, 8, 40)


def tensors(
    rows: tuple[int, ...] = (2, 5), dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"x": (*rows, K), "weight": (sum(SIZES), K), "bias": (sum(SIZES),)}
    shapes |= {"norm_weight": (K,), "norm_bias": (K,)}
    return {
        n: torch.randn(s, dtype=torch.float64).to(dtype).requires_grad_() for n, s in shapes.items()
    }


def ours(p: dict[str, Tensor], **options: Any) -> list[Tensor]:
    norm = {name: p[name] for name in ("norm_weight", "norm_bias")}
    return list(norm_linear_in_parts(p["x"], p["weight"], p.get("bias"), SIZES, **norm, **options))


def eager(p: dict[str, Tensor], residual: Tensor | None = None, **options: Any) -> list[Tensor]:
    x = p["x"] if residual is None else p["x"] + residual
    z = F.layer_norm(x, (K,), p["norm_weight"], p["norm_bias"])
    parts = F.linear(z, p["weight"], p.get("bias")).split(SIZES, -1)
    return [*parts, *[x] * bool(options.get("return_sum")), *[z] * bool(options.get("return_norm"))]


def gradients(results: list[Tensor], leaves: list[Tensor], **options: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    dys = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in results]
    return torch.autograd.grad(results, leaves, [d.to(results[0].dtype) for d in dys], **options)


@pytest.mark.parametrize("rows", [(2, 5), (0, 5), (7,)], ids=str)
@pytest.mark.parametrize("every_size", [False, True])
@pytest.mark.parametrize("used", [(0, 1, 2, 3, 4), (1,), (0, 2), (3,), (4,), (2, 3)], ids=str)
def test_gradients(rows: tuple[int, ...], every_size: bool, used: tuple[int, ...]) -> None:
    p = tensors(rows)
    residual = torch.randn_like(p["x"]).requires_grad_()
    options = {"residual": residual, "return_sum": True, "return_norm": True}
    leaves = [*p.values(), residual]
    found = []
    for run in (ours, eager):
        if every_size:
            with at_every_size():
                results = run(p, **options)
        else:
            results = run(p, **options)
        chosen = [results[i] for i in used]
        found.append([*results, *gradients(chosen, leaves, allow_unused=True)])
    for mine, other in zip(*found, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


def test_no_gradients_and_not_all() -> None:
    p = tensors()
    with torch.no_grad(), at_every_size():
        torch.testing.assert_close(ours(p), eager(p))
    p["weight"].requires_grad_(False)
    leaves = [p["x"], p["bias"]]
    with at_every_size():
        torch.testing.assert_close(gradients(ours(p), leaves), gradients(eager(p), leaves))
    p = {name: v.requires_grad_(name == "weight") for name, v in tensors().items()}
    with at_every_size():
        found, expected = (gradients(run(p), [p["weight"]]) for run in (ours, eager))
    torch.testing.assert_close(found, expected)


def test_derivatives_of_gradients() -> None:
    p = tensors()
    with at_every_size():
        found = [gradients(run(p), [*p.values()], create_graph=True) for run in (ours, eager)]
        second = [
            torch.autograd.grad(
                sum(g.square().sum() for g in each), [*p.values()], allow_unused=True
            )
            for each in found
        ]
    for mine, other in zip(*second, strict=True):
        if other is not None:
            torch.testing.assert_close(mine, other)


def test_modes() -> None:
    p = tensors(dtype=torch.float32)
    with fn.batch_invariant():
        mine = gradients(ours(p), [*p.values()])
    torch.testing.assert_close(mine, gradients(eager(p), [*p.values()]), rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16), at_every_size():
        results = ours(p)
        assert {y.dtype for y in results} == {torch.bfloat16}
    found = gradients(results, [*p.values()])
    with torch.autocast("cpu", torch.bfloat16):
        results = eager(p)
    expected = gradients(results, [*p.values()])
    for mine, other in zip(found, expected, strict=True):
        assert (mine - other).norm() <= 0.02 * other.norm()


def test_op() -> None:
    """PyTorch's checks of an op take gradients of parts."""
    p = {name: v.detach() for name, v in tensors(dtype=torch.float32).items()}
    kind = ("layer_norm", "", 1e-5, 0.0, False, False, False, False, False)
    norm = (None, p["norm_weight"], p["norm_bias"], None, None)
    ops = torch.ops.fused_norm
    call = (p["x"], *norm, None, None, None, None, None, [p["weight"]], [p["bias"]], *kind, True)
    y, mean, rstd = ops.norm_linear_forward(*call)
    of = (p["x"], *norm, mean, rstd, None, None, None, [p["weight"]], [None], *kind)
    dys = [torch.randn_like(part) for part in y.split(SIZES, -1)]
    torch.library.opcheck(ops.norm_linear_backward.default, (*of, [], dys, [0, 2, 3, 11, 12]))
    whole = ops.norm_linear_backward(*of, [], [torch.cat(dys, -1)], [0, 2, 3, 11, 12])
    parts = ops.norm_linear_backward(*of, [], dys, [0, 2, 3, 11, 12])
    # Sums over rows may cancel: elements of them are as exact as the whole is large.
    for part, other in zip(parts, whole, strict=True):
        assert torch.linalg.vector_norm(part - other) <= 1e-6 * torch.linalg.vector_norm(other)
    with pytest.raises(RuntimeError, match="of parts"):
        ops.norm_linear_backward(*of, [], dys[:2], [0])


def test_traced() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Any:
            return norm_linear_in_parts(x, weight, None, SIZES)

    p = tensors()
    module = torch.fx.symbolic_trace(Model())
    assert norm_linear_in_parts in [node.target for node in module.graph.nodes]
    given = p["x"], p["weight"]
    torch.testing.assert_close(module(*given), Model()(*given))
    with pytest.raises(TypeError, match="activation"):
        norm_linear_in_parts(*given, None, SIZES, activation="gelu")


def test_cpus_have_no_such_kernel() -> None:
    assert not adds_up_gradients(torch.empty(4, K, dtype=torch.bfloat16), SIZES, True)
