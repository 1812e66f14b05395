"""The Hopper kernels against float64: matrix product, statistics, weight fold, fused forward."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from accuracy import check, make_inputs
from devices import ON_HOPPER
from kernel_harness import Guarded, address, extension
from strategies import hopper_goes
from test_norm_linear_gpu import forward as normalized
from torch import Tensor

import fused_norm as fn
from fused_norm.activations import ACTIVATIONS
from fused_norm.call import record

EPS = 1e-5
DTYPES = [torch.bfloat16, torch.float16]
# A product's error is its rounding to the dtype, or that of both operands to tf32, to nearest; 1.2
# leaves room for the tensor cores' sums.
ROUNDING = {
    torch.bfloat16: 1.2 * 1.67e-3,
    torch.float16: 1.2 * 2.1e-4,
    torch.float32: 1.2 * 2.9e-4,
}

gpu = [
    pytest.mark.gpu,
    ON_HOPPER,
]


def error(ours: Tensor, truth: Tensor) -> float:
    return ((ours.double() - truth).norm() / truth.norm()).item()


class Kernels:
    """The extension of one dtype and entry points for tests, with tensors instead of addresses."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.module = extension("norm_linear_sm90", dtype, gpu=True)
        self.own = self.module.new_launcher(0, torch.cuda.current_stream().cuda_stream, 1)

    @functools.cached_property
    def parts(self) -> ModuleType:
        return extension("sm90_entries", self.dtype, "tests/mojo", gpu=True)

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        y = torch.empty(len(x), len(w), dtype=x.dtype, device=x.device)
        sizes = (len(x), *w.shape)
        self.parts.product(self.own, y.data_ptr(), x.data_ptr(), w.data_ptr(), *sizes, 0)
        return y

    def call(
        self,
        x: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        w: Tensor,
        bias: Tensor | None,
    ) -> record.Call:
        """Return a record with what a forward reads."""
        call = record.Call(eps=EPS, context=self.own)
        call.N, call.K = w.shape
        call.M = 0 if x is None else len(x)
        tensors = {"x": x, "gamma": gamma, "beta": beta, "weight": w, "bias": bias}
        for name, tensor in tensors.items():
            setattr(call, name, address(tensor))
        call.norm_is_float32 = torch.float32 in [t.dtype for t in (gamma, beta) if t is not None]
        return call

    def forward(
        self, strategy: int, call: record.Call, *, statistics: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, mean and rstd, whichever strategy would be fastest."""
        y = torch.empty(call.M, call.N, dtype=self.dtype, device="cuda")
        mean, rstd = (torch.empty(call.M, device="cuda") for _ in range(2))
        call.y, call.strategy = y.data_ptr(), strategy
        if statistics:
            call.mean, call.rstd = mean.data_ptr(), rstd.data_ptr()
        assert plan(call, self) == strategy
        scratch = Guarded((call.workspace_bytes // 4,), torch.float32, "cuda")
        call.workspace = scratch.tensor.data_ptr()
        self.module.forward(ctypes.addressof(call))
        if not torch.cuda.is_current_stream_capturing():
            scratch.checked()
        return y, mean, rstd

    def stats(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, rstd = (torch.empty(len(x), device=x.device) for _ in range(2))
        addresses = mean.data_ptr(), rstd.data_ptr(), x.data_ptr()
        self.parts.statistics(self.own, *addresses, *x.shape, EPS)
        return mean, rstd

    def fold(
        self, w: Tensor, gamma: Tensor | None, beta: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        folded = torch.empty_like(w)
        s, c = (torch.empty(len(w), device=w.device) for _ in range(2))
        call = self.call(None, gamma, beta, w, bias)
        call.fold_weight, call.fold_sums, call.fold_constants = map(address, (folded, s, c))
        self.module.fold(ctypes.addressof(call))
        return folded, s, c

    def folded(
        self, x: Tensor, fold: tuple[Tensor, Tensor, Tensor], *, statistics: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, mean and rstd by a fold that was kept."""
        call = self.call(x, None, None, fold[0], None)
        call.fold_weight, call.fold_sums, call.fold_constants = map(address, fold)
        return self.forward(record.KEPT_FOLD, call, statistics=statistics)


def plan(call: record.Call, kernels: Kernels) -> int:
    """Plan a forward, and return the strategy."""
    kernels.module.plan_forward(ctypes.addressof(call))
    strategy: int = call.strategy
    return strategy


# float32 is not folded, nor is float16.
with_float32 = pytest.mark.parametrize("kernels", [*DTYPES, torch.float32], indirect=True, ids=str)


@pytest.fixture(params=[torch.bfloat16], ids=str)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(request.param)


def true_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.double()
    return wide.mean(1), (wide.var(1, unbiased=False) + EPS).rsqrt()


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0, mean: float = 0.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale + mean).to(dtype)


