"""The ops that are row programs, kernel by kernel, on every device of the machine."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
from collections.abc import Callable

import pytest
import torch
from kernel_harness import DEVICES, GUARD, ROOT, Guarded, address, assert_as_exact, error, extension
from torch import Tensor

from fused_norm.call.record import RowCall

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
# widths around the limits of each path through a kernel; multiples of no vector
SHAPES = [
    *((1, 1), (3, 1), (5, 7), (37, 64), (130, 129), (64, 769), (37, 1024), (70001, 8)),
    *((301, 1536), (16, 4096), (29, 5001), (27, 8192), (25, 8200), (23, 33000), (21, 65537)),
]
PLACES = re.findall(r'^    Entry\[\s*"(\w+)"', (ROOT / "op/rows/op.mojo").read_text(), re.M)
every_device = pytest.mark.parametrize("device", DEVICES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def gomp_parallel() -> int:
    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp.so.1")
    gomp = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return ctypes.cast(gomp.GOMP_parallel, ctypes.c_void_p).value


def call(
    op: str,
    inputs: list[Tensor],
    outputs: list[Tensor | None],
    o: Tensor | None = None,
    do: Tensor | None = None,
    scratch: Tensor | None = None,
    *,
    accumulate: bool = False,
) -> None:
    """Call an op by its record, on the device and for the dtype of its inputs."""
    like = inputs[0]
    call = RowCall(*like.shape)
    if like.device.type == "cpu":
        kernels = extension("rows_cpu", like.dtype)
        call.context = gomp_parallel()
        call.threads = torch.get_num_threads()
    else:
        kernels = extension("rows_gpu", like.dtype, gpu=True)
        stream = torch.cuda.current_stream().cuda_stream
        call.context = kernels.new_launcher(torch.cuda.current_device(), stream, True)
    call.accumulate = accumulate
    call.parameter = address(o)
    call.parameter_is_float32 = o is not None and o.dtype is torch.float32
    call.parameter_gradient = address(do)
    call.workspace = address(scratch)
    for found, tensors in ((call.outputs, outputs), (call.inputs, inputs)):
        for index, tensor in enumerate(tensors):
            found[index] = address(tensor)
    run = ctypes.CDLL(kernels.__file__).rows_run
    assert run(PLACES.index(op), ctypes.byref(call)) == 0


def accum(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# The ops in PyTorch, for any dtype; in float64 they are the reference.
def trainable_eps(x: Tensor, o: Tensor) -> Tensor:
    v = x - x.mean(-1, keepdim=True)
    return v / torch.sqrt(o * o + (v * v).mean(-1, keepdim=True))


def mean(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def norm(v: Tensor) -> Tensor:
    return torch.sqrt((v * v).mean(-1, keepdim=True)).expand_as(v)


def div(a: Tensor, b: Tensor) -> Tensor:
    return a / b


class Case:
    """An op with its arguments, run by us, by PyTorch and in float64."""

    def __init__(self, op: str, shape: tuple[int, int], dtype: torch.dtype, device: str, shift=0):
        self.op, self.shape, self.dtype, self.device, self.shift = op, shape, dtype, device, shift
        self.count = 2 if op == "div" else 1
        tensors = [
            torch.randn(shape, device=device, dtype=dtype) * 2 + 1 for _ in range(self.count)
        ]
        if op == "div":
            tensors[1] = tensors[1].sign() * (tensors[1].abs() + 0.5)
        if op == "trainable_eps":
            tensors.append(torch.full((1,), 0.3, device=device, dtype=dtype))
        self.tensors = [Guarded.of(t, shift).tensor for t in tensors]
        # The norm's gradient is the sum of dy, and one that cancels leaves a number of noise a row.
        dy = torch.randn(shape, device=device, dtype=dtype) + (op == "norm")
        self.dy = Guarded.of(dy, shift).tensor
        self.solve()

    def solve(self) -> None:
        """Compute the results in float64 and by PyTorch."""
        function: Callable[..., Tensor] = globals()[self.op]
        exact = [t.double().requires_grad_() for t in self.tensors]
        self.exact = function(*exact)
        self.exact_grads = torch.autograd.grad(self.exact, exact, self.dy.double())
        peer = [t.clone().requires_grad_() for t in self.tensors]
        self.peer = function(*peer)
        self.peer_grads = torch.autograd.grad(self.peer, peer, self.dy)

    def forward(self) -> Tensor:
        y = Guarded(self.shape, self.dtype, self.device, self.shift)
        call(NAMES[self.op], self.tensors[: self.count], [y.tensor], *self.tensors[self.count :])
        return y.checked()

    def backward(self, into: list[Guarded] | None = None, wanted=(True, True)) -> list[Tensor]:
        """Compute gradients; with `into`, add them to what is there."""
        grads = into or [
            Guarded(tuple(t.shape), self.dtype, self.device, self.shift) for t in self.tensors
        ]
        outs = [g.tensor if w else None for g, w in zip(grads, wanted, strict=False)]
        inputs, o = self.tensors[: self.count], self.tensors[self.count :]
        name = NAMES[self.op] + "_backward"
        if self.op == "mean":
            name, inputs = NAMES[self.op], []
        scratch = Guarded((self.shape[0],), accum(self.dtype), self.device)
        scalars = [*o, outs[-1], scratch.tensor] if o else []
        call(
            *(name, [self.dy, *inputs], outs[: self.count], *scalars),
            accumulate=into is not None,
        )
        scratch.checked()
        return [g.checked() for g in grads]

    def check(self) -> None:
        check_together([self])


def check_together(cases: list[Case]) -> None:
    """Compare the errors of several draws, taken together, with PyTorch's."""
    y, peer, exact = ([getattr(c, name) for c in cases] for name in ("forward", "peer", "exact"))
    assert_as_exact(torch.cat([of() for of in y]), torch.cat(peer), torch.cat(exact), "y")
    grads = [c.backward() for c in cases]
    for i in range(len(grads[0])):
        found = torch.cat([g[i] for g in grads])
        peers = torch.cat([c.peer_grads[i] for c in cases])
        exacts = torch.cat([c.exact_grads[i] for c in cases])
        assert_as_exact(found, peers, exacts, f"gradient {i}")


