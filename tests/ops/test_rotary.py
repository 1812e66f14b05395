"""Heads that are normalized and rotated, and queries, keys and values made of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accuracy import as_copies, as_float64, assert_within_budget
from devices import GPU
from processes import run_script
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fused_norm as fn
from fused_norm.chain import rotary as kernels
from fused_norm.ops import rotary
from fused_norm.rotation import Heads, Rotation

ROWS = (2, 7)
HEADS = 3


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Seen(TorchDispatchMode):
    """Which of our ops run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "fused_norm":
            self.names.append(op.name().removeprefix("fused_norm::"))
        return op(*args, **(kwargs or {}))


def expected(
    x: Tensor, gamma: Tensor | None, angles: Tensor | None, rotation: Rotation, size: int
) -> Tensor:
    """Return what PyTorch makes of it, rotated as complex numbers are multiplied."""
    D = x.shape[-1]
    z = x
    if rotation.is_normalized:
        weight = None if gamma is None else gamma + rotation.weight_offset
        z = F.rms_norm(x, (D,), None if weight is None else weight.to(x.dtype), rotation.eps)
    if angles is None:
        return z
    turned, rest = z[..., :size], z[..., size:]
    pairs = turned.unflatten(-1, (-1, 2) if rotation.is_interleaved else (2, -1))
    if not rotation.is_interleaved:
        pairs = pairs.transpose(-1, -2)
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    numbers = torch.view_as_complex(pairs.to(wide).contiguous())
    turns = torch.polar(torch.ones_like(angles), angles).unsqueeze(-2)
    pairs = torch.view_as_real(numbers * turns.to(numbers.dtype))
    if not rotation.is_interleaved:
        pairs = pairs.transpose(-1, -2)
    return torch.cat((pairs.flatten(-2).to(x.dtype), rest), -1)


def of_angles(angles: Tensor | None, rotation: Rotation, dtype: torch.dtype) -> list[Any]:
    """Return the cosines and sines of the angles of pairs, in the form that is asked for."""
    if angles is None:
        return [None, None]
    if not rotation.is_half:
        angles = (
            angles.repeat_interleave(2, -1)
            if rotation.is_interleaved
            else torch.cat((angles, angles), -1)
        )
    return [angles.cos().to(dtype), angles.sin().to(dtype)]


