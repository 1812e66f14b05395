"""Decides which Linear layers of a graph are computed in FP8, and why others are not."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch.fx import Node

from fused_norm import recipes
from fused_norm.models.emit import Emitter
from fused_norm.models.forms import form
from fused_norm.models.norms import module_path
from fused_norm.models.sites import LINEAR, Site
from fused_norm.models.values import have_same_strides, is_plain, is_tensor, value
from fused_norm.ops.eight_bits import MULTIPLE
from fused_norm.ops.fp8 import scaled_linear
from fused_norm.ops.operands import hint

# With fewer features or outputs, a product is too short to win back the cost of quantization.
SMALLEST = 1024


def unsuited(weight: Any) -> str:
    """Return why a layer should not be in FP8, judging by its weight; `""` if it may be.

    Args:
        weight: The weight, of shape `[N, K]` or transposed.
    """
    if weight.dim() != 2:
        return f"a weight of {weight.dim()} dimensions"
    sizes = [hint(size) for size in weight.shape]
    if min(sizes) < SMALLEST:
        return f"a size of {min(sizes)}, below {SMALLEST}"
    for size in sizes:
        if size % MULTIPLE:
            return f"a size of {size}, not a multiple of {MULTIPLE}"
    return ""


def in_fp8(site: Site, recipe: str) -> Site:
    """Return a Linear layer's site, marked as FP8.

    Args:
        site: The layer's site.
        recipe: One of RECIPES.
    """
    site.fused, site.calls, site.implementation = True, ["linear"], f"FP8 {recipe}"
    site.ops_before = site.ops_after = 1
    return site


class Precision:
    """The FP8 settings of a pass.

    Args:
        recipe: One of `recipes.RECIPES`, or None for no FP8.
        skip: Layers to leave out, by the end of their paths or a pattern: `"lm_head"`,
            `"layers.0.*"`.
    """

    def __init__(self, recipe: str | None = None, skip: Sequence[str] = ()) -> None:
        if recipe is not None:
            recipes.find(recipe)
        if isinstance(skip, str):
            raise TypeError(f"skip must be a sequence of names, got {skip!r}")
        self.recipe, self.skip = recipe, tuple(skip)

    def why_not(self, node: Node, weight: Any) -> str:
        """Return why a layer is not in FP8, `""` if it is.

        Args:
            node: The node that multiplies.
            weight: Its weight, of shape `[N, K]` or transposed.
        """
        if self.recipe is None:
            return "no recipe"
        path = module_path(node)
        for name in self.skip:
            if path == name or path.endswith(f".{name}") or fnmatchcase(path, name):
                return f"skipped by {name!r}"
        return unsuited(value(weight))

    def of_call(self, products: Sequence[Any]) -> tuple[str | None, str]:
        """Return the recipe of a call, and its precision and the reason in words.

        Args:
            products: All its Linear layers, which are in FP8 together or not at all; of one recipe
                if the model has them in FP8.
        """
        own = products[0].recipe
        if own is not None:
            return own, f"FP8 {own}"
        if self.recipe is None:
            return None, ""
        for product in products:
            if reason := self.why_not(product.node, product.weight):
                dtype = str(value(product.weight).dtype).removeprefix("torch.")
                return None, f"{dtype}: {module_path(product.node)}, {reason}"
        return self.recipe, f"FP8 {self.recipe}"

    def rewrite_linears(self, emitter: Emitter) -> list[Site]:
        """Compute Linear layers outside of other calls in FP8; return all their sites.

        Args:
            emitter: Adds nodes to the graph, whose norms have been rewritten.
        """
        if self.recipe is None:
            return []
        return [
            self._rewrite(node, emitter)
            for node in list(emitter.graph.nodes)
            if form(node).kind == "linear" and is_tensor(node)
        ]

    def _rewrite(self, node: Node, emitter: Emitter) -> Site:
        f = form(node)
        x, weight, bias = f["input"], f["weight"], f["bias"]
        rows = value(x)
        site = Site(module_path(node), LINEAR, linears=1).describe(rows)
        site.reason = self.why_not(node, weight)
        if not site.reason and not (is_plain(rows) and is_plain(value(weight))):
            site.reason = "a tensor of a kind of its own"
        if site.reason:
            return site
        count = len(emitter.made)
        with emitter.graph.inserting_before(node):
            new = emitter.emit(node, scaled_linear, x, weight, bias, recipe=self.recipe)
        if value(new).dtype is not value(node).dtype or not have_same_strides(
            value(node), value(new)
        ):
            emitter.forget(count)
            site.reason = "a result with another memory layout"
            return site
        node.replace_all_uses_with(new)
        emitter.graph.erase_node(node)
        assert self.recipe is not None
        return in_fp8(site, self.recipe)
