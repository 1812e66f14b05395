"""The CPU's fused kernels with any norm, residual, modulation and activation."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from accuracy import assert_within_budget
from kernel_harness import Guarded, address, extension
from torch import Tensor

from fused_norm.call.record import DECLINED, FUSED, Call
from fused_norm.native import build

DTYPES = [
    torch.float32,
    torch.bfloat16,
    # the other two of each width
    pytest.param(torch.float16, marks=pytest.mark.slow),
    pytest.param(torch.float64, marks=pytest.mark.slow),
]
SHAPES = [
    (1, 63, 50),  # one row, one thread
    (37, 130, 99),  # few rows, nothing divides
    (64, 512, 130),  # several blocks along the features
    (301, 200, 145),  # many rows: the weight is packed first
]
# On tile registers fewer rows than elsewhere are few: many of them, and few of many features.
TILE_SHAPES = [(530, 70, 290), (300, 2000, 99)]
LAYER_NORM, RMS_NORM = range(2)
GATED = 8
GRADIENTS = frozenset({"dx", "dgamma", "dbeta", "dweight", "dbias"})
ACTIVATIONS = {
    1: F.relu,
    2: F.gelu,
    3: lambda h: F.gelu(h, approximate="tanh"),
    4: lambda h: h * torch.sigmoid(1.702 * h),
    5: F.silu,
}
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        shape: M, K and N; a gate's weight has twice N rows.
        dtype: Dtype of the tensors.
        norm: The number of the norm.
        offset: What is added to gamma.
        missing: Names of parameters that are not there.
        mean: Mean of x.
        is_float32: Whether gamma and beta are float32 while x is narrower.
        residual: Whether there is one.
        groups: Groups of rows with a scale and a shift.
        activation: The number of the activation.
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype = torch.float32
    norm: int = LAYER_NORM
    offset: float = 0.0
    missing: tuple[str, ...] = ()
    mean: float = 0.0
    is_float32: bool = False
    residual: bool = False
    groups: int = 0
    activation: int = 0

    @property
    def columns(self) -> int:
        """Columns of the product."""
        return self.shape[2] * (2 if self.activation >= GATED else 1)

    def tensors(self) -> dict[str, Tensor]:
        """Return the inputs of a forward by the names of the record's fields."""
        M, K, _ = self.shape
        affine = torch.float32 if self.is_float32 else self.dtype
        made = {
            "x": (torch.randn(M, K) + self.mean).to(self.dtype),
            "gamma": (1 - self.offset + 0.2 * torch.randn(K)).to(affine),
            "beta": (0.2 * torch.randn(K)).to(affine),
            "weight": (torch.randn(self.columns, K) / K**0.5).to(self.dtype),
            "bias": (0.2 * torch.randn(self.columns)).to(self.dtype),
        }
        if self.residual:
            made["residual"] = torch.randn(M, K).to(self.dtype)
        if self.groups:
            made["scale"] = (0.3 * torch.randn(self.groups, K)).to(self.dtype)
            made["shift"] = torch.randn(self.groups, K).to(self.dtype)
        return {name: t for name, t in made.items() if name not in self.missing}

    def compose(self, t: dict[str, Tensor]) -> Tensor:
        """Return the product as PyTorch computes it; x is the sum where there was a residual."""
        x, gamma, beta = t["x"], t.get("gamma"), t.get("beta")
        features = x.shape[-1:]
        if gamma is not None:
            gamma = (gamma + self.offset).to(x.dtype)
        if self.norm == RMS_NORM:
            z = F.rms_norm(x, features, gamma, EPS)
            z = z if beta is None else z + beta.to(x.dtype)
        else:
            z = F.layer_norm(x, features, gamma, None if beta is None else beta.to(x.dtype), EPS)
        if self.groups:
            z = z.unflatten(0, (self.groups, -1))
            z = z * (1 + t["scale"][:, None]) if "scale" in t else z
            z = (z + t["shift"][:, None] if "shift" in t else z).flatten(0, 1)
        return F.linear(z, t["weight"], t.get("bias"))

    def activated(self, h: Tensor) -> Tensor:
        """Return y as PyTorch makes it of the product."""
        if not self.activation:
            return h
        activate = ACTIVATIONS[self.activation % GATED]
        if self.activation < GATED:
            return activate(h)
        gate, value = h.chunk(2, -1)
        return activate(gate) * value


def record(case: Case, tensors: dict[str, Guarded], threads: int = 2) -> Call:
    """Return the record of a call on tensors by the names of its fields."""
    M, K, N = case.shape
    call = Call(M=M, K=K, N=N, eps=EPS, context=build.gomp_parallel(), threads=threads)
    call.strategy = FUSED
    call.normalization, call.weight_offset = case.norm, case.offset
    call.norm_is_float32, call.groups, call.activation = (
        case.is_float32,
        case.groups,
        case.activation,
    )
    for name, memory in tensors.items():
        setattr(call, name, address(memory.tensor))
    return call