# One tile; less than a tile; more tiles than SMs; ragged in each size; few rows and
# narrow tiles, with k a multiple of the k block and not; many tiles of one k block, which follow
# each other faster than they are stored; rows of few tiles, whose statistics these gather.
SHAPES = [
    (128, 64, 256),
    (37, 72, 8),
    (4096, 1024, 1024),
    (1000, 776, 1032),
    (8192, 256, 2304),
    (1, 4096, 512),
    (3000, 2048, 4104),
    (64, 4096, 4096),
    (16, 1032, 776),
    (9, 72, 520),
    (5, 64, 64),
    (512, 1024, 4096),
    (500, 776, 3992),
    (37, 64, 131072),
    (9, 33792, 24),
    (16384, 512, 1000),
]
# Outputs that make rows of y which TMA cannot store.
ODD = [(37, 72, 9), (64, 1024, 1031), (1000, 776, 1031), (4096, 256, 4097)]


@pytest.mark.parametrize("shape", SHAPES + ODD)
class TestOnHopper:
    pytestmark = gpu

    @with_float32
    def test_product(self, kernels: Kernels, shape: tuple[int, ...]) -> None:
        dtype = kernels.dtype
        m, k, n = shape
        x, w = random(m, k, dtype=dtype), random(n, k, dtype=dtype)
        y = kernels.product(x, w)
        assert error(y, x.double() @ w.double().t()) < ROUNDING[dtype]

    @with_float32
    def test_fused(self, kernels: Kernels, shape: tuple[int, ...]) -> None:
        dtype = kernels.dtype
        m, k, n = shape
        x, w = random(m, k, dtype=dtype, mean=3.0), random(n, k, dtype=dtype, scale=k**-0.5)
        for affine in (dtype, torch.float32):
            gamma, beta = random(k, dtype=affine, mean=1), random(k, dtype=affine)
            z = F.layer_norm(x.double(), (k,), gamma.double(), beta.double(), EPS)
            for bias in (random(n, dtype=dtype, scale=10.0), None):
                call = kernels.call(x, gamma, beta, w, bias)
                y, *found = kernels.forward(record.FUSED, call)
                check_statistics(x, *found)
                truth = F.linear(z, w.double(), None if bias is None else bias.double())
                assert error(y, truth) < 2 * ROUNDING[dtype]

    def test_statistics(self, kernels: Kernels, shape: tuple[int, ...]) -> None:
        dtype = kernels.dtype
        m, k, _ = shape
        for mean in (0.0, 1.0, 30.0, 1000.0):
            x = random(m, k, dtype=dtype, mean=mean)
            check_statistics(x, *kernels.stats(x))

    def test_fold(self, kernels: Kernels, shape: tuple[int, ...]) -> None:
        dtype = kernels.dtype
        _, k, n = shape
        w, bias = random(n, k, dtype=dtype, scale=k**-0.5), random(n, dtype=dtype)
        for affine in (dtype, torch.float32):
            gamma, beta = random(k, dtype=affine, mean=1), random(k, dtype=affine)
            for present in ((gamma, beta, bias), (gamma, None, None), (None, beta, bias)):
                wc, s, c = kernels.fold(w, *present)
                scaled = w.double() * (1 if present[0] is None else gamma.double())
                assert error(wc, scaled - scaled.mean(1, keepdim=True)) < ROUNDING[dtype]
                # Of the weight as rounded: exact but for float32 sums.
                bound = 1e-6 * wc.double().abs().sum(1)
                assert ((s.double() - wc.double().sum(1)).abs() <= bound).all()
                shift = 0 if present[1] is None else w.double() @ beta.double()
                truth = shift + (0 if present[2] is None else bias.double())
                assert torch.allclose(c.double(), truth + torch.zeros_like(c).double(), atol=1e-5)

    @pytest.mark.parametrize("ratio", [0, 1, 10, 100])
    def test_folded(self, kernels: Kernels, shape: tuple[int, ...], ratio: float) -> None:
        dtype = kernels.dtype
        m, k, n = shape
        x = random(m, k, dtype=dtype, mean=ratio)
        w, bias = random(n, k, dtype=dtype, scale=k**-0.5), random(n, dtype=dtype)
        gamma, beta = (random(k, dtype=dtype, scale=0.5).exp(), random(k, dtype=dtype))
        folded = kernels.fold(w, gamma, beta, bias)
        y, mean, rstd = kernels.folded(x, folded)
        check_statistics(x, mean, rstd)
        true_mean, true_rstd = true_statistics(x)
        normal = (x.double() - true_mean[:, None]) * true_rstd[:, None]
        truth = (normal * gamma.double() + beta.double()) @ w.double().t() + bias.double()
        eager = F.linear(F.layer_norm(x, (k,), gamma, beta, EPS), w, bias)
        assert error(y, truth) <= 1.1 * error(eager, truth)
        for _ in range(10):
            again = kernels.folded(x, folded)
            assert all(torch.equal(a, b) for a, b in zip((y, mean, rstd), again, strict=True))
        assert torch.equal(kernels.folded(x, folded, statistics=False)[0], y)
        call = kernels.call(x, gamma, beta, w, bias)
        anew = kernels.forward(record.NEW_FOLD, call)
        assert all(torch.equal(a, b) for a, b in zip((y, mean, rstd), anew, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
class TestEpilogues:
    """What becomes of a folded product before it is stored."""

    pytestmark = gpu

    @pytest.mark.parametrize("activation", ["gelu", "silu", "geglu_tanh", "swiglu"])
    def test_activated(self, kernels: Kernels, shape: tuple[int, ...], activation: str) -> None:
        self.check_activated(kernels, shape, activation)

    def check_activated(self, kernels: Kernels, shape: tuple[int, ...], activation: str) -> None:
        dtype = kernels.dtype
        m, k, n = shape
        number, function, *_ = ACTIVATIONS[activation]
        gates = number > 8
        parts = 2 if gates else 1
        x = random(m, k, dtype=dtype, mean=1.0)
        w, bias = random(parts * n, k, dtype=dtype, scale=k**-0.5), random(parts * n, dtype=dtype)
        gamma, beta = (random(k, dtype=dtype, scale=0.5).exp(), random(k, dtype=dtype))

        def activated(h: Tensor) -> Tensor:
            halves = h.split(n, -1)
            return function(halves[0]) * halves[1] if gates else function(h)

        wide = [t.double() for t in (x, gamma, beta, w, bias)]
        true_h = F.linear(F.layer_norm(wide[0], (k,), *wide[1:3], EPS), *wide[3:])
        eager_h = F.linear(F.layer_norm(x, (k,), gamma, beta, EPS), w, bias)
        bar = 1.1 * error(activated(eager_h), activated(true_h))

        fold = Guarded((parts * n, k), dtype, "cuda")
        s, c = (Guarded((parts * n,), torch.float32, "cuda") for _ in range(2))
        outputs = []
        for strategy, keeps in itertools.product(
            (record.NEW_FOLD, record.KEPT_FOLD), (True, False)
        ):
            call = kernels.call(x, gamma, beta, w, bias)
            call.N, call.activation, call.strategy = n, number, strategy
            if gates:
                call.up, call.up_bias = w[n:].data_ptr(), bias[n:].data_ptr()
            if strategy == record.KEPT_FOLD:
                call.fold_weight, call.fold_sums, call.fold_constants = (
                    t.tensor.data_ptr() for t in (fold, s, c)
                )
                kernels.module.fold(ctypes.addressof(call))
            y, h = (Guarded((m, width), dtype, "cuda") for width in (n, parts * n))
            call.y, call.h = y.tensor.data_ptr(), h.tensor.data_ptr() if keeps else 0
            kernels.module.plan_forward(ctypes.addressof(call))
            if keeps and gates and n % 64:
                assert call.strategy == record.DECLINED
                continue
            assert call.strategy == strategy
            scratch = Guarded((call.workspace_bytes // 4,), torch.float32, "cuda")
            call.workspace = scratch.tensor.data_ptr()
            kernels.module.forward(ctypes.addressof(call))
            for guarded in (scratch, fold, s, c):
                guarded.checked()
            assert error(y.checked(), activated(true_h)) <= bar
            if keeps:
                assert error(h.checked(), true_h) <= 1.1 * error(eager_h, true_h)
            outputs.append(y.tensor)
        assert all(torch.equal(outputs[0], other) for other in outputs[1:])

    def test_residual_added(self, kernels: Kernels, shape: tuple[int, ...]) -> None:
        dtype = kernels.dtype
        m, k, n = shape
        x, w = random(m, k, dtype=dtype), random(n, k, dtype=dtype, scale=k**-0.5)
        bias, residual = random(n, dtype=dtype), random(m, n, dtype=dtype, scale=3.0)
        for its_bias in (bias, None):
            wide_bias = None if its_bias is None else its_bias.double()
            truth = residual.double() + F.linear(x.double(), w.double(), wide_bias)
            bar = error(residual + F.linear(x, w, its_bias), truth)
            y = Guarded((m, n), dtype, "cuda")
            call = kernels.call(x, None, None, w, its_bias)
            call.y, call.residual = y.tensor.data_ptr(), residual.data_ptr()
            kernels.module.plan_linear(ctypes.addressof(call))
            kernels.module.linear(ctypes.addressof(call))
            assert error(y.checked(), truth) <= bar


class TestEveryActivation:
    pytestmark = gpu

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activated(self, kernels: Kernels, activation: str) -> None:
        for shape in ((300, 512, 640), (30, 512, 640)):
            TestEpilogues().check_activated(kernels, shape, activation)


def check_statistics(x: Tensor, mean: Tensor, rstd: Tensor) -> None:
    true_mean, true_rstd = true_statistics(x)
    assert ((rstd.double() - true_rstd).abs() <= 1e-6 * true_rstd).all()
    off = (mean.double() - true_mean).abs()
    assert (off <= 1e-6 * (true_mean.abs() + 1 / true_rstd)).all()


def tf32(t: Tensor) -> Tensor:
    """Return t rounded to 10 bits of mantissa, to nearest."""
    bits = t.view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


@pytest.fixture
def allow_tf32() -> Iterator[Callable[[bool], None]]:
    """Allow tf32 during a test; the function that it gets allows and forbids it."""
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision

    def allow(whether: bool) -> None:
        setting.fp32_precision = "tf32" if whether else "ieee"

    allow(True)
    yield allow
    setting.fp32_precision = before


def fused(inputs: list[Tensor | None]) -> Tensor:
    """Return what our LayerNorm and our product make of float32, whatever would be faster."""
    kernels = Kernels(torch.float32)
    return kernels.forward(record.FUSED, kernels.call(*inputs), statistics=False)[0]


def misaligned(t: Tensor) -> Tensor:
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view_as(t)


class TestTf32:
    pytestmark = gpu

    @pytest.mark.parametrize("mean", [0.0, 1000.0])
    @pytest.mark.parametrize(
        "shape",
        # K and N that are not multiples of 8 or of the k block; each kernel for few rows and many.
        [(1, 4096, 4096), (64, 4096, 4096), (17, 68, 132), (8192, 1024, 1028), (1000, 1036, 132)],
    )
    def test_error_is_that_of_eager(
        self, shape: tuple[int, ...], mean: float, allow_tf32: object
    ) -> None:
        inputs = make_inputs(*shape, device="cuda", mean=mean)
        for bias in (inputs[4], None):
            case = [*inputs[:4], bias]
            x, gamma, beta, w, _ = (None if t is None else t.double() for t in case)
            z = F.layer_norm(x, x.shape[-1:], gamma, beta, EPS)
            wide_bias = None if bias is None else bias.double()
            truth = F.linear(z, w, wide_bias)
            eager = F.linear(F.layer_norm(*case[:1], x.shape[-1:], *case[1:3], EPS), *case[3:])
            # cuBLAS takes IEEE float32 for a single row.
            ideal = F.linear(tf32(z.float()).double(), tf32(case[3]).double(), wide_bias)
            bar = 1.05 * max(error(eager, truth), error(ideal, truth))
            assert error(fused(case), truth) <= bar
            assert error(fn.fused_layernorm_linear(*case), truth) <= bar

    @pytest.mark.parametrize("which", [0, 3, 4])
    def test_misaligned(self, which: int, allow_tf32: object) -> None:
        inputs = make_inputs(64, 256, 512, device="cuda")
        x, gamma, beta, w, bias = (t.double() for t in inputs)
        truth = F.linear(F.layer_norm(x, (256,), gamma, beta, EPS), w, bias)
        inputs[which] = misaligned(inputs[which])
        # x may have any address: only the LayerNorm kernel reads it. The others are left to cuBLAS.
        kernels = Kernels(torch.float32)
        assert plan(kernels.call(*inputs), kernels) == (record.DECLINED if which else record.FUSED)
        if which == 0:
            assert error(fused(inputs), truth) < ROUNDING[torch.float32]
        assert error(fn.fused_layernorm_linear(*inputs), truth) < 1e-3

    def test_sizes_beyond_tma(self, allow_tf32: object) -> None:
        check(make_inputs(33, 70, 30, device="cuda"))

    def test_gradients(self, allow_tf32: object) -> None:
        check(make_inputs((3, 40), 256, 512, device="cuda", requires_grad=True))

    def test_setting_is_honored_at_once(self, allow_tf32: Callable[[bool], None]) -> None:
        inputs = make_inputs(64, 1024, 1024, device="cuda")
        x, gamma, beta, w, bias = (t.double() for t in inputs)
        truth = F.linear(F.layer_norm(x, (1024,), gamma, beta, EPS), w, bias)
        for allowed in (True, False, True, False):
            allow_tf32(allowed)
            y = fn.fused_layernorm_linear(*inputs)
            if allowed:
                assert 1e-5 < error(y, truth) < ROUNDING[torch.float32]
            else:
                assert error(y, truth) < 3e-6
                z = normalized(*inputs[:3], False, stats=False)[0]
                assert torch.equal(y, F.linear(z, *inputs[3:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
class TestBesideOthers:
    pytestmark = gpu

    def test_outlier_in_the_first_features(self, dtype: torch.dtype) -> None:
        """A shift taken from one element would lose the variance."""
        kernels = Kernels(dtype)
        x = random(256, 1024, dtype=dtype)
        x[:, 0] = 1000
        check_statistics(x, *kernels.stats(x))
        w = random(256, 1024, dtype=dtype)
        check_statistics(x, *kernels.folded(x, kernels.fold(w, None, None, None))[1:])

    @pytest.mark.usefixtures("back_to_back")
    def test_inputs_written_just_before(self, dtype: torch.dtype) -> None:
        """Kernels that may start early wait for the ones that write what they read."""
        x = random(8192, 1024, dtype=dtype)
        w = random(1024, 1024, dtype=dtype, scale=1 / 32)
        kernels = Kernels(dtype)
        folded = kernels.fold(w, None, None, None)
        expected = kernels.folded(x, folded)[0]
        for _ in range(20):
            late = torch.zeros_like(x)
            torch.cuda._sleep(100_000)
            late.copy_(x)
            y = kernels.folded(late, folded)[0]
            late.fill_(float("nan"))
            assert torch.equal(y, expected)

    @pytest.mark.usefixtures("back_to_back")
    def test_weight_made_just_before(self, dtype: torch.dtype) -> None:
        """A product lets a fold start during its last tiles, when most of the device idles."""
        kernels = Kernels(dtype)
        a, b = random(5120, 8192, dtype=dtype), random(2048, 8192, dtype=dtype, scale=1 / 90)
        w = kernels.product(a, b)
        expected = kernels.fold(w, None, None, None)
        found = kernels.fold(w, None, None, None)
        call = kernels.call(None, None, None, w, None)
        call.fold_weight, call.fold_sums, call.fold_constants = map(address, found)
        for _ in range(10):
            w.fill_(float("nan"))
            torch.cuda._sleep(100_000)
            # Nothing of PyTorch's between the two: no kernel could start before it ends.
            kernels.parts.product(kernels.own, *map(address, (w, a, b)), 5120, 2048, 8192, 0)
            kernels.module.fold(ctypes.addressof(call))
            assert all(map(torch.equal, found, expected))

    @pytest.mark.parametrize("strategy", [record.FUSED, record.NEW_FOLD])
    @pytest.mark.parametrize("shape", [(1, 4096, 4096), (64, 1024, 1024), (4096, 1024, 4096)])
    @pytest.mark.usefixtures("back_to_back")
    def test_parameters_written_just_before(
        self, dtype: torch.dtype, shape: tuple[int, ...], strategy: int
    ) -> None:
        """Few rows are multiplied by a weight that is read while the norm's kernel runs."""
        m, k, n = shape
        x, gamma, beta = (random(*size, dtype=dtype) for size in ((m, k), (k,), (k,)))
        w, bias = random(n, k, dtype=dtype, scale=k**-0.5), random(n, dtype=dtype)
        kernels = Kernels(dtype)
        inputs = [x, gamma, beta, w, bias]
        expected = kernels.forward(strategy, kernels.call(*inputs))
        late = [t.clone() for t in inputs]
        call = kernels.call(*late)
        for turn in range(20):
            for t in late:
                t.fill_(float("nan"))
            torch.cuda._sleep(100_000)
            # Each of them is once the one that the kernel before writes.
            for i in range(len(late)):
                late[(i + turn) % len(late)].copy_(inputs[(i + turn) % len(late)])
            found = kernels.forward(strategy, call)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    def test_norm_without_parameters_needs_no_fold(self, dtype: torch.dtype) -> None:
        """Its weight is multiplied as it is, to the same bits as one folded with ones."""
        for m, k, n in ((1, 4096, 512), (37, 72, 8), (512, 1024, 4096), (16384, 512, 1000)):
            x, w = random(m, k, dtype=dtype), random(n, k, dtype=dtype, scale=k**-0.5)
            for bias in (random(n, dtype=dtype), None):
                with hopper_goes(record.NEW_FOLD):
                    found = [
                        fn.norm_linear(x, w, bias, normalization="rms_norm", norm_weight=gamma)
                        for gamma in (torch.ones_like(x[0]), None)
                    ]
                assert torch.equal(*found)

    def test_forward_after_forward(self, dtype: torch.dtype) -> None:
        """A kernel that starts before the last one ends reads none of what is yet to come."""
        kernels = Kernels(dtype)
        folded = kernels.fold(random(1024, 1024, dtype=dtype, scale=1 / 32), None, None, None)
        x = random(16384, 1024, dtype=dtype)
        alone = [x]
        for _ in range(4):
            alone.append(kernels.folded(alone[-1], folded)[0])
            torch.cuda.synchronize()
        for _ in range(10):
            y = x
            for _ in range(4):
                y = kernels.folded(y, folded)[0]
            assert torch.equal(y, alone[-1])

    def test_cuda_graph(self, dtype: torch.dtype) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            kernels = Kernels(dtype)
            x = random(1024, 776, dtype=dtype)
            folded = kernels.fold(random(512, 776, dtype=dtype), None, None, None)
            expected = kernels.folded(x, folded)[0]
            held = torch.zeros_like(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                y = kernels.folded(held, folded)[0]
            held.copy_(x)
            graph.replay()
            stream.synchronize()
            assert torch.equal(y, expected)
