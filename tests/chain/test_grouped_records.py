"""What records of several Linear layers say is to be computed, by kernels that stand in."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from grouped import check, make
from stand_in import standing_in
from torch import Tensor

import fused_norm as fn
from fused_norm.call import record


def _at(address: int, *shape: int, pitch: int = 0) -> Tensor:
    """Return the float16 matrix at an address."""
    rows, columns = shape
    pitch = pitch or columns
    memory = (ctypes.c_char * (2 * ((rows - 1) * pitch + columns))).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float16).as_strided(shape, (pitch, 1))


def _sum(call: record.Call, parts: Any) -> Any:
    """Return the sum of dy weight over all parts."""
    return sum(
        _at(part.dy, call.M, part.N, pitch=call.pitch).float()
        @ _at(part.weight, part.N, call.K).float()
        for part in parts
    )


# What one Linear layer has by itself, which is tested in test_linear_records.py.
ALONE = ("linear", "input_gradient")


class StandIn:
    """Kernels that find in a record what they compute with, by PyTorch on the CPU."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.declines: tuple[str, ...] = ("passed_rows", *ALONE)

    def __getattr__(self, name: str) -> Callable[[int], None]:
        def function(place: int) -> None:
            call = record.Call.from_address(place)
            kernel = name.removeprefix("plan_")
            ran = "weight_gradients" if kernel == "weight_gradient" and call.parts else kernel
            if name.startswith("plan_"):
                declined = kernel in self.declines or ran in self.declines
                call.strategy = record.DECLINED if declined else record.FUSED
                return
            self.done.append(ran)
            parts = (record.Part * call.part_count).from_address(call.parts or place)
            assert sum(part.N for part in parts) == call.N or not parts
            getattr(self, f"_{name}")(call, parts)

        return function

    @staticmethod
    def _products(call: record.Call, parts: Any) -> None:
        for part in parts:
            y = F.linear(_at(call.z, call.M, call.K), _at(part.weight, part.N, call.K))
            if part.bias:
                y += _at(part.bias, 1, part.N)
            _at(part.y, call.M, part.N, pitch=call.pitch).copy_(y)

    @staticmethod
    def _input_gradients(call: record.Call, parts: Any) -> None:
        _at(call.dz, call.M, call.K).copy_(_sum(call, parts))

    @staticmethod
    def _passed_rows(call: record.Call, parts: Any) -> None:
        x = _at(call.x, call.M, call.K).float()
        gamma, beta = (_at(v, 1, call.K)[0].float() for v in (call.gamma, call.beta))
        leaves = [v.requires_grad_() for v in (x, gamma, beta)]
        with torch.enable_grad():
            z = F.layer_norm(x, (call.K,), gamma, beta, 1e-5)
        gradients = torch.autograd.grad(z, leaves, _sum(call, parts))
        for place, gradient in zip((call.dx, call.dgamma, call.dbeta), gradients, strict=True):
            _at(place, *gradient.view(-1, call.K).shape).copy_(gradient.view(-1, call.K))
        _at(call.dz, call.M, call.K).copy_(z.detach())

    @staticmethod
    def _weight_gradient(call: record.Call, parts: Any) -> None:
        z = _at(call.z, call.M, call.K)
        for part in parts:
            dy = _at(part.dy, call.M, part.N)
            _at(part.y, part.N, call.K).copy_(dy.t() @ z)
            if part.bias:
                _at(part.bias, 1, part.N).copy_(dy.float().sum(0, keepdim=True))
        if parts:
            return
        dy = _at(call.dy, call.M, call.N)
        _at(call.dweight, call.N, call.K).copy_(dy.t() @ _at(call.z, call.M, call.K))
        if call.dbias:
            _at(call.dbias, 1, call.N).copy_(dy.float().sum(0, keepdim=True))


@pytest.fixture
def kernels(tmp_path: Path) -> Iterator[StandIn]:
    """Replace Hopper's kernels by the stand-in."""
    stand_in = StandIn()
    with standing_in(tmp_path, lambda name, place: getattr(stand_in, name)(place)):
        yield stand_in


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("biases", ["bbb", "---", "b-b"])
@pytest.mark.parametrize("used", [None, {0, 2}, {1}])
def test_records_say_what_to_compute(kernels: StandIn, biases: str, used: set[int] | None) -> None:
    check(make((24, 32, [40, 16, 8]), biases), used=used)
    count = 3 if used is None else len(used)
    # Of all weights in one launch.
    of_weights = ["weight_gradients"] if used is None else ["weight_gradient"] * count
    assert kernels.done == ["products"] + ["input_gradients"] * (count > 1) + of_weights


@pytest.mark.usefixtures("by_kernels")
def test_one_kernel_passes_over_the_rows(kernels: StandIn) -> None:
    kernels.declines = ALONE
    check(make((24, 32, [40, 16, 8]), "b-b"))
    assert kernels.done == ["products", "passed_rows", "weight_gradients"]
    kernels.done.clear()
    kernels.declines = (*ALONE, "weight_gradients")
    check(make((24, 32, [40, 16, 8]), "b-b"))
    assert kernels.done == ["products", "passed_rows"] + ["weight_gradient"] * 3
    kernels.done.clear()
    inputs = make((24, 32, [16, 16]), "bb", residual=True)
    check(inputs, activation="swiglu")
    assert kernels.done == ["products", "passed_rows"]
    kernels.done.clear()
    # Without the gradient of x, nothing passes.
    inputs = make((24, 32, [40, 16, 8]), "b-b")
    inputs[0].requires_grad_(False)
    check(inputs)
    assert "passed_rows" not in kernels.done


@pytest.mark.usefixtures("by_kernels")
def test_records_of_what_lies_side_by_side(kernels: StandIn) -> None:
    inputs = make((24, 32, [16, 16]), "bb", residual=True)
    check(inputs, activation="swiglu")
    # Each half of the gradient is no matrix of its own, which the product of dW would need.
    assert kernels.done == ["products", "input_gradients"]


@pytest.mark.usefixtures("by_kernels")
def test_what_is_declined_pytorch_multiplies(kernels: StandIn) -> None:
    kernels.declines += ("products", "input_gradients", "weight_gradient")
    check(make((24, 32, [40, 16, 8]), "b-b"))
    assert not kernels.done
    kernels.declines = ALONE
    with fn.batch_invariant():
        check(make((24, 32, [40, 16, 8]), "bbb"))
    assert not kernels.done
    kernels.declines = ALONE
    # More than one launch takes, but for their gradients, which have one each.
    check(make((24, 32, [8, 8, 8, 8]), "bbbb"))
    assert kernels.done == ["weight_gradient"] * 4