NAMES = {
    "trainable_eps": "trainable_eps_layer_norm",
    "mean": "composed_mean",
    "norm": "composed_norm",
    "div": "composed_div",
}
OPS = list(NAMES)
EPS = NAMES["trainable_eps"]
every_op = pytest.mark.parametrize("op", OPS)


@every_device
@every_dtype
@every_shape
@every_op
def test_shapes(op, shape, dtype, device):
    Case(op, shape, dtype, device).check()


@every_device
@every_dtype
@every_op
@pytest.mark.parametrize("shift", [1, 3])
def test_misaligned(op, dtype, device, shift):
    for shape in ((37, 64), (29, 5001), (23, 33000)):
        # A norm is one number a row: those of so few rows err by luck.
        draws = 8 if op == "norm" else 1
        check_together([Case(op, shape, dtype, device, shift) for _ in range(draws)])


@every_device
@every_dtype
@every_op
def test_primed_form_adds_to_the_destination(op, dtype, device):
    for shape in ((37, 64), (29, 769), (700, 5000), (23, 33000)):
        case = Case(op, shape, dtype, device)
        before = [Guarded.of(torch.randn_like(t)) for t in case.tensors]
        expected = [b.tensor.double() + g for b, g in zip(before, case.exact_grads, strict=True)]
        peers = [
            (b.tensor.to(accum(dtype)) + p.to(accum(dtype))).to(dtype)
            for b, p in zip(before, case.peer_grads, strict=True)
        ]
        for i, grad in enumerate(case.backward(before)):
            assert_as_exact(grad, peers[i], expected[i], f"gradient {i}")


@every_device
@every_op
def test_same_bits_every_time(op, device):
    for shape in ((1000, 769), (3, 70000)):
        case = Case(op, shape, torch.float32, device)
        once = [case.forward(), *case.backward()]
        for _ in range(5):
            for a, b in zip(once, [case.forward(), *case.backward()], strict=True):
                assert torch.equal(a, b)


def test_same_bits_for_any_number_of_threads():
    case = Case("trainable_eps", (3000, 769), torch.float32, "cpu")
    once = [case.forward(), *case.backward()]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for a, b in zip(once, [case.forward(), *case.backward()], strict=True):
            assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)


@every_device
@pytest.mark.parametrize("op", ["trainable_eps", "div"])
@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_unwanted_gradients_are_not_written(op, device, wanted):
    case = Case(op, (40, 769), torch.float32, device)
    grads = case.backward(wanted=wanted)
    for i, is_wanted in enumerate(wanted):
        if is_wanted:
            assert_as_exact(grads[i], case.peer_grads[i], case.exact_grads[i], f"gradient {i}")
        else:
            assert grads[i].isnan().all()


