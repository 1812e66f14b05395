"""linear_add with a gate: as PyTorch's ops compute it, and by one product on Hopper."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from launches import names
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import fused_norm as fn
from fused_norm.ops.linear_gated_add import groups_of

B, T, K, N = 3, 5, 24, 16
GATES = ((B, 1, N), (1, 1, N), (N,), (B, T, N), (1, T, N), (B, 1, 1), ())

_on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no Hopper",
)


def leaves(device: str, dtype: torch.dtype, gate: tuple[int, ...] = (B, 1, N)) -> list[Tensor]:
    shapes = ((B, T, K), (N, K), (N,), (B, T, N), gate)
    return [torch.randn(s, device=device, dtype=dtype).requires_grad_() for s in shapes]


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, gate: Tensor) -> Tensor:
    return residual + gate * F.linear(x, weight, bias)


def ours(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, gate: Tensor) -> Tensor:
    return fn.linear_add(x, weight, bias, residual, gate=gate, normalization=None)[0]


@pytest.mark.filterwarnings("ignore:fused_norm has no kernels for torch.float64:UserWarning")
@pytest.mark.parametrize("shape", GATES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_values_and_gradients(device: str, shape: tuple[int, ...], has_bias: bool) -> None:
    tensors = leaves(device, torch.float64, shape)
    call = [*tensors[:2], tensors[2] if has_bias else None, *tensors[3:]]
    torch.testing.assert_close(ours(*call), plain(*call))
    with torch.no_grad():
        torch.testing.assert_close(ours(*call), plain(*call))
    dy = torch.randn(B, T, N, device=device, dtype=torch.float64)
    given = [v for v in call if v is not None]
    for found, expected in zip(
        torch.autograd.grad(ours(*call), given, dy),
        torch.autograd.grad(plain(*call), given, dy),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_gradients_of_gradients() -> None:
    tensors = leaves("cpu", torch.float64)
    assert torch.autograd.gradcheck(ours, tensors)
    assert torch.autograd.gradgradcheck(ours, tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_sum_is_rounded_once(device: str, dtype: torch.dtype) -> None:
    tensors = [t.detach() for t in leaves(device, dtype)]
    y = F.linear(*tensors[:3]).float()
    expected = (tensors[3].float() + tensors[4].float() * y).to(dtype)
    torch.testing.assert_close(ours(*tensors), expected, rtol=0.0, atol=0.0)


def test_statistics(device: str) -> None:
    tensors = [t.detach() for t in leaves(device, torch.float32)]
    total, statistics = fn.linear_add(*tensors[:4], gate=tensors[4], eps=1e-3)
    rows = plain(*tensors)
    torch.testing.assert_close(total, rows)
    torch.testing.assert_close(statistics.mean, rows.mean(-1))
    torch.testing.assert_close(statistics.rstd, (rows.var(-1, correction=0) + 1e-3).rsqrt())


def test_registration(device: str) -> None:
    tensors = [t.detach() for t in leaves(device, torch.float32)]
    op = torch.ops.fused_norm.linear_gated_add.default
    torch.library.opcheck(op, tensors)
    torch.testing.assert_close(op(*tensors), plain(*tensors))
    turned = [*tensors[:3], tensors[3].transpose(0, 1).contiguous().transpose(0, 1), tensors[4]]
    assert op(*turned).is_contiguous()
    with FlopCounterMode(display=False) as counter:
        op(*tensors)
    assert counter.get_total_flops() == 2 * B * T * K * N


def test_export_and_training_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op in an exported program has the gradients of PyTorch's ops."""
    monkeypatch.setattr("fused_norm.ops.linear_gated_add._is_gated_in_product", lambda *_: True)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(K, N)

        def forward(self, x: Tensor, residual: Tensor, gate: Tensor) -> Tensor:
            return ours(x, self.linear.weight, self.linear.bias, residual, gate)

    layer, tensors = Layer(), leaves("cpu", torch.float32)
    given = (tensors[0], tensors[3], tensors[4])
    program = torch.export.export(layer, tuple(t.detach() for t in given))
    targets = {str(node.target) for node in program.graph.nodes}
    assert "fused_norm.linear_gated_add.default" in targets
    expected = plain(given[0], layer.linear.weight, layer.linear.bias, *given[1:])
    total = program.module()(*given)
    torch.testing.assert_close(total, expected)
    dy = torch.randn_like(expected)
    for found, wanted in zip(
        torch.autograd.grad(total, given, dy), torch.autograd.grad(expected, given, dy), strict=True
    ):
        torch.testing.assert_close(found, wanted)
    alone = program.run_decompositions(fn.decompositions())
    assert not any("fused_norm" in str(node.target) for node in alone.graph.nodes)
    torch.testing.assert_close(alone.module()(*given), expected)


