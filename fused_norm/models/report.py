"""Lists a model's norms, each with what it was fused with, or why it was not fused."""

from __future__ import annotations

import functools
import inspect
import io
import json
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from fused_norm.models.backend import compiled_next
from fused_norm.models.fuse import fuse
from fused_norm.models.settings import Settings, settings
from fused_norm.models.sites import ATTENTION, HEAD, OTHERS, RESIDUAL, ROTARY, Site
from fused_norm.models.timing import Replaced, measure

# The width of a table without a terminal.
WIDEST = 160
_FAST_PATH = torch._transformer_encoder_layer_fwd


@dataclass
class Report:
    """What became of a model's norms; prints as a table.

    Attributes:
        sites: In this order: heads; norms, as in the graph; sums that the products before them add;
            with FP8, Linear layers outside of calls on a norm; rotary embeddings.
        graphs: How many graphs Dynamo made from the model.
        failures: Why the pass failed on a graph, if it did.
        fast_paths: Encoder layers that PyTorch computed as one op each, with their norms.
        breaks: Why Dynamo broke graphs within the call, each reason once.
    """

    sites: list[Site] = field(default_factory=list)
    graphs: int = 0
    failures: list[str] = field(default_factory=list)
    fast_paths: int = 0
    breaks: list[str] = field(default_factory=list)

    @property
    def norms(self) -> list[Site]:
        """The norms."""
        return [site for site in self.sites if site.kind not in OTHERS]

    @property
    def fused(self) -> list[Site]:
        """The norms that are fused."""
        return [site for site in self.norms if site.fused]

    @property
    def bytes_saved(self) -> int:
        """Bytes of tensors that a forward no longer writes."""
        return sum(site.bytes_saved for site in self.sites)

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        """Return a table as wide as the terminal, in which similar layers share a line."""
        # Imported late: it takes as long as this whole package.
        from rich.console import Console
        from rich.table import Table

        titles = ["norm, sum or head", "kind", "shape", "fused with, or why not", "computed by"]
        is_timed = any(site.seconds_after for site in self.sites)
        table = Table()
        for title in titles + ["before → after"] * is_timed:
            table.add_column(title, overflow="fold")
        for path, sites in _alike(self.sites).items():
            site = sites[0]
            shape = f"{' x '.join(site.shape)} {site.dtype}"
            words = "; ".join(site.calls) if site.fused else f"left: {site.reason}"
            name = f"{len(sites)} x {path[0]}" if len(sites) > 1 else site.path or "(model)"
            row = [name, site.kind, shape, words, site.implementation]
            table.add_row(*row, *[_timed(site)] * is_timed)
        text, columns = io.StringIO(), _columns()
        if self.sites:
            Console(file=text, width=columns or WIDEST).print(table)
        last = self.summary()
        return text.getvalue() + (textwrap.fill(last, columns) if columns else last)

    def summary(self) -> str:
        """Return the last line: how many norms are fused, and why there are none."""
        if not self.sites:
            return f"0 of 0 norms fused in {_counted(self.graphs, 'graph')}: {self._why_none()}"
        graphs = _counted(self.graphs, "graph")
        counted = f"{len(self.fused)} of {_counted(len(self.norms), 'norm')} fused in {graphs}"
        left = [site for site in self.norms if _leaves(site)] if self.breaks else []
        if left:
            counted += f", {_counted(len(left), 'norm')} read beyond a break ({self.breaks[0]})"
        if self.norms and not self.fused:
            (reason, count), *_ = Counter(site.reason for site in self.norms).most_common()
            counted += f": {reason} ({count} of {len(self.norms)})"
            if not any(site.fused for site in self.sites):
                return counted
        before = sum(site.ops_before for site in self.sites)
        after = sum(site.ops_after for site in self.sites)
        sums = sum(site.kind == RESIDUAL for site in self.sites)
        heads = sum(site.kind == HEAD and site.fused for site in self.sites)
        added = f", {_counted(sums, 'sum')} added by products" if sums else ""
        added += f", {_counted(heads, 'head')} without logits" if heads else ""
        turns = sum(site.kind == ROTARY and site.fused for site in self.sites)
        added += f", {_counted(turns, 'rotation')} of heads" if turns else ""
        masks = sum(site.kind == ATTENTION for site in self.sites)
        added += f", {_counted(masks, 'attention')} without a mask" if masks else ""
        return (
            f"{counted}{added}: {_counted(before, 'op')} become {_counted(after, 'launch', 'es')}, "
            f"a forward writes {self.bytes_saved / 2**20:.1f} MiB less"
        )

    def _why_none(self) -> str:
        if not self.graphs:
            return (
                "Dynamo traced nothing of this call. Is it under torch.compiler.disable, or "
                "compiled with another backend?"
            )
        if self.failures:
            return f"the pass failed: {self.failures[0]}"
        if self.fast_paths:
            return (
                f"PyTorch computes {_counted(self.fast_paths, 'encoder layer')} as one op each. "
                "torch.backends.mha.set_fastpath_enabled(False) has them written out"
            )
        return "the call computes no LayerNorm or RMSNorm in a form that docs/models.md lists"


