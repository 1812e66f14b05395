"""What a graph writes in place, under whatever name: fused graphs read what the model reads."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import with_sites
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fused_norm.models import Site

K, N = 24, 40
Function = Callable[..., Any]


@torch.library.custom_op("fused_norm_tests::add_into", mutates_args=("total",))
def add_into(x: Tensor, total: Tensor) -> None:
    total.add_(x)


@torch._dynamo.allow_in_graph
def opaque(x: Tensor) -> None:
    """A function that Dynamo does not look into."""
    x.mul_(2)


def given() -> dict[str, Tensor]:
    """Return rows, and parameters that no gradient goes to, so that all may be written."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (2, 4, K), "r": (2, 4, K), "w": (N, K), "v": (N, K), "g": (K,), "o": (K, N)}
    return {name: 0.5 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def hold(function: Function, **options: Any) -> list[Site]:
    """Hold results and the inputs' final contents to PyTorch's; return what became of norms."""
    compiled, sites = with_sites(function, True, **options)
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    own, ours = ([given()[name] for name in names] for _ in range(2))
    expected = function(*own)
    found = compiled(*ours)
    for a, b in zip([*expected, *own], [*found, *ours], strict=True):
        torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-5)
    return sites


MODULES = [
    *(nn.LeakyReLU(0.1, inplace=True), nn.ELU(inplace=True), nn.ReLU6(inplace=True)),
    *(nn.Hardtanh(inplace=True), nn.Hardswish(inplace=True), nn.SiLU(inplace=True)),
    *(nn.CELU(inplace=True), nn.SELU(inplace=True), nn.Threshold(0.1, 0.2, inplace=True)),
    *(nn.Mish(inplace=True), nn.Hardsigmoid(inplace=True), nn.RReLU(0.1, 0.1, inplace=True)),
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
def test_modules_in_place(module: nn.Module) -> None:
    """They pass `inplace` by position, and the sum was read after it in a plain block."""

    def function(x, r, w):
        s = x + r
        z = F.layer_norm(s, (K,))
        module(s)
        return F.linear(z, w), s

    hold(function)

    def at_the_input(x, w):
        z = F.layer_norm(x, (K,))
        module(x)
        return F.linear(z, w), x

    (site,) = hold(at_the_input)
    assert site.reason == "an operand is written in between"


def test_dropout_in_place() -> None:
    """By position, and not counted as a write: what is dropped came back in the residual."""

    def function(x, w):
        s = x * 2
        z = F.layer_norm(s, (K,))
        nn.Dropout(1.0, inplace=True)(s)
        return F.linear(z, w), s

    (site,) = hold(function)
    assert site.reason == "an operand is written in between"


def test_dropout_in_place_that_drops_nothing() -> None:
    def function(x, w, o):
        h = F.gelu(F.linear(F.layer_norm(x, (K,)), w))
        return (F.linear(nn.Dropout(0.5, inplace=True).eval()(h), o),)

    (site,) = hold(function)
    assert site.calls == ["norm_mlp: gelu"]


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda s: s.mul_(2),
    "operator": lambda s: operator.imul(s, 2),
    "item": lambda s: s.__setitem__((..., 0), 1.0),
    "out": lambda s: torch.add(s, 1, out=s),
    "out by method's name": lambda s: torch.mul(
        s, 2, out=s.view(-1, K)[: s.numel() // K].view_as(s)
    ),
    "custom op": lambda s: add_into(s * 2, s),
    "custom op by name": lambda s: torch.ops.fused_norm_tests.add_into(total=s, x=s * 2),
    "opaque": opaque,
    "foreach": lambda s: torch._foreach_add_([s], 1.0),
    "foreach, second": lambda s: torch._foreach_mul_([torch.ones_like(s), s], [s * 2, s * 3]),
    "copy": lambda s: s.copy_(s * 2),
    "init": nn.init.zeros_,
    "batch norm": lambda s: (
        F.batch_norm(s, s[0, :, 0].mul(1), s[0, :, 1].mul(1), training=True)
        + F.instance_norm(s, s[0, :, 0], s[1, :, 0].abs()).mul(0)
    ),
    **{
        name: (lambda s, view=view: view(s).mul_(2))
        for name, view in {
            "data": lambda s: s.data,
            "detach": lambda s: s.detach(),
            "mT": lambda s: s.mT,
            "ravel": lambda s: s.ravel(),
            "swapdims": lambda s: s.swapdims(0, 1),
            "moveaxis": lambda s: s.moveaxis(0, 1),
            "movedim": lambda s: torch.movedim(s, 0, 1),
            "broadcast_to": lambda s: s.broadcast_to(s.shape),
            "unsafe_chunk": lambda s: s.unsafe_chunk(2, -1)[0],
            "hsplit": lambda s: s.hsplit(2)[1],
            "atleast_3d": torch.atleast_3d,
            "cpu": lambda s: s.cpu(),
            "chunk": lambda s: s.chunk(2, -1)[1],
            "split": lambda s: s.split(8, -1)[2],
            "unbind": lambda s: s.unbind(1)[1],
            "narrow": lambda s: s.narrow(-1, 3, 4),
            "diagonal": lambda s: s.diagonal(0, 1, 2),
            "as_strided": lambda s: s.as_strided((3,), (1,)),
            "unfold": lambda s: s.unfold(-1, 2, 2),
            "to": lambda s: s.to(s.dtype),
            "type_as": lambda s: s.type_as(s),
            "contiguous": lambda s: s.contiguous(),
            "reshape": lambda s: s.reshape(-1),
            "real": torch.real,
            "view_as_complex": lambda s: torch.view_as_complex(s.unflatten(-1, (-1, 2))),
        }.items()
    },
}


@pytest.mark.parametrize("name", WRITES)
def test_operand_written_between_norm_and_linear(name: str) -> None:
    """The rows were normalized after they had been overwritten."""
    write = WRITES[name]

    def function(x, w):
        s = x * 1.5
        z = F.layer_norm(s, (K,))
        write(s)
        return F.linear(z, w), s

    (site,) = hold(function)
    assert site.reason == "an operand is written in between"


@pytest.mark.parametrize("name", WRITES)
def test_normalized_rows_written(name: str) -> None:
    """Another reader of the rows got them as they were before the write."""
    write = WRITES[name]

    def function(x, w):
        z = F.layer_norm(x, (K,))
        y = F.linear(z, w)
        write(z)
        return y, z

    (site,) = hold(function)
    assert site.reason == "the normalized rows are written in place"


def test_inputs_that_share_memory_in_a_later_call() -> None:
    """Regression: traced with separate inputs, it normalized what had been written over them."""

    def function(x, r, w):
        z = F.layer_norm(x, (K,))
        r.tanh_()
        return F.linear(z, w)

    compiled, sites = with_sites(function, True)
    p = given()
    compiled(p["x"].clone(), p["r"], p["w"])
    one, other = p["x"].clone(), p["x"].clone()
    found = compiled(one, one.view_as(one), p["w"])
    torch.testing.assert_close(found, function(other, other.view_as(other), p["w"]))
    assert [site.reason for site in sites] == ["an operand is written in between"]


def test_buffers_and_inputs_of_another_dtype_share_no_memory_with_rows() -> None:
    """In training, where a write at any time after a norm would keep it from being fused."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(K), nn.Linear(K, N)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: Tensor, count: Tensor) -> Tensor:
            z = self.norm(x)
            self.calls += 1
            count += 1
            return self.linear(z)

    module = Module()
    compiled, sites = with_sites(module, True)
    compiled(given()["x"], torch.zeros(1, dtype=torch.int64)).sum().backward()
    assert [site.fused for site in sites] == [True], sites[0].reason
    assert module.norm.weight.grad is not None


def test_weight_written_after_a_copy_of_it() -> None:
    """The copy was skipped, and the weight read after it had been written."""

    def function(x, w, g):
        copy, gamma = w.clone(), 1.0 + g
        w.mul_(3)
        g.mul_(3)
        return (F.linear(F.rms_norm(x, (K,), gamma), copy),)

    (site,) = hold(function)
    assert site.reason == "an operand is written in between"


def test_square_in_place() -> None:
    """The mean square's rows were taken to be what they were before."""

    def function(x, w):
        s = x * 2
        return (F.linear(s * torch.rsqrt(s.mul_(s).mean(-1, keepdim=True) + 1e-6), w),)

    hold(function)


def test_write_inside_a_checkpoint() -> None:
    """The checkpoint's graph writes what the graph around it hands in."""

    def body(s):
        s.detach().mul_(2)
        return s + 1

    def function(x, w):
        s = x * 2
        z = F.layer_norm(s, (K,))
        y = checkpoint(body, s, use_reentrant=False)
        return F.linear(z, w), y

    (site,) = hold(function)
    assert site.reason == "an operand is written in between"


def test_checkpoint_that_writes_nothing_of_ours() -> None:
    def body(s):
        return nn.ReLU(inplace=True)(s + 1)

    def function(x, w):
        s = x * 2
        z = F.layer_norm(s, (K,))
        y = checkpoint(body, s, use_reentrant=False)
        return F.linear(z, w), y

    (site,) = hold(function)
    assert site.fused, site.reason


def test_write_to_what_took_the_place_of_a_sum() -> None:
    """The first call returns the sum; a view of it is written before the second call reads it."""

    def function(x, r, w, v):
        s = x + r
        y = F.linear(F.layer_norm(s, (K,)), w)
        z = F.layer_norm(s, (K,))
        s.view(-1).mul_(2)
        return y, F.linear(z, v), s

    sites = hold(function)
    assert [site.fused for site in sites] == [True, False]


def test_copies_of_normalized_rows_are_no_aliases() -> None:
    """Both took the same tensor's place: who wrote one wrote the other."""

    def function(x, w, v):
        z = F.layer_norm(x, (K,))
        c = z.clone()
        return z, c, F.linear(z, w), F.linear(c, v)

    compiled, _ = with_sites(function)
    p = given()
    z, c, *_ = compiled(p["x"], p["w"], p["v"])
    assert z.untyped_storage().data_ptr() != c.untyped_storage().data_ptr()


@pytest.mark.parametrize("cast", ["type_as", "to"])
def test_a_tensor_that_gives_only_its_type_is_not_read(cast: str) -> None:
    """Wan's norms: what made the rows, long before, writes in place as its rotations do."""

    def function(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        rotated = torch.empty_like(x)
        rotated[..., 0::2] = x[..., 1::2]
        rotated[..., 1::2] = x[..., 0::2]
        rows = rotated * 2
        total = getattr(rows.float() + v * 3, cast)(rows)
        return F.linear(getattr(F.layer_norm(total.float(), (16,)), cast)(total), w)

    compiled, sites = with_sites(function, small=True)
    x, v, w = torch.randn(4, 16), torch.randn(4, 16), torch.randn(8, 16)
    torch.testing.assert_close(compiled(x, v, w), function(x, v, w))
    assert [site.fused for site in sites] == [True]
