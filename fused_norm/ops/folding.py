"""Calls on frozen parameters: a weight's fold is made when a plan first wants it, and kept."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm.activations import GATED, number_of
from fused_norm.call import contexts, frozen
from fused_norm.call.frozen import Frozen
from fused_norm.call.offload import Keys
from fused_norm.call.prepared import Prepared
from fused_norm.chain import library
from fused_norm.composition import Operands, Spec
from fused_norm.ops.registration import SPEC_SCHEMA, TENSORS_SCHEMA, define

_forward_folded = define(
    f"norm_linear_forward_folded({TENSORS_SCHEMA}, {SPEC_SCHEMA}, bool keeps, "
    "Tensor? fold_weight, Tensor? fold_sums, int fold_activation, bool is_offloaded) -> Tensor[]"
)
_wanted_fold = define(f"norm_linear_wanted_fold({TENSORS_SCHEMA}, {SPEC_SCHEMA}) -> int")
_fold = define(
    "norm_linear_fold(Tensor? gamma, Tensor? beta, Tensor[] weights, Tensor?[] biases, "
    "str normalization, float weight_offset, int activation) -> Tensor[]"
)


def _tell_changes(chain: ctypes.CDLL) -> None:
    frozen.tell_changes(lambda level: chain.chain_set_frozen(level))


library.after_loading.append(_tell_changes)


def folded(spec: Spec, t: Operands, keeps: bool, arguments: Sequence[Any]) -> list[Tensor]:
    """Compute a call whose parameters may be frozen.

    Args:
        spec: What to compute.
        t: The tensors.
        keeps: Whether a backward follows.
        arguments: The arguments of the op `norm_linear_forward`.

    Raises:
        RuntimeError: If values that the call needs have left the device.
    """
    own = (t.gamma, t.beta, *(v for pair in zip(t.weights, t.biases, strict=True) for v in pair))
    may_fold = not keeps and t.x.is_cuda and t.x.dtype is torch.bfloat16
    found = contexts.find(own) if may_fold else None
    if found is None:
        return _computed(None, own, spec, t, arguments)
    with found[0].offload.turn():
        # It may have been thawed, or its keys changed, while this call waited for the lock.
        return _computed(contexts.find(own), own, spec, t, arguments)


def _computed(
    found: tuple[Frozen, Keys] | None,
    own: Sequence[Tensor | None],
    spec: Spec,
    t: Operands,
    arguments: Sequence[Any],
) -> list[Tensor]:
    made = None
    if found is not None and found[0].offload.has_any_of(found[1]):
        # Whatever the plan would choose: only a fold has the values.
        for activation in (number_of(spec.activation), 0):
            made = made or _prepared(*found, spec, t, activation)
    elif found is not None:
        activation = _wanted_fold(*arguments[:-1])
        if activation >= 0:
            made = _prepared(*found, spec, t, activation)
    if made is None:
        if frozen.has_offloaded():
            # One by one: other parameters of the call may not be frozen.
            for weight in (*t.weights, t.out_weight):
                frozen.require_values([weight])
        return list(_forward_folded(*arguments, None, None, -1, False))
    # Making it may have moved values.
    again = contexts.find(own)
    is_offloaded = again is not None and again[0].offload.has_any_of(again[1])
    return list(_forward_folded(*arguments, *made.tensors, made.activation, is_offloaded))


def _prepared(
    record: Frozen, keys: Keys, spec: Spec, t: Operands, activation: int
) -> Prepared | None:
    """Return the fold of frozen parameters, None if there is none and none can be made now."""
    name = ("fold", spec.normalization, spec.weight_offset, activation, spec.is_joined)

    def make() -> tuple[Tensor, ...]:
        is_gate = activation >= GATED
        count = len(t.weights) if is_gate or not spec.is_joined else 1
        layers = (t.gamma, t.beta, t.weights[:count], t.biases[:count])
        return tuple(_fold(*layers, spec.normalization, spec.weight_offset, activation))

    return record.prepared(name, keys, make, t.x.device, activation)
