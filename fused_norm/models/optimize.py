"""Fuses the norms of programs from torch.export."""

from __future__ import annotations

import copy
import operator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fused_norm.models.fuse import Options, fuse_graph
from fused_norm.models.values import computed, value

if TYPE_CHECKING:
    from torch.export import ExportedProgram

# The targets that exported programs may have.
_OF_PROGRAMS: Any = (torch._ops.OpOverload, torch._ops.HigherOrderOperator)


def optimize(program: ExportedProgram, *, rounding: str = "once") -> ExportedProgram:
    """Return a copy of an exported program with its norms fused.

    Inputs, outputs, parameters and their names do not change. The result contains this package's
    ops, so `import fused_norm` before you load it.

    Args:
        program: A result of `torch.export.export`, with dynamic shapes or without.
        rounding: `"once"`, or `"model"` to round wherever the model does.

    Returns:
        A program for `torch._inductor.aoti_compile_and_package`, for `torch.export.save`, or to
        call as `.module()`.

    Raises:
        ValueError: If the rounding is unknown.
    """
    options = Options(rounding=rounding)
    module = copy.deepcopy(program.graph_module)
    for node, original in zip(module.graph.nodes, program.graph.nodes, strict=True):
        # Copying renames nodes named like a builtin, such as `input`; the signature has the name.
        node.name = original.name
    before, own = _outputs(module.graph), set(module.graph.nodes)
    for node in list(module.graph.nodes):
        # These checks read every tensor, including those that are about to be removed.
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)
    if fuse_graph(module.graph, options):
        for node in list(module.graph.nodes):
            # A program holds only registered ops, whatever a pass added to its graph.
            if node not in own and not _is_of_programs(node):
                _lower(module.graph, node)
        module.graph.eliminate_dead_code()
        module.graph.lint()
    module.recompile()
    signature = copy.deepcopy(program.graph_signature)
    for old, new in zip(before, _outputs(module.graph), strict=True):
        if old != new:
            signature.replace_all_uses(old, new)
    return program._update(module, signature)


def _is_of_programs(node: Node) -> bool:
    if node.op not in ("call_function", "call_method") or node.target is operator.getitem:
        return True
    return isinstance(node.target, _OF_PROGRAMS)


def _outputs(graph: Graph) -> list[str]:
    """Return the names of a graph's results, which a program's signature repeats."""
    results: Any = graph.output_node().args[0]
    return [getattr(each, "name", "") for each in results]


def _lower(graph: Graph, node: Node) -> None:
    """Replace a call of ours by the registered ops that it consists of."""
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = list(node.all_input_nodes)

    def run(*tensors: Any) -> Any:
        given = dict(zip(inputs, tensors, strict=True))
        return computed(node, given.__getitem__)

    values = [value(v) for v in inputs]
    mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)
    with torch.no_grad(), mode or nullcontext():
        fragment = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*values)
    known: dict[Node, Any] = {}
    given = iter(inputs)
    with graph.inserting_before(node):
        for each in fragment.graph.nodes:
            if each.op == "placeholder":
                known[each] = next(given)
            elif each.op != "output":
                known[each] = graph.node_copy(each, known.__getitem__)
    _give(node, map_arg(fragment.graph.output_node().args[0], known.__getitem__), graph)


def _give(node: Node, results: Any, graph: Graph) -> None:
    """Replace a node, and the items that are read from it, by results."""
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            _give(user, results[user.args[1]], graph)
    graph.erase_node(node)
