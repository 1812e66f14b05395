"""Calls on DTensors: each process runs the kernels on its shards, and wraps the results.

Along each dimension of a mesh a call takes one of three strategies:

- rows: x is sharded by its rows, and so are the results; parameters are replicated, and a process
  computes a partial sum of their gradients.
- columns: the weights are sharded by their outputs, and so are the products; x is gathered if it is
  sharded, and a process computes a partial sum of the gradients of x and the norm's parameters.
  A second weight is sharded by its inputs, and its product is a partial sum.
- replicated: every process computes everything.

Anything else is left to DTensor and PyTorch's ops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm.activations import is_gate
from fused_norm.call.memory import ORDINARY
from fused_norm.composition import NAMED, NAMES, Operands, Spec, flat, unflat

_LIKE_X = ("x", *NAMES["rows"], "out_residual")
_COLUMNS, _REPLICATED = "columns", "replicated"


def has_dtensor(tensors: Sequence[Any]) -> bool:
    """Return whether a call has a DTensor among its tensors."""
    if ORDINARY.issuperset(map(type, tensors)):
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(v, module.DTensor) for v in tensors)


def over_shards(
    run: Callable[[Spec, Operands], list[Tensor]], spec: Spec, t: Operands
) -> list[Tensor] | None:
    """Return the results of a call on DTensors, None if it is left to PyTorch's ops.

    Args:
        run: Computes a call on the local tensors.
        spec: What to compute.
        t: The tensors.
    """
    from torch.distributed.tensor import DTensor

    tensors = [v for v in flat(t) if v is not None]
    if not all(isinstance(v, DTensor) for v in tensors):
        return None
    mesh = cast_dtensor(t.x).device_mesh
    if any(v.device_mesh != mesh for v in map(cast_dtensor, tensors)):
        return None
    strategies = [_strategy(spec, t, axis) for axis in range(mesh.ndim)]
    if None in strategies or not t.x.dim() or any(w.dim() != 2 for w in t.weights):
        return None
    last = t.out_weight is not None and _COLUMNS in strategies
    # Bias and residual are added to a product after its partial sums have been reduced.
    inner = t._replace(out_bias=None, out_residual=None) if last else t
    results = run(spec, _local(strategies, inner))
    count = len(results) - spec.returns_sum - spec.returns_norm
    outputs = [
        _of_shards(y, t.x, size, [_output_placement(strategy, t) for strategy in strategies])
        for y, size in zip(results, _output_sizes(spec, t), strict=False)
    ]
    if last:
        for summand in (t.out_bias, t.out_residual):
            outputs[0] = outputs[0] if summand is None else outputs[0] + summand
    is_first = all(
        mesh.get_local_rank(axis) == 0
        for axis, strategy in enumerate(strategies)
        if strategy == _COLUMNS
    )
    for extra in results[count:]:
        if _COLUMNS in strategies:
            # It is replicated, and the gradient of x is the sum of those of all processes.
            extra = _GradientOnce.apply(extra, is_first)
        places = [_row_placement(strategy) for strategy in strategies]
        outputs.append(_of_shards(extra, t.x, t.x.shape[-1], places))
    return outputs


def cast_dtensor(tensor: Any) -> Any:
    """Return a DTensor typed as Any: its type lacks attributes for mypy."""
    return tensor


def _strategy(spec: Spec, t: Operands, axis: int) -> Any:
    """Return the strategy along a dimension of the mesh: a dimension of x for rows, or None."""
    tensors = [cast_dtensor(v) for v in flat(t) if v is not None]
    places = [v.placements[axis] for v in tensors]
    if not all(p.is_replicate() or p.is_partial() or p.is_shard() for p in places):
        return None
    weights = [cast_dtensor(w).placements[axis] for w in t.weights]
    last = None if t.out_weight is None else cast_dtensor(t.out_weight).placements[axis]
    if any(p.is_shard() for p in weights):
        # Of concatenated weights, only those of a gate have columns that belong together.
        is_split = spec.is_joined and len(t.weights) > 1
        fits = (
            is_gate(spec.activation) == is_split
            and all(p.is_shard(0) for p in weights)
            and (last is None or last.is_shard(1))
        )
        return _COLUMNS if fits else None
    if not all(p.is_replicate() for p in (*weights, *([] if last is None else [last]))):
        return None
    for tensor in (getattr(t, name) for name in _LIKE_X):
        place = None if tensor is None else cast_dtensor(tensor).placements[axis]
        if place is not None and place.is_shard() and place.dim % t.x.dim() != t.x.dim() - 1:
            return place.dim % t.x.dim()
    return _REPLICATED


def _local(strategies: Sequence[Any], t: Operands) -> Operands:
    """Return the shards of a call's tensors."""
    names = [*NAMED, *["weights"] * len(t.weights), *["biases"] * len(t.biases)]
    return unflat(
        [
            v
            if v is None
            else _shard(v, [_placements(strategy, name, v, t.x) for strategy in strategies])
            for name, v in zip(names, flat(t), strict=True)
        ]
    )


def _placements(strategy: Any, name: str, tensor: Tensor, x: Tensor) -> tuple[Any, Any]:
    """Return the placements of a tensor and of its gradient."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if strategy == _REPLICATED:
        return Replicate(), Replicate()
    if strategy == _COLUMNS:
        if name in ("weights", "biases"):
            return Shard(0), Shard(0)
        if name == "out_weight":
            return Shard(1), Shard(1)
        return Replicate(), Partial()
    if name in _LIKE_X or name in NAMES["statistics"]:
        return Shard(strategy), Shard(strategy)
    if name in NAMES["groups"]:
        dim = strategy - (x.dim() - tensor.dim())
        if dim >= 0 and tensor.shape[dim] == x.shape[strategy]:
            return Shard(dim), Shard(dim)
    return Replicate(), Partial()


def _shard(tensor: Tensor, places: Sequence[tuple[Any, Any]]) -> Tensor:
    dtensor = cast_dtensor(tensor)
    wanted = [place for place, _ in places]
    if list(dtensor.placements) != wanted:
        dtensor = dtensor.redistribute(placements=wanted)
    local: Tensor = dtensor.to_local(grad_placements=[grad for _, grad in places])
    return local


def _output_sizes(spec: Spec, t: Operands) -> list[int]:
    if t.out_weight is not None:
        return [t.out_weight.shape[0]]
    sizes = [weight.shape[0] for weight in t.weights]
    sizes = [sum(sizes)] if spec.is_joined else sizes
    return [size // 2 for size in sizes] if is_gate(spec.activation) else sizes


def _output_placement(strategy: Any, t: Operands) -> Any:
    from torch.distributed.tensor import Partial, Shard

    if strategy != _COLUMNS:
        return _row_placement(strategy)
    return Shard(t.x.dim() - 1) if t.out_weight is None else Partial()


def _row_placement(strategy: Any) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    return Replicate() if strategy in (_COLUMNS, _REPLICATED) else Shard(strategy)


def _of_shards(local: Tensor, x: Tensor, features: int, places: Sequence[Any]) -> Tensor:
    """Return the DTensor of `[..., features]` that a shard belongs to."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*x.shape[:-1], features))
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * size)
    found: Tensor = DTensor.from_local(
        local, cast_dtensor(x).device_mesh, places, shape=shape, stride=tuple(stride)
    )
    return found


class _GradientOnce(torch.autograd.Function):
    """The identity, which passes the gradient on in one process alone."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, is_first: bool) -> Tensor:
        """Return the tensor."""
        ctx.is_first = is_first
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """Return the gradient, or zeros."""
        return grad_output if ctx.is_first else torch.zeros_like(grad_output), None
