"""The CPU kernels without the library around them: memory, alignment, threads, plans."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable

import pytest
import torch
from accuracy import NAMES, as_float64, assert_within_budget, eager, make_inputs
from torch import Tensor

from fused_norm.call.record import DECLINED, FUSED, Call
from fused_norm.native import build

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [
    (16, 8, 16),  # so small that the workspace is on the stack
    (37, 50, 65),  # nothing divides
    (1, 1023, 7),  # one row, an odd number of features
    (3, 7, 1),  # one output
    (5, 1, 3),  # one feature
    (70, 770, 130),  # few rows, several blocks along the features
    (160, 100, 90),  # few rows, and more than one block of them
    (199, 768, 96),  # many rows: the weight is packed first
    (700, 333, 530),  # several slabs, several tiles of the weight
    (4096, 64, 32),  # long sums over the rows
]
GRADIENTS = ("dx", "dgamma", "dbeta", "dweight", "dbias")
CANARY = 97
GUARD = 64
EntryPoint = Callable[[int], int]


class Guarded:
    """Memory for a tensor, filled with NaN, with canaries on both sides.

    Args:
        shape: Shape of the tensor.
        dtype: Its dtype.
        offset: Elements by which it misses the alignment of its memory.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> None:
        size = torch.Size(shape).numel()
        self.memory = torch.full((size + 2 * GUARD,), CANARY, dtype=dtype)
        self.inside = slice(GUARD + offset, GUARD + offset + size)
        if dtype.is_floating_point:
            self.memory[self.inside] = float("nan")
        self.tensor = self.memory[self.inside].view(shape)

    def check(self, name: str, may_be_nan: bool = False) -> None:
        """Assert that every element was written, and nothing outside the tensor."""
        assert may_be_nan or not self.tensor.isnan().any(), f"{name} is not written everywhere"
        outside = torch.ones_like(self.memory, dtype=torch.bool)
        outside[self.inside] = False
        assert (self.memory[outside] == CANARY).all(), f"written outside of {name}"


