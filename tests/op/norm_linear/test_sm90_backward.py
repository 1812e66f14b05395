"""The backward on Hopper against float64: its products, and all gradients together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from devices import ON_HOPPER
from kernel_harness import Guarded, address, assert_as_exact, error, extension
from launches import names
from torch import Tensor

import fused_norm as fn
from fused_norm.composition import Operands, Spec
from fused_norm.norms import NORMALIZATIONS, NORMS

EPS = 1e-5
DTYPES = [torch.bfloat16, torch.float16]
REPEATS = 5

pytestmark = [
    pytest.mark.gpu,
    ON_HOPPER,
]

# Rows, features, outputs. One tile; less than one; few rows; ragged in each size; tiles that two
# blocks share; that two grids share, the second with fewer rows; more tiles than SMs;
# many narrow tiles of one k block.
SHAPES = [
    (128, 256, 256),
    (37, 72, 8),
    (1, 512, 4096),
    (16, 1032, 776),
    (64, 4096, 4096),
    (1000, 776, 1032),
    (16384, 768, 2304),
    (16384, 1024, 1024),
    (8200, 264, 520),
    (193, 512, 256),
    (3000, 2048, 4104),
    (37, 65536, 16),
]

# Many and long rows, which the kernel that makes them passes on: ragged, and in many columns.
PASSED = [(8200, 3080, 6152), (5000, 4600, 6144)]


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0, mean: float = 0.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale + mean).to(dtype)


class Products:
    """The products of one dtype, between guards."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.module = extension("sm90_entries", dtype, "tests/mojo", gpu=True)
        self.own = self.module.new_launcher(0, torch.cuda.current_stream().cuda_stream, 1)

    def input_gradient(self, dy: Tensor, w: Tensor) -> Tensor:
        dz = Guarded((len(dy), w.shape[1]), dy.dtype, "cuda")
        self.module.product(
            *(self.own, dz.tensor.data_ptr(), dy.data_ptr(), w.data_ptr()),
            *(len(dy), w.shape[1], w.shape[0], True),
        )
        return dz.checked()

    def weight_gradient(
        self, dw: Guarded, db: Guarded | None, dy: Tensor, z: Tensor, accumulate: bool = False
    ) -> None:
        tensors = (dw.tensor, None if db is None else db.tensor, dy, z)
        addresses = map(address, tensors)
        sizes = (dy.shape[1], z.shape[1], len(dy), dw.tensor.dtype is torch.float32, accumulate)
        size = self.module.split_k(self.own, 0, 0, 0, 0, 0, *sizes)
        scratch = Guarded((max(size // 4, 1),), torch.float32, "cuda")
        self.module.split_k(self.own, *addresses, scratch.tensor.data_ptr(), *sizes)
        scratch.checked()
        dw.checked()
        if db is not None:
            db.checked()


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.mark.parametrize("shape", SHAPES, ids=str)
class TestProducts:
    def test_gradient_of_the_input(self, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
        m, k, n = shape
        dy, w = random(m, n, dtype=dtype), random(n, k, dtype=dtype, scale=n**-0.5)
        products = Products(dtype)
        dz = products.input_gradient(dy, w)
        assert_as_exact(dz, torch.mm(dy, w), dy.double() @ w.double(), "dz")
        assert all(torch.equal(products.input_gradient(dy, w), dz) for _ in range(REPEATS))

    def test_gradient_of_the_weight(self, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
        m, k, n = shape
        dy, z = random(m, n, dtype=dtype), random(m, k, dtype=dtype)
        exact, exact_db = dy.double().t() @ z.double(), dy.double().sum(0)
        products = Products(dtype)
        results = []
        for _ in range(REPEATS):
            dw, db = Guarded((n, k), dtype, "cuda"), Guarded((n,), dtype, "cuda")
            products.weight_gradient(dw, db, dy, z)
            results.append((dw.tensor, db.tensor))
        dw_tensor, db_tensor = results[0]
        assert_as_exact(dw_tensor, torch.mm(dy.t(), z), exact, "dw")
        assert_as_exact(db_tensor, dy.sum(0), exact_db, "db")
        assert all(torch.equal(a, dw_tensor) and torch.equal(b, db_tensor) for a, b in results)
        alone = Guarded((n, k), dtype, "cuda")
        products.weight_gradient(alone, None, dy, z)
        assert torch.equal(alone.tensor, dw_tensor)

    def test_main_gradients(self, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
        """In float32, replacing what is there or added to it."""
        m, k, n = shape
        dy, z = random(m, n, dtype=dtype), random(m, k, dtype=dtype)
        exact, exact_db = dy.double().t() @ z.double(), dy.double().sum(0)
        peer = torch.mm(dy.t(), z, out_dtype=torch.float32)
        peer_db = dy.float().sum(0)
        products = Products(dtype)
        dw, db = Guarded((n, k), torch.float32, "cuda"), Guarded((n,), torch.float32, "cuda")
        products.weight_gradient(dw, db, dy, z)
        assert_as_exact(dw.tensor, peer, exact, "dw")
        assert_as_exact(db.tensor, peer_db, exact_db, "db")
        before = dw.tensor.clone(), db.tensor.clone()
        products.weight_gradient(dw, db, dy, z, accumulate=True)
        assert_as_exact(dw.tensor, 2 * peer, exact + before[0].double(), "dw added to")
        assert_as_exact(db.tensor, 2 * peer_db, exact_db + before[1].double(), "db added to")


Inputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]


def make(m: int, k: int, n: int, affine: torch.dtype | None) -> Inputs:
    x, w = random(m, k, dtype=torch.bfloat16, mean=3.0), random(n, k, dtype=torch.bfloat16)
    bias = random(n, dtype=torch.bfloat16)
    if affine is None:
        return x, None, None, w * k**-0.5, bias
    gamma, beta = random(k, dtype=affine, scale=0.5).exp(), random(k, dtype=affine)
    return x, gamma, beta, w * k**-0.5, bias


def by_autograd(inputs: Inputs, dy: Tensor, dtype: torch.dtype | None) -> list[Tensor | None]:
    """Differentiate PyTorch's ops; they want all parameters in one dtype."""
    wanted = [None if t is None else t.to(dtype or t.dtype).requires_grad_() for t in inputs]
    one = dtype or inputs[0].dtype
    x, gamma, beta, w, bias = (None if t is None else t.to(one) for t in wanted)
    assert x is not None
    assert w is not None
    y = F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, EPS), w, bias)
    given = [t for t in wanted if t is not None]
    found = iter(torch.autograd.grad(y, given, dy.to(y.dtype)))
    return [None if t is None else next(found) for t in wanted]


def run(
    inputs: Inputs, dy: Tensor, mean: Tensor, rstd: Tensor, wanted: list[bool]
) -> list[Tensor | None]:
    x, gamma, beta, w, _ = inputs
    t = Operands(x, gamma=gamma, beta=beta, mean=mean, rstd=rstd, weights=[w], biases=[None])
    places = [place for place, w in zip((0, 2, 3, 11, 12), wanted, strict=True) if w]
    op = torch.ops.fused_norm.norm_linear_backward
    found = dict(zip(places, op(*t, *Spec(eps=EPS), [], [dy], places), strict=True))
    return [found.get(place) for place in (0, 2, 3, 11, 12)]


def backward(inputs: Inputs, dy: Tensor, mask: list[bool]) -> list[Tensor | None]:
    wide = inputs[0].double()
    rstd = (wide.var(-1, unbiased=False) + EPS).rsqrt().float()
    return run(inputs, dy, wide.mean(-1).float(), rstd, mask)


def assert_equal(a: Tensor | None, b: Tensor | None) -> None:
    assert (a is None) == (b is None)
    if a is not None and b is not None:
        assert torch.equal(a, b)


class TestBackward:
    @pytest.mark.parametrize("affine", [torch.bfloat16, torch.float32, None], ids=str)
    @pytest.mark.parametrize("shape", SHAPES + PASSED, ids=str)
    def test_gradients(self, shape: tuple[int, int, int], affine: torch.dtype | None) -> None:
        m, k, n = shape
        inputs = make(m, k, n, affine)
        dy = random(m, n, dtype=torch.bfloat16)
        mask = [t is not None for t in inputs]
        ours = backward(inputs, dy, mask)
        theirs, exact = by_autograd(inputs, dy, None), by_autograd(inputs, dy, torch.float64)
        for name, a, b, c in zip(
            ("x", "gamma", "beta", "w", "bias"), ours, theirs, exact, strict=True
        ):
            if c is None:
                assert a is None
            else:
                assert a is not None
                assert b is not None
                assert_as_exact(a, b, c, name)
        for a, b in zip(ours, backward(inputs, dy, mask), strict=True):
            assert_equal(a, b)

    @pytest.mark.parametrize("shape", PASSED, ids=str)
    def test_rows_are_passed_on(self, shape: tuple[int, int, int]) -> None:
        m, k, n = shape
        inputs = make(m, k, n, torch.bfloat16)
        dy = random(m, n, dtype=torch.bfloat16)
        # Counters of rows are what only that kernel needs.
        assert "fused_norm_prepare" in names(lambda: backward(inputs, dy, [True] * 5))

    @pytest.mark.parametrize("shape", [(1000, 776, 1032), PASSED[0]], ids=str)
    def test_only_what_is_wanted(self, shape: tuple[int, int, int]) -> None:
        m, k, n = shape
        inputs = make(m, k, n, torch.bfloat16)
        dy = random(m, n, dtype=torch.bfloat16)
        whole = backward(inputs, dy, [True] * 5)
        for bits in range(1, 32):
            mask = [bool(bits >> i & 1) for i in range(5)]
            for wanted, a, b in zip(mask, backward(inputs, dy, mask), whole, strict=True):
                assert (a is not None) == wanted
                # Another kernel makes z where no dz is wanted, or dx where nothing else is, and
                # rounds it again.
                if a is not None and b is not None:
                    assert error(a, b) < torch.finfo(torch.bfloat16).eps

    @pytest.mark.parametrize("shape", [(16384, 1024, 1024), (64, 4096, 4096), PASSED[0]], ids=str)
    @pytest.mark.usefixtures("back_to_back")
    def test_inputs_written_just_before(self, shape: tuple[int, int, int]) -> None:
        """Grids that may start early wait for what they read, and leave it until they have."""
        m, k, n = shape
        inputs = make(m, k, n, torch.bfloat16)
        dy = random(m, n, dtype=torch.bfloat16)
        expected = backward(inputs, dy, [True] * 5)
        x, gamma, beta, w, _ = inputs
        mean, rstd = x.double().mean(-1).float(), (x.double().var(-1, unbiased=False) + EPS).rsqrt()
        for _ in range(10):
            late_dy, late_x, late_w = torch.zeros_like(dy), torch.zeros_like(x), torch.zeros_like(w)
            torch.cuda._sleep(100_000)
            late_dy.copy_(dy)
            late_x.copy_(x)
            late_w.copy_(w)
            late = (late_x, gamma, beta, late_w, None)
            found = run(late, late_dy, mean, rstd.float(), [True] * 5)
            for tensor in (late_dy, late_x, late_w):
                tensor.fill_(float("nan"))
            for a, b in zip(found, expected, strict=True):
                assert_equal(a, b)

    @pytest.mark.parametrize("shape", [(16384, 1024, 1024), PASSED[0]], ids=str)
    def test_cuda_graph(self, shape: tuple[int, int, int]) -> None:
        m, k, n = shape
        inputs = make(m, k, n, torch.bfloat16)
        x = inputs[0]
        dy = random(m, n, dtype=torch.bfloat16)
        mean, rstd = x.double().mean(-1).float(), (x.double().var(-1, unbiased=False) + EPS).rsqrt()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            arguments = (mean, rstd.float(), [True] * 5)
            expected = run(inputs, dy, *arguments)
            held = torch.zeros_like(dy)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                found = run(inputs, held, *arguments)
            held.copy_(dy)
            for _ in range(3):
                graph.replay()
            stream.synchronize()
        for a, b in zip(found, expected, strict=True):
            assert_equal(a, b)

    def test_streams_of_different_priority(self) -> None:
        """Blocks that wait for others of their grid leave room for them, whatever else runs."""
        inputs = make(*PASSED[1], torch.bfloat16)
        m, _, n = PASSED[1]
        dy = random(m, n, dtype=torch.bfloat16)
        expected = backward(inputs, dy, [True] * 5)
        other = random(4096, 4096, dtype=torch.bfloat16)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream(priority=p) for p in (0, -1, 0, -1)]
        found = []
        for _ in range(10):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    torch.mm(other, other[:, : 128 * (i + 1)])
                    found.append(backward(inputs, dy, [True] * 5))
        torch.cuda.synchronize()
        for gradients in found:
            for a, b in zip(gradients, expected, strict=True):
                assert_equal(a, b)

    def test_beside_collectives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        m, k, n = PASSED[0]
        inputs = make(m, k, n, torch.bfloat16)
        dy = random(m, n, dtype=torch.bfloat16)
        alone = backward(inputs, dy, [True] * 5)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        for a, b in zip(backward(inputs, dy, [True] * 5), alone, strict=True):
            assert a is not None
            assert b is not None
            assert error(a, b) < torch.finfo(torch.bfloat16).eps

    def test_misaligned_tensors(self) -> None:
        inputs = make(128, 256, 512, torch.bfloat16)
        dy = random(128 * 512 + 1, dtype=torch.bfloat16)[1:].view(128, 512)
        ours, exact = backward(inputs, dy, [True] * 5), by_autograd(inputs, dy, torch.float64)
        theirs = by_autograd(inputs, dy, None)
        for a, b, c in zip(ours, theirs, exact, strict=True):
            assert a is not None
            assert b is not None
            assert c is not None
            assert_as_exact(a, b, c, "gradient")


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("shape", [SHAPES[0], PASSED[1]], ids=str)
def test_both_norms_in_float16(shape: tuple[int, int, int], normalization: str) -> None:
    """They share a build, whose row pass asks each call for its norm."""
    m, k, n = shape
    x, gamma = random(m, k, dtype=torch.float16, mean=1.0), random(k, dtype=torch.float16)
    w, bias = random(n, k, dtype=torch.float16, scale=k**-0.5), random(n, dtype=torch.float16)
    dy = random(m, n, dtype=torch.float16)
    leaves = [t.requires_grad_() for t in (x, gamma, w, bias)]
    y = fn.norm_linear(x, w, bias, normalization=normalization, norm_weight=gamma, eps=EPS)
    ours = torch.autograd.grad(y, leaves, dy)

    def by_pytorch(dtype: torch.dtype) -> tuple[Tensor, ...]:
        own = [t.detach().to(dtype).requires_grad_() for t in leaves]
        z = NORMS[normalization].function(own[0], (k,), own[1], None, EPS)
        return torch.autograd.grad(F.linear(z, *own[2:]), own, dy.to(dtype))

    both = zip(ours, by_pytorch(torch.float16), by_pytorch(torch.float64), strict=True)
    for name, (a, b, c) in zip(("x", "gamma", "w", "bias"), both, strict=True):
        assert_as_exact(a, b, c, name)