def run(module: ModuleType, which: str, call: Call) -> None:
    """Plan and run a pass, with a workspace of just the size."""
    place = ctypes.addressof(call)
    getattr(module, f"plan_{which}")(place)
    assert call.strategy == FUSED
    workspace = Guarded((call.workspace_bytes,), torch.uint8, "cpu", 1)
    call.workspace = address(workspace.tensor)
    getattr(module, which)(place)
    workspace.checked()


def forward(
    case: Case, t: dict[str, Tensor], threads: int = 2, h: bool = True
) -> dict[str, Tensor]:
    """Return the results of a forward by the names of the record's fields."""
    M, K, N = case.shape
    wide = torch.float64 if case.dtype is torch.float64 else torch.float32
    results = {"y": Guarded((M, N), case.dtype, "cpu", 3), "rstd": Guarded((M,), wide, "cpu", 1)}
    if case.norm == LAYER_NORM:
        results["mean"] = Guarded((M,), wide, "cpu", 1)
    if case.residual:
        results["sum"] = Guarded((M, K), case.dtype, "cpu", 5)
    if case.activation and h:
        results["h"] = Guarded((M, case.columns), case.dtype, "cpu", 7)
    inputs = {name: Guarded.of(tensor, 1) for name, tensor in t.items()}
    call = record(case, inputs | results, threads)
    run(extension("norm_linear_cpu", case.dtype), "forward", call)
    return {name: memory.checked() for name, memory in results.items()}


def backward(
    case: Case, t: dict[str, Tensor], given: dict[str, Tensor], wanted: frozenset[str] = GRADIENTS
) -> dict[str, Tensor]:
    """Return the gradients wanted by the names of the record's fields.

    Args:
        case: The call.
        t: The inputs of the forward; x is the sum where there was a residual.
        given: Statistics, dy or dh, perhaps dsum.
        wanted: Their names; only those of what is there are made.
    """
    results = {
        name: Guarded(tuple(t[name[1:]].shape), t[name[1:]].dtype, "cpu", 1)
        for name in wanted
        if name[1:] in t
    }
    inputs = {name: Guarded.of(tensor, 1) for name, tensor in (t | given).items()}
    call = record(case, inputs | results)
    run(extension("norm_linear_cpu", case.dtype), "backward", call)
    return {name: memory.checked() for name, memory in results.items()}


def as_truth(t: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double().clone().requires_grad_() for name, tensor in t.items()}


def as_bar(t: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone().requires_grad_() for name, tensor in t.items()}


def check_forward(case: Case, **tensors: Tensor) -> dict[str, Tensor]:
    """Compare a forward with float64, PyTorch's own error as the bar, and return its results."""
    t = case.tensors() | tensors
    ours = forward(case, t)
    normalized = dict(t)
    if case.residual:
        normalized["x"] = t["x"] + t["residual"]
        assert torch.equal(ours["sum"], normalized["x"])
    exact, low = case.compose(as_truth(normalized)), case.compose(normalized)
    if "h" in ours:
        assert_within_budget("h", ours["h"], exact, low)
    assert_within_budget("y", ours["y"], case.activated(exact), case.activated(low))
    return ours


def check_backward(case: Case, ours: dict[str, Tensor], **tensors: Tensor) -> None:
    """Compare gradients with float64, PyTorch's own error as the bar.

    Args:
        case: The call.
        ours: The results of its forward.
        tensors: Its inputs.
    """
    t = {name: tensor for name, tensor in tensors.items() if name != "residual"}
    if case.residual:
        t["x"] = ours["sum"]
    truth, bar = as_truth(t), as_bar(t)
    exact, low = case.compose(truth), case.compose(bar)
    given = {name: ours[name] for name in ("mean", "rstd") if name in ours}
    product = given["dh" if case.activation else "dy"] = torch.randn_like(low)
    exact.backward(product.double())
    low.backward(product)
    if case.residual:
        dsum = given["dsum"] = torch.randn_like(t["x"])
        truth["x"].grad += dsum
        bar["x"].grad += dsum
    gradients = backward(case, t, given)
    assert len(gradients) == len(t)
    for name, gradient in gradients.items():
        assert_within_budget(name, gradient, truth[name[1:]].grad, bar[name[1:]].grad)
    for name in ("dx", "dweight"):
        assert torch.equal(backward(case, t, given, frozenset({name}))[name], gradients[name])