def _columns() -> int | None:
    """Return how wide standard output is, up to `WIDEST`, or None if it is no terminal."""
    if not sys.stdout.isatty():
        return None
    try:
        return min(os.get_terminal_size(sys.stdout.fileno()).columns or WIDEST, WIDEST)
    except OSError:
        return None


def _leaves(site: Site) -> bool:
    """Return whether a norm without Linear readers is a result of the graph."""
    readers = site.reason.removeprefix("output read by no Linear: ")
    return readers != site.reason and "output" in readers.split(", ")


def _timed(site: Site) -> str:
    """Return the times of a site before and after, in microseconds."""
    if not site.seconds_after:
        return ""
    before, after = site.seconds_before, site.seconds_after
    return f"{before * 1e6:,.1f} → {after * 1e6:,.1f} µs, {after / before:.2f}"


def _counted(count: int, what: str, plural: str = "s") -> str:
    return f"{count} {what}{'' if count == 1 else plural}"


def explain(
    model: nn.Module | Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    training: bool | None = None,
    time: bool = False,
    **kwargs: Any,
) -> Report:
    """Run a model once with its norms fused, and report what each norm was fused with, or why not.

    The report describes a call of `torch.compile(model, backend="fused_norm")` with these arguments
    and the same `options`, `mode` and `dynamic`. The model runs in its own mode (`train()` or
    `eval()`) with its own parameters, and changes only as a forward changes it. The rest of its
    graphs is not compiled. Wrap a model in a function if it has arguments of the names below. With
    the option `fp8`, the report also lists the precision of each Linear layer, and why it is not in
    FP8.

    Args:
        model: A model, or a function.
        args: Its arguments.
        options: As for `torch.compile` with this backend.
        mode: As for `torch.compile`.
        dynamic: As for `torch.compile`.
        training: Whether gradients are recorded, which decides what is worth fusing; by default as
            in the caller.
        time: Whether to time each fused call against the ops that it replaced: both compiled by the
            next backend, on random inputs of the same sizes, alternating; a forward or, if
            gradients are recorded, a forward and a backward. Norms that are alike are timed once.
        kwargs: Its keyword arguments.

    Returns:
        A report to print, with `.sites`, `.summary()` and `.to_json()`.

    Raises:
        ValueError: If an option is unknown.
        RuntimeError: If both options and a mode are given, or the mode is unknown.
    """
    report = Report()
    chosen = settings(options, mode)
    replaced: list[Replaced] | None = [] if time else None

    def reporting(module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        report.graphs += 1
        report.fast_paths += sum(node.target is _FAST_PATH for node in module.graph.nodes)
        report.sites += fuse(module, chosen.fusing, report.failures, replaced)
        return module.forward

    # In isolation, if PyTorch supports that: the user's compiled graphs are not evicted.
    name = "isolate_recompiles"
    apart: Any = {name: True} if name in inspect.signature(torch.compile).parameters else {}
    recorded = torch.is_grad_enabled() if training is None else training
    breaks = torch._dynamo.utils.counters["graph_break"]
    before = Counter(breaks)
    with torch.set_grad_enabled(recorded):
        torch.compile(model, backend=reporting, dynamic=dynamic, **apart)(*args, **kwargs)
        _time(replaced or [], chosen)
    report.breaks = [why.strip().splitlines()[0] for why in Counter(breaks) - before if why.strip()]
    return report


def _time(replaced: list[Replaced], chosen: Settings) -> None:
    """Time parts of graphs against their replacements, similar ones once."""
    alike = _alike([each.site for each in replaced])
    own = {id(each.site): each for each in replaced}
    for sites in alike.values():
        measure(own[id(sites[0])], functools.partial(compiled_next, chosen=chosen))
        for site in sites[1:]:
            site.seconds_before = sites[0].seconds_before
            site.seconds_after = sites[0].seconds_after


def _alike(sites: list[Site]) -> dict[tuple[Any, ...], list[Site]]:
    """Return sites grouped by what they have in common, ignoring numbers in paths."""
    found: dict[tuple[Any, ...], list[Site]] = {}
    for site in sites:
        path = re.sub(r"(?<![^.])\d+(?![^.])", "*", site.path)
        key = (path, site.kind, site.shape, tuple(site.calls), site.reason, site.implementation)
        found.setdefault(key, []).append(site)
    return found
