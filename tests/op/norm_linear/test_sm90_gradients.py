"""Products that become the gradient of an activation's input on Hopper, against float64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from devices import ON_HOPPER
from family import FUNCTIONS
from kernel_harness import Guarded, address, error, extension
from torch import Tensor

from fused_norm.activations import ACTIVATIONS, GATED
from fused_norm.call import record

DTYPES = [torch.bfloat16, torch.float16]
# Of all of a result: roundings, and the curves that replace the normal distribution.
BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 7e-4}
SMOOTH = ["gelu", "gelu_tanh", "quick_gelu", "silu"]
# Rows, outputs of the layer, columns of h: in tiles of 192 columns and of 128, whole and ragged.
SHAPES = [
    (4096, 1024, 4096),
    (16448, 1024, 4096),
    (4101, 768, 3104),
    (8192, 1600, 6400),
    (2560, 72, 4640),
    (3000, 4096, 12320),
]

pytestmark = [pytest.mark.gpu, ON_HOPPER]


class Gradients:
    """The product of one dtype, with its results between guards."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.module = extension("norm_linear_sm90", dtype, gpu=True)
        stream = torch.cuda.current_stream().cuda_stream
        self.own = self.module.new_launcher(0, stream, 1)

    def run(
        self, kind: int, dy: Tensor, weight: Tensor, h: Tensor, wants_a: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Return dh, and a if it is wanted."""
        M, K = len(h), weight.shape[1]
        dh = Guarded(tuple(h.shape), h.dtype, "cuda")
        a = Guarded((M, K), h.dtype, "cuda") if wants_a else None
        call = record.Call(context=self.own, M=M, N=dy.shape[1], K=K, activation=kind)
        call.dy, call.weight, call.h = map(address, (dy, weight, h))
        call.dh, call.a = address(dh.tensor), 0 if a is None else address(a.tensor)
        self.module.plan_input_gradient(ctypes.addressof(call))
        assert call.strategy == record.FUSED
        self.module.input_gradient(ctypes.addressof(call))
        torch.cuda.synchronize()
        return dh.checked(), None if a is None else a.checked()


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def gradients(request: pytest.FixtureRequest) -> tuple[Gradients, torch.dtype]:
    return Gradients(request.param), request.param


def _tensors(
    shape: tuple[int, int, int], parts: int, dtype: torch.dtype, scale: float = 2.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dy, the weight and h."""
    M, N, K = shape
    torch.manual_seed(M + K)
    dy, weight = torch.randn(M, N, device="cuda"), torch.randn(N, K, device="cuda") * N**-0.5
    h = torch.randn(M, parts * K, device="cuda") * scale
    return dy.to(dtype), weight.to(dtype), h.to(dtype)


def _exact(name: str, gates: bool, dy: Tensor, weight: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return dh and a in float64."""
    h = h.double().requires_grad_()
    function = FUNCTIONS[name]
    if gates:
        gate, up = h.chunk(2, -1)
        a = function(gate) * up
    else:
        a = function(h)
    a.backward(dy.double() @ weight.double())
    assert h.grad is not None
    return h.grad, a.detach()


@pytest.mark.parametrize("gates", [False, True], ids=["alone", "gate"])
@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_exact(
    gradients: tuple[Gradients, torch.dtype], shape: tuple[int, int, int], name: str, gates: bool
) -> None:
    kernels, dtype = gradients
    tensors = _tensors(shape, 1 + gates, dtype)
    kind = ACTIVATIONS[name][0] + GATED * gates
    dh, a = kernels.run(kind, *tensors)
    exact = _exact(name, gates, *tensors)
    assert a is not None
    assert error(dh, exact[0]) < BOUNDS[dtype]
    assert error(a, exact[1]) < BOUNDS[dtype]
    again, nothing = kernels.run(kind, *tensors, wants_a=False)
    assert nothing is None
    assert torch.equal(dh, again)


@pytest.mark.parametrize("name", SMOOTH)
def test_values_that_are_not_numbers_stay_in_their_elements(
    gradients: tuple[Gradients, torch.dtype], name: str
) -> None:
    kernels, dtype = gradients
    dy, weight, h = _tensors((4096, 64, 4096), 1, dtype)
    large = torch.finfo(dtype).max
    marked = torch.tensor([large, -large, 30.0, -30.0, 0.0, -0.0], device="cuda", dtype=dtype)
    h[7, : len(marked)] = marked
    h[9, 3] = h[130, 191] = torch.nan
    h[11, 5], h[11, 6] = torch.inf, -torch.inf
    dh, a = kernels.run(ACTIVATIONS[name][0], dy, weight, h)
    exact = _exact(name, False, dy, weight, h)
    assert a is not None
    for found, expected in zip((dh, a), exact, strict=True):
        assert torch.equal(found[[7, 9, 130]].isnan(), expected[[7, 9, 130]].isnan())
        others = torch.ones(len(h), dtype=torch.bool, device="cuda")
        others[[7, 9, 11, 130]] = False
        assert error(found[others], expected[others]) < BOUNDS[dtype]
    row, expected = dh[7, : len(marked)].double(), exact[0][7, : len(marked)]
    torch.testing.assert_close(row, expected, rtol=2e-2, atol=1e-2)


def test_it_follows_what_was_queued(gradients: tuple[Gradients, torch.dtype]) -> None:
    """The kernel may start while the one before still runs."""
    kernels, dtype = gradients
    dy, weight, h = _tensors((16448, 1024, 4096), 1, dtype)
    kind = ACTIVATIONS["gelu"][0]
    expected, _ = kernels.run(kind, dy, weight, h)
    for _ in range(5):
        late = torch.zeros_like(h)
        torch.cuda.synchronize()
        # Takes longer than what it copies.
        late.copy_(h.double().tanh().to(dtype) * 0 + h)
        assert torch.equal(kernels.run(kind, dy, weight, late)[0], expected)
