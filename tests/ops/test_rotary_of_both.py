"""Queries and keys that one launch rotates by the same angles: the bits of two."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from devices import GPU
from test_rotary import DTYPES, SIZES, Attention, Seen, of_angles
from torch import Tensor

from fused_norm.chain import rotary as kernels
from fused_norm.ops import rotary
from fused_norm.rotation import Heads, Rotation

ROWS = (2, 7)


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Both:
    """Queries, keys, what normalizes and rotates them, and gradients of the results."""

    def __init__(self, heads: tuple[int, int], D: int, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device, self.D = dtype, device, D
        # Parts of the rows of one product, which has values as well.
        total = sum(heads) + heads[1]
        rows = torch.randn(*ROWS, total * D, dtype=dtype, device=device).unflatten(-1, (total, D))
        self.packed = [rows[..., : heads[0], :], rows[..., heads[0] : sum(heads), :]]
        self.dense = [x.contiguous() for x in self.packed]
        self.angles = torch.rand(ROWS[1], D // 2, dtype=torch.float64, device=device) * 6

    def calls(self, xs: list[Tensor], rotation: Rotation, size: int, of_gamma: Any) -> list[Heads]:
        cos, sin = None, None
        if size:
            cos, sin = of_angles(self.angles[:, : size // 2], rotation, torch.float32)
        gammas: list[Any] = [None, None]
        if of_gamma is not None:
            torch.manual_seed(2)
            gammas = [(torch.rand(self.D, device=self.device) + 0.5).to(of_gamma) for _ in xs]
        return [Heads(x, gamma, cos, sin) for x, gamma in zip(xs, gammas, strict=True)]


def results(two: list[Heads], rotation: Rotation, dys: list[Tensor], at_once: bool) -> list[Tensor]:
    """Return both results and all gradients, by one call or by two."""
    leaves = [
        t._replace(
            x=t.x.detach().requires_grad_(),
            gamma=None if t.gamma is None else t.gamma.detach().requires_grad_(),
        )
        for t in two
    ]
    with Seen() as seen:
        if at_once:
            ys = list(rotary.call_both(leaves[0], leaves[1], rotation))
        else:
            ys = [rotary.call(t, rotation) for t in leaves]
    assert seen.names == (["rotary_of_both"] if at_once else ["rotary"] * 2)
    inputs = [v for t in leaves for v in (t.x, t.gamma) if v is not None]
    return [*ys, *torch.autograd.grad(ys, inputs, dys)]


# As many as keys, a group of queries for each key, numbers that no share divides, a single head.
HEADS = [(4, 4), (32, 8), (5, 3), (3, 5), (7, 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("D", "size"), SIZES)
def test_bits_are_those_of_two_calls(device: str, dtype: torch.dtype, D: int, size: int) -> None:
    if device == "cuda" and dtype is torch.float64 and D > 128:
        pytest.skip("a head longer than what a warp has in registers is PyTorch's")
    norms = (None, dtype, torch.float32) if dtype.itemsize < 4 else (None, dtype)
    forms = itertools.product(norms, (False, True), (False, True), (False, True))
    for heads, (of_gamma, interleaved, half, is_packed) in zip(itertools.cycle(HEADS), forms):
        if not size and (interleaved or half or of_gamma is None):
            continue
        both = Both(heads, D, dtype, device)
        rotation = Rotation(of_gamma is not None, 1e-6, 0.5, interleaved, half)
        two = both.calls(both.packed if is_packed else both.dense, rotation, size, of_gamma)
        dys = [torch.randn_like(x) for x in both.dense]
        found, wanted = (results(two, rotation, dys, once) for once in (True, False))
        for mine, other in zip(found, wanted, strict=True):
            assert torch.equal(mine, other), (heads, rotation)
            assert mine.stride() == other.stride()


@pytest.mark.parametrize("rows", [1, 16, 4096])
def test_one_row_a_batch_of_decoding_and_many_rows(device: str, rows: int) -> None:
    """Parts of a CPU and blocks of a GPU have heads of one tensor, of the other, and of both."""
    rotation = Rotation(True)
    cos, sin = torch.rand(2, 1, 64, device=device)
    q, k = (torch.randn(rows, 1, n, 64, device=device, dtype=torch.bfloat16) for n in (32, 8))
    gamma = torch.rand(64, device=device)
    # A weight of the queries' norm alone, or of the keys'.
    for one, other in ((gamma, None), (None, gamma)):
        two = [Heads(q, one, cos, sin), Heads(k, other, cos, sin)]
        with Seen() as seen:
            found = rotary.call_both(two[0], two[1], rotation)
        assert seen.names == ["rotary_of_both"]
        assert all(
            torch.equal(y, rotary.call(t, rotation)) for y, t in zip(found, two, strict=True)
        )


def of_kind(change: str) -> tuple[Heads, Heads]:
    """Return calls that no single one computes."""
    cos, sin = torch.rand(2, 7, 64)
    gamma = torch.rand(64)
    one = Heads(torch.randn(*ROWS, 4, 64, dtype=torch.bfloat16), gamma, cos, sin)
    second = one._replace(x=torch.randn(*ROWS, 2, 64, dtype=torch.bfloat16), gamma=gamma + 1)
    changed: dict[str, dict[str, Any]] = {
        "rows": {"x": torch.randn(1, 7, 2, 64, dtype=torch.bfloat16)},
        "type": {"x": second.x.float()},
        "weight's type": {"gamma": gamma.bfloat16()},
        "angles": {"cos": cos + 1},
        "sines": {"sin": sin.clone()},
        "length": {"x": second.x[..., :32].contiguous(), "gamma": gamma[:32]},
        "gradients": {"x": second.x.clone().requires_grad_()},
    }
    return one, second._replace(**changed[change])


@pytest.mark.parametrize(
    "change", ["rows", "type", "weight's type", "angles", "sines", "gradients"]
)
def test_others_are_two_calls(change: str) -> None:
    one, second = of_kind(change)
    with Seen() as seen:
        found = rotary.call_both(one, second, Rotation(True))
    assert seen.names == ["rotary", "rotary"]
    assert torch.equal(found[0], rotary.call(one, Rotation(True)))
    assert torch.equal(found[1], rotary.call(second, Rotation(True)))
    assert [y.requires_grad for y in found] == [False, change == "gradients"]


@pytest.mark.parametrize("change", ["rows", "type", "weight's type", "length"])
def test_no_kernel_reads_beyond_a_tensor(change: str) -> None:
    """The kernel has the sizes of the first tensor: the op leaves others to two calls."""
    one, second = of_kind(change)
    assert not kernels.serves_both(one, second, Rotation(True))
    assert kernels.serves_both(one, one._replace(x=one.x[..., :1, :]), Rotation(True))
    tensors = (*one[:2], *second[:2], *one[2:])
    if change == "length":
        with pytest.raises(RuntimeError):
            torch.ops.fused_norm.rotary_of_both(*tensors, *Rotation(True))
        return
    found = torch.ops.fused_norm.rotary_of_both(*tensors, *Rotation(True))
    assert torch.equal(found[0], rotary.call(one, Rotation(True)))
    assert torch.equal(found[1], rotary.call(second, Rotation(True)))


def test_gradients_of_one_result(device: str) -> None:
    """A result that nothing depends on has no gradient to hand on."""
    both = Both((4, 2), 64, torch.float32, device)
    rotation = Rotation(True)
    two = both.calls(both.dense, rotation, 64, torch.float32)
    one, second = (t._replace(x=t.x.requires_grad_()) for t in two)
    y, _ = rotary.call_both(one, second, rotation)
    dx, none = torch.autograd.grad(y.sin().sum(), (one.x, second.x), allow_unused=True)
    z = rotary.call(one, rotation)
    assert torch.equal(dx, torch.autograd.grad(z.sin().sum(), one.x)[0])
    assert none is None


def test_gradients_of_the_tensors_that_want_them(device: str) -> None:
    """The heads of one tensor, and the weight of the other's norm."""
    both = Both((4, 2), 64, torch.float32, device)
    rotation = Rotation(True)
    one, second = both.calls(both.dense, rotation, 64, torch.float32)
    wanted = [one.x.requires_grad_(), second.gamma.requires_grad_()]
    dys = [torch.randn_like(x) for x in both.dense]
    ys = rotary.call_both(one, second, rotation)
    found = torch.autograd.grad(ys, wanted, dys)
    others = torch.autograd.grad([rotary.call(t, rotation) for t in (one, second)], wanted, dys)
    assert all(map(torch.equal, found, others))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
