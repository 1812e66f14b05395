"""A handful of rows, for which the weight stays in place: the bits of the same rows among more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from accuracy import make_inputs
from test_cpu_family import GATED, Case
from test_cpu_family import forward as family_forward
from test_cpu_kernels import DTYPES, Kernels

# Beyond the rows that are multiplied in place, and few enough to be in the same call's other form.
MANY = 56
# Of one pass, and of several, which have as many rows each or one more.
ROWS = (*range(1, 10), 12, 13, 25, 32, 48)
# Of less than a square, of several blocks, whole or not in both directions; several panels a task.
SIZES = [(7, 5), (31, 17), (64, 48), (130, 49), (545, 33), (1030, 70), (31, 1700), (1030, 1100)]
RMS_NORM = 1
# Below the normal numbers of float32: tile registers take them for zero.
TINY = 1e-38


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bits_are_those_of_the_rows_among_more(size: tuple[int, int], dtype: torch.dtype) -> None:
    kernels = Kernels(dtype)
    inputs = make_inputs(MANY, *size, dtype=dtype)
    y, mean, rstd = kernels.forward(inputs)
    for rows in ROWS:
        part = slice(MANY - rows, MANY)
        some = kernels.forward([inputs[0][part], *inputs[1:]])
        assert all(map(torch.equal, some, (y[part], mean[part], rstd[part]))), rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [*SIZES[:3], (530, 300), (1030, 129)], ids=str)
def test_gradients_have_the_bits_of_those_among_rows_without_gradient(
    size: tuple[int, int], dtype: torch.dtype
) -> None:
    kernels = Kernels(dtype)
    inputs = make_inputs(MANY, *size, dtype=dtype)
    _, mean, rstd = kernels.forward(inputs)
    grad_output = torch.randn(MANY, size[1]).to(dtype)
    for rows in range(1, 10):
        padded = grad_output.clone()
        padded[rows:] = 0
        dx, *others = kernels.backward(inputs, padded, mean, rstd)
        few = [inputs[0][:rows], *inputs[1:]]
        some = kernels.backward(few, grad_output[:rows], mean[:rows], rstd[:rows])
        assert all(map(torch.equal, some, (dx[:rows], *others))), rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_and_alignment_do_not_change_bits(dtype: torch.dtype) -> None:
    inputs = make_inputs(2, 1030, 600, dtype=dtype)
    grad_output = torch.randn(2, 600).to(dtype)
    first = Kernels(dtype).both(inputs, grad_output)
    others = [Kernels(dtype, threads) for threads in (1, 3, 16)]
    for kernels in [*others, Kernels(dtype, pool=True), Kernels(dtype, offset=3)]:
        assert all(map(torch.equal, first, kernels.both(inputs, grad_output)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [0, 2, 5 + GATED])
def test_the_rest_of_the_family_is_the_same(activation: int, dtype: torch.dtype) -> None:
    case = Case((MANY, 130, 99), dtype, RMS_NORM, residual=True, groups=1, activation=activation)
    t = case.tensors()
    many = family_forward(case, t)
    for rows in (1, 2, 5, 8, 30):
        rest = {name: t[name][:rows].clone() for name in ("x", "residual")}
        some = family_forward(replace(case, shape=(rows, 130, 99)), t | rest)
        for name, tensor in some.items():
            assert torch.equal(tensor, many[name][:rows]), (name, rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_below_the_normal_ones_count_as_they_do_among_more_rows(dtype: torch.dtype) -> None:
    x, gamma, beta, weight, _ = make_inputs(MANY, 130, 49, dtype=torch.float32)
    inputs = [t.to(dtype) for t in (x, gamma, beta, TINY * weight)]
    kernels = Kernels(dtype)
    y = kernels.forward([*inputs, None])[0]
    for rows in (1, 2, 8):
        some = kernels.forward([inputs[0][:rows], *inputs[1:], None])[0]
        assert torch.equal(some, y[:rows])
    # The mode that this takes does not outlast the call.
    assert torch.tensor([TINY]).mul(0.5).item() > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_in_its_row_and_column(dtype: torch.dtype, bad: float) -> None:
    kernels = Kernels(dtype)
    inputs = make_inputs(2, 70, 50, dtype=dtype)
    clean = kernels.forward(inputs)[0]
    inputs[0][1, 3] = bad
    inputs[3][9, 69], inputs[3][11, 0] = bad, bad
    y = kernels.forward(inputs, may_be_nan=True)[0]
    is_bad = torch.zeros(2, 50, dtype=torch.bool)
    is_bad[1], is_bad[:, 9], is_bad[:, 11] = True, True, True
    assert torch.equal(y[~is_bad], clean[~is_bad])
    assert not y[is_bad].isfinite().any()
