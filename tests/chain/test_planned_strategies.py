"""A forward takes the strategy of its plan, by kernels that stand in and note what they do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accuracy import make_inputs
from devices import ON_HOPPER
from stand_in import standing_in
from torch import Tensor

import fused_norm as fn
from fused_norm.call.record import AROUND_PRODUCTS, DECLINED, FUSED, KEPT_FOLD, NEW_FOLD, Call
from fused_norm.chain import kernels as chain_kernels
from fused_norm.composition import Operands, Spec

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16


class StandIn:
    """Kernels that plan what they are told."""

    def __init__(self) -> None:
        self.kept = self.otherwise = DECLINED
        self.done: list[str] = []
        self.residuals: list[int] = []

    def __call__(self, name: str, place: int) -> None:
        call = Call.from_address(place)
        if name == "plan_forward":
            self.residuals.append(call.residual)
            call.strategy = self.kept if call.may_keep else self.otherwise
        elif name == "forward":
            self.done.append({FUSED: "fused", KEPT_FOLD: "kept", NEW_FOLD: "new"}[call.strategy])
        else:
            self.done.append(name)

    def forward(
        self,
        inputs: list[Tensor],
        kept: int,
        otherwise: int,
        *,
        keeps: bool = False,
        residual: Tensor | None = None,
    ) -> list[str]:
        """Run with what is planned where a fold may be kept, and where none may."""
        self.done.clear()
        self.kept, self.otherwise = kept, otherwise
        x, gamma, beta, weight, bias = inputs
        t = Operands(x, residual, gamma, beta, weights=[weight], biases=[bias])
        torch.ops.fused_norm.norm_linear_forward(*t, *Spec(), keeps)
        return list(self.done) or ["declined"]


@pytest.fixture
def kernels(tmp_path: Path) -> Iterator[StandIn]:
    stand_in = StandIn()
    with standing_in(tmp_path, stand_in, ("forward", "fold")):
        yield stand_in


def test_planned_strategy(kernels: StandIn) -> None:
    inputs = make_inputs(8, 64, 32, dtype=BFLOAT16)
    assert kernels.forward(inputs, FUSED, FUSED) == ["fused"]
    assert kernels.forward(inputs, DECLINED, DECLINED) == ["declined"]
    assert kernels.forward(inputs, AROUND_PRODUCTS, AROUND_PRODUCTS) == ["declined"]
    assert kernels.forward(inputs, NEW_FOLD, NEW_FOLD) == ["new"]
    # Only of frozen parameters, and never on a CPU.
    assert kernels.forward(inputs, KEPT_FOLD, FUSED) == ["fused"]
    with fn.frozen_parameters():
        assert [kernels.forward(inputs, KEPT_FOLD, FUSED) for _ in range(3)] == [["fused"]] * 3


def test_plan_is_told_how_a_residual_lies(kernels: StandIn) -> None:
    """Regression: an address of 1 stood for any, and no product behind the sum was aligned."""
    inputs = make_inputs(8, 64, 32, dtype=BFLOAT16)
    x = inputs[0]
    shifted = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view_as(x)
    residuals = [None, torch.zeros_like(x), shifted]
    for residual in residuals:
        kernels.forward(inputs, DECLINED, DECLINED, keeps=True, residual=residual)
    assert kernels.residuals == [0 if r is None else r.data_ptr() for r in residuals]


def test_products_of_float32_are_ours_in_tf32_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_kernels, "is_hopper", lambda device: True)
    monkeypatch.setattr(chain_kernels, "hopper_kind", lambda device: "nvidia-h100")
    monkeypatch.setattr(chain_kernels, "launcher", lambda *_: (None, 7))
    monkeypatch.setattr(chain_kernels.build, "check_at_hand", lambda *_: None)
    for name in ("gpu_extension", "hopper_extension"):
        found = SimpleNamespace(path=name)
        monkeypatch.setattr(chain_kernels, name, lambda *_, found=found: found)
    for dtype, allowed, product in (
        (torch.float32, False, b""),
        (torch.float32, True, b"hopper_extension"),
        (BFLOAT16, False, b"hopper_extension"),
        (FLOAT16, False, b"hopper_extension"),
    ):
        number = chain_kernels.NUMBERS[dtype]
        question = chain_kernels.Question(dtype=number, may_use_tf32=allowed)
        answer = chain_kernels.Answer()
        chain_kernels.find(question, answer)
        assert (answer.product, answer.passes) == (product, b"gpu_extension")


@ON_HOPPER
@pytest.mark.gpu
def test_folds_of_frozen_parameters(kernels: StandIn) -> None:
    inputs = make_inputs(8, 64, 32, dtype=BFLOAT16, device="cuda")

    def captured() -> list[str]:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            # Of a graph without any kernel, PyTorch warns.
            inputs[0].clone()
            return kernels.forward(inputs, KEPT_FOLD, DECLINED)

    for strategy, name in ((FUSED, "fused"), (DECLINED, "declined"), (NEW_FOLD, "new")):
        assert kernels.forward(inputs, strategy, strategy) == [name]
    # Only of frozen parameters: then it is made once.
    assert kernels.forward(inputs, KEPT_FOLD, FUSED) == ["fused"]
    with fn.frozen_parameters():
        assert kernels.forward(inputs, KEPT_FOLD, FUSED) == ["fused"]
        assert kernels.forward(inputs, KEPT_FOLD, FUSED) == ["fold", "kept"]
        assert kernels.forward(inputs, KEPT_FOLD, FUSED) == ["kept"]
        assert kernels.forward(inputs, KEPT_FOLD, FUSED, keeps=True) == ["fused"]
        assert captured() == ["kept"]
    assert kernels.forward(inputs, KEPT_FOLD, DECLINED) == ["declined"]
    with fn.frozen_parameters():
        for _ in range(3):
            assert captured() == ["declined"]
        assert kernels.forward(inputs, KEPT_FOLD, FUSED) == ["fold", "kept"]


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FLOAT16, torch.float32], ids=str)
def test_other_dtypes_have_no_folds(
    kernels: StandIn, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(8, 64, 32, dtype=dtype, device="cuda")
    with fn.frozen_parameters():
        for allowed in (True, False, True):
            monkeypatch.setattr(chain_kernels, "may_use_tf32", lambda answer=allowed: answer)
            expected = "fused" if allowed or dtype is FLOAT16 else "declined"
            for _ in range(3):
                assert kernels.forward(inputs, KEPT_FOLD, FUSED) == [expected]