def test_what_is_wrong_pytorch_says(device: str) -> None:
    x, weight, bias, residual, gate = (t.detach() for t in leaves(device, torch.float32))
    for call, words in (
        ((x, weight[:, 1:], bias, residual, gate), "cannot be multiplied"),
        ((x, weight, bias, residual[..., 1:], gate), "must match the size of tensor"),
        ((x, weight, bias, residual, gate[:2]), "must match the size of tensor"),
    ):
        with pytest.raises(RuntimeError, match=words):
            ours(*call)
    assert ours(x, weight, bias, residual, gate.double()).dtype is torch.float64


def test_with_fp8() -> None:
    shapes = ((B, T, 32), (N, 32), (N,), (B, T, N), (B, 1, N))
    x, weight, bias, residual, gate = (torch.randn(s, dtype=torch.bfloat16) for s in shapes)
    options = {"normalization": None, "recipe": "rowwise"}
    total, _ = fn.linear_add(x, weight, bias, residual, gate=gate, **options)
    y, _ = fn.linear_add(x, weight, bias, torch.zeros_like(residual), **options)
    torch.testing.assert_close(total, torch.addcmul(residual, gate, y))


def test_batch_invariance(device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tensors = [t.detach() for t in leaves(device, dtype)]
    with fn.batch_invariant():
        total = ours(*tensors)
        first = ours(tensors[0][:1], *tensors[1:3], tensors[3][:1], tensors[4][:1])
    # Rounded at other places, in 16 bits.
    near = {} if device == "cpu" else {"rtol": 1.6e-2, "atol": 8e-3}
    torch.testing.assert_close(total, plain(*tensors), **near)
    assert torch.equal(total[:1], first)


@pytest.mark.parametrize(
    ("gate", "rows", "groups"),
    [
        ((4, 1, 8), (4, 9, 8), 4),
        ((1, 1, 8), (4, 9, 8), 1),
        ((8,), (4, 9, 8), 1),
        ((2, 3, 1, 8), (2, 3, 9, 8), 6),
        ((4, 9, 8), (4, 9, 8), 36),
        # Groups that are not consecutive, of columns, or of another shape.
        ((1, 9, 8), (4, 9, 8), 0),
        ((4, 1, 1), (4, 9, 8), 0),
        ((2, 1, 8), (4, 9, 8), 0),
        ((1, 4, 9, 8), (4, 9, 8), 0),
        ((), (4, 9, 8), 0),
    ],
)
def test_groups(gate: tuple[int, ...], rows: tuple[int, ...], groups: int) -> None:
    assert groups_of(gate, rows) == groups


# Groups, rows of each, K, N: tiles of 192 and of 128 columns, the last of them not whole, and
# groups of which a pair of tiles has two. All rows may be one group of any size.
_SHAPES = {
    (32, 256, 1152, 1152): 192,
    (32, 256, 1024, 1096): 192,
    # The last pair of tiles of rows has one.
    (63, 128, 1024, 1096): 192,
    (1, 8064, 1024, 1096): 192,
    (1, 8100, 1024, 1096): 192,
    (32, 256, 1024, 2048): 128,
    (16, 512, 256, 1160): 128,
}


@pytest.mark.gpu
@_on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", _SHAPES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_one_product_on_hopper(
    shape: tuple[int, int, int, int], has_bias: bool, dtype: torch.dtype
) -> None:
    groups, rows, k, n = shape
    x, weight, bias, residual = (
        torch.randn(s, device="cuda").to(dtype)
        for s in ((groups, rows, k), (n, k), (n,), (groups, rows, n))
    )
    # One of six parts of a row, as adaLN-Zero has them.
    gate = torch.randn(groups, 6 * n, device="cuda").to(dtype).unsqueeze(1).chunk(6, -1)[2]
    call = (x, weight / k**0.5, bias if has_bias else None, residual, gate)
    found = []
    op = torch.ops.fused_norm.linear_gated_add
    launched = names(lambda: found.append(op(*call)))
    assert f"128x{_SHAPES[shape]}_ping_pong_gated_add" in launched, launched
    exact = plain(*(None if v is None else v.double() for v in call))
    theirs = (torch.addcmul(residual, gate, F.linear(*call[:3])).double() - exact).norm()
    assert (found[0].double() - exact).norm() < theirs
    # Not one element is off by more than its rounding, and sums in float32.
    assert ((found[0].double() - exact).abs() <= 8e-3 * exact.abs() + 1e-3).all()
    assert all(torch.equal(op(*call), found[0]) for _ in range(3))