def check(case: Case) -> None:
    """Compare a forward and its backward with float64, PyTorch's own error as the bar."""
    t = case.tensors()
    check_backward(case, check_forward(case, **t), **t)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    case = Case(shape, dtype, RMS_NORM, missing=("beta",))
    check(case)
    check(replace(case, mean=1000))
    # Nothing, and everything, of what a norm may have.
    check(replace(case, missing=("gamma", "beta", "bias"), offset=1))
    check(replace(case, missing=(), offset=1))


@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_offset_of_gamma(dtype: torch.dtype, norm: int) -> None:
    for shape in SHAPES[1:]:
        check(Case(shape, dtype, norm, offset=1))
        check(Case(shape, dtype, norm, offset=1, is_float32=True))


def test_rms_norm_keeps_the_scale_of_small_rows() -> None:
    """Regression: eps must join the mean square, and a row of zeros stay one."""
    x = torch.cat([torch.zeros(1, 96), 1e-3 * torch.randn(9, 96)])
    case = Case((10, 96, 40), norm=RMS_NORM, missing=("beta", "bias"))
    t = case.tensors() | {"x": x}
    y = forward(case, t)["y"]
    assert (y[0] == 0).all()
    assert_within_budget("y", y, case.compose(as_truth(t)), case.compose(t))


BOTH = ("plan_forward", "plan_backward")


@pytest.mark.parametrize(
    ("plans", "fields"),
    [
        (BOTH, {"normalization": 3}),
        (BOTH, {"activation": 6}),
        (BOTH, {"activation": GATED}),
        (BOTH, {"activation": 2 * GATED + 1}),
        (BOTH[:1], {"has_statistics": 1}),
        (BOTH[:1], {"residual": 1}),
        (BOTH[:1], {"groups": 7}),
        (BOTH[1:], {"groups": 3}),
    ],
    ids=str,
)
def test_what_has_no_kernel_is_declined(plans: tuple[str, ...], fields: dict[str, int]) -> None:
    for plan in plans:
        call = Call(M=300, K=300, N=200, threads=2, strategy=FUSED, **fields)
        getattr(extension("norm_linear_cpu", torch.float32), plan)(ctypes.addressof(call))
        assert call.strategy == DECLINED


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_residual(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    for norm in (LAYER_NORM, RMS_NORM):
        check(Case(shape, dtype, norm, residual=True))
        if dtype is not torch.float64:  # its own truth, which loses as much of such rows
            check(Case(shape, dtype, norm, residual=True, mean=1000))


@pytest.mark.parametrize("missing", [(), ("scale",), ("shift",), ("gamma", "beta")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_modulation(dtype: torch.dtype, missing: tuple[str, ...]) -> None:
    for M, groups in ((1, 1), (36, 4), (36, 36), (300, 5)):
        case = Case((M, 130, 99), dtype, groups=groups, missing=missing, residual=M > 1)
        check_forward(case)
        check_forward(replace(case, norm=RMS_NORM))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", [0, GATED])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind: int, gate: int, dtype: torch.dtype) -> None:
    for shape in SHAPES + (TILE_SHAPES if dtype is torch.bfloat16 else []):
        check_forward(Case(shape, dtype, activation=kind + gate))
    case = Case(SHAPES[-1], dtype, RMS_NORM, activation=kind + gate, groups=7)
    check_forward(replace(case, residual=True, missing=("bias", "gamma")))


@pytest.mark.parametrize("gate", [0, GATED])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation_of_extremes(kind: int, gate: int) -> None:
    """Numbers that activations rarely meet, infinities and NaN."""
    extremes = [0.0, 1e-30, 1e-4, 1.0, 6.0, 20.0, 80.0, 100.0, 1e4, 1e30, float("inf")]
    wanted = torch.tensor([*extremes, *(-e for e in extremes), float("nan")])
    N = len(wanted)
    case = Case((5, 8, N), activation=kind + gate)
    bias = torch.cat([wanted, torch.ones(N)]) if gate else wanted
    t = case.tensors() | {"bias": bias}
    t["weight"].zero_()
    y = forward(case, t)["y"]
    expected = case.activated(bias.expand(5, -1))
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("activation", [2, 5 + GATED])
@pytest.mark.parametrize("rows", [37, 300])
def test_h_is_optional_and_threads_give_the_same_bits(rows: int, activation: int) -> None:
    case = Case((rows, 300, 200), residual=True, groups=1, activation=activation)
    t = case.tensors()
    first = forward(case, t)
    for threads in (1, 2, 3, 16):
        again = forward(case, t, threads, h=threads != 2)
        assert all(torch.equal(first[name], tensor) for name, tensor in again.items())


@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_before_an_activation(dtype: torch.dtype, norm: int) -> None:
    for shape in SHAPES:
        for activation in (2, 5 + GATED):
            check(Case(shape, dtype, norm, activation=activation, residual=True, offset=1))
