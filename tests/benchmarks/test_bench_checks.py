"""Wrong results are refused and right ones kept: of providers, ops and blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from bench_cases import (
    SHAPE,
    in_bfloat16,
    in_float64,
    not_a_number,
    plan,
    provider,
    right,
    run_of,
    without_bias,
    without_gradient_of_gamma,
)
from torch import Tensor

from benchmarks import check, command_line, providers
from benchmarks.blocks import BLOCKS
from benchmarks.case import Case
from benchmarks.check import errors, truth, verdict
from benchmarks.ops import OPS, Member
from benchmarks.plan import Listener
from benchmarks.provider import as_function
from benchmarks.runner import Runner
from benchmarks.shapes import Shape
from fused_norm import functional


@pytest.mark.parametrize(
    "function", [without_bias, not_a_number, in_float64, in_bfloat16], ids=lambda f: f.__name__
)
def test_wrong_output_is_reported_and_not_timed(
    function: Callable[..., Tensor], registry: Callable[..., None]
) -> None:
    run = run_of(provider("bad", function), provider("good", right), registry=registry)
    for measurement in run.measurements:
        bad, good = measurement.of("bad"), measurement.of("good")
        assert (bad.status, bad.timings, bad.vs_eager) == ("wrong", {}, {})
        assert "y is off by" in bad.message
        assert good.status == "ok"
        assert good.timings["wall"].median > 0
        assert max(good.errors.values()) < 1e-6


def test_wrong_gradient_is_not_timed_in_training(registry: Callable[..., None]) -> None:
    bad = provider("bad", without_gradient_of_gamma)
    run = run_of(bad, registry=registry, modes=("forward", "forward_grad", "backward", "train"))
    status = {m.mode: m.of("bad").status for m in run.measurements}
    assert status == {
        "forward": "ok",
        "forward_grad": "wrong",
        "backward": "wrong",
        "train": "wrong",
    }
    assert "grad_ln_weight is off by" in run.measurements[-1].of("bad").message
    assert [bool(m.of("bad").timings) for m in run.measurements] == [True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [SHAPE, Shape(199, 769, 97)], ids=str)
def test_check_lets_rounding_pass(
    shape: Shape, dtype: torch.dtype, registry: Callable[..., None]
) -> None:
    """The formulas of the reference round elsewhere than eager does, and are no less right."""

    def by_hand(x: Tensor, g: Tensor, b: Tensor, w: Tensor, c: Tensor) -> Tensor:
        mean = x.float().mean(-1, keepdim=True)
        rstd = torch.rsqrt((x.float() - mean).square().mean(-1, keepdim=True) + 1e-5)
        return F.linear((((x.float() - mean) * rstd) * g + b).to(x.dtype), w, c)

    registry(provider("by hand", by_hand))
    made = Runner(plan(shape, dtype=dtype), Listener()).execute()
    assert [m.of("by hand").status for m in made.measurements] == ["ok", "ok"]


def residual_rms_norm_linear(x: Tensor, r: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + r
    return F.linear(F.rms_norm(total, x.shape[-1:], g, 1e-5), w), total


def test_all_outputs_are_compared(registry: Callable[..., None]) -> None:
    """The second output, its gradient's way to the inputs, and how many there are."""
    op = "residual_rms_norm_linear"

    def other_sum(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return residual_rms_norm_linear(*inputs)[0], inputs[0]

    def without_gradient_of_sum(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        y, total = residual_rms_norm_linear(*inputs)
        return y, total.detach() + 0 * total

    def one(*inputs: Tensor) -> Tensor:
        return residual_rms_norm_linear(*inputs)[0]

    functions = {"good": residual_rms_norm_linear, "other sum": other_sum, "one": one}
    functions["no gradient"] = without_gradient_of_sum
    registry(*(provider(name, function, op=op) for name, function in functions.items()))
    forward, train = Runner(plan(op=op), Listener()).execute().measurements
    names = ["y", "sum", "grad_x", "grad_residual", "grad_norm_weight", "grad_weight"]
    assert list(train.of("good").errors) == names
    assert (train.of("good").status, train.of("eager").status) == ("ok", "ok")
    assert (forward.of("other sum").status, train.of("other sum").status) == ("wrong", "wrong")
    assert "sum is off by" in forward.of("other sum").message
    assert (forward.of("no gradient").status, train.of("no gradient").status) == ("ok", "wrong")
    assert "grad_residual is off by" in train.of("no gradient").message
    assert forward.of("one").message == "ValueError: returned 1 tensors, expected y, sum"


def test_a_scalar_is_measured_by_what_rows_add() -> None:
    """Regression: the gradient of eps was refused where the rows' shares all but cancel."""
    op = OPS["layer_norm"]
    case = Case(op, Shape(64, 1024, 0), torch.float32, torch.device("cpu"))
    x, o = torch.randn(64, 1024), torch.tensor([0.25])
    exact = truth(op.reference, case, [x, o], [dy := torch.randn(64, 1024)])
    shares = [
        truth(op.reference, case, [x[i : i + 1], o], [dy[i : i + 1]]).gradients["o"]
        for i in range(64)
    ]
    assert exact.sizes == pytest.approx({"o": float(torch.stack(shares).norm())})
    assert float(exact.gradients["o"]) == pytest.approx(float(sum(shares)))


def test_check_needs_finite_eager() -> None:
    """Regression: compared with an eager that is not finite, everything would pass."""
    inf = float("inf")
    assert check.verdict({"y": inf}, {"y": inf}, torch.float32)
    assert not check.verdict({"y": 1e-7}, {"y": 1e-7}, torch.float32)


def test_ops_agree_with_their_formulas() -> None:
    x, o = torch.randn(5, 33, dtype=torch.float64), torch.tensor([0.25], dtype=torch.float64)
    expected = F.layer_norm(x, (33,), None, None, 0.25**2)
    torch.testing.assert_close(OPS["layer_norm"].reference(x, o), expected)


SHORT = ("layernorm_linear", "layer_norm", "residual_rms_norm_linear", "norm_swiglu", "norm_mlp")


@pytest.mark.parametrize(
    "op", [op if op in SHORT else pytest.param(op, marks=pytest.mark.slow) for op in OPS]
)
def test_every_installed_provider_of_this_machine_is_right(op: str, device: str) -> None:
    """All that can be imported here and needs no compiler, on a shape where nothing divides."""
    names = [name for name in providers.NAMES if name not in command_line.SLOW]
    for shape in (Shape(37, 50, 65), Shape(24, 32, 40)):
        made = Runner(
            plan(shape, op=op, device=device, names=names, measures_memory=False), Listener()
        ).execute()
        for measurement in made.measurements:
            for result in measurement.results:
                assert result.status in ("ok", "unsupported"), result
            assert measurement.of("eager").vs_eager[measurement.metric] == 1


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.op.name)
def test_our_block_is_eagers(block: Member) -> None:
    kind = block.ours.args[0]
    width = 2 * kind.head * kind.share
    case = Case(block.op, Shape(3 * kind.batch, width, 96), torch.float32, torch.device("cpu"))
    inputs, grads = case.inputs(0), case.grad_outputs(0)
    exact = truth(case.op.reference, case, inputs, grads)
    found = {}
    for call in (block.op.reference, partial(block.ours, functional)):
        bind = as_function(call, case)
        found[call] = errors(bind, inputs, grads, exact, gradients=True)
    eager, ours = found.values()
    assert verdict(ours, eager, torch.float32) == ""
    # Every input has a gradient, of eager's and ours.
    assert not [name for name, gradient in exact.gradients.items() if gradient is None]
    with pytest.raises(ValueError, match="whole heads"):
        block.op.inputs(Shape(3 * kind.batch, width + 1, 96))
