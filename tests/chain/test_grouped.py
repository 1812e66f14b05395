"""Several Linear layers on the same rows on Hopper: one launch for their products, one for dx."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accuracy import as_float64, assert_within_budget
from devices import ON_HOPPER
from grouped import check, make, ours, plain
from launches import names
from strategies import hopper_goes
from torch import Tensor

import fused_norm as fn
from fused_norm.call import record
from fused_norm.composition import Operands, Spec
from fused_norm.ops import folding, node

SHAPE = (8400, 1024, [1000, 264, 136])
# Where the pass over rows runs in the kernel that adds up their gradients.
PASSED = (10400, 2048, [1800, 264, 136])


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biases", ["---", "bbb", "b-b"])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_values_and_gradients(norm: str, biases: str, dtype: torch.dtype) -> None:
    inputs = make(SHAPE, biases, dtype=dtype, device="cuda")
    check(inputs, norm=norm)
    check(inputs, norm=norm, used={0, 2})


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("in_python", [False, True])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_rows_passed_on(norm: str, in_python: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_python:
        monkeypatch.setattr(node, "forward", lambda *_, **__: None)
    inputs = make(PASSED, "b-b", dtype=torch.bfloat16, device="cuda")
    check(inputs, norm=norm)
    total = sum(y.sum() for y in ours(inputs, norm=norm))
    launched = names(lambda: total.backward())
    assert launched.count("256_one_sum") == 1, launched


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("in_python", [False, True])
def test_one_launch_for_all(in_python: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and dx, with a residual before the norm, too, and for a gate's pair behind one."""
    if in_python:
        monkeypatch.setattr(node, "forward", lambda *_, **__: None)
    three = make(SHAPE, "b-b", dtype=torch.bfloat16, device="cuda", residual=True)
    # Whose h no kernel with a gate in its epilogue stores.
    pair = make((8400, 1024, [712, 712]), "bb", dtype=torch.bfloat16, device="cuda", residual=True)
    for inputs, activation in ((three, None), (pair, "swiglu")):
        check(inputs, activation=activation)
        launched = names(lambda i=inputs, a=activation: ours(i, a))
        assert launched.count("side_by_side") == 1, launched
        total = sum(y.sum() for y in ours(inputs, activation))
        launched = names(lambda total=total: total.backward())
        assert launched.count("one_sum") == 1, launched


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biases", ["---", "bbb", "b-b"])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("rows", [1, 9, 16])
def test_few_rows(rows: int, norm: str, biases: str, dtype: torch.dtype) -> None:
    """Tiles that end within a part, and a k block that ends beyond K."""
    # The last have more tiles than an H100 has clusters.
    for sizes in ([264, 72, 1000], [6000, 72, 4000]):
        inputs = make((rows, 1056, sizes), biases, dtype=dtype, device="cuda")
        check(inputs, norm=norm)
        launched = names(lambda i=inputs: ours(i, norm=norm))
        assert launched.count("side_by_side_biases") == 1, launched
        assert "few_rows" in launched, launched


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [9, 16])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_folded_few_rows(norm: str, rows: int) -> None:
    inputs = make((rows, 1024, [264, 72, 1000]), "b-b", dtype=torch.bfloat16, device="cuda")
    copies = [None if t is None else t.detach() for t in inputs]
    exact, bar = plain(as_float64(copies), norm=norm), plain(copies, norm=norm)
    x, residual, gamma, beta, *linears = copies
    t = Operands(x, residual, gamma, beta, weights=linears[:3], biases=linears[3:])
    kind = Spec(normalization=norm, activation="", eps=1e-5, weight_offset=0.0)
    with hopper_goes(record.NEW_FOLD, record.NEW_FOLD):
        run = lambda: torch.ops.fused_norm.norm_linear_forward(*t, *kind, True)[:3]  # noqa: E731
        outputs, launched = run(), names(run)
    assert "side_by_side_scale" in launched, launched
    assert "few_rows" in launched, launched
    for mine, low, high in zip(outputs, bar, exact, strict=True):
        assert_within_budget("y", mine, high.detach(), low)


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("strategy", [record.KEPT_FOLD, record.NEW_FOLD])
@pytest.mark.parametrize("is_sum", [False, True])
def test_folded(is_sum: bool, strategy: int, norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(SHAPE, "b-b", dtype=torch.bfloat16, device="cuda", residual=is_sum)
    copies = [None if t is None else t.detach() for t in inputs]
    exact, bar = plain(as_float64(copies), norm=norm), plain(copies, norm=norm)
    x, residual, gamma, beta, *linears = copies
    t = Operands(x, residual, gamma, beta, weights=linears[:3], biases=linears[3:])
    kind = Spec(normalization=norm, activation="", eps=1e-5, weight_offset=0.0)
    ran: list[int] = []
    make_fold = folding._fold

    def counted(*arguments: Any) -> Any:
        ran.append(1)
        return make_fold(*arguments)

    monkeypatch.setattr(folding, "_fold", counted)
    first = None

    def run() -> Any:
        keeps = strategy == record.NEW_FOLD
        return torch.ops.fused_norm.norm_linear_forward(*t, *kind, keeps)[:3]

    for _ in range(3):
        with hopper_goes(record.NEW_FOLD, strategy), fn.frozen_parameters():
            run()
            outputs = run()
            launched = names(run)
        assert launched.count("side_by_side") == 1, launched
        assert "scale" in launched, launched
        for mine, low, high in zip(outputs, bar, exact, strict=True):
            assert_within_budget("y", mine, high.detach(), low)
        assert first is None or all(map(torch.equal, outputs, first))
        first = outputs
    assert len(ran) == 3 * (strategy == record.KEPT_FOLD)


@ON_HOPPER
@pytest.mark.gpu
def test_kept_folds_are_found_by_either_language() -> None:
    inputs = make(SHAPE, "b-b", dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        with fn.frozen_parameters():
            results = [ours(inputs) for _ in range(4)]
            launched = names(lambda: ours(inputs))
        assert "side_by_side_scale" in launched
        inputs[5].mul_(2)
        changed = ours(inputs)
    for first, *others in zip(*results, strict=True):
        # The first call is not frozen yet; all later ones read the same fold.
        assert all(torch.equal(other, others[0]) for other in others[1:])
        torch.testing.assert_close(first, others[0], rtol=0.02, atol=0.05)
    assert not torch.equal(changed[1], results[-1][1])
    torch.testing.assert_close(changed[0], results[-1][0], rtol=0.02, atol=0.05)


@ON_HOPPER
@pytest.mark.gpu
def test_graphs_replay_the_same_bits() -> None:
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        inputs = make(SHAPE, "b-b", dtype=torch.bfloat16, device="cuda")
        leaves = [t for t in inputs if t is not None]

        def step() -> list[Tensor]:
            outputs = ours(inputs)
            dys = list(map(torch.ones_like, outputs))
            return [*outputs, *torch.autograd.grad(outputs, leaves, dys)]

        expected = step()
        assert all(map(torch.equal, expected, step()))
        with torch.cuda.graph(graph, stream=side):
            captured = step()
        for _ in range(2):
            for result in captured:
                result.detach().fill_(float("nan"))
            graph.replay()
            assert all(map(torch.equal, captured, expected))
    torch.cuda.current_stream().wait_stream(side)
