"""FP8 Linear layers of transformers, as they appear in a graph.

There are two kinds, which keep a weight's 8-bit values and its scales in two parameters. Those of
compressed tensors (`CompressedTensorsFP8Linear`) are PyTorch's ops: rows are quantized, and
`scaled_mm` multiplies. Those of FineGrainedFP8 (`FP8Linear`) are one op of a Triton kernel, which
quantizes its rows itself. transformers is never imported.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fused_norm.models.calls import Left
from fused_norm.models.forms import form
from fused_norm.models.values import dtype, is_number, is_tensor, shape
from fused_norm.recipes import BLOCK, E4M3

# PyTorch's number of a scale for each row.
_OF_ROWS = [1]
_OF_BLOCKS = "w8a8_block_dynamic_fp8_matmul"
_LARGEST = 448.0


class Parts(NamedTuple):
    """The parts of a layer.

    Attributes:
        x: Its input.
        qdata: The weight's 8-bit values, `[N, K]`.
        scale: The weight's scales.
        bias: Of shape `[N]`, or None.
        recipe: One of RECIPES.
        inner: The nodes that quantize x, and the transposed weight.
    """

    x: Node
    qdata: Node
    scale: Node
    bias: Any
    recipe: str
    inner: set[Node]


def is_product(node: Node) -> bool:
    """Return whether a node may be the product of such a layer."""
    if node.op != "call_function":
        return False
    return node.target is torch._scaled_mm_v2 or _is_of_blocks(node.target)


def _is_of_blocks(target: Any) -> bool:
    # The Hub adds a digest of the kernel's sources to the namespace.
    if not isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return False
    namespace, name = str(target).split(".")[:2]
    return name == _OF_BLOCKS and "finegrained_fp8" in namespace


def parts(node: Node) -> Parts:
    """Return the parts of a layer.

    Args:
        node: Its product.

    Raises:
        Left: If we have no such recipe.
    """
    found = _of_rows(node) if node.target is torch._scaled_mm_v2 else _of_blocks(node)
    for each in (found.qdata, found.scale):
        if each.op not in ("placeholder", "get_attr"):
            raise Left("a weight that is no parameter")
    if dtype(found.qdata) is not E4M3 or dtype(found.scale) is not torch.float32:
        raise Left(f"a weight of {dtype(found.qdata)} with scales of {dtype(found.scale)}")
    return found


def _of_rows(node: Node) -> Parts:
    """Return the parts of a layer whose rows PyTorch's ops quantize, with a scale for each."""
    names = "q weight scale_a kind_a swizzle_a scale_b kind_b swizzle_b bias out_dtype dims fast"
    given: dict[str, Any] = dict(zip(names.split(), node.args, strict=False))
    kinds, swizzles = ((given.get(f"{n}_a"), given.get(f"{n}_b")) for n in ("kind", "swizzle"))
    plain = kinds == (_OF_ROWS, _OF_ROWS) and swizzles == ([], []) and not given.get("dims")
    if node.kwargs or not plain:
        raise Left("scales of another kind than one for each row")
    x, scales, inner = _quantized_rows(given["q"])
    column, turned = given["scale_a"][0], form(given["weight"])
    (scale,) = given["scale_b"]
    if not _is_column(column, scales):
        raise Left("rows that are scaled otherwise than they were quantized")
    if turned.kind not in ("t", "transpose") or not is_tensor(turned["input"]):
        raise Left("a weight that is no transposed parameter")
    qdata = turned["input"]
    if tuple(shape(scale)) != (1, shape(qdata)[0]):
        raise Left("scales of a weight of another shape")
    inner |= {column, given["weight"]}
    return Parts(x, qdata, scale, given.get("bias"), "rowwise", inner)


def _quantized_rows(q: Node) -> tuple[Node, Node, set[Node]]:
    """Return the input of `quantize_fp8_per_row`, its scales, and its nodes.

    Raises:
        Left: If the nodes are other ops.
    """
    clamped = form(q)["input"]
    divided = form(clamped)["input"]
    wide, column = form(divided)["input"], form(divided)["other"]
    scales = form(column)["input"]
    safe = form(scales)["input"]
    chain = [(q, "cast"), (clamped, "clamp"), (divided, "div"), (wide, "cast"), (scales, "div")]
    if not all(form(each).kind == kind for each, kind in chain):
        raise Left("rows that are quantized in another way")
    bounds = [is_number(form(clamped)[end], sign * _LARGEST) for end, sign in _ENDS]
    above: Any = None
    maxima: Any = None
    ones: Any = None
    if _is(safe, torch.where) and len(safe.args) == 3:
        above, maxima, ones = safe.args
    magnitudes: Any = maxima.args[0] if _is(maxima, "amax") else None
    if not (
        all(bounds)
        and dtype(q) is E4M3
        and dtype(wide) is torch.float32
        and _is_column(column, scales)
        and is_number(form(scales)["other"], _LARGEST)
        and _is(above, operator.gt)
        and above.args == (maxima, 0)
        and _is(ones, torch.ones_like)
        and ones.args[0] is maxima
        and maxima.kwargs == {"dim": -1}
        and _is(magnitudes, "abs")
        and magnitudes.args == (wide,)
    ):
        raise Left("rows that are quantized in another way")
    nodes = {q, clamped, divided, wide, column, scales, safe, above, maxima, ones, magnitudes}
    return form(wide)["input"], scales, nodes


_ENDS = (("min", -1), ("max", 1))


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target == target


def _is_column(node: Any, scales: Node) -> bool:
    """Return whether a node is scales `[M]` as a column."""
    f = form(node)
    return f.kind == "view" and f["input"] is scales and tuple(shape(node)[1:]) == (1,)


def _of_blocks(node: Node) -> Parts:
    """Return the parts of a layer whose kernel quantizes rows, with scales of 128 elements."""
    names = ("A", "B", "Bs", "block_size", "output_dtype")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False))
    given |= node.kwargs
    if list(given["block_size"]) != [BLOCK, BLOCK]:
        raise Left(f"blocks of {list(given['block_size'])}")
    x, qdata, scale = given["A"], given["B"], given["Bs"]
    return Parts(x, qdata, scale, None, "blockwise", set())
