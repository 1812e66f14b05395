"""Linear layers whose output a model reads only in parts: queries, keys and values of one layer.

Autograd concatenates the gradients of the parts to that of the output, a pass of its own. A call
that returns the parts takes their gradients as they are.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from fused_norm import recipes
from fused_norm.activations import PLAIN
from fused_norm.call.record import MOST_PARTS
from fused_norm.chain.kernels import ALIGNMENT
from fused_norm.models.costs import count
from fused_norm.models.flow import Flow
from fused_norm.models.forms import form, is_noop
from fused_norm.models.readers import Product
from fused_norm.models.values import are_same, is_plain, is_tensor, shape, value
from fused_norm.models.views import is_permutation, order_of
from fused_norm.models.writes import written
from fused_norm.ops.eight_bits import MULTIPLE, serves
from fused_norm.ops.operands import adds_up_gradients, hint

# Measurements switch this off.
SPLITS = True
# A tile's columns: a smaller part fills none.
_FEWEST_FEATURES = 128
# Up to this many elements of the output, concatenating takes no longer than starting a kernel for
# the gradient of each part of the weight.
_FEWEST_ELEMENTS = 1 << 22
# Readers whose gradients PyTorch's compiler writes where they are concatenated, at no cost.
_BY_ELEMENT = {
    *("add", "sub", "mul", "div", "addcmul", "pow", "neg", "clamp", "sigmoid", "tanh", "erf"),
    *("cast", "dropout", *PLAIN),
}
_VIEWS = {"view", "permute", "transpose", "getitem", "select", "slice", "narrow", "expand"}
_VIEWS |= {"contiguous", "clone", "unbind", "chunk", "split"}
_WHOLE = slice(None)


class Picked(NamedTuple):
    """A node that reads consecutive features of an output, and how it is made from these alone.

    Attributes:
        node: The node.
        start: The first feature.
        stop: The one after the last.
        sizes: Of the dimensions into which the features are split; at least one.
        order: Which dimension each of the node is, before they change places.
    """

    node: Node
    start: int
    stop: int
    sizes: tuple[int, ...]
    order: tuple[int, ...]


@dataclass
class OutputParts:
    """The parts of an output.

    Attributes:
        sizes: The features of each.
        picked: The nodes that read one, in the order of the graph.
        inner: All nodes between the output and the readers of its parts.
    """

    sizes: tuple[int, ...] = ()
    picked: list[Picked] = field(default_factory=list)
    inner: set[Node] = field(default_factory=set)

    def results(self, parts: Sequence[Node], emit: Callable[..., Node]) -> list[Node]:
        """Emit what replaces each of the nodes that read a part.

        Args:
            parts: The parts, of shapes `[..., size]`.
            emit: Adds a node to the graph.
        """
        ends = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        found = []
        for picked in self.picked:
            node = parts[ends.index(picked.start)]
            if len(picked.sizes) > 1:
                node = emit("unflatten", node, -1, picked.sizes)
            if picked.order != tuple(range(len(picked.order))):
                node = emit("permute", node, picked.order)
            found.append(node)
        return found


class _Place(NamedTuple):
    """Where the features of an output are in a view of it.

    Attributes:
        dims: For each dimension of the view, which it is of those that the output is split into.
        sizes: Of the dimensions into which the features are split.
        first: The first of these dimensions.
    """

    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int

    @property
    def column(self) -> int:
        """The outermost dimension of the features, in the view."""
        return self.dims.index(self.first)


def splits_outputs(x: Tensor, sizes: Sequence[int], is_modulated: bool, recipe: str | None) -> bool:
    """Return whether a call returns its output in parts, where a model splits it in training.

    Tests replace this function.

    Args:
        x: The input of the norm, of shape `[..., K]`, on its device.
        sizes: The features of each part.
        is_modulated: Whether the normalized rows are.
        recipe: The call's FP8 recipe, or None.
    """
    if not SPLITS or not x.is_cuda or len(sizes) > MOST_PARTS:
        return False
    if recipe is not None:
        how = recipes.find(recipe)
        scalings = how.grad.scaling, how.weight_for_dgrad.scaling
        # A product in bfloat16 would read the whole gradient, and so do kernels for blocks.
        is_quantized = how.has_fp8_wgrad and how.grad.scaling in ("row", "tensor")
        return is_quantized and x.dtype is torch.bfloat16 and serves(x, *scalings)
    rows = count(x) // max(hint(x.shape[-1]), 1)
    is_large = rows * sum(sizes) >= _FEWEST_ELEMENTS
    return is_large and adds_up_gradients(x, sizes, not is_modulated)


def find_parts(
    product: Product, x: Node, is_modulated: bool, recipe: str | None, flow: Flow
) -> OutputParts | None:
    """Return the parts in which a Linear layer's output is read, None if a call should return it.

    Args:
        product: The layer.
        x: Its input, before the norm.
        is_modulated: Whether its input is modulated after the norm.
        recipe: The FP8 recipe of its call, or None.
        flow: What is known of the graph.
    """
    out, weight = product.out, product.weight
    given = [value(v) for v in (out, x, weight, product.bias) if v is not None]
    if product.is_transposed or not all(map(is_plain, given)):
        return None
    trains = flow.records_gradients(product.node) and value(out).requires_grad
    if not (trains and value(weight).requires_grad):
        return None
    N = shape(out)[-1]
    if not isinstance(N, int) or value(out).dtype is not value(x).dtype or not _is_dense(out):
        return None
    found = OutputParts()
    last = value(out).dim() - 1
    if not _follow(out, _Place(tuple(range(last + 1)), (N,), last), found, flow):
        return None
    found.picked.sort()
    found.sizes = _sizes(found.picked, N) or ()
    elements = MULTIPLE if recipe else ALIGNMENT // value(out).itemsize
    sizes = (*found.sizes, shape(x)[-1])
    is_served = (
        1 < len(found.sizes) <= MOST_PARTS
        and all(isinstance(size, int) and size % elements == 0 for size in sizes)
        and min(found.sizes) >= _FEWEST_FEATURES
        and any(_needs_memory(picked.node) for picked in found.picked)
        and not _is_seen(out, flow)
        and flow.are_under_same_modes([product.node, *found.inner])
        and splits_outputs(value(x), found.sizes, is_modulated, recipe)
    )
    return found if is_served else None


def _is_dense(node: Node) -> bool:
    sizes, strides = value(node).shape, value(node).stride()
    step: Any = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if not (are_same(size, 1) or are_same(stride, step)):
            return False
        step = step * size
    return True


def _is_seen(out: Node, flow: Flow) -> bool:
    """Return whether an output's memory is written, or is that of one of the graph's results."""
    memory = flow.reach([out])
    end = next(node for node in reversed(flow.graph.nodes) if node.op == "output")
    return flow.is_written([out], out) or bool(memory & flow.reach(end.all_input_nodes))


def _follow(node: Node, place: _Place, found: OutputParts, flow: Flow) -> bool:
    """Find the readers of parts of a view of the output; return whether there are no others."""
    for user in node.users:
        if written(user):
            return False
        f = form(user)
        found.inner.add(user)
        if f.kind in ("split", "chunk", "unbind"):
            if not _split(user, node, place, found):
                return False
            continue
        bounds = _bounds(user, node, place)
        if bounds is not None:
            start, stop, keeps = bounds
            found.picked.append(_picked(user, place, start, stop, keeps))
            continue
        after = _after(user, node, place)
        if after is None or flow.reach([user]) != flow.reach([node]):
            return False
        if not _follow(user, after, found, flow):
            return False
    return True


def _after(user: Node, node: Node, place: _Place) -> _Place | None:
    """Return where the features are after a view of whole rows; None for another reader."""
    if not is_tensor(user) or form(user)["input"] is not node:
        return None
    if is_noop(user):
        return place
    if is_permutation(user):
        order = order_of(user, value(user).dim())
        return place._replace(dims=tuple(place.dims[dim] for dim in order))
    rows, sizes = shape(node)[:-1], tuple(shape(user))
    parts = sizes[len(rows) :]
    is_split = (
        form(user).kind == "view"
        and value(user).dtype is value(node).dtype
        and len(place.sizes) == 1
        and place.dims == tuple(range(len(rows) + 1))
        and len(parts) > 1
        and are_same(tuple(rows), sizes[: len(rows)])
        and all(isinstance(size, int) for size in parts)
        and math.prod(parts) == place.sizes[0]
    )
    return _Place(tuple(range(len(sizes))), parts, len(rows)) if is_split else None


def _split(user: Node, node: Node, place: _Place, found: OutputParts) -> bool:
    """Find what reads results of `split`, `chunk` or `unbind`; return whether each reads one."""
    f = form(user)
    results = value(user)
    if f["input"] is not node or not isinstance(results, (list, tuple)):
        return False
    dim = f.args.get("dim", 0)
    if not isinstance(dim, int) or dim % value(node).dim() != place.column:
        return False
    keeps = f.kind != "unbind"
    sizes = [each.shape[place.column] if keeps else 1 for each in results]
    if not all(isinstance(size, int) for size in sizes):
        return False
    for item in user.users:
        index = item.args[1] if item.target is operator.getitem else None
        if not isinstance(index, int):
            return False
        index %= len(sizes)
        start = sum(sizes[:index])
        found.inner.add(item)
        found.picked.append(_picked(item, place, start, start + sizes[index], keeps))
    return True


def _bounds(user: Node, node: Node, place: _Place) -> tuple[int, int, bool] | None:
    """Return what a node picks of the outermost dimension, and whether that stays; or None."""
    f, size = form(user), place.sizes[0]
    if not is_tensor(user) or f["input"] is not node or is_noop(user):
        return None
    dim = f.args.get("dim", 0)
    if f.kind == "getitem":
        picked = _of_index(f["index"], value(node).dim(), place.column)
    elif not isinstance(dim, int) or dim % value(node).dim() != place.column:
        return None
    elif f.kind == "select":
        picked = f["index"]
    elif f.kind == "slice":
        picked = slice(f["start"], f["end"], f["step"])
    elif f.kind == "narrow" and isinstance(f["start"], int) and isinstance(f["length"], int):
        start = f["start"] % size
        picked = slice(start, start + f["length"])
    else:
        return None
    if isinstance(picked, int):
        return picked % size, picked % size + 1, False
    if not isinstance(picked, slice):
        return None
    given = (picked.start, picked.stop, picked.step)
    if any(each is not None and not isinstance(each, int) for each in given):
        return None
    start, stop, step = picked.indices(size)
    return (start, stop, True) if step == 1 and start < stop else None


def _of_index(index: Any, rank: int, column: int) -> Any:
    """Return what an index has for one dimension if it takes all others whole, otherwise None."""
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(each, Node) for each in index) or None in index or len(index) > rank + 1:
        return None
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[_WHOLE] * (rank - len(index) + 1), *index[at + 1 :])
    index = (*index, *[_WHOLE] * (rank - len(index)))
    others = [*index[:column], *index[column + 1 :]]
    return index[column] if all(each == _WHOLE for each in others) else None


def _picked(node: Node, place: _Place, start: int, stop: int, keeps: bool) -> Picked:
    """Return a reader of a range of the outermost dimension, which stays or not."""
    step = math.prod(place.sizes[1:])
    sizes = place.sizes[1:] if not keeps else (stop - start, *place.sizes[1:])
    dims = [dim for dim in place.dims if keeps or dim != place.first]
    ranks = sorted(dims)
    order = tuple(ranks.index(dim) for dim in dims)
    return Picked(node, start * step, stop * step, sizes, order)


def _sizes(picked: Sequence[Picked], N: int) -> tuple[int, ...] | None:
    """Return the sizes of the parts, also of what nothing reads; None if some overlap."""
    ranges = sorted({(each.start, each.stop) for each in picked})
    if any(one[1] > other[0] for one, other in pairwise(ranges)):
        return None
    bounds = sorted({0, N, *(bound for each in ranges for bound in each)})
    return tuple(stop - start for start, stop in pairwise(bounds))


def _needs_memory(node: Node) -> bool:
    """Return whether a kernel of its own, such as attention's, computes the gradient of a part."""
    return any(form(user).kind not in _BY_ELEMENT for user in _readers(node))


def _readers(node: Node) -> Iterator[Node]:
    """Yield what reads a node through views."""
    for user in node.users:
        if form(user).kind in _VIEWS:
            yield from _readers(user)
        else:
            yield user