SIZES = [(64, 64), (128, 128), (128, 32), (96, 96), (256, 128), (128, 0), (80, 16)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("D", "size"), SIZES)
def test_values_and_gradients(device: str, dtype: torch.dtype, D: int, size: int) -> None:
    if device == "cuda" and dtype is torch.float64 and D > 128:
        pytest.skip("a head longer than what a warp has in registers is PyTorch's")
    forms = itertools.product((False, True), (0.0, 1.0), (False, True), (False, True), "12")
    for normalized, offset, interleaved, half, gamma_bytes in forms:
        if not size and (interleaved or half):
            continue
        rotation = Rotation(normalized, 1e-6, offset, interleaved, half)
        x = torch.randn(*ROWS, HEADS, D, dtype=dtype, device=device, requires_grad=True)
        gamma = None
        if normalized:
            of_gamma = torch.float32 if gamma_bytes == "1" and dtype.itemsize < 4 else dtype
            gamma = (torch.rand(D, device=device) + 0.5).to(of_gamma).requires_grad_()
        angles = None
        if size:
            angles = torch.rand(ROWS[1], size // 2, dtype=torch.float64, device=device) * 6
        # Exact in the truth too: what is compared is the rotation, not the rounding of cosines.
        kept = torch.float64 if dtype is torch.float64 else torch.float32
        cos, sin = of_angles(angles, rotation, kept)
        with Seen() as seen:
            y = rotary.call(Heads(x, gamma, cos, sin), rotation)
        assert seen.names == ["rotary"]
        dy = torch.randn_like(y)
        inputs = [v for v in (x, gamma) if v is not None]
        mine = [y, *torch.autograd.grad(y, inputs, dy)]
        found = []
        for copies, grad in ((as_copies(inputs), dy), (as_float64(inputs), dy.double())):
            z = expected(copies[0], copies[1] if len(copies) > 1 else None, angles, rotation, size)
            found.append([z, *torch.autograd.grad(z, copies, grad)])
        for name, a, bar, truth in zip(("y", "x", "gamma"), mine, *found, strict=False):
            assert_within_budget(f"{name} of {rotation}", a, truth, bar.to(a.dtype))


def test_angles_of_each_row_and_of_narrow_types(device: str) -> None:
    """Rows of a batch may have positions of their own, and cosines may be rounded."""
    x = torch.randn(*ROWS, HEADS, 64, dtype=torch.bfloat16, device=device)
    rotation = Rotation(True)
    angles = torch.rand(*ROWS, 64, dtype=torch.float64, device=device) * 6
    cos, sin = (v.to(torch.bfloat16).reshape(-1, 64) for v in (angles.cos(), angles.sin()))
    y = rotary.call(Heads(x, None, cos, sin), rotation)
    for batch in range(ROWS[0]):
        part = slice(batch * ROWS[1], (batch + 1) * ROWS[1])
        alone = rotary.call(Heads(x[batch], None, cos[part], sin[part]), rotation)
        assert torch.equal(y[batch], alone)


def test_long_sums_over_heads(device: str) -> None:
    """The gradient of gamma is a sum over all heads of all rows."""
    x = torch.randn(4096, 8, 64, device=device)
    gamma = torch.ones(64, device=device, requires_grad=True)
    y = rotary.call(Heads(x, gamma), Rotation(True))
    dy = torch.randn_like(y) + 1
    (found,) = torch.autograd.grad(y, gamma, dy, retain_graph=True)
    wide = gamma.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(F.rms_norm(x.double(), (64,), wide, 1e-6), wide, dy.double())
    theirs = gamma.detach().clone().requires_grad_()
    (bar,) = torch.autograd.grad(F.rms_norm(x, (64,), theirs, 1e-6), theirs, dy)
    assert_within_budget("gamma", found, truth, bar)
    again = torch.autograd.grad(y, gamma, dy)[0]
    assert torch.equal(found, again)


def test_norms_without_an_eps(device: str) -> None:
    """Heads that a row has not, where lanes have several together, are no zeros to divide by."""
    x = torch.randn(37, 3, 64, device=device, requires_grad=True)
    gamma = torch.rand(64, device=device, requires_grad=True)
    y = rotary.call(Heads(x, gamma), Rotation(True, 0.0))
    expected = F.rms_norm(x, (64,), gamma, 0.0)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    found, truth = (torch.autograd.grad(each, (x, gamma), dy) for each in (y, expected))
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("D", "size", "dtype"), [(72, 72, torch.float32), (64, 24, torch.bfloat16)]
)
def test_sizes_without_a_kernel(D: int, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(*ROWS, HEADS, D, dtype=dtype, requires_grad=True)
    angles = torch.rand(ROWS[1], size // 2, dtype=torch.float64)
    rotation = Rotation(True)
    cos, sin = of_angles(angles, rotation, torch.float32)
    with Seen() as seen:
        y = rotary.call(Heads(x, None, cos, sin), rotation)
    assert not seen.names
    truth = expected(x.detach().double(), None, angles, rotation, size)
    assert_within_budget("y", y, truth, expected(x, None, angles, rotation, size))


@pytest.mark.parametrize(
    ("gamma", "cos", "sin"),
    [
        ((32,), (7, 64), (7, 64)),
        ((64,), (7, 64), (7, 1)),
        ((64,), (7, 64), (1, 64)),
        ((64,), (7, 128), (7, 128)),
        ((64,), (3, 64), (3, 64)),
        ((64,), (0, 64), (0, 64)),
    ],
    ids=str,
)
def test_no_kernel_reads_beyond_a_tensor(gamma: Any, cos: Any, sin: Any) -> None:
    """Shapes that do not go together are PyTorch's to compute, or to refuse."""
    t = Heads(torch.randn(*ROWS, HEADS, 64), torch.ones(gamma), torch.ones(cos), torch.ones(sin))
    assert not kernels.serves(t, Rotation(True))


def test_empty_rows_and_rows_that_are_not_dense(device: str) -> None:
    rotation = Rotation(True)
    gamma = torch.ones(64, device=device, requires_grad=True)
    empty = torch.zeros(0, 3, 64, device=device, requires_grad=True)
    y = rotary.call(Heads(empty, gamma), rotation)
    assert y.shape == empty.shape
    assert torch.equal(torch.autograd.grad(y.sum(), gamma)[0], torch.zeros_like(gamma))
    x = torch.randn(3, 5, 64, device=device).transpose(0, 1)
    x.requires_grad_()
    y = rotary.call(Heads(x, gamma), rotation)
    assert torch.equal(y, rotary.call(Heads(x.contiguous(), gamma), rotation))
    # The gradient has the layout of x, as with PyTorch's ops.
    assert torch.autograd.grad(y.sum(), x)[0].stride() == x.stride()


def test_heads_beside_others_in_a_row(device: str) -> None:
    """Queries, keys and values of one product are parts of its rows: nothing is copied."""
    rotation = Rotation(True)
    gamma = torch.rand(64, device=device, requires_grad=True)
    cos, sin = torch.rand(2, 5, 64, device=device)
    rows = torch.randn(2, 5, 6 * 64, device=device, requires_grad=True)
    x = rows.unflatten(-1, (6, 64))[..., 2:4, :]
    assert kernels.pitch_of(x) == 6 * 64
    y = rotary.call(Heads(x, gamma, cos, sin), rotation)
    dy = torch.randn_like(y)
    mine = [y, *torch.autograd.grad(y, (x, gamma, rows), dy)]
    other = x.detach().contiguous().requires_grad_()
    y = rotary.call(Heads(other, gamma, cos, sin), rotation)
    others = [y, *torch.autograd.grad(y, (other, gamma), dy)]
    assert all(map(torch.equal, mine, others))
    assert torch.equal(mine[3].unflatten(-1, (6, 64))[..., 2:4, :], others[1])
    for shifted in (x.transpose(0, 1), x.expand(3, 2, 5, 2, 64), x[..., :32], x[..., ::2]):
        assert kernels.pitch_of(shifted) is None
    assert kernels.pitch_of(x[:, :1]) == 5 * 6 * 64
    assert kernels.pitch_of(x[:1, :1]) == 2 * 64


@pytest.mark.parametrize("device", [GPU], indirect=True)
def test_unaligned_tensors(device: str) -> None:
    rotation = Rotation(True)
    flat = torch.randn(1 + 5 * 2 * 64, device=device)
    gamma, cos, sin = (torch.rand(1 + n, device=device)[1:] for n in (64, 5 * 64, 5 * 64))
    cos, sin = cos.view(5, 64), sin.view(5, 64)
    x = flat[1:].view(5, 2, 64)
    expected = rotary.call(Heads(*(v.clone() for v in (x, gamma, cos, sin))), rotation)
    assert torch.equal(rotary.call(Heads(x, gamma, cos, sin), rotation), expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
def test_derivatives_that_have_no_kernel(device: str) -> None:
    x = torch.randn(3, 2, 16, dtype=torch.float64, device=device, requires_grad=True)
    gamma = torch.rand(16, dtype=torch.float64, device=device, requires_grad=True)
    angles = torch.rand(3, 16, dtype=torch.float64, device=device)
    cos, sin = angles.cos().requires_grad_(), angles.sin()

    def run(*tensors: Tensor) -> Tensor:
        return rotary.call(Heads(*tensors, sin), Rotation(True))

    assert torch.autograd.gradcheck(run, (x, gamma, cos))
    fixed = cos.detach()
    assert torch.autograd.gradgradcheck(lambda x, gamma: run(x, gamma, fixed), (x, gamma))
    t = torch.randn_like(x)
    by_forward = torch.func.jvp(lambda x: run(x, gamma, fixed), (x,), (t,))[1]
    step = 1e-6
    near = (run(x + step * t, gamma, fixed) - run(x - step * t, gamma, fixed)) / (2 * step)
    torch.testing.assert_close(by_forward, near, rtol=1e-6, atol=1e-8)
    batched = torch.func.vmap(lambda x: run(x, gamma, fixed))(torch.stack((x, 2 * x)))
    assert torch.equal(batched[1], run(2 * x, gamma, fixed))


def test_pytorchs_rules_for_ops(device: str) -> None:
    x = torch.randn(3, 2, 64, device=device, requires_grad=True)
    gamma = torch.rand(64, device=device, requires_grad=True)
    cos, sin = torch.rand(3, 64, device=device), torch.rand(3, 64, device=device)
    options = (True, 1e-6, 0.0, False, False)
    arguments = (x.detach(), gamma.detach(), cos, sin, *options)
    torch.library.opcheck(torch.ops.fused_norm.rotary.default, arguments)
    for wants_gamma in (True, False):
        torch.library.opcheck(
            torch.ops.fused_norm.rotary_backward.default,
            (torch.randn_like(x), *arguments, wants_gamma),
        )


def test_after_a_fork() -> None:
    """OpenMP's workers are not there in a child, where PyTorch's ops would wait for them."""
    done = run_script(
        "-c",
        "import os, sys, torch\n"
        "from fused_norm.ops import rotary\n"
        "from fused_norm.rotation import Heads, Rotation\n"
        "x = torch.randn(4096, 4, 64)\n"
        "y = rotary.call(Heads(x), Rotation(True)).numpy().tobytes()\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    os._exit(y != rotary.call(Heads(x), Rotation(True)).numpy().tobytes())\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n",
    )
    assert done.returncode == 0, done.stderr


class Attention:
    """The tensors of a Qwen3 block's attention, which norms queries and keys."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        def leaf(*shape: int, around: float = 0.0) -> Tensor:
            t = torch.randn(*shape, device=device) * shape[-1] ** -0.5 + around
            return t.to(dtype).requires_grad_()

        self.leaves = [leaf(2, 9, 48), leaf(48, around=1), leaf(256, 48), leaf(128, 48)]
        self.leaves += [leaf(128, 48), leaf(64, around=1), leaf(64, around=1)]
        angles = torch.rand(1, 9, 32, device=device, dtype=torch.float64) * 6
        angles = torch.cat((angles, angles), -1)
        self.rotary = (angles.cos().to(dtype), angles.sin().to(dtype))

    def ours(self, x: Tensor, g: Tensor, *rest: Tensor, **options: Any) -> Any:
        *weights, q_norm, k_norm = rest
        return fn.norm_qkv(
            x,
            weights,
            head_dim=64,
            **{"q_norm": q_norm, "k_norm": k_norm, "rotary": self.rotary}
            | {"normalization": "rms_norm", "norm_weight": g, "eps": 1e-6}
            | options,
        )

    def theirs(self, x: Tensor, g: Tensor, *rest: Tensor) -> list[Tensor]:
        """Return what transformers computes."""
        qwen = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
        *weights, q_norm, k_norm = rest
        z = F.rms_norm(x, x.shape[-1:], g, 1e-6)
        q, k, v = (F.linear(z, w).unflatten(-1, (-1, 64)) for w in weights)
        q, k = (F.rms_norm(t, (64,), w, 1e-6) for t, w in ((q, q_norm), (k, k_norm)))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        rotary = [v.to(x.dtype) for v in self.rotary]
        return [*qwen.apply_rotary_pos_emb(q, k, *rotary), v]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_qkv_is_what_transformers_computes(device: str, dtype: torch.dtype) -> None:
    block = Attention(dtype, device)
    results = []
    for run, copies in (
        (block.ours, as_copies(block.leaves)),
        (block.theirs, as_copies(block.leaves)),
        (block.theirs, as_float64(block.leaves)),
    ):
        heads = list(run(*copies))
        attended = F.scaled_dot_product_attention(*heads, enable_gqa=True)
        torch.manual_seed(1)
        dy = torch.randn(attended.shape, dtype=torch.float64, device=device)
        grads = torch.autograd.grad(attended, copies, dy.to(attended.dtype))
        results.append([*heads, *grads])
    names = ["q", "k", "v", "dx", "dgamma", "dWq", "dWk", "dWv", "dq_norm", "dk_norm"]
    for name, mine, bar, truth in zip(names, *results, strict=True):
        assert_within_budget(name, mine, truth, bar)
    # Attention's own kernels want heads next to each other in memory.
    assert results[0][0].stride() == results[1][0].stride()


def test_norm_qkv_with_what_norm_linear_returns_besides() -> None:
    block = Attention(torch.float32, "cpu")
    residual = torch.randn_like(block.leaves[0])
    *heads, total, rows = block.ours(
        *block.leaves, residual=residual, return_sum=True, return_norm=True
    )
    x, g = block.leaves[:2]
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(rows, F.rms_norm(total, (48,), g, 1e-6))
    plain = block.ours(total, *block.leaves[1:])
    for mine, other in zip(heads, plain, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("fullgraph_backend", ["aot_eager", "inductor"])
def test_norm_qkv_compiles_to_one_graph(fullgraph_backend: str) -> None:
    block = Attention(torch.float32, "cpu")
    compiled = torch.compile(block.ours, fullgraph=True, backend=fullgraph_backend)
    found = compiled(*block.leaves)
    dys = [torch.randn_like(t) for t in found]
    mine = torch.autograd.grad(found, block.leaves, dys)
    plain = block.ours(*block.leaves)
    others = torch.autograd.grad(plain, block.leaves, dys)
    for a, b in zip((*found, *mine), (*plain, *others), strict=True):
        torch.testing.assert_close(a, b)


def test_norm_qkv_under_autocast() -> None:
    block = Attention(torch.float32, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        q, k, v = block.ours(*block.leaves)
    assert q.dtype is k.dtype is v.dtype is torch.bfloat16
    truth = block.theirs(*as_float64(block.leaves))
    narrow = [t.bfloat16() for t in block.leaves]
    for mine, bar, exact in zip((q, k, v), block.theirs(*narrow), truth, strict=True):
        assert_within_budget("heads", mine, exact, bar)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"head_dim": 60}, ValueError, "256 outputs are not a multiple of head_dim=60"),
        ({"head_dim": 0}, ValueError, "head_dim must be positive, got 0"),
        ({"head_dim": -64}, ValueError, "head_dim must be positive, got -64"),
        ({"weights": 2}, ValueError, "queries, keys and values, got 2"),
        ({"rotary": (8, 64)}, ValueError, r"of shape \[9, 'R'\] or \[2, 9, 'R'\], got \[8, 64\]"),
        ({"rotary": (9, 128)}, ValueError, "at most head_dim=64"),
        ({"rotary_dim": 16}, ValueError, "got rotary_dim=16"),
        ({"q_norm": 32}, RuntimeError, r"of shape \[64\], got \[32\]"),
        ({"activation": "gelu"}, TypeError, "activation"),
        ({"x": None}, TypeError, "Tensor"),
    ],
    ids=str,
)
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], words: str) -> None:
    block = Attention(torch.float32, "cpu")
    x, g, *weights, q_norm, k_norm = (t.detach() for t in block.leaves)
    options = {"head_dim": 64, "q_norm": q_norm, "k_norm": k_norm, "rotary": block.rotary}
    options |= {"normalization": "rms_norm", "norm_weight": g}
    change = dict(change)
    weights = weights[: change.pop("weights", 3)]
    x = change.pop("x", x)
    if "q_norm" in change:
        change["q_norm"] = q_norm[: change["q_norm"]]
    if "rotary" in change:
        change["rotary"] = (torch.zeros(change["rotary"]),) * 2
    with pytest.raises(error, match=words):
        fn.norm_qkv(x, weights, **options | change)