@pytest.mark.gpu
@_on_hopper
@pytest.mark.parametrize(
    ("groups", "rows", "n"), [(80, 100, 1096), (1, 16, 1096), (32, 256, 1100), (32, 4, 1096)]
)
def test_what_the_product_leaves_to_pytorch(groups: int, rows: int, n: int) -> None:
    """A tile with two gates, few rows, and rows that TMA cannot store."""
    x, weight, residual, gate = (
        torch.randn(s, device="cuda", dtype=torch.bfloat16)
        for s in ((groups, rows, 1024), (n, 1024), (groups, rows, n), (groups, 1, n))
    )
    found = []
    op = torch.ops.fused_norm.linear_gated_add
    launched = names(lambda: found.append(op(x, weight, None, residual, gate)))
    assert "gated_add" not in launched, launched
    expected = torch.addcmul(residual, gate, F.linear(x, weight))
    torch.testing.assert_close(found[0], expected, rtol=0.0, atol=0.0)


@pytest.mark.gpu
@_on_hopper
def test_function_on_hopper() -> None:
    """One product in inference, PyTorch's ops where a backward follows."""
    x, weight, bias, residual, gate = (
        torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for s in ((32, 1024, 1152), (1152, 1152), (1152,), (32, 1024, 1152), (32, 1, 1152))
    )
    call = (x, weight, bias, residual, gate)
    found = []
    with torch.no_grad():
        launched = names(lambda: found.append(fn.linear_add(*call[:4], gate=gate, eps=1e-3)))
    assert launched.count("gated_add") == 1, launched
    (total, statistics) = found[0]
    rows = total.double()
    torch.testing.assert_close(statistics.mean.double(), rows.mean(-1), rtol=1e-5, atol=1e-5)
    rstd = (rows.var(-1, correction=0) + 1e-3).rsqrt()
    torch.testing.assert_close(statistics.rstd.double(), rstd, rtol=1e-5, atol=0.0)
    launched = names(lambda: found.append(ours(*call)))
    assert "gated_add" not in launched, launched
    for own, theirs in zip(
        torch.autograd.grad(found[1].float().sum(), call),
        torch.autograd.grad(torch.addcmul(residual, gate, F.linear(*call[:3])).float().sum(), call),
        strict=True,
    ):
        assert torch.equal(own, theirs)


@pytest.mark.gpu
@_on_hopper
def test_compiled_block_on_hopper() -> None:
    """Both gated sums of a block of DiT become calls, and run as products."""
    batch, tokens, width = 32, 256, 1152

    def block(x, m, w, b, u, c, v, d):
        shift, scale, gate1, gate2, _, _ = m.unsqueeze(1).chunk(6, -1)
        x = x + gate1 * F.linear(x.tanh(), w, b)
        z = F.layer_norm(x, (width,)) * (1 + scale) + shift
        return x + gate2 * F.linear(F.gelu(F.linear(z, u, c), approximate="tanh"), v, d)

    hidden = 4 * width
    shapes = ((batch, tokens, width), (batch, 6 * width), (width, width), (width,))
    shapes += ((hidden, width), (hidden,), (width, hidden), (width,))
    given = [
        (torch.randn(s, device="cuda") * (0.03 if i > 1 else 1)).bfloat16()
        for i, s in enumerate(shapes)
    ]
    backend = functools.partial(fn.models.backend, options={"small": True})
    compiled = torch.compile(block, backend=backend)
    with torch.no_grad():
        report = fn.explain(block, *given, options={"small": True})
        calls = [call for site in report.sites for call in site.calls]
        assert calls.count("linear_add: gate") == 2, calls
        assert "norm_mlp" not in str(calls)
        y = compiled(*given)
        launched = names(lambda: compiled(*given))
        exact = block(*(v.double() for v in given))
        eager = block(*given).double()
    assert launched.count("gated_add") == 2, launched
    assert (y.double() - exact).norm() < (eager - exact).norm()
