"""Where a call can be in a graph: after all its operands, before all readers of its results."""

from __future__ import annotations

from torch.fx import Node

from fused_norm.models.calls import FusedCall, Left
from fused_norm.models.flow import Flow, reads
from fused_norm.models.forms import above, form
from fused_norm.models.norms import Norm
from fused_norm.models.values import value


def place_of(flow: Flow, norm: Norm, call: FusedCall, x: Node, dead: set[Node]) -> Node:
    """Return the node before which a call can be inserted.

    Args:
        flow: What is known of the graph.
        norm: The norm.
        call: The call.
        x: The input of the norm.
        dead: The nodes that all calls of the norm replace.

    Raises:
        Left: If there is no such place.
    """
    nodes = _operands(norm, call, x)
    replaced = call.results()
    if call.total is not None and call.returns_sum:
        replaced.append(call.total[2])
    layers = {product.node for product in call.reading.products}
    first = min(layers)
    readers = {u for r in replaced for u in r.users if u not in dead}
    if call.norm is not None:
        # The rows are known under the names of all nodes that leave them unchanged.
        rows = above(call.norm, casts=False)
        names = [node for node in {*dead, rows, call.norm} if above(node, casts=False) is rows]
        readers |= {u for node in names for u in node.users if u not in dead}
    earliest = min([first, *readers])
    late = [node for node in nodes if node >= earliest]
    if late:
        raise Left(f"{late[0]} is computed after a result is read by {earliest}")
    if not flow.are_under_same_modes([first, earliest]):
        raise Left("read under another autocast or recording of gradients")
    activation = call.activated.inner if call.activated else set()
    read = reads(norm.inner | call.inner(), nodes)
    results = activation.union(*(product.inner for product in call.reading.products))
    if not flow.are_recorded_alike({first, *read}):
        raise Left("a part of it is computed without recording gradients")
    begin = min(read)
    # A node between an operand and the call may be a copy that is written.
    nodes = [*nodes, *(read - results)]
    if flow.is_written(
        nodes, min(begin, earliest), max(layers | activation | {earliest}), but=dead
    ):
        raise Left("an operand is written in between")
    trains = any(value(node).requires_grad for node in replaced)
    if trains and flow.is_written(nodes, begin, but=dead):
        raise Left("an operand that the backward needs is written later")
    return earliest


def _operands(norm: Norm, call: FusedCall, x: Node) -> list[Node]:
    """Return the nodes that a call reads."""
    found = [x] if call.total is None else [*call.total[:2]]
    found += [norm.gamma, norm.beta]
    for product in call.products():
        found += [product.weight, product.bias]
    for view in call.reading.views:
        found += [v for v in view.all_input_nodes if v is not form(view)["input"]]
    if call.reading.modulation is not None:
        found += [call.reading.modulation.scale, call.reading.modulation.shift]
    if call.activated is not None:
        found.append(call.activated.residual)
    return [node for node in found if isinstance(node, Node)]
