"""Tells what became of a model's norms: each with what it was fused with, or why not."""

from __future__ import annotations

import inspect
import io
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from fused_norm.models.backend import backend
from fused_norm.models.sites import LINEAR, RESIDUAL, Site


@dataclass
class Report:
    """What became of a model's norms, printed as a table.

    Attributes:
        sites: The norms in the order of the graph, then the sums that products before them add,
            then, where FP8 is asked for, the Linear layers that are part of no call on a norm.
        graphs: How many graphs Dynamo made of the model.
    """

    sites: list[Site] = field(default_factory=list)
    graphs: int = 0

    @property
    def norms(self) -> list[Site]:
        """The norms."""
        return [site for site in self.sites if site.kind not in (RESIDUAL, LINEAR)]

    @property
    def fused(self) -> list[Site]:
        """Norms that are part of a call of ours."""
        return [site for site in self.norms if site.fused]

    @property
    def bytes_saved(self) -> int:
        """Bytes of tensors that a forward no longer writes."""
        return sum(site.bytes_saved for site in self.sites)

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        """Return a table, in which layers that are alike share a line."""
        # Imported late: it takes as long as all of this package.
        from rich.console import Console
        from rich.table import Table

        table = Table(
            "norm or sum", "", "kind", "shape", "fused with, or why not", "way", title=self._title()
        )
        for path, sites in _alike(self.sites).items():
            site = sites[0]
            shape = f"{' x '.join(site.shape)} {site.dtype}"
            words = "; ".join(site.calls) if site.fused else f"left: {site.reason}"
            count = f"{len(sites)} x" if len(sites) > 1 else ""
            name = path[0] if len(sites) > 1 else site.path
            table.add_row(name or "(model)", count, site.kind, shape, words, site.way)
        text = io.StringIO()
        Console(file=text, width=160).print(table)
        return text.getvalue()

    def _title(self) -> str:
        before = sum(site.ops_before for site in self.sites)
        after = sum(site.ops_after for site in self.sites)
        sums = sum(site.kind == RESIDUAL for site in self.sites)
        added = f", {_counted(sums, 'sum')} added by products" if sums else ""
        graphs = _counted(self.graphs, "graph")
        return (
            f"{len(self.fused)} of {len(self.norms)} norms fused in {graphs}{added}: "
            f"{before} ops become {after} launches, a forward writes "
            f"{self.bytes_saved / 2**20:.1f} MiB less"
        )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def explain(model: nn.Module | Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Run a model once with its seams fused, and report what became of each of its norms.

    The model runs as it is called, in its own mode and with its own parameters, and changes only as
    a forward changes it. Under `torch.no_grad()` the report describes inference, otherwise
    training. Within `autocast_fp8(recipe)`, it says of each norm and Linear layer in which precision
    it is computed, and why not in FP8.

    Args:
        model: A model, or a function.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        A report to print, with `.sites` and `.to_json()`.
    """
    report = Report()

    def reporting(module: Any, example_inputs: list[Any]) -> Callable[..., Any]:
        report.graphs += 1
        return backend(module, example_inputs, options={"then": "eager"}, sites=report.sites)

    # Its own entries where PyTorch keeps such: what the user compiled is not thrown away for them.
    name = "isolate_recompiles"
    apart: Any = {name: True} if name in inspect.signature(torch.compile).parameters else {}
    torch.compile(model, backend=reporting, **apart)(*args, **kwargs)
    return report


def _alike(sites: list[Site]) -> dict[tuple[Any, ...], list[Site]]:
    """Return sites by what they have in common, numbers in paths left out."""
    found: dict[tuple[Any, ...], list[Site]] = {}
    for site in sites:
        path = re.sub(r"(?<![^.])\d+(?![^.])", "*", site.path)
        key = (path, site.kind, site.shape, tuple(site.calls), site.reason, site.way)
        found.setdefault(key, []).append(site)
    return found