class Kernels:
    """The extension for one dtype; every call checks the memory that it was given.

    Args:
        dtype: Dtype of the tensors.
        threads: Threads to use.
        pool: Whether to run on Mojo's threads instead of PyTorch's.
        offset: Elements by which every tensor misses the alignment of its memory.
    """

    def __init__(
        self, dtype: torch.dtype, threads: int = 2, pool: bool = False, offset: int = 0
    ) -> None:
        extension = build.Extension("norm_linear_cpu", build.DTYPES[dtype])
        self.module = build.load(extension)
        self.dtype = dtype
        self.accum = torch.float64 if dtype is torch.float64 else torch.float32
        self.threads = threads
        self.gomp = 0 if pool else build.gomp_parallel()
        self.offset = offset

    def forward(
        self,
        inputs: list[Tensor | None],
        eps: float = 1e-5,
        statistics: bool = True,
        may_be_nan: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, mean and rstd."""
        tensors = [self._shifted(t) for t in inputs]
        M, N = tensors[0].shape[0], tensors[3].shape[0]
        y = Guarded((M, N), self.dtype, self.offset)
        mean, rstd = (Guarded((M,), self.accum, self.offset) for _ in range(2))
        call = self._call(tensors, eps)
        call.y = _address(y)
        if statistics:
            call.mean, call.rstd = _address(mean), _address(rstd)
        workspace = self._run(call, self.module.plan_forward, self.module.forward)
        written = {"y": y, "workspace": workspace}
        if statistics:
            written |= {"mean": mean, "rstd": rstd}
        for name, memory in written.items():
            memory.check(name, may_be_nan)
        return y.tensor, mean.tensor, rstd.tensor

    def backward(
        self,
        inputs: list[Tensor | None],
        grad_output: Tensor,
        mean: Tensor,
        rstd: Tensor,
        wanted: tuple[bool, ...] = (True,) * 5,
    ) -> list[Tensor | None]:
        """Return the gradients that are wanted, None for each other."""
        tensors = [self._shifted(t) for t in inputs[:4]]
        grad_output, mean, rstd = map(self._shifted, (grad_output, mean, rstd))
        (M, K), N = tensors[0].shape, tensors[3].shape[0]
        affine = torch.float32 if _is_float32(*tensors[1:3]) else self.dtype
        forms = [((M, K), self.dtype), ((K,), affine), ((K,), affine)]
        forms += [((N, K), self.dtype), ((N,), self.dtype)]
        gradients = [
            Guarded(*form, self.offset) if want else None
            for form, want in zip(forms, wanted, strict=True)
        ]
        call = self._call(tensors)
        call.dy, call.mean, call.rstd = map(_address, (grad_output, mean, rstd))
        for name, gradient in zip(GRADIENTS, gradients, strict=True):
            setattr(call, name, _address(gradient))
        workspace = self._run(call, self.module.plan_backward, self.module.backward)
        workspace.check("workspace")
        for name, gradient in zip(NAMES, gradients, strict=True):
            if gradient is not None:
                gradient.check(f"grad_{name}")
        return [None if g is None else g.tensor for g in gradients]

    def both(self, inputs: list[Tensor | None], grad_output: Tensor) -> list[Tensor]:
        """Return y, mean, rstd and all gradients."""
        y, mean, rstd = self.forward(inputs)
        return [y, mean, rstd, *self.backward(inputs, grad_output, mean, rstd)]

    def _shifted(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        shifted = Guarded(tuple(tensor.shape), tensor.dtype, self.offset)
        return shifted.tensor.copy_(tensor.detach())

    def _call(self, tensors: list[Tensor | None], eps: float = 0.0) -> Call:
        x, gamma, beta, weight, *bias = tensors
        call = Call(context=self.gomp, threads=self.threads, eps=eps, strategy=FUSED)
        (call.M, call.K), call.N = x.shape, weight.shape[0]
        call.x, call.gamma, call.beta, call.weight = map(_address, (x, gamma, beta, weight))
        call.bias = _address(bias[0]) if bias else 0
        call.norm_is_float32 = _is_float32(gamma, beta)
        return call

    def _run(self, call: Call, plan: EntryPoint, run: EntryPoint) -> Guarded:
        address = ctypes.addressof(call)
        plan(address)
        assert call.strategy == FUSED
        # Bytes at an odd address: the kernels align what they put there.
        workspace = Guarded((call.workspace_bytes,), torch.uint8, 1)
        call.workspace = _address(workspace)
        run(address)
        return workspace


def _address(memory: Guarded | Tensor | None) -> int:
    if isinstance(memory, Guarded):
        memory = memory.tensor
    return 0 if memory is None or memory.numel() == 0 else memory.data_ptr()


def _is_float32(*parameters: Tensor | None) -> bool:
    return any(p is not None and p.dtype is torch.float32 for p in parameters)


def check(
    kernels: Kernels,
    inputs: list[Tensor | None],
    wanted: tuple[bool, ...] = (True,) * 5,
    eps: float = 1e-5,
) -> None:
    """Compare output, statistics and gradients with float64, PyTorch's own error as the bar."""
    bar_inputs = [t if t is None else t.to(kernels.dtype) for t in inputs]
    bar_inputs = [t if t is None else t.detach().requires_grad_() for t in bar_inputs]
    inputs = [t if t is None else t.detach() for t in inputs]
    truth_inputs = [t if t is None else t.requires_grad_() for t in as_float64(inputs)]
    bar, truth = eager(*bar_inputs, eps), eager(*truth_inputs, eps)
    y, mean, rstd = kernels.forward(inputs, eps)
    assert_within_budget("y", y, truth, bar)

    x = truth_inputs[0].detach()
    exact_rstd = (x.var(-1, unbiased=False) + eps).rsqrt()
    tolerance = {torch.float64: 1e-12}.get(kernels.accum, 2e-6)
    torch.testing.assert_close(mean.double(), x.mean(-1), rtol=1e-6, atol=tolerance)
    torch.testing.assert_close(rstd.double(), exact_rstd, rtol=tolerance, atol=0)

    grad_output = torch.randn_like(truth).to(kernels.dtype)
    bar.backward(grad_output)
    truth.backward(grad_output.double())
    gradients = kernels.backward(inputs, grad_output, mean, rstd, wanted)
    compared = zip(NAMES, gradients, truth_inputs, bar_inputs, inputs, strict=True)
    for name, gradient, exact, low, tensor in compared:
        if gradient is not None and tensor is not None:
            low_gradient = low.grad.to(gradient.dtype)
            assert_within_budget(f"grad_{name}", gradient, exact.grad, low_gradient)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(Kernels(dtype), make_inputs(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_large_values_and_gradients(dtype: torch.dtype) -> None:
    check(Kernels(dtype), make_inputs(64, 1024, 1024, dtype=dtype))
    check(Kernels(dtype), make_inputs(512, 1024, 1024, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [1, 3, 7])
def test_misaligned_tensors_give_the_same_bits(offset: int, dtype: torch.dtype) -> None:
    for shape in [(37, 50, 65), (300, 130, 100)]:
        inputs = make_inputs(*shape, dtype=dtype)
        grad_output = torch.randn(shape[0], shape[2]).to(dtype)
        aligned = Kernels(dtype).both(inputs, grad_output)
        shifted = Kernels(dtype, offset=offset).both(inputs, grad_output)
        assert all(map(torch.equal, aligned, shifted))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("missing", [None, 1, 2], ids=["both", "no weight", "no bias"])
def test_float32_layernorm_parameters(missing: int | None, dtype: torch.dtype) -> None:
    inputs = make_inputs(70, 96, 40, dtype=dtype, affine_dtype=torch.float32)
    if missing is not None:
        inputs[missing] = None
    check(Kernels(dtype, offset=1), inputs)


@pytest.mark.parametrize("missing", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_missing_parameters(missing: tuple[bool, ...], dtype: torch.dtype) -> None:
    inputs = make_inputs(37, 50, 65, dtype=dtype)
    for index, is_missing in zip((1, 2, 4), missing, strict=True):
        if is_missing:
            inputs[index] = None
    # No gradient is asked for what is not there.
    check(Kernels(dtype), inputs, tuple(t is not None for t in inputs))


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=5)), ids=str)
@pytest.mark.parametrize("rows", [37, 300])
def test_any_subset_of_gradients(rows: int, wanted: tuple[bool, ...]) -> None:
    kernels = Kernels(torch.float32)
    inputs = make_inputs(rows, 50, 65)
    grad_output = torch.randn(rows, 65)
    _, mean, rstd, *every = kernels.both(inputs, grad_output)
    some = kernels.backward(inputs, grad_output, mean, rstd, wanted)
    for gradient, expected, want in zip(some, every, wanted, strict=True):
        assert gradient is not None if want else gradient is None
        if gradient is not None:
            assert torch.equal(gradient, expected)


def test_statistics_are_optional() -> None:
    kernels = Kernels(torch.float32)
    for rows in (37, 300):
        inputs = make_inputs(rows, 50, 65)
        y, _, _ = kernels.forward(inputs)
        alone, mean, rstd = kernels.forward(inputs, statistics=False)
        assert torch.equal(y, alone)
        assert mean.isnan().all()
        assert rstd.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [130, 500])
def test_threads_and_repetition_give_the_same_bits(rows: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(rows, 300, 200, dtype=dtype)
    grad_output = torch.randn(rows, 200).to(dtype)
    first = Kernels(dtype).both(inputs, grad_output)
    variants = [Kernels(dtype, threads) for threads in (1, 2, 2, 3, 5, 16)]
    for kernels in [*variants, Kernels(dtype, pool=True)]:
        assert all(map(torch.equal, first, kernels.both(inputs, grad_output)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    kernels = Kernels(dtype)
    inputs = make_inputs(1000, 300, 200, dtype=dtype)
    grad_output = torch.randn(1000, 200).to(dtype)
    y, mean, rstd = kernels.forward(inputs)
    dx = kernels.backward(inputs, grad_output, mean, rstd)[0]
    # From one row to several register tiles, and from few rows to slabs.
    for first, last in [(0, 1), (7, 9), (500, 517), (3, 195), (100, 700)]:
        part = slice(first, last)
        some_inputs = [inputs[0][part], *inputs[1:]]
        some = kernels.forward(some_inputs)
        assert all(map(torch.equal, some, (y[part], mean[part], rstd[part])))
        some_dx = kernels.backward(some_inputs, grad_output[part], mean[part], rstd[part])[0]
        assert torch.equal(some_dx, dx[part])


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("mean", [10, 1000, 30000])
def test_large_means(mean: float, dtype: torch.dtype) -> None:
    check(Kernels(dtype), make_inputs(64, 512, 64, dtype=dtype, mean=mean))


@pytest.mark.parametrize("outputs", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 4, 16, 64, 200, 700])
def test_what_a_mean_loses_as_it_is_rounded(rows: int, outputs: int) -> None:
    """Regression: a saved mean's rounding, the same for a whole row, stood in sums over rows.

    Of few columns no average hides it: dweight and dgamma had up to six times the error allowed.
    """
    for features in (8, 64, 257, 512):
        for mean in (1000.0, -30.0):
            check(Kernels(torch.float32), make_inputs(rows, features, outputs, mean=mean))


def test_mean_is_subtracted_exactly() -> None:
    """Regression: a mean rounded to float32 shifts every value of its row."""
    x, *_ = make_inputs(32, 512, 1, mean=1000)
    identity = torch.eye(512)
    y, _, _ = Kernels(torch.float32).forward([x, None, None, identity, None])
    exact = eager(x.double(), None, None, identity.double(), None)
    assert (y.double() - exact).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0.0, 1.1, -3.7e4, 8.5e37])
def test_constant_rows_are_exactly_zero(value: float, dtype: torch.dtype) -> None:
    x = torch.full((3, 777), value).to(dtype)
    if x.isinf().any():
        pytest.skip("not a number of this dtype")
    weight = torch.eye(777, dtype=dtype)
    y, mean, rstd = Kernels(dtype).forward([x, None, None, weight, None], eps=1e-5)
    assert (y == 0).all()
    assert (mean.to(dtype) == x[:, 0]).all()
    torch.testing.assert_close(rstd, torch.full_like(rstd, 1e-5**-0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_large_rows_do_not_overflow(dtype: torch.dtype) -> None:
    x = 8.5e37 * (1 + 1e-6 * torch.randn(4, 1000, dtype=torch.float64)).to(dtype)
    # Deviations near 1e19 are as large as a float32 can square.
    x = x if dtype is torch.float64 else x.clamp(8.5e37 - 5e18, 8.5e37 + 5e18)
    weight = torch.eye(1000, dtype=dtype)
    y, _, _ = Kernels(dtype).forward([x, None, None, weight, None])
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rows", [40, 300])
def test_nan_and_inf_stay_in_their_row(rows: int, bad: float) -> None:
    kernels = Kernels(torch.float32)
    inputs = make_inputs(rows, 100, 30)
    clean, _, _ = kernels.forward(inputs)
    inputs[0][7, 3] = bad
    y, _, _ = kernels.forward(inputs, may_be_nan=True)
    others = torch.arange(rows) != 7
    assert y[7].isnan().all()
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("eps", [0.0, 0.5, -0.5, float("inf"), float("nan")])
def test_eps(eps: float) -> None:
    inputs = make_inputs(10, 30, 8)
    y, _, _ = Kernels(torch.float32).forward(inputs, eps, may_be_nan=True)
    torch.testing.assert_close(y, eager(*inputs, eps), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("rows", [37, 300])
def test_a_plan_knows_what_is_wanted_before_it_is_there(rows: int) -> None:
    """Regression: memory is asked for before the gradients have addresses."""
    module = Kernels(torch.float32).module
    call = Call(M=rows, K=300, N=200, threads=2, strategy=FUSED)
    for name in GRADIENTS:
        setattr(call, name, 1)
    module.plan_backward(ctypes.addressof(call))
    every = call.workspace_bytes
    call.dx = call.dgamma = call.dbeta = call.dweight = 0
    module.plan_backward(ctypes.addressof(call))
    assert 0 <= call.workspace_bytes < every


@pytest.mark.parametrize("condition", ["narrow", "accumulate"])
def test_what_has_no_kernel_is_declined(condition: str) -> None:
    module = Kernels(torch.float32).module
    for plan in (module.plan_forward, module.plan_backward):
        call = Call(M=300, K=300, N=200, threads=2, strategy=FUSED, **{condition: 1})
        plan(ctypes.addressof(call))
        assert call.strategy == DECLINED
