"""What any GPU does around PyTorch's products, called as the library calls it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
import torch
from kernel_harness import Guarded, address, assert_as_exact, error, extension

from fused_norm.call.record import Call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
# widths around the limits of each kernel shape: a warp, a block, registers; multiples of no vector
SHAPES = [
    *((1, 1), (3, 1), (5, 7), (37, 64), (70001, 8), (130, 128), (64, 769), (37, 1024)),
    *((301, 1536), (16, 4096), (9, 5001), (7, 8192), (5, 8200), (3, 33000), (2, 65536)),
    *((300, 16384), (1, 262144), (2, 262143)),
]
EPS = 1e-5


def run(
    function: str, dtype: torch.dtype, call: Call, stream: torch.cuda.Stream | None = None
) -> None:
    """Call a function of the extension on a stream, the current one if not another."""
    kernels = extension("passes_gpu", dtype, gpu=True)
    raw = (stream or torch.cuda.current_stream()).cuda_stream
    call.context = kernels.new_launcher(torch.cuda.current_device(), raw, True)
    getattr(kernels, function)(ctypes.addressof(call))


def call_of(**fields: torch.Tensor | float | None) -> Call:
    """Return a record of tensors and numbers."""
    call = Call(eps=EPS)
    for name, value in fields.items():
        is_number = isinstance(value, (int, float))
        setattr(call, name, value if is_number else address(value))
    return call


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Exact:
    """LayerNorm and its gradients in float64."""

    y: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor

    @classmethod
    def forward(cls, x, gamma, beta, eps=EPS) -> Exact:
        x = x.double()
        mean = x.mean(1, keepdim=True)
        v = x - mean
        rstd = 1 / torch.sqrt((v * v).mean(1, keepdim=True) + eps)
        y = v * rstd
        if gamma is not None:
            y = y * gamma.double()
        if beta is not None:
            y = y + beta.double()
        return cls(y, mean[:, 0], rstd[:, 0])


def exact_backward(dy, x, gamma, mean, rstd):
    dy, x = dy.double(), x.double()
    xhat = (x - mean.double()[:, None]) * rstd.double()[:, None]
    g = dy if gamma is None else dy * gamma.double()
    dx = rstd.double()[:, None] * (
        g - g.mean(1, keepdim=True) - xhat * (g * xhat).mean(1, keepdim=True)
    )
    return dx, (dy * xhat).sum(0), dy.sum(0)


def params(K, dtype, float32, which, shift=0):
    ftype = torch.float32 if float32 else dtype
    gamma = Guarded.of(torch.randn(K, device="cuda", dtype=ftype), shift).tensor
    beta = Guarded.of(torch.randn(K, device="cuda", dtype=ftype), shift).tensor
    return gamma if "g" in which else None, beta if "b" in which else None


def forward(x, gamma, beta, float32, shift=0, stats=True, eps=EPS):
    M, K = x.shape
    y = Guarded((M, K), x.dtype, "cuda", shift)
    mean = Guarded((M,), stats_dtype(x.dtype), "cuda")
    rstd = Guarded((M,), stats_dtype(x.dtype), "cuda")
    call = call_of(M=M, K=K, x=x, z=y.tensor, gamma=gamma, beta=beta, eps=eps)
    call.norm_is_float32 = float32
    if stats:
        call.mean, call.rstd = address(mean.tensor), address(rstd.tensor)
    run("plan_normalize", x.dtype, call)
    assert call.workspace_bytes == 0
    run("normalize", x.dtype, call)
    return y.checked(), mean.checked(), rstd.checked()


def backward(
    dz, x, gamma, mean, rstd, float32, *, beta=None, dy=None, shift=0, wanted="xgb", in_place=False
):
    """Return dx, dgamma, dbeta, z and db, of which `wanted` names x, g, b, z and l."""
    M, K = x.shape
    N = 0 if dy is None else dy.shape[1]
    ftype = torch.float32 if float32 else x.dtype
    dx, z = (Guarded((M, K), x.dtype, "cuda", shift) for _ in range(2))
    dgamma, dbeta = (Guarded((K,), ftype, "cuda") for _ in range(2))
    db = Guarded((N,), x.dtype, "cuda")
    if in_place:
        z = Guarded.of(dz, shift)
        dz = z.tensor
    outputs = dict(zip("xgblz", (dx, dgamma, dbeta, db, z), strict=True))
    fields = dict(zip("xgblz", ("dx", "dgamma", "dbeta", "dbias", "z"), strict=True))
    call = call_of(M=M, K=K, N=N, dz=dz, dy=dy, x=x, gamma=gamma, beta=beta, mean=mean, rstd=rstd)
    for name in wanted:
        setattr(call, fields[name], address(outputs[name].tensor))
    call.norm_is_float32 = float32
    run("plan_normalize_backward", x.dtype, call)
    size = call.workspace_bytes
    assert (size > 0) == bool(M and set("gbl") & set(wanted))
    workspace = Guarded((size // 4,), torch.float32, "cuda") if size else None
    call.workspace = workspace.tensor.data_ptr() if workspace else 0
    run("normalize_backward", x.dtype, call)
    if workspace:
        workspace.checked()
    return tuple(t.checked() for t in (dx, dgamma, dbeta, z, db))


def check_forward(x, gamma, beta, float32, **options):
    y, mean, rstd = forward(x, gamma, beta, float32, **options)
    exact = Exact.forward(x, gamma, beta)
    # PyTorch mixes bfloat16 with float32 parameters on some builds only
    peer_x = x.float() if float32 else x
    peer = torch.native_layer_norm(peer_x, (x.shape[1],), gamma, beta, EPS)
    assert_as_exact(y, peer[0].to(x.dtype), exact.y, "y")
    # A mean's error counts against the spread of the elements that it is subtracted from.
    ours, theirs = ((m - exact.mean).abs() * exact.rstd for m in (mean, peer[1].flatten()))
    assert ours.max() <= 2 * theirs.max() + torch.finfo(mean.dtype).eps
    assert_as_exact(rstd, peer[2].flatten(), exact.rstd, "rstd")


def check_backward(dy, x, gamma, float32, **options):
    K = x.shape[1]
    exact = Exact.forward(x, None, None)
    mean, rstd = exact.mean.to(stats_dtype(x.dtype)), exact.rstd.to(stats_dtype(x.dtype))
    grads = backward(dy, x, gamma, mean, rstd, float32, **options)
    exacts = exact_backward(dy, x, gamma, mean, rstd)
    weight = torch.ones(K, device="cuda", dtype=dy.dtype) if gamma is None else gamma
    high = (lambda t: t.float()) if float32 else (lambda t: t)
    peer = torch.ops.aten.native_layer_norm_backward(
        *(high(dy), high(x), (K,), mean[:, None], rstd[:, None], weight, weight),
        [True, True, True],
    )
    wanted = options.get("wanted", "xgb")
    for name, grad, theirs, best in zip("xgb", grads[:3], peer, exacts, strict=True):
        if name in wanted:
            assert_as_exact(grad, theirs.to(grad.dtype), best, f"d{name}")
        else:
            assert grad.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
class TestShapes:
    def test_forward(self, shape, dtype):
        x = torch.randn(shape, device="cuda", dtype=dtype) * 3 + 1
        check_forward(x, *params(shape[1], dtype, False, "gb"), False)

    def test_backward(self, shape, dtype):
        x, dy = torch.randn((2, *shape), device="cuda", dtype=dtype)
        check_backward(dy, x, params(shape[1], dtype, False, "gb")[0], False)

    def test_misaligned(self, shape, dtype):
        x = Guarded.of(torch.randn(shape, device="cuda", dtype=dtype), 1).tensor
        dy = Guarded.of(torch.randn(shape, device="cuda", dtype=dtype), 3).tensor
        gamma, beta = params(shape[1], dtype, False, "gb", shift=1)
        check_forward(x, gamma, beta, False, shift=1)
        check_backward(dy, x, gamma, False, shift=1)

    def test_same_bits(self, shape, dtype):
        x, dy = torch.randn((2, *shape), device="cuda", dtype=dtype)
        gamma, beta = params(shape[1], dtype, False, "gb")
        once = forward(x, gamma, beta, False)
        once += backward(dy, x, gamma, once[1], once[2], False, dy=dy, wanted="xgbl")[:3]
        for _ in range(3):
            again = forward(x, gamma, beta, False)
            again += backward(dy, x, gamma, again[1], again[2], False, dy=dy, wanted="xgbl")[:3]
            assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("which", ["", "g", "b", "gb"])
@pytest.mark.parametrize("float32", [False, True])
@pytest.mark.parametrize("shape", [(33, 96), (40, 769), (10, 3072), (3, 70000)], ids=str)
def test_parameters(shape, float32, which):
    dtype = torch.bfloat16
    x, dy = torch.randn((2, *shape), device="cuda", dtype=dtype)
    gamma, beta = params(shape[1], dtype, float32, which)
    check_forward(x, gamma, beta, float32)
    if gamma is not None or not float32:
        check_backward(dy, x, gamma, float32)


@pytest.mark.parametrize("wanted", ["x", "g", "b", "xg", "gb", "xgb"])
@pytest.mark.parametrize("shape", [(33, 96), (40, 769), (600, 3072), (3, 70000)], ids=str)
def test_wanted(shape, wanted):
    x, dy = torch.randn((2, *shape), device="cuda")
    check_backward(dy, x, params(shape[1], x.dtype, False, "g")[0], False, wanted=wanted)


# rows in a warp, in a block and in parts, of either width of loads, and few enough for one part
BETWEEN = [(700, 96, 130), (600, 769, 1024), (400, 3072, 65), (3, 70000, 8), (20, 33001, 16)]


@pytest.mark.parametrize("float32", [False, True])
@pytest.mark.parametrize("sizes", BETWEEN, ids=str)
class TestBetweenProducts:
    """All that the backward computes between its products, in one call."""

    def tensors(self, sizes, float32):
        M, K, N = sizes
        x, dz = torch.randn((2, M, K), device="cuda", dtype=torch.bfloat16)
        dy = torch.randn((M, N), device="cuda", dtype=torch.bfloat16)
        gamma, beta = params(K, x.dtype, float32, "gb")
        z, mean, rstd = forward(x, gamma, beta, float32)
        return dz, dy, (x, gamma, mean, rstd, float32), beta, z

    def test_as_each_alone(self, sizes, float32):
        dz, dy, saved, beta, z = self.tensors(sizes, float32)
        alone = backward(dz, *saved, wanted="xgb")
        together = backward(dz, *saved, beta=beta, dy=dy, wanted="xgblz", in_place=True)
        for ours, theirs in zip(together[:3], alone, strict=False):
            assert torch.equal(ours, theirs)
        exact = Exact.forward(saved[0], saved[1], beta)
        assert_as_exact(together[3], z, exact.y, "z")
        assert_as_exact(together[4], dy.sum(0), dy.double().sum(0), "db")

    @pytest.mark.parametrize("wanted", ["z", "xz", "gz", "bz", "zl", "l", "xl", "gbzl"])
    def test_wanted(self, sizes, float32, wanted):
        dz, dy, saved, beta, _ = self.tensors(sizes, float32)
        every = backward(dz, *saved, beta=beta, dy=dy, wanted="xgblz")
        some = backward(dz, *saved, beta=beta, dy=dy, wanted=wanted)
        for name, ours, theirs in zip("xgbzl", some, every, strict=True):
            if name not in wanted:
                assert ours.isnan().all(), name
            else:
                # Where less is wanted, another kernel may compute it.
                assert error(ours, theirs) < torch.finfo(torch.bfloat16).eps, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    "shape", [(1, 1), (7, 33), (64, 4096), (3001, 264), (16384, 1024), (100, 50257)], ids=str
)
def test_column_sums(shape, dtype, shift):
    M, N = shape
    dy = Guarded.of(torch.randn(shape, device="cuda", dtype=dtype) + 0.1, shift).tensor
    found = []
    for _ in range(3):
        db = Guarded((N,), dtype, "cuda")
        call = call_of(M=M, K=1, N=N, dy=dy, dbias=db.tensor)
        run("plan_normalize_backward", dtype, call)
        scratch = Guarded((call.workspace_bytes // 4,), torch.float32, "cuda")
        call.workspace = scratch.tensor.data_ptr()
        run("normalize_backward", dtype, call)
        scratch.checked()
        found.append(db.checked())
    assert_as_exact(found[0], dy.sum(0), dy.double().sum(0), "db")
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_without_statistics():
    x = torch.randn(20, 300, device="cuda")
    y, mean, rstd = forward(x, None, None, False, stats=False)
    assert torch.equal(y, forward(x, None, None, False)[0])
    assert mean.isnan().all()
    assert rstd.isnan().all()


@pytest.mark.parametrize("K", [64, 1000, 4096, 70000])
@pytest.mark.parametrize("mean", [1e3, -1e3, 1e5])
def test_far_from_zero(K, mean):
    x = torch.randn(50, K, device="cuda") + mean
    y, *_ = forward(x, None, None, False)
    exact = Exact.forward(x, None, None)
    assert (y - exact.y).abs().max() < 4e-6


@pytest.mark.parametrize("K", [64, 1000, 4096, 70000])
def test_outlier_first(K):
    x = torch.randn(50, K, device="cuda")
    x[:, 0] = 1e4
    check_forward(x, None, None, False)


@pytest.mark.parametrize("K", [1, 7, 769, 4096, 70000])
@pytest.mark.parametrize("value", [0.1, -3.3, 1e8, 1e-30])
def test_constant_rows(K, value):
    x = torch.full((5, K), value, device="cuda")
    beta = torch.randn(K, device="cuda")
    assert torch.equal(forward(x, None, beta, False)[0], beta.expand(5, K))
    assert (forward(x, None, None, False)[0] == 0).all()
    assert forward(x, None, None, False, eps=0.0)[0].isnan().all()


def test_nonfinite_rows():
    x = torch.randn(6, 1000, device="cuda")
    x[1, 17] = float("nan")
    x[3, 999] = float("inf")
    x[4, 0] = -float("inf")
    y, *_ = forward(x, None, None, False)
    bad = y.isnan().all(1)
    assert bad.tolist() == [False, True, False, True, True, False]
    assert y[~bad].isfinite().all()


def test_tiny_variance_and_eps():
    x = torch.randn(8, 512, device="cuda") * 1e-20
    check = Exact.forward(x, None, None, 0.0)
    y, _, rstd = forward(x, None, None, False, eps=0.0)
    torch.testing.assert_close(y.double(), check.y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rstd.double(), check.rstd, rtol=1e-5, atol=0.0)
    assert (forward(x, None, None, False, eps=float("inf"))[0] == 0).all()
    assert forward(x, None, None, False, eps=-1.0)[0].isnan().all()


def test_no_rows():
    x = torch.randn(0, 300, device="cuda")
    empty = torch.empty(0, device="cuda")
    dx, *sums = backward(x, x, None, empty, empty, False, dy=x, wanted="xgbl")
    assert dx.shape == (0, 300)
    for gradient in (sums[0], sums[1], sums[3]):
        assert (gradient == 0).all()
    forward(x, None, None, False)


def test_rows_do_not_depend_on_their_neighbors():
    x = torch.randn(1000, 768, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(forward(x, None, None, False)[0][5:8], forward(x[5:8], None, None, False)[0])


@pytest.mark.slow
def test_more_than_2_to_31_elements():
    M, K = 2**18 + 3, 8200
    x = torch.empty(M, K, device="cuda", dtype=torch.bfloat16).normal_()
    y, mean, rstd = forward(x, None, None, False)
    dx, *_ = backward(x, x, None, mean, rstd, False)
    last = slice(M - 3, M)
    assert torch.equal(y[last], forward(x[last].clone(), None, None, False)[0])
    alone = backward(x[last].clone(), x[last].clone(), None, mean[last], rstd[last], False)
    assert torch.equal(dx[last], alone[0])


def test_graph_and_side_stream():
    x = torch.randn(256, 1024, device="cuda")
    expected = forward(x, None, None, False)[0].clone()
    y = torch.empty_like(x)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run("normalize", x.dtype, call_of(M=256, K=1024, x=x, z=y), stream)
    y.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)
