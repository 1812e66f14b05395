"""Heads on DTensors whose vocabulary is sharded: each process has some of the classes.

Along one dimension of the mesh the weight is sharded by classes, and a bias with it; x is gathered
if it is sharded. A process computes its classes' gradients and a partial sum of the gradient of x.
Along the other dimensions all processes compute the same. Other placements, and errors, are left to
DTensor and PyTorch's ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fused_norm.cross_entropy import Head, Loss
from fused_norm.ops.sharding import cast_dtensor


def over_shards(
    run: Callable[[Head, Loss], tuple[Tensor, Tensor]], t: Head, loss: Loss
) -> tuple[Tensor, Tensor] | None:
    """Return the results of a call on DTensors, None if it is left to PyTorch's ops.

    The target and the class weights may be ordinary tensors, replicated on all processes.

    Args:
        run: Computes a call on the local tensors.
        t: Tensors that fit together.
        loss: What to compute.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    product = [cast_dtensor(v) for v in (t.x, t.weight, t.bias) if v is not None]
    if not all(isinstance(v, DTensor) for v in product):
        return None
    mesh = product[0].device_mesh
    others = [cast_dtensor(v) for v in t[3:] if isinstance(v, DTensor)]
    if any(v.device_mesh != mesh for v in (*product, *others)):
        return None
    places = product[1].placements
    split = [axis for axis, place in enumerate(places) if not place.is_replicate()]
    if len(split) != 1 or type(places[split[0]]) is not Shard or places[split[0]].dim != 0:
        return None
    (axis,) = split
    replicated = [Replicate()] * mesh.ndim

    def local(tensor: Any, wanted: list[Any], of_gradient: list[Any]) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        if list(tensor.placements) != wanted:
            tensor = tensor.redistribute(placements=wanted)
        return tensor.to_local(grad_placements=of_gradient)

    summands: list[Any] = list(replicated)
    summands[axis] = Partial()
    mine = Head(
        local(t.x, replicated, summands),
        *(local(v, list(places), list(places)) for v in (t.weight, t.bias)),
        *(local(v, replicated, replicated) for v in t[3:]),
    )
    classes = t.weight.shape[0]
    # Like torch.chunk: the last processes may have fewer classes, or none.
    each = -(-classes // mesh.size(axis))
    shared = loss._replace(
        group=mesh.get_group(axis).group_name,
        first=min(mesh.get_local_rank(axis) * each, classes),
        classes=classes,
    )
    result, logsumexp = (
        DTensor.from_local(v, mesh, replicated, run_check=False) for v in run(mine, shared)
    )
    return result, logsumexp
