"""What the record of a Linear layer says is to be computed, by kernels that stand in."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import family
import pytest
import torch
from linears import ROWS, case_of
from stand_in import standing_in
from torch import Tensor

from fused_norm.activations import ACTIVATIONS, GATED
from fused_norm.call import record


def _at(address: int, *shape: int) -> Tensor:
    """Return the bfloat16 matrix at an address."""
    memory = (ctypes.c_char * (2 * shape[0] * shape[1])).from_address(address)
    return torch.frombuffer(memory, dtype=torch.bfloat16).view(shape)


def _activated(number: int, h: Tensor) -> Tensor:
    kinds = {ACTIVATIONS[name][0]: function for name, function in family.FUNCTIONS.items()}
    if number < GATED:
        return kinds[number](h)
    gate, up = h.chunk(2, -1)
    return kinds[number - GATED](gate) * up


# What test_grouped_records.py is about.
GROUPED = ("products", "input_gradients", "passed_rows")


class StandIn:
    """Kernels that find in a record what they compute with, by PyTorch on the CPU."""

    def __init__(self) -> None:
        self.done: list[str] = []
        # What products have made gradients of, instead of a pass.
        self.differentiated: list[str] = []
        self.declines: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Callable[[int], None]:
        def function(place: int) -> None:
            call = record.Call.from_address(place)
            if name.startswith("plan_"):
                planned = name.removeprefix("plan_")
                is_declined = planned in self.declines or (
                    call.activation != 0 and f"activated_{planned}" in self.declines
                )
                call.strategy = record.DECLINED if is_declined else record.FUSED
                return
            self.done.append(name)
            getattr(self, f"_{name}")(call)

        return function

    @staticmethod
    def _linear(call: record.Call) -> None:
        # Only what a pass has written may be read ahead of what else is queued.
        assert bool(call.x) != bool(call.z)
        rows = _at(call.x or call.z, call.M, call.K).float()
        halves = [(call.weight, call.bias)]
        if call.activation >= GATED:
            halves.append((call.up, call.up_bias))
        h = []
        for weight, bias in halves:
            h.append(rows @ _at(weight, call.N, call.K).float().t())
            if bias:
                h[-1] += _at(bias, 1, call.N)
        y = torch.cat(h, -1)
        if call.h:
            _at(call.h, call.M, y.shape[-1]).copy_(y)
        if call.activation:
            y = _activated(call.activation, y)
        if call.residual:
            y += _at(call.residual, call.M, call.N)
        _at(call.y, call.M, call.N).copy_(y)

    def _input_gradient(self, call: record.Call) -> None:
        dy, weight = _at(call.dy, call.M, call.N), _at(call.weight, call.N, call.K)
        gradient = dy.float() @ weight.float()
        if not call.activation:
            _at(call.dx, call.M, call.K).copy_(gradient)
            return
        self.differentiated.append("h")
        is_gate = call.activation >= GATED
        h = _at(call.h, call.M, (1 + is_gate) * call.K).double()
        gate, *up = h.chunk(2, -1) if is_gate else (h,)
        kind, step = call.activation % GATED, 1e-4
        # Nothing is recorded while the chain runs.
        slope = (_activated(kind, gate + step) - _activated(kind, gate - step)) / (2 * step)
        dh = gradient * slope * (up[0] if is_gate else 1)
        if is_gate:
            dh = torch.cat([dh, gradient * _activated(kind, gate)], -1)
        _at(call.dh, *h.shape).copy_(dh)
        if call.a:
            _at(call.a, call.M, call.K).copy_(_activated(call.activation, h))

    @staticmethod
    def _weight_gradient(call: record.Call) -> None:
        dy, z = _at(call.dy, call.M, call.N).float(), _at(call.z, call.M, call.K).float()
        _at(call.dweight, call.N, call.K).copy_(dy.t() @ z)
        if call.dbias:
            _at(call.dbias, 1, call.N).copy_(dy.sum(0, keepdim=True))


@pytest.fixture
def kernels(tmp_path: Path) -> Iterator[StandIn]:
    """Replace Hopper's kernels by the stand-in."""
    stand_in = StandIn()
    stand_in.declines = GROUPED
    with standing_in(tmp_path, lambda name, place: getattr(stand_in, name)(place)):
        yield stand_in


@pytest.mark.parametrize("name", ROWS)
def test_records_say_what_to_compute(kernels: StandIn, name: str) -> None:
    case, (_, forward, backward) = case_of(name), ROWS[name]
    family.check(case, family.make_tensors(case), draws=1)
    assert kernels.done == forward + backward


@pytest.mark.parametrize("name", ROWS)
def test_what_is_declined_pytorch_multiplies(kernels: StandIn, name: str) -> None:
    kernels.declines = (*GROUPED, "linear", "input_gradient", "weight_gradient")
    case = case_of(name)
    family.check(case, family.make_tensors(case), draws=1)
    assert not kernels.done


def test_a_pass_activates_where_the_product_does_not(kernels: StandIn) -> None:
    kernels.declines = (*GROUPED, "activated_linear")
    case = case_of("GELU")
    family.check(case, family.make_tensors(case), draws=1)
    assert kernels.done == ["linear", "input_gradient", "weight_gradient"]


@pytest.mark.parametrize("name", ["MLP", "MLP without a residual, recomputed"])
def test_a_pass_differentiates_where_the_product_does_not(kernels: StandIn, name: str) -> None:
    case, (_, forward, backward) = case_of(name), ROWS[name]
    for declined in ((), ("activated_input_gradient",)):
        kernels.declines = (*GROUPED, *declined)
        kernels.done.clear()
        family.check(case, family.make_tensors(case), draws=1)
        assert kernels.done == forward + backward
        assert ("h",) * (not declined) == tuple(kernels.differentiated)
        kernels.differentiated.clear()


@pytest.mark.parametrize("name", ["residual", "MLP"])
def test_any_gradient_alone(kernels: StandIn, name: str) -> None:
    """Of two products, those that lead to it."""
    case = case_of(name)
    tensors = family.make_tensors(case)
    leaves = family.leaves(tensors)
    grads = [torch.randn_like(result) for result in family.ours(case, tensors)]
    every = torch.autograd.grad(family.ours(case, tensors), list(leaves.values()), grads)
    for leaf, expected in zip(leaves, every, strict=True):
        for other, tensor in leaves.items():
            tensor.requires_grad_(other == leaf)
        kernels.done.clear()
        results = zip(family.ours(case, tensors), grads, strict=True)
        outputs, its_grads = zip(*((r, g) for r, g in results if r.requires_grad), strict=True)
        (alone,) = torch.autograd.grad(outputs, leaves[leaf], its_grads)
        torch.testing.assert_close(alone, expected, rtol=2e-2, atol=2e-2)
        assert kernels.done.count("weight_gradient") == ("weight" in leaf and "norm" not in leaf)