@every_device
def test_fused_is_composed_plus_o_and_layer_norm_with_eps(device):
    x = torch.randn(64, 1000, device=device, dtype=torch.float64)
    for value in (0.0, 0.01, -0.7):
        o = torch.full((1,), value, device=device, dtype=torch.float64)
        y, v, n, composed = (torch.empty_like(x) for _ in range(4))
        call(EPS, [x], [y], o)
        layer_norm = torch.nn.functional.layer_norm(x, (1000,), eps=value * value)
        torch.testing.assert_close(y, layer_norm, rtol=1e-12, atol=1e-12)
        if value == 0:
            call("composed_mean", [x], [v])
            call("composed_norm", [v], [n])
            call("composed_div", [v, n], [composed])
            torch.testing.assert_close(y, composed, rtol=1e-12, atol=1e-12)


@every_device
@pytest.mark.parametrize("K", [64, 1001, 4096, 70000])
@pytest.mark.parametrize("far", [1e3, -1e3, 1e5])
def test_far_from_zero(far, K, device):
    x = torch.randn(20, K, device=device) + far
    o = torch.zeros(1, device=device)
    y, m = torch.empty_like(x), torch.empty_like(x)
    call(EPS, [x], [y], o)
    call("composed_mean", [x], [m])
    assert (y - trainable_eps(x.double(), o.double())).abs().max() < 4e-6
    assert (m - mean(x.double())).abs().max() < 4e-6


@every_device
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("K", [100, 769, 5001])
def test_first_elements_unlike_the_rest(K, dtype, device):
    """A pass over a part of a row only estimates its mean."""
    case = Case("trainable_eps", (20, K), dtype, device)
    for tensor in (case.tensors[0], case.dy):
        tensor.copy_(tensor.sort(-1).values)
        tensor[:10, : K // 8] -= 1000
    case.solve()
    assert_as_exact(case.forward(), case.peer, case.exact, "y")
    for i, grad in enumerate(case.backward()):
        assert_as_exact(grad, case.peer_grads[i], case.exact_grads[i], f"gradient {i}")


@every_device
@pytest.mark.parametrize("K", [1, 7, 769, 4096, 70000])
@pytest.mark.parametrize("value", [0.1, -3.3, 1e8])
def test_constant_rows(value, K, device):
    x = torch.full((5, K), value, device=device)
    y = torch.full_like(x, GUARD)
    o = torch.full((1,), 1e-3, device=device)
    call(EPS, [x], [y], o)
    assert (y == 0).all()
    call(EPS, [x], [y], torch.zeros_like(o))
    assert y.isnan().all(), "0 / 0 is NaN, as the formula says"


@every_device
def test_nonfinite_rows_do_not_spread(device):
    x = torch.randn(6, 1000, device=device)
    x[1, 17], x[3, 999], x[4, 0] = float("nan"), float("inf"), -float("inf")
    y = torch.empty_like(x)
    call(EPS, [x], [y], torch.ones(1, device=device))
    assert y.isnan().all(1).tolist() == [False, True, False, True, True, False]
    assert y[[0, 2, 5]].isfinite().all()


@every_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_o_in_float32(dtype, device):
    x, dy = torch.randn(2, 50, 300, device=device, dtype=dtype)
    o = torch.full((1,), 0.123456, device=device)
    y, dx = torch.empty_like(x), torch.empty_like(x)
    do, scratch = torch.empty_like(o), torch.empty(50, device=device)
    call(EPS, [x], [y], o)
    call(EPS + "_backward", [dy, x], [dx], o, do, scratch)
    exact = [t.double().requires_grad_() for t in (x, o)]
    reference = trainable_eps(*exact)
    gradients = torch.autograd.grad(reference, exact, dy.double())
    assert error(y, reference) < torch.finfo(dtype).eps
    assert error(dx, gradients[0]) < torch.finfo(dtype).eps
    assert error(do, gradients[1]) < 1e-6


@every_device
@every_op
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_empty(op, shape, device):
    case = Case(op, shape, torch.float32, device)
    case.forward()
    grads = case.backward()
    if op == "trainable_eps":
        assert grads[1] == 0


@every_device
def test_rows_do_not_depend_on_their_neighbors(device):
    x = torch.randn(1000, 769, device=device)
    o = torch.ones(1, device=device)
    y, alone = torch.empty_like(x), torch.empty_like(x[5:8])
    call(EPS, [x], [y], o)
    for i, row in itertools.product(range(3), [5]):
        one = x[row + i : row + i + 1].clone()
        call(EPS, [one], [alone[i : i + 1]], o)
    assert torch.equal(y[5:8], alone)


def test_the_document_shows_what_its_code_prints(capsys):
    text = (ROOT / "docs" / "rows.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    shown = text.split("```text\n")[1].split("```")[0]
    exec(compile(code, "docs/rows.md", "exec"), {})
    pattern = re.compile(r"[\d.]+e-\d+")
    assert pattern.sub("", capsys.readouterr().out) == pattern.sub("", shown)
    assert [float(e) < 1e-12 for e in pattern.findall(shown)] == [False, True]
