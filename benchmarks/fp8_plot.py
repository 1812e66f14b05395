"""The plot of blocks in FP8: time over eager bfloat16, and the fastest recipe of a peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import plots
from benchmarks.blocks import EVERY
from benchmarks.png import digest

MODES = {"forward": "Inference", "train": "Training step"}
FROZEN = "fused_norm rowwise, frozen"
# Of several recipes, the fastest one.
LOOKS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "products in FP8 and attention": (
        ("products",),
        {"color": "#5f6b76", "marker": "|", "markersize": 12, "markeredgewidth": 2},
    ),
    "torch.compile, bfloat16": (("compile",), {"color": "#5f6b76", "marker": "D", "markersize": 6}),
    "torchao, FP8, torch.compile": (
        ("torchao rowwise", "torchao tensorwise", "torchao rowwise_with_gw_hp"),
        {"color": "#2e86ab", "marker": "s", "markersize": 7},
    ),
    "fused_norm, FP8": (
        ("fused_norm rowwise", "fused_norm tensorwise", "fused_norm rowwise_with_gw_hp"),
        {"color": plots.OURS, "marker": "o", "markersize": 8, "markerfacecolor": "white"},
    ),
    "fused_norm, FP8, frozen": (
        (FROZEN,),
        {"color": plots.OURS, "marker": "o", "markersize": 8},
    ),
}


def plot(run: dict[str, Any], path: Path, source: Path | None = None) -> None:
    """Write a panel for each direction, a line for each block.

    Args:
        run: What `poe bench --fp8` measured.
        path: Of the PNG.
        source: The file of that, whose digest the PNG keeps.
    """
    titles = list(dict.fromkeys(case["block"] for case in run["cases"]))
    figure = Figure(figsize=(8, 0.42 * len(titles) + 1.6), layout="constrained")
    panels = figure.subplots(1, len(MODES), sharey=True, sharex=True)
    for panel, (mode, title) in zip(panels, MODES.items(), strict=True):
        for case in run["cases"]:
            if case["mode"] == mode:
                _draw(panel, titles.index(case["block"]), case["results"])
        panel.set_title(title, fontsize=10, color=plots.INK, loc="left")
        panel.axvline(1, color=plots.FAINT, linewidth=1)
        panel.set_yticks(range(len(titles)), [EVERY[name].title for name in titles], fontsize=9)
        panel.set_ylim(len(titles) - 0.5, -0.6)
        panel.grid(True, axis="x", color=plots.GRID, linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(labelsize=9, length=0)
    where = f"Blocks: time over eager bfloat16 on an {run['environment']['gpu']}. Left is faster."
    figure.suptitle(where, fontsize=10.5, color=plots.INK, x=0.01, ha="left")
    handles = {h.get_label(): h for panel in panels for h in panel.get_lines() if h.get_marker()}
    named = [handles[name] for name in LOOKS if name in handles]
    figure.legend(handles=named, loc="outside lower left", ncols=3, frameon=False, fontsize=8.5)
    text = {"Software": None, "Description": digest(source) if source else None}
    figure.savefig(path, dpi=144, metadata=text)


def _draw(panel: Any, row: int, results: dict[str, Any]) -> None:
    us = {name: result["us"] for name, result in results.items() if "us" in result}
    for label, (names, look) in LOOKS.items():
        if found := [us[name] for name in names if name in us]:
            panel.plot(min(found) / us["eager"], row, linestyle="none", label=label, **look)
