"""The passes over rows around products, called as the library calls them."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernel_harness import DEVICES, Guarded, address, assert_as_exact, error, extension
from torch import Tensor

from fused_norm.call.record import Call
from fused_norm.chain import kernels
from fused_norm.native import build

DTYPES = [
    torch.float32,
    torch.bfloat16,
    # the other two of each width
    pytest.param(torch.float16, marks=pytest.mark.slow),
    pytest.param(torch.float64, marks=pytest.mark.slow),
]
SHAPES = [(1, 1), (3, 7), (5, 257), (33, 1000), (2, 9000)]
ACTIVATIONS = ["", "relu", "gelu", "gelu_tanh", "quick_gelu", "silu"]
GATED = 8
EPS = 1e-5
WANTED = 1

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
every_device = pytest.mark.parametrize("device", DEVICES)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def run(function: str, dtype: torch.dtype, device: str, call: Call) -> None:
    """Plan and run a pass, with a workspace of the size that the plan asked for."""
    on_gpu = device == "cuda"
    kernels = extension(f"passes_{'gpu' if on_gpu else 'cpu'}", dtype, gpu=on_gpu)
    if on_gpu:
        stream = torch.cuda.current_stream().cuda_stream
        call.context = kernels.new_launcher(torch.cuda.current_device(), stream, True)
    else:
        call.context, call.threads = build.gomp_parallel(), 2
    place = ctypes.addressof(call)
    if function != "activate":
        getattr(kernels, f"plan_{function}")(place)
    scratch = Guarded((call.workspace_bytes,), torch.uint8, device)
    call.workspace = address(scratch.tensor) if call.workspace_bytes else 0
    getattr(kernels, function)(place)
    scratch.checked()


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


class Case:
    """A norm and all that may stand around it, in one dtype."""

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: str,
        *,
        rms: bool = False,
        residual: bool = False,
        affine: str = "gb",
        norm_dtype: torch.dtype | None = None,
        narrow: torch.dtype | None = None,
        offset: float = 0.0,
        groups: int = 0,
        modulation: str = "st",
        pitch: int = 0,
        mean: float = 0.0,
        shift: int = 0,
    ) -> None:
        self.shape, self.dtype, self.device, self.rms = shape, dtype, device, rms
        self.offset, self.groups, self.shift = offset, groups, shift
        self.pitch = pitch
        self.norm_dtype, self.z_dtype = norm_dtype or dtype, narrow or dtype
        M, K = shape
        self.M = M - M % groups if groups else M
        shape = self.shape = (self.M, K)

        def make(size: tuple[int, ...], kind: torch.dtype, middle: float = 0.0) -> Tensor:
            values = torch.randn(size, dtype=torch.float64) + middle
            return Guarded.of(values.to(device, kind), shift).tensor

        self.x = make(shape, dtype, mean)
        self.residual = make(shape, dtype) if residual else None
        self.gamma = make((K,), self.norm_dtype, 1.0 - offset) if "g" in affine else None
        self.beta = make((K,), self.norm_dtype) if "b" in affine else None
        # Of each group, some of the columns of a wider tensor.
        wide = (groups, pitch or K)
        self.scale = make(wide, dtype)[:, :K] if groups and "s" in modulation else None
        self.move = make(wide, dtype)[:, :K] if groups and "t" in modulation else None
        self.dz, self.dsum = make(shape, dtype), make(shape, dtype)

    @property
    def sum(self) -> Tensor:
        """x + residual, rounded."""
        return self.x if self.residual is None else self.x + self.residual

    def call(self) -> Call:
        call = Call(M=self.M, K=self.shape[1], eps=EPS, normalization=self.rms)
        call.weight_offset, call.groups = self.offset, self.groups
        call.gamma, call.beta = address(self.gamma), address(self.beta)
        call.scale, call.shift = address(self.scale), address(self.move)
        call.group_pitch = self.pitch
        call.norm_is_float32 = self.norm_dtype is not self.dtype
        types = [self.dtype, torch.bfloat16, torch.float16]
        call.narrow = types.index(self.z_dtype) if self.z_dtype is not self.dtype else 0
        return call

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and rstd of rows."""
        x = x.double()
        mean = torch.zeros_like(x[:, 0]) if self.rms else x.mean(1)
        variance = ((x - mean[:, None]) ** 2).mean(1)
        return mean, 1 / torch.sqrt(variance + EPS)

    def tensors(self, cast: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        """Return copies of sum, gamma, beta, scale and shift that require gradients."""
        every = (self.sum, self.gamma, self.beta, self.scale, self.move)
        return [None if t is None else cast(t.detach()).requires_grad_() for t in every]

    def apply(
        self,
        tensors: list[Tensor | None],
        statistics: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return z by PyTorch's ops, in the dtype of the tensors."""
        s, gamma, beta, scale, move = tensors
        size = s.shape[1:]
        high = [None if t is None else t.to(s.dtype) for t in (gamma, beta)]
        weight = None if gamma is None else high[0] + self.offset
        if statistics is not None:
            mean, rstd = (t.to(s.dtype)[:, None] for t in statistics)
            z = (s - mean) * rstd
            z = z if weight is None else z * weight
            z = z if beta is None else z + high[1]
        elif self.rms:
            z = F.rms_norm(s, size, weight, EPS)
            z = z if beta is None else z + high[1]
        else:
            z = F.layer_norm(s, size, weight, high[1], EPS)
        if self.groups:
            z = z.view(self.groups, -1, *size)
            z = z if scale is None else z * (1 + scale[:, None])
            z = z if move is None else z + move[:, None]
        return z.reshape(s.shape)


def peer_type(dtype: torch.dtype, norm_dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return the conversion to what PyTorch computes with: mixed types in the wider one."""
    return lambda t: t.clone().to(norm_dtype if norm_dtype is not dtype else dtype)


def normalize(case: Case, given: bool = False) -> dict[str, Tensor]:
    """Return what the forward writes, by name."""
    stats = stats_dtype(case.dtype)
    results = {
        "sum": Guarded(case.shape, case.dtype, case.device, case.shift),
        "z": Guarded(case.shape, case.z_dtype, case.device, case.shift),
        "mean": Guarded((case.M,), stats, case.device),
        "rstd": Guarded((case.M,), stats, case.device),
    }
    call = case.call()
    call.x, call.residual = address(case.x), address(case.residual)
    if case.residual is None:
        del results["sum"]
    if case.rms:
        del results["mean"]
    if given:
        call.has_statistics = 1
        for name, value in zip(("mean", "rstd"), case.statistics(case.sum), strict=True):
            if name in results:
                results[name].tensor.copy_(value)
    for name, value in results.items():
        setattr(call, name, address(value.tensor))
    run("normalize", case.dtype, case.device, call)
    return {name: value.checked() for name, value in results.items()}


def check_forward(case: Case, given: bool = False) -> None:
    found = normalize(case, given)
    mean, rstd = case.statistics(case.sum)
    statistics = (mean, rstd) if given else None
    exact = case.apply(case.tensors(lambda t: t.double()), statistics)
    cast = peer_type(case.dtype, case.norm_dtype)
    stats = stats_dtype(case.dtype)
    kept = tuple(t.to(stats) for t in statistics) if given else None
    peer = case.apply(case.tensors(cast), kept)
    assert_as_exact(found["z"], peer.to(case.z_dtype), exact, "z")
    if case.residual is not None:
        assert torch.equal(found["sum"], case.sum)
    if not given and not case.rms:
        # A mean's error counts against the spread of the elements that it is subtracted from.
        peer_mean = case.sum.to(stats).mean(1)
        ours, theirs = (((m - mean).abs() * rstd).max() for m in (found["mean"], peer_mean))
        assert ours <= 2 * theirs + torch.finfo(stats).eps
    assert error(found["rstd"], rstd) <= 4 * torch.finfo(stats).eps


def backward(
    case: Case, wanted: set[str], *, dsum: bool = False, N: int = 0, in_place: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """Return what the backward writes, by name, and dy."""
    K = case.shape[1]
    vector = (K,)
    dy = Guarded.of(torch.randn(case.M, N).to(case.device, case.z_dtype)).tensor
    sizes = {
        **{"dx": (case.shape, case.dtype), "z": (case.shape, case.z_dtype)},
        **dict.fromkeys(("dgamma", "dbeta"), (vector, case.norm_dtype)),
        **dict.fromkeys(("dscale", "dshift"), ((case.groups, K), case.dtype)),
        "dbias": ((N,), case.z_dtype),
    }
    results = {
        name: Guarded(size, dtype, case.device, case.shift)
        for name, (size, dtype) in sizes.items()
        if name in wanted
    }
    call = case.call()
    call.N, call.dy = N, address(dy)
    call.x, call.dz = address(case.sum), address(case.dz)
    keep = case.sum
    call.x = address(keep)
    if dsum:
        call.dsum = address(case.dsum)
    if in_place:
        results["z"] = Guarded.of(case.dz, case.shift)
        call.dz = address(results["z"].tensor)
    mean, rstd = (t.to(stats_dtype(case.dtype)) for t in case.statistics(keep))
    call.mean, call.rstd = address(None if case.rms else mean), address(rstd)
    for name, value in results.items():
        setattr(call, name, address(value.tensor))
    run("normalize_backward", case.dtype, case.device, call)
    return {name: value.checked() for name, value in results.items()}, dy


NAMES = ("dx", "dgamma", "dbeta", "dscale", "dshift")


def gradients(
    case: Case, cast: Callable[[Tensor], Tensor], dsum: bool, statistics: bool = False
) -> dict[str, Tensor]:
    """Return z and the gradients by PyTorch's ops."""
    tensors = case.tensors(cast)
    z = case.apply(tensors)
    z.backward(cast(case.dz))
    grads = {name: t.grad for name, t in zip(NAMES, tensors, strict=True) if t is not None}
    if dsum:
        grads["dx"] = grads["dx"] + cast(case.dsum)
    return grads | {"z": z.detach()}


def check_backward(case: Case, wanted: set[str], *, dsum: bool = False, **options: object) -> None:
    found, dy = backward(case, wanted, dsum=dsum, **options)
    exact = gradients(case, lambda t: t.double(), dsum)
    peer = gradients(case, peer_type(case.dtype, case.norm_dtype), dsum)
    for name in sorted(wanted - {"dbias"}):
        if case.shape[1] == 1 and name in ("dx", "dgamma", "dscale"):
            # What is normalized alone is 0, but for the rounding of its mean.
            added = case.dsum if dsum and name == "dx" else 0
            assert case.rms or (found[name] - added).abs().max() < 1e-3
            continue
        assert_as_exact(found[name], peer[name].to(found[name].dtype), exact[name], name)
    if "dbias" in wanted:
        assert_as_exact(found["dbias"], dy.sum(0), dy.double().sum(0), "dbias")


def all_gradients(case: Case) -> set[str]:
    every = (case.x, case.gamma, case.beta, case.scale, case.move)
    return {name for name, t in zip(NAMES, every, strict=True) if t is not None} | {"z"}


@every_device
@every_dtype
@every_shape
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
class TestNorm:
    """Every norm in every dtype at every size."""

    def test_forward(self, rms, shape, dtype, device):
        check_forward(Case(shape, dtype, device, rms=rms, residual=True))

    def test_backward(self, rms, shape, dtype, device):
        case = Case(shape, dtype, device, rms=rms)
        check_backward(case, all_gradients(case) | {"dbias"}, dsum=True, N=shape[1] + 1)


# Pairs of options, not all combinations.
OPTIONS = [
    {"residual": True, "affine": "g", "offset": 1.0},
    {"residual": True, "affine": "", "groups": 2, "modulation": "st"},
    {"affine": "gb", "groups": 3, "modulation": "st"},
    {"affine": "g", "groups": 4, "modulation": "s", "offset": 1.0},
    {"residual": True, "affine": "b", "groups": 2, "modulation": "t"},
    {"affine": "gb", "offset": 1.0, "shift": 1},
    {"affine": "gb", "groups": 5, "modulation": "st", "shift": 3, "offset": 0.5},
    {"affine": "", "residual": True, "shift": 1},
    {"affine": "gb", "groups": 1, "modulation": "s"},
    {"affine": "g", "groups": 20, "modulation": "st"},
    {"affine": "", "groups": 4, "modulation": "s"},
    {"affine": "", "groups": 5, "modulation": "st", "pitch": 300},
    {"affine": "", "groups": 2, "modulation": "t", "pitch": 3 * 257},
    {"affine": "gb", "groups": 5, "modulation": "st", "pitch": 301},
]


@every_device
@every_dtype
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
class TestOptions:
    """What may stand around a norm."""

    def test_forward(self, rms, options, dtype, device):
        check_forward(Case((20, 257), dtype, device, rms=rms, **options))
        check_forward(Case((20, 257), dtype, device, rms=rms, **options), given=True)

    def test_backward(self, rms, options, dtype, device):
        case = Case((20, 257), dtype, device, rms=rms, **options)
        check_backward(case, all_gradients(case), dsum="residual" in options)

    def test_float32_parameters(self, rms, options, dtype, device):
        if dtype in (torch.float32, torch.float64):
            pytest.skip("they are no narrower")
        case = Case((20, 257), dtype, device, rms=rms, norm_dtype=torch.float32, **options)
        check_forward(case)
        check_backward(case, all_gradients(case))

    def test_narrow(self, rms, options, dtype, device):
        if dtype not in (torch.bfloat16, torch.float16):
            pytest.skip("the type of products")
        case = Case((20, 257), torch.float32, device, rms=rms, narrow=dtype, **options)
        check_forward(case)
        check_forward(case, given=True)
        check_backward(case, all_gradients(case) | {"dbias"}, N=33)


@every_device
@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize(
    "wanted",
    ["dx", "z", "dgamma", "dbeta", "dx z", "dgamma z dbias", "dbias", "dx dbias", "z dbias"],
)
def test_wanted(wanted, groups, device):
    case = Case((40, 769), torch.bfloat16, device, groups=groups)
    names = set(wanted.split())
    check_backward(case, names, N=10)
    if groups:
        check_backward(case, names | {"dscale"}, N=10)
        check_backward(case, names | {"dshift"}, N=10)


# Groups of 3 rows, of 32, and of 2048, whose sums have many parts on a GPU.
@every_device
@every_dtype
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("affine", ["", "g"])
@pytest.mark.parametrize(
    ("shape", "groups"), [((96, 1152), 32), ((1024, 1152), 32), ((4096, 64), 2)], ids=str
)
def test_modulation_within_wider_rows(shape, groups, affine, rms, dtype, device):
    """As models have it: one of six parts of what a Linear layer returned."""
    pitch = 6 * shape[1]
    case = Case(shape, dtype, device, rms=rms, affine=affine, groups=groups, pitch=pitch)
    check_forward(case)
    check_backward(case, all_gradients(case), dsum=True)


@every_device
@every_dtype
def test_z_in_place_of_dz(dtype, device):
    case = Case((33, 1000), dtype, device)
    check_backward(case, all_gradients(case), in_place=True)


@every_device
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_far_from_zero(dtype, rms, device):
    case = Case((33, 1000), dtype, device, rms=rms, mean=1000.0)
    check_forward(case)
    check_backward(case, all_gradients(case))


@every_device
def test_rows_of_equal_elements(device):
    case = Case((5, 769), torch.float32, device, residual=True, affine="b")
    case.x.fill_(0.1)
    case.residual.fill_(0.7)
    assert torch.equal(normalize(case)["z"], case.beta.expand(5, 769))


@every_device
@every_dtype
@pytest.mark.parametrize("shape", [(300, 257), (40, 9000)], ids=str)
def test_same_bits(shape, dtype, device):
    case = Case(shape, dtype, device, groups=4)
    once = normalize(case) | backward(case, all_gradients(case))[0]
    for _ in range(2):
        again = normalize(case) | backward(case, all_gradients(case))[0]
        assert all(torch.equal(once[name], again[name]) for name in once)


def act(h: Tensor, kind: int) -> Tensor:
    """Apply an activation by PyTorch's ops."""
    if kind >= GATED:
        gate, up = h.chunk(2, 1)
        return act(gate, kind - GATED) * up
    functions = {
        "": lambda h: h * 1,
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
        "quick_gelu": lambda h: h * torch.sigmoid(1.702 * h),
        "silu": F.silu,
    }
    return functions[ACTIVATIONS[kind]](h)


def activation_call(h: Tensor, kind: int, narrow: torch.dtype | None) -> Call:
    M, width = h.shape
    call = Call(M=M, N=width // 2 if kind >= GATED else width, activation=kind, h=address(h))
    call.narrow = 0 if narrow is None else 1 + [torch.bfloat16, torch.float16].index(narrow)
    return call


def activate(h: Tensor, kind: int, narrow: torch.dtype | None = None, shift: int = 0) -> Tensor:
    call = activation_call(h, kind, narrow)
    a = Guarded((call.M, call.N), h.dtype, h.device.type, shift)
    call.a = address(a.tensor)
    run("activate", torch.float32 if narrow else h.dtype, h.device.type, call)
    return a.checked()


def activate_backward(
    h: Tensor,
    da: Tensor,
    kind: int,
    wanted: set[str],
    narrow: torch.dtype | None = None,
    shift: int = 0,
) -> dict[str, Tensor]:
    call = activation_call(h, kind, narrow)
    call.da = address(da)
    device = h.device.type
    sizes = {"dh": h.shape, "a": da.shape, "dbias": h.shape[1:]}
    results = {name: Guarded(tuple(sizes[name]), h.dtype, device, shift) for name in wanted}
    for name, value in results.items():
        setattr(call, name, address(value.tensor))
    run("activate_backward", torch.float32 if narrow else h.dtype, device, call)
    return {name: value.checked() for name, value in results.items()}


def check_activation(
    M: int,
    N: int,
    dtype: torch.dtype,
    device: str,
    kind: int,
    *,
    narrow: torch.dtype | None = None,
    shift: int = 0,
    wanted: tuple[str, ...] = ("dh", "a", "dbias"),
) -> None:
    width = 2 * N if kind >= GATED else N
    h = Guarded.of((torch.randn(M, width) * 3).to(device, dtype), shift).tensor
    da = Guarded.of(torch.randn(M, N).to(device, dtype), shift).tensor

    def by_pytorch(cast: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        leaf = cast(h.clone()).requires_grad_()
        a = act(leaf, kind)
        a.backward(cast(da))
        return {"a": a.detach(), "dh": leaf.grad, "dbias": leaf.grad.sum(0)}

    exact, peer = by_pytorch(Tensor.double), by_pytorch(lambda t: t)
    assert_as_exact(activate(h, kind, narrow, shift), peer["a"], exact["a"], "a")
    found = activate_backward(h, da, kind, set(wanted), narrow, shift)
    for name in wanted:
        assert_as_exact(found[name], peer[name], exact[name], name)


@every_device
@every_dtype
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", range(1, 6), ids=ACTIVATIONS[1:])
def test_activation(kind, gated, dtype, device):
    for shape in SHAPES:
        check_activation(*shape, dtype, device, kind + GATED * gated)


@every_device
@pytest.mark.parametrize("wanted", ["dh", "a", "dbias", "dh dbias", "a dbias"])
@pytest.mark.parametrize("kind", [2, 5 + GATED])
def test_activation_wanted(kind, wanted, device):
    for narrow, shift in itertools.product([None, torch.bfloat16, torch.float16], [0, 1]):
        check_activation(
            *(70, 264, narrow or torch.float32, device, kind),
            **{"narrow": narrow, "shift": shift, "wanted": tuple(wanted.split())},
        )


@pytest.mark.parametrize("kind", [2, 5], ids=["gelu", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_activation_of_every_magnitude(kind, dtype):
    """No element is off, where a formula of few operations begins, ends or is scaled either."""
    least = torch.finfo(dtype).smallest_normal
    values = torch.cat([torch.linspace(0, 9, 40001), torch.logspace(-12, 1.9, 20001)])
    h = torch.cat([values, -values])[None].to(dtype)
    h = h[:, (h[0].abs() >= least) | (h[0] == 0)].contiguous()
    exact = act(h.double(), kind)
    eps = torch.finfo(dtype).eps
    for found in (activate(h, kind), activate_backward(h, h, kind, {"a"})["a"]):
        # GELU's share of h is a difference of numbers near 1/2; that of SiLU has bits of its own.
        of_share = 3e-7 * h.abs() if ACTIVATIONS[kind] == "gelu" else 4e-7 * exact.abs()
        bound = of_share + eps / 2 * exact.abs() + least
        assert ((found - exact).abs() <= bound).all()


@every_device
@every_dtype
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", range(1, 6), ids=ACTIVATIONS[1:])
def test_activation_of_the_infinite(kind, gated, dtype, device):
    values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 200.0, -200.0, 88.0, -88.0]
    h = torch.tensor([values * (2 if gated else 1)], dtype=dtype, device=device)
    da = torch.ones(1, len(values), dtype=dtype, device=device)
    # Some builds of PyTorch make NaN of GELU's infinity, but not in float64.
    leaf = h.double().requires_grad_()
    a = act(leaf, kind + GATED * gated)
    a.backward(da.double())
    found = activate_backward(h, da, kind + GATED * gated, {"dh", "a"})
    options = {"equal_nan": True, "rtol": 1e-2, "atol": 1e-30}
    torch.testing.assert_close(activate(h, kind + GATED * gated), a.to(dtype), **options)
    torch.testing.assert_close(found["a"], a.to(dtype), **options)
    torch.testing.assert_close(found["dh"], leaf.grad.to(dtype), **options)


@every_device
@every_dtype
def test_sums_without_an_activation(dtype, device):
    da = (torch.randn(300, 1001) + 0.1).to(device, dtype)
    dbias = activate_backward(da, da, 0, {"dbias"})["dbias"]
    assert_as_exact(dbias, da.sum(0), da.double().sum(0), "dbias")


@every_device
def test_activation_of_long_rows(device):
    for kind in (2, 5 + GATED):
        check_activation(65, 16384, torch.bfloat16, device, kind)
        h = torch.randn(65, 16384, device=device)
        da = torch.randn(65, 16384 // (2 if kind >= GATED else 1), device=device)
        once, again = (activate_backward(h, da, kind, {"dbias"})["dbias"] for _ in range(2))
        assert torch.equal(once, again)


@every_device
def test_no_rows(device):
    case = Case((0, 300), torch.float32, device)
    found, _ = backward(case, {"dx", "dgamma", "dbeta", "dbias"}, N=7)
    assert all((found[name] == 0).all() for name in ("dgamma", "dbeta", "dbias"))
    normalize(case)


def test_rounding_to_bfloat16() -> None:
    """Every kind of number becomes what PyTorch makes of it: a CPU rounds with integers."""
    bits = torch.arange(-(2**31), 2**31, 49_999, dtype=torch.int64).to(torch.int32)
    ties = (torch.arange(2**16, dtype=torch.int64) << 16 | 0x8000).to(torch.int32)
    x = torch.cat([bits, ties, ties - 1, ties + 1]).view(torch.float32)
    x = x[: len(x) // 64 * 64].view(-1, 64)
    z = torch.empty(x.shape, dtype=torch.bfloat16)
    mean, rstd = torch.zeros(len(x)), torch.ones(len(x))
    call = Call(M=len(x), K=64, eps=EPS, x=x.data_ptr(), z=z.data_ptr(), narrow=1, threads=1)
    call.mean, call.rstd, call.has_statistics = mean.data_ptr(), rstd.data_ptr(), True
    call.context = build.gomp_parallel()
    kernels.cpu_extension("passes_cpu", torch.float32).normalize(ctypes.addressof(call))
    expected = x.to(torch.bfloat16)
    assert torch.equal(z.isnan(), expected.isnan())
    assert torch.equal(z[~z.isnan()], expected[~z.isnan()])
