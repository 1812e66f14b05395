"""Masks of constants: those that mask nothing, or what `is_causal` does, go; others stay."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from fused_norm.models.fuse import Options, fuse

BATCH, HEADS, LENGTH, FEATURES = 2, 4, 6, 8
Mask = Callable[[Tensor], Tensor]


def of_transformers(q: Tensor) -> Tensor:
    """The mask of BERT without padding in transformers 5.17, as it is traced."""
    rows = torch.arange(q.shape[-2], device=q.device) + 0
    return (rows[None, None, :, None] >= 0).expand(q.shape[0], -1, q.shape[-2], q.shape[-2])


def of_zeros(q: Tensor) -> Tensor:
    return torch.zeros(q.shape[-2], q.shape[-2], device=q.device)


def causal(q: Tensor) -> Tensor:
    rows = torch.arange(q.shape[-2], device=q.device)
    return rows[:, None] >= rows[None, :]


def causal_of_transformers(q: Tensor) -> Tensor:
    """The mask of Llama without padding in transformers 5.17, as it is traced."""
    batch, length = q.shape[0], q.shape[-2]
    position_ids = (torch.arange(length, device=q.device) + 0).unsqueeze(0).expand(batch, -1)
    before = position_ids[:, :1] - 1
    sequence = (torch.diff(position_ids, prepend=before, dim=-1) != 1).cumsum(-1)
    sample = torch.arange(batch, device=q.device)[:, None, None, None]
    rows = torch.arange(length, device=q.device) + 0
    row, column = rows[None, None, :, None], rows[None, None, None, :]
    mask = row.new_ones((), dtype=torch.bool)
    mask = mask & (column <= row).to(q.device)
    mask = mask & sequence[sample, row].__eq__(sequence[sample, column]).to(q.device)
    return mask.expand(batch, -1, length, length)


def causal_in_floats(q: Tensor) -> Tensor:
    zero = torch.zeros((), device=q.device)
    return torch.where(causal(q), zero, torch.full((), -torch.inf, device=q.device))


def not_quite_infinite(q: Tensor) -> Tensor:
    zero = torch.zeros((), device=q.device)
    return torch.where(causal(q), zero, torch.full((), -3e38, device=q.device))


def of_later_rows(q: Tensor) -> Tensor:
    rows = torch.arange(q.shape[-2], device=q.device)
    return rows[:, None] <= rows[None, :]


def without_itself(q: Tensor) -> Tensor:
    rows = torch.arange(q.shape[-2], device=q.device)
    return (rows[:, None] > rows[None, :]) | (rows[:, None] + rows[None, :] == 0)


def of_a_window(q: Tensor) -> Tensor:
    rows = torch.arange(q.shape[-2], device=q.device)
    return causal(q) & (rows[:, None] - rows[None, :] < q.shape[-2] - 1)


def of_one_sample(q: Tensor) -> Tensor:
    """Causal in the last sample alone."""
    samples = torch.arange(q.shape[0], device=q.device)[:, None, None, None]
    return causal(q) & (samples > 0) | (samples < 1)


def but_one(q: Tensor) -> Tensor:
    return torch.arange(q.shape[-2], device=q.device)[None] < q.shape[-2] - 1


def written(q: Tensor) -> Tensor:
    mask = torch.ones(q.shape[-2], q.shape[-2], device=q.device)
    mask = mask == 1
    mask[0, 1] = False
    return mask


def of_an_input(q: Tensor) -> Tensor:
    return (q[0, 0, :, :1] > -100.0).expand(q.shape[-2], q.shape[-2])


def by_chance(q: Tensor) -> Tensor:
    return torch.rand(q.shape[-2], q.shape[-2], device=q.device) >= 0


def attention(mask: Mask, q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask(q))


def compiled(function: Any, *inputs: Tensor, **options: Any) -> tuple[Any, list[Any]]:
    """Return what a compiled function gives, and the masks of its attention."""
    left: list[Any] = []

    def backend(module: GraphModule, _: Any) -> Any:
        failures: list[str] = []
        fuse(module, Options(), failures)
        assert not failures
        graphs = [each.graph for each in module.modules() if isinstance(each, GraphModule)]
        for node in (node for graph in graphs for node in graph.nodes):
            if node.target is F.scaled_dot_product_attention:
                left.append(node.kwargs.get("attn_mask", (*node.args, None, None)[3]))
        return module.forward

    torch.compiler.reset()
    return torch.compile(function, backend=backend, **options)(*inputs), left


def rows() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(BATCH, HEADS, LENGTH, FEATURES)


@pytest.mark.parametrize("mask", [of_transformers, of_zeros])
def test_masks_that_mask_nothing_go(mask: Mask) -> None:
    q, call = rows(), functools.partial(attention, mask)
    found, left = compiled(call, q)
    assert left == [None]
    torch.testing.assert_close(found, call(q))


@pytest.mark.parametrize("mask", [causal, causal_of_transformers, causal_in_floats])
@pytest.mark.parametrize("is_given", [False, True])
def test_what_is_causal_is_said_to_be(mask: Mask, is_given: bool) -> None:
    def call(q: Tensor) -> Tensor:
        if is_given:
            return F.scaled_dot_product_attention(q, q, q, mask(q), 0.0, False)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask(q))

    q = rows()
    found, left = compiled(call, q)
    assert left == [None]
    torch.testing.assert_close(found, call(q))


_OTHERS = [not_quite_infinite, of_later_rows, without_itself, of_a_window, of_one_sample]


@pytest.mark.parametrize("mask", [*_OTHERS, but_one, written, of_an_input, by_chance])
def test_all_others_stay(mask: Mask) -> None:
    q, call = rows(), functools.partial(attention, mask)
    found, (left,) = compiled(call, q)
    assert left is not None
    torch.testing.assert_close(found, call(q))


def test_rows_of_another_length_are_not_said_to_be_causal() -> None:
    def call(q: Tensor) -> Tensor:
        columns = torch.arange(LENGTH, device=q.device)
        mask = columns[: LENGTH // 2, None] >= columns[None]
        return F.scaled_dot_product_attention(q[..., : LENGTH // 2, :], q, q, attn_mask=mask)

    q = rows()
    found, (left,) = compiled(call, q)
    assert left is not None
    torch.testing.assert_close(found, call(q))


@pytest.mark.parametrize("mask", [causal, causal_of_transformers, of_transformers])
def test_a_checkpoint_is_handed_no_mask_that_is_known(mask: Mask) -> None:
    found, left, expected = checkpointed(mask)
    assert left == [None, None]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mask", [of_later_rows, of_an_input, written])
def test_a_checkpoint_is_handed_all_others(mask: Mask) -> None:
    found, left, expected = checkpointed(mask)
    assert len(left) == 2
    assert None not in left
    torch.testing.assert_close(found, expected)


def checkpointed(mask: Mask) -> tuple[list[Tensor], list[Any], list[Tensor]]:
    """Return output and gradient of two checkpoints, compiled and not, and the masks left."""

    def block(q: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q * 2, attn_mask=mask).sin()

    def call(q: Tensor) -> Tensor:
        its = mask(q)
        for _ in range(2):
            q = checkpoint(block, q, its, use_reentrant=False)
        return q

    results: list[list[Tensor]] = []
    left: list[Any] = []
    for is_compiled in (False, True):
        q = rows().requires_grad_()
        y, left = compiled(call, q) if is_compiled else (call(q), left)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), q)])
    return results[1], left, results[0]


def test_a_mask_by_its_place_goes() -> None:
    def call(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, of_transformers(q))

    q = rows()
    found, left = compiled(call, q)
    assert left == [None]
    torch.testing.assert_close(found, call(q))


def test_a_mask_that_others_read_stays_for_them() -> None:
    def call(q: Tensor) -> tuple[Tensor, Tensor]:
        mask = of_transformers(q)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask), mask

    q = rows()
    (found, mask), left = compiled(call, q)
    assert left == [None]
    torch.testing.assert_close(found, call(q)[0])
    assert torch.equal(mask, call(q)[1])


def test_a_mask_of_too_many_rows_is_an_error_still() -> None:
    def call(q: Tensor) -> Tensor:
        one = q[:1]
        return F.scaled_dot_product_attention(one, one, one, attn_mask=of_transformers(q))

    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        compiled(call, rows())


def test_sizes_that_are_not_known_keep_a_mask() -> None:
    q, call = rows(), functools.partial(attention, of_transformers)
    found, (left,) = compiled(call, q, dynamic=True)
    assert left is not None
    torch.testing.assert_close(found, call(q))
