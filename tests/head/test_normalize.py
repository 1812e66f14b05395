"""The norm before the head by passes, on CPUs by those of CPUs, against PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fused_norm as fn
from fused_norm import composition
from fused_norm.chain import normalize
from fused_norm.composition import Operands, Spec
from fused_norm.norms import NORMALIZATIONS
from fused_norm.ops import normalize as ops


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have a CPU's passes take a GPU's place; return what runs."""
    ran: list[str] = []
    for name in ("forward", "backward"):
        monkeypatch.setattr(normalize, name, _noted(getattr(normalize, name), name, ran))
    monkeypatch.setattr(normalize, "serves", lambda t: normalize._fits(t))
    return ran


def _noted(function: Any, name: str, ran: list[str]) -> Any:
    def run(*arguments: Any) -> Any:
        ran.append(name)
        return function(*arguments)

    return run


def operands(
    residual: bool, gamma: Any, beta: Any, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor | None]:
    """Return x, a residual, gamma and beta of some dtypes, each of which None leaves out."""
    torch.manual_seed(0)
    x = torch.randn(3, 37, 40).to(dtype)
    added = torch.randn(3, 37, 40).to(dtype) if residual else None
    of_features = [None if d is None else torch.randn(40).to(d) for d in (gamma, beta)]
    return [v if v is None else v.requires_grad_() for v in (x, added, *of_features)]


def gradients(z: Tensor, tensors: list[Tensor | None], dz: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(z, [v for v in tensors if v is not None], dz))


LOW, WIDE = torch.bfloat16, torch.float32


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("gamma", "beta"),
    [(LOW, None), (LOW, LOW), (WIDE, WIDE), (WIDE, None), (None, LOW), (None, None)],
)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gradients(
    normalization: str, residual: bool, gamma: Any, beta: Any, offset: float, served: list[str]
) -> None:
    spec = Spec(normalization, eps=1e-3, weight_offset=offset)
    tensors = operands(residual, gamma, beta)
    wide = [v if v is None else v.detach().double().requires_grad_() for v in tensors]
    z = ops.normalized(spec, Operands(*tensors))
    dz = torch.randn(z.shape).to(z.dtype)
    found = [z, *gradients(z, tensors, dz)]
    assert served == ["forward", "backward"]
    by_pytorch = composition.normalized(spec, composition.summed(Operands(*wide)), Operands(*wide))
    exact = [by_pytorch, *gradients(by_pytorch, wide, dz.double())]
    # A sum of x and a residual is rounded once more.
    tolerance = 2**-7 if residual else 2**-8
    for a, b in zip(found, exact, strict=True):
        assert a.dtype in (LOW, WIDE)
        scale = float(b.detach().abs().max())
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * scale)


def test_only_what_requires_gradients(served: list[str]) -> None:
    x, _, gamma, beta = operands(False, LOW, LOW)
    spec = Spec("layer_norm")
    dz = torch.randn(3, 37, 40).to(LOW)
    every = gradients(ops.normalized(spec, Operands(x, None, gamma, beta)), [x, gamma, beta], dz)
    for i, leaf in enumerate((x, gamma, beta)):
        given = [v if v is leaf else v.detach() for v in (x, gamma, beta) if v is not None]
        z = ops.normalized(spec, Operands(given[0], None, *given[1:]))
        (found,) = torch.autograd.grad(z, leaf, dz)
        torch.testing.assert_close(found, every[i])
    served.clear()
    with torch.no_grad():
        assert not ops.normalized(spec, Operands(x, None, gamma, beta)).requires_grad
    assert served == ["forward"]


@pytest.mark.parametrize("residual", [False, True])
def test_second_derivatives(residual: bool, served: list[str]) -> None:
    """Through x, the residual and gamma, whose sum is kept; PyTorch's ops compute them."""
    spec = Spec("rms_norm")
    tensors = operands(residual, WIDE, None)
    leaves = [v for v in tensors if v is not None]

    def second(run: Any) -> list[Tensor]:
        z = run(Operands(*tensors)).float()
        first = torch.autograd.grad(z.square().sum(), leaves, create_graph=True)
        total = sum(g.float().square().sum() for g in first)
        return list(torch.autograd.grad(total, leaves))

    exact = second(lambda t: composition.normalized(spec, composition.summed(t), t))
    served.clear()
    for a, b in zip(second(lambda t: ops.normalized(spec, t)), exact, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.detach().abs().max()))
    # The first backward is PyTorch's, the second reaches the rows once more.
    assert served == ["forward", "backward"]


@pytest.mark.parametrize("residual", [False, True])
def test_rows_that_are_not_dense(residual: bool, served: list[str]) -> None:
    spec = Spec("rms_norm")
    tensors = operands(residual, LOW, None)
    x = tensors[0]
    assert x is not None
    turned = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    dz = torch.randn(3, 37, 40).to(LOW)
    every = gradients(ops.normalized(spec, Operands(*tensors)), tensors, dz)
    others = [turned, *tensors[1:]]
    found = gradients(ops.normalized(spec, Operands(*others)), others, dz)
    for a, b in zip(found, every, strict=True):
        torch.testing.assert_close(a, b)
    assert served == ["forward", "backward"] * 2


def test_what_is_left_to_pytorch(served: list[str]) -> None:
    x, residual, gamma, _ = operands(True, LOW, None)
    spec = Spec("rms_norm")
    others = [
        Operands(x, residual, gamma.half()),
        Operands(x, residual.float(), gamma),
        Operands(x.float(), None, gamma.float()),
        Operands(x[:0], None, gamma),
        Operands(x, None, gamma, torch.ones(40)),
    ]
    for t in others:
        ops.normalized(spec, t)
    with torch.autocast("cpu", torch.bfloat16):
        ops.normalized(spec, Operands(x, None, gamma))
    torch.func.vmap(lambda v: ops.normalized(spec, Operands(v, None, gamma)))(x)
    assert not served


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_head(normalization: str, served: list[str]) -> None:
    x, residual, gamma, _ = operands(True, LOW, None)
    weight = torch.randn(301, 40).to(LOW).requires_grad_()
    target = torch.randint(0, 301, (3, 37))

    def found() -> list[Tensor]:
        loss = fn.norm_linear_cross_entropy(
            x, weight, target, normalization=normalization, norm_weight=gamma, residual=residual
        )
        return [loss, *torch.autograd.grad(loss, (x, residual, gamma, weight))]

    own = found()
    assert served == ["forward", "backward"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normalize, "serves", lambda t: False)
        for a, b in zip(own, found(), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.detach().abs().max()))
