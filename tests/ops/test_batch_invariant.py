"""The mode in which a row's bits depend on no other row, on CPUs and on Hopper GPUs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from devices import GPU
from family import LOW, check, make_tensors
from family_cases import CASES
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fused_norm as fn
from fused_norm.ops import invariance, node

Call = Callable[..., Any]
aten = torch.ops.aten

ROWS = (1, 2, 3, 7, 16, 17, 64, 100, 128, 200, 512, 1024, 4096, 16384)
# On a CPU, the last two run the code of float32, in other widths.
DTYPES = [
    torch.float32,
    torch.bfloat16,
    pytest.param(torch.float16, marks=pytest.mark.slow),
    pytest.param(torch.float64, marks=pytest.mark.slow),
]


class Parameters:
    """Those of every call, in one dtype, with features K and outputs N."""

    def __init__(
        self, dtype: torch.dtype, device: str, K: int, N: int, wants_gradients: bool = True
    ) -> None:
        def tensor(*shape: int, size: float = 1.0, around: float = 0.0) -> Tensor:
            values = around + size * torch.randn(*shape, dtype=torch.float64)
            return values.to(device, dtype).requires_grad_(wants_gradients)

        self.dtype, self.device, self.K = dtype, device, K
        self.gamma, self.beta = tensor(K, around=1.0, size=0.2), tensor(K, size=0.2)
        self.scale, self.shift = tensor(K, size=0.2), tensor(K, size=0.2)
        self.weights = [tensor(N, K, size=K**-0.5) for _ in range(3)]
        self.biases = [tensor(N, size=0.2) for _ in range(3)]
        self.out, self.out_bias = tensor(K, N, size=N**-0.5), tensor(K, size=0.2)
        self.square = tensor(K, K, size=K**-0.5)
        self.norm = {"norm_weight": self.gamma, "norm_bias": self.beta}

    def rows(self, count: int) -> Tensor:
        """Return random rows, which want a gradient."""
        x = torch.randn(count, self.K, device=self.device).to(self.dtype)
        return x.requires_grad_()


def plain(p: Parameters, x: Tensor, residual: Tensor) -> Any:
    return fn.fused_layernorm_linear(x, p.gamma, p.beta, p.weights[0], p.biases[0])


def residual_and_gelu(p: Parameters, x: Tensor, residual: Tensor) -> Any:
    return fn.norm_linear(
        x,
        p.weights[0],
        p.biases[0],
        normalization="rms_norm",
        residual=residual,
        activation="gelu",
        return_sum=True,
        **p.norm,
    )


def three_weights(p: Parameters, x: Tensor, residual: Tensor) -> Any:
    return fn.norm_linear(x, p.weights, p.biases, residual=residual, return_sum=True, **p.norm)


def modulated(p: Parameters, x: Tensor, residual: Tensor) -> Any:
    modulation = {"scale": p.scale, "shift": p.shift}
    return fn.norm_linear(x, p.weights[0], None, return_norm=True, **modulation, **p.norm)


def gated_mlp(p: Parameters, x: Tensor, residual: Tensor) -> Any:
    weights, biases = p.weights[:2], p.biases[:2]
    options: dict[str, Any] = {"activation": "swiglu", "residual_out": residual, **p.norm}
    return fn.norm_mlp(x, weights, biases, p.out, p.out_bias, **options)


def recomputed_mlp(p: Parameters, x: Tensor, residual: Tensor) -> Any:
    options: dict[str, Any] = {"activation": "gelu_tanh", "recompute": True, **p.norm}
    return fn.norm_mlp(x, p.weights[0], p.biases[0], p.out, None, **options)


def sums(p: Parameters, x: Tensor, residual: Tensor) -> Any:
    total, statistics = fn.linear_add(x, p.square, None, residual)
    other, _ = fn.linear_add(x, p.square, p.beta, residual, normalization=None)
    y = fn.norm_linear(total, p.weights[0], None, statistics=statistics, **p.norm)
    return y, total, other


CALLS = [
    plain,
    residual_and_gelu,
    three_weights,
    modulated,
    gated_mlp,
    recomputed_mlp,
    sums,
]


def flat(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [t for r in results for t in flat(r)]


def bits_of_row(p: Parameters, call: Call, rows: int, place: int, is_on: bool) -> list[Tensor]:
    """Return a row of all results and of the gradients of x and the residual."""
    torch.manual_seed(rows)
    x, residual = p.rows(rows), p.rows(rows)
    torch.manual_seed(-1)
    own = p.rows(1), p.rows(1)
    with torch.no_grad():
        x[place], residual[place] = own[0][0], own[1][0]
    with fn.batch_invariant() if is_on else nullcontext():
        results = flat(call(p, x, residual))
    grads = [torch.randn(1, r.shape[-1], device=r.device).to(r) for r in results]
    all_grads = [torch.randn(r.shape, device=r.device).to(r) for r in results]
    for one, every in zip(grads, all_grads, strict=True):
        every[place] = one
    # The backward knows by itself that its forward was in the mode.
    found = torch.autograd.grad(results, (x, residual), all_grads, allow_unused=True)
    return [t.detach()[place].clone() for t in (*results, *found) if t is not None]


def changed(p: Parameters, call: Call, numbers: tuple[int, ...], is_on: bool) -> list[int]:
    """Return the numbers of rows at which a row has other bits than alone."""
    alone = bits_of_row(p, call, 1, 0, is_on)
    assert all(t.isfinite().all() for t in alone)
    return [
        rows
        for rows in numbers
        for place in {0, rows // 3, rows - 1}
        if not all(map(torch.equal, alone, bits_of_row(p, call, rows, place, is_on)))
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_a_row_has_the_same_bits_in_any_batch(call: Call, dtype: torch.dtype) -> None:
    p = Parameters(dtype, "cpu", 96, 80)
    assert changed(p, call, ROWS[:-3], True) == []


@pytest.mark.parametrize(
    ("call", "K", "N", "numbers"),
    [
        (plain, 50, 66, ROWS[:-2]),
        (gated_mlp, 50, 66, ROWS[:-3]),
        (plain, 4096, 192, ROWS[:-3]),
        (plain, 40, 48, ROWS),
        (gated_mlp, 40, 48, ROWS[-3:]),
    ],
    ids=["tails", "tails of an MLP", "long rows", "many rows", "many rows of an MLP"],
)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_at_other_sizes(
    dtype: torch.dtype, call: Call, K: int, N: int, numbers: tuple[int, ...]
) -> None:
    assert changed(Parameters(dtype, "cpu", K, N), call, numbers, True) == []


@pytest.mark.as_dispatched
@pytest.mark.parametrize("call", [three_weights, gated_mlp, sums])
def test_without_the_mode_bits_depend_on_the_batch(call: Call) -> None:
    assert changed(Parameters(torch.float32, "cpu", 512, 640), call, ROWS[:-3], False) != []


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_on_hopper(call: Call, dtype: torch.dtype, device: str) -> None:
    assert changed(Parameters(dtype, device, 512, 640), call, ROWS, True) == []


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("call", [plain, gated_mlp])
def test_on_hopper_without_the_mode_bits_depend_on_the_batch(call: Call, device: str) -> None:
    assert changed(Parameters(torch.bfloat16, device, 1024, 1024), call, ROWS, False) != []


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(("K", "N"), [(4096, 4096), (1024, 3072), (72, 50264)], ids=str)
def test_on_hopper_at_other_sizes(dtype: torch.dtype, K: int, N: int, device: str) -> None:
    numbers = (*ROWS[:-1], 6000) if K > 72 else ROWS[:-2]
    assert changed(Parameters(dtype, device, K, N), plain, numbers, True) == []


SOME = CASES[::3]


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("case", SOME, ids=range(len(SOME)))
def test_values_and_gradients(case: dict[str, Any], device: str) -> None:
    tensors = make_tensors(case, device)
    sizes = [size for weight in tensors["weight"] for size in weight.shape]
    if device == "cuda" and (case["dtype"] not in LOW or any(size % 8 for size in sizes)):
        pytest.skip("a GPU needs 16 bits and multiples of 8")
    with fn.batch_invariant():
        check(case, tensors)


def test_autocast_is_as_without() -> None:
    p = Parameters(torch.float32, "cpu", 96, 80)
    with torch.autocast("cpu", torch.bfloat16):
        assert changed(p, plain, (2, 17, 300), True) == []
        assert changed(p, sums, (2, 17, 300), True) == []
        with fn.batch_invariant():
            assert plain(p, p.rows(3), p.rows(3)).dtype is torch.bfloat16


def test_mode_is_left_and_nests() -> None:
    is_on = invariance.is_batch_invariant
    with fn.batch_invariant():
        with contextlib.suppress(KeyError), fn.batch_invariant():
            assert is_on()
            raise KeyError
        assert is_on()
    assert not is_on()

    @fn.batch_invariant()
    def inside() -> bool:
        return is_on()

    assert inside()
    assert inside()
    assert not is_on()


def test_mode_is_a_threads_own() -> None:
    found = []
    with fn.batch_invariant():
        thread = threading.Thread(target=lambda: found.append(invariance.is_batch_invariant()))
        thread.start()
        thread.join()
    assert found == [False]


def test_node_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def module() -> Any:
        raise AssertionError("C++ was asked")

    monkeypatch.setattr(node, "module", module)
    p = Parameters(torch.float32, "cpu", 16, 8)
    with fn.batch_invariant():
        for call in CALLS:
            call(p, p.rows(3), p.rows(3))
    with pytest.raises(AssertionError, match="C"):
        plain(p, p.rows(3), p.rows(3))


def test_pytorch_multiplies_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoProducts(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            assert func.overloadpacket not in (aten.mm, aten.addmm, aten.bmm), func
            return func(*args, **(kwargs or {}))

    # Nobody asks for the parameters' gradients, which PyTorch's products compute.
    p = Parameters(torch.bfloat16, "cpu", 16, 8, wants_gradients=False)
    with NoProducts(), fn.batch_invariant():
        for call in CALLS:
            x, residual = p.rows(3), p.rows(3)
            results = flat(call(p, x, residual))
            torch.autograd.grad(results, x, [torch.ones_like(r) for r in results])


def test_given_statistics_are_found_anew() -> None:
    p = Parameters(torch.float32, "cpu", 16, 8)
    x = p.rows(3)
    wrong = fn.Statistics(torch.zeros(3), torch.ones(3), "layer_norm", 1e-5)
    with fn.batch_invariant():
        y = fn.norm_linear(x, p.weights[0], None, statistics=wrong, **p.norm)
        assert torch.equal(y, fn.norm_linear(x, p.weights[0], None, **p.norm))


@pytest.mark.parametrize("call", [plain, three_weights, sums])
def test_what_nothing_computes_raises(call: Call) -> None:
    p = Parameters(torch.float32, "cpu", 16, 8)
    x = p.rows(3)
    with fn.batch_invariant():
        with pytest.raises(RuntimeError, match="batch_invariant"):
            torch.vmap(lambda x: flat(call(p, x, x))[0])(p.rows(6).view(2, 3, 16))
        y = flat(call(p, x, x))[0]
    with pytest.raises(RuntimeError, match="batch_invariant"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_wrong_calls_raise_in_pytorchs_words() -> None:
    p = Parameters(torch.float32, "cpu", 16, 8)
    with fn.batch_invariant():
        with pytest.raises(RuntimeError, match="normalized_shape"):
            fn.norm_linear(torch.ones(3, 5), p.weights[0])
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            fn.linear_add(torch.ones(3, 5), p.weights[0], None, torch.ones(3, 8))
        with pytest.raises(TypeError):
            fn.norm_linear([1.0], p.weights[0])  # type: ignore[arg-type]


def test_empty_batches_stay_empty() -> None:
    p = Parameters(torch.float32, "cpu", 16, 8)
    with fn.batch_invariant():
        for call in CALLS:
            assert flat(call(p, p.rows(0), p.rows(0)))[0].shape[0] == 0


@pytest.mark.parametrize(
    ("hopper", "dtype", "N", "words"),
    [
        (False, torch.bfloat16, 8, "needs a CPU, or a Hopper GPU .* but got a tensor on"),
        (True, torch.float32, 8, "bfloat16 or float16, but got torch.float32"),
        (True, torch.bfloat16, 7, r"multiples of 8 on a GPU, but got a weight of shape \[7, 16\]"),
        (True, torch.float16, 8, ""),
    ],
    ids=["GPU", "dtype", "size", "served"],
)
def test_gpus(
    monkeypatch: pytest.MonkeyPatch, hopper: bool, dtype: torch.dtype, N: int, words: str
) -> None:
    monkeypatch.setattr(invariance, "is_hopper", lambda device: hopper)
    monkeypatch.setattr(invariance, "_name", lambda device: "a GPU")
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, 16, device="cuda", dtype=dtype)
        weight = torch.empty(N, 16, device="cuda", dtype=dtype)
    expected = pytest.raises(RuntimeError, match=words) if words else nullcontext()
    with expected:
        invariance.require_invariant(x, dtype, [weight])


def test_compiled_functions_are_compiled_anew_in_the_mode() -> None:
    p = Parameters(torch.float32, "cpu", 96, 80)
    graphs: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        boxed = lambda module, inputs: make_boxed_func(module.forward)  # noqa: E731
        return aot_autograd(fw_compiler=boxed)(module, inputs)

    def call(x: Tensor, residual: Tensor) -> Any:
        return sums(p, x, residual)

    run = torch.compile(call, backend=backend, fullgraph=True)
    inputs = p.rows(5), p.rows(5)
    run(*inputs)
    for _ in range(2):
        with fn.batch_invariant():
            found, expected = flat(run(*inputs)), flat(call(*inputs))
        assert all(map(torch.equal, found, expected))
        found, expected = (
            torch.autograd.grad(results, inputs, [torch.ones_like(r) for r in results])
            for results in (found, expected)
        )
        assert all(map(torch.equal, found, expected))
        run(*inputs)
    # Outside and inside.
    assert len(graphs) == 2


def test_models_compiled_outside_of_the_mode_say_so() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 8))
    options = {"then": "eager", "small": True}
    x = torch.randn(3, 16)
    outside = torch.compile(model, backend="fused_norm", options=options)
    outside(x)
    with fn.batch_invariant(), pytest.raises(RuntimeError, match="compiled outside"):
        outside(x)
    torch.compiler.reset()
    with fn.batch_invariant():
        inside = torch.compile(model, backend="fused_norm", options=options)
        y = inside(x)
        norm, linear = model
        own = fn.fused_layernorm_linear(x, norm.weight, norm.bias, linear.weight, linear.bias)
    assert torch.equal(y, own)
    assert torch.equal(inside(x), own)