def test_derivatives_that_have_no_kernel(device: str) -> None:
    cos, sin = torch.rand(2, 3, 16, dtype=torch.float64, device=device)
    x = torch.randn(3, 2, 16, dtype=torch.float64, device=device, requires_grad=True)
    k = torch.randn(3, 1, 16, dtype=torch.float64, device=device, requires_grad=True)

    def run(x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotary.call_both(Heads(x, None, cos, sin), Heads(k, None, cos, sin), Rotation(True))

    assert torch.autograd.gradcheck(run, (x, k))
    assert torch.autograd.gradgradcheck(run, (x, k))
    batched = torch.func.vmap(run, (0, None))(torch.stack((x, 2 * x)), k)
    assert torch.equal(batched[0][1], run(2 * x, k)[0])
    assert torch.equal(batched[1][1], run(2 * x, k)[1])


def test_pytorchs_rules_for_ops(device: str) -> None:
    x, k = (torch.randn(3, n, 64, device=device) for n in (4, 2))
    gamma, other = torch.rand(2, 64, device=device)
    cos, sin = torch.rand(2, 3, 64, device=device)
    arguments = (x, gamma, k, other, cos, sin, *Rotation(True))
    torch.library.opcheck(torch.ops.fused_norm.rotary_of_both.default, arguments)


def test_norm_qkv_rotates_both_at_once(device: str) -> None:
    """Unless only one of them is normalized."""
    block = Attention(torch.float32, device)
    changes: list[tuple[dict[str, None], list[str]]] = [
        ({}, ["rotary_of_both"]),
        ({"q_norm": None, "k_norm": None}, ["rotary_of_both"]),
        ({"k_norm": None}, ["rotary", "rotary"]),
    ]
    for norms, names in changes:
        with torch.no_grad(), Seen() as seen:
            block.ours(*block.leaves, **norms)
        assert [name for name in seen.names if name.startswith("rotary")] == names


@pytest.mark.parametrize("device", [GPU], indirect=True)
def test_unaligned_tensors(device: str) -> None:
    rotation = Rotation(True)
    q, k = (torch.randn(1 + 5 * n * 64, device=device)[1:].view(5, n, 64) for n in (4, 2))
    gamma, other = (torch.rand(65, device=device)[1:] for _ in range(2))
    cos, sin = (torch.rand(1 + 5 * 64, device=device)[1:].view(5, 64) for _ in range(2))
    two = [Heads(q, gamma, cos, sin), Heads(k, other, cos, sin)]
    found = rotary.call_both(two[0], two[1], rotation)
    for y, t in zip(found, two, strict=True):
        assert torch.equal(y, rotary.call(t, rotation))


@pytest.mark.parametrize("device", [GPU], indirect=True)
def test_one_kernel_is_launched(device: str) -> None:
    cos, sin = torch.rand(2, 1, 128, device=device)
    q, k = (torch.randn(16, 1, n, 128, device=device).bfloat16() for n in (32, 8))
    two = [Heads(q, None, cos, sin), Heads(k, None, cos, sin)]
    rotary.call_both(two[0], two[1], Rotation())
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as log:
        rotary.call_both(two[0], two[1], Rotation())
        torch.cuda.synchronize()
    assert [e.count for e in log.key_averages() if "rotary" in e.key] == [1]
