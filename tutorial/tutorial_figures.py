"""Draw the figures of docs/tutorial.md, for light and dark pages.

python tutorial/tutorial_figures.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from benchmarks.front import THEMES, Theme
from benchmarks.png import digest

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
# Rows, features and outputs of the first figure.
M, K, N = 2048, 768, 3072
# Features of a row, and a block's rows in time, in the others.
FEATURES, BLOCKS = 12, 5


def main() -> int:
    """Write every figure and return an exit status."""
    for name, draw in FIGURES.items():
        for theme_name, theme in THEMES.items():
            with matplotlib.rc_context({"font.family": "DejaVu Sans", "text.color": theme.ink}):
                figure = draw(theme)
            text = {"Software": None, "Description": digest(Path(__file__))}
            path = IMAGES / f"tutorial-{name}-{theme_name}.png"
            figure.savefig(path, dpi=200, metadata=text, facecolor=theme.background)
    return 0


def cost(theme: Theme) -> Figure:
    """Draw what the forward kernels cost: op/README.md has the formulas."""
    figure = _figure(theme, 2.35, "Fusion saves memory traffic and pays in arithmetic")
    where = f"Forward of {M} rows, {K} features, {N} outputs, in float32"
    figure.text(0.012, 0.83, where, fontsize=9, color=theme.faint, va="top")
    memory = {"unfused": 3 * M * K + 3 * N * K + 3 * M * N, "fused": M * K + N * K + M * N}
    work = {"unfused": M * N * K + 2 * M * K * K, "fused": 3 * M * N * K}
    panels = (
        ("moved to and from memory", {k: 4 * v / 2**20 for k, v in memory.items()}, "MiB"),
        ("multiply-additions", {k: v / 1e9 for k, v in work.items()}, "billion"),
    )
    for place, (title, values, unit) in enumerate(panels):
        axes = figure.add_axes((0.13 + 0.46 * place, 0.06, 0.33, 0.53))
        colors = [theme.peer, theme.ours]
        axes.barh(range(2), list(values.values()), color=colors, height=0.6)
        most = max(values.values())
        for row, value in enumerate(values.values()):
            axes.text(value + most * 0.02, row, f"{value:.3g} {unit}", va="center", fontsize=9)
        axes.set_yticks(range(2), ["4 kernels", "1 kernel"] if place == 0 else ["", ""])
        axes.set_xlim(0, most * 1.3)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9.5, loc="left", color=theme.ink)
        _bare(axes, theme)
    return figure


def jacobian(theme: Theme) -> Figure:
    """Draw how each normalized element of a row depends on each element of x."""
    figure = _figure(theme, 3.85, "Every element of a row moves every other")
    where = "The derivative of the normalized row by x: row k, column j"
    figure.text(0.012, 0.9, where, fontsize=9, color=theme.faint, va="top")
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(FEATURES, dtype=torch.float64, generator=generator)
    whole = torch.autograd.functional.jacobian(
        lambda x: torch.nn.functional.layer_norm(x, (FEATURES,)), x
    )
    base = "#ffffff" if theme.background != "none" else "#0d1117"
    colors = LinearSegmentedColormap.from_list("ours", [theme.peer, base, theme.ours])
    panels = {"what the puzzle's text says: the diagonal": whole.diag().diag(), "what it is": whole}
    for place, (title, matrix) in enumerate(panels.items()):
        axes = figure.add_axes((0.06 + 0.5 * place, 0.04, 0.38, 0.7))
        # Small ones show, too.
        most = 0.4 * float(whole.abs().max())
        axes.imshow(matrix.numpy(), cmap=colors, vmin=-most, vmax=most)
        axes.set_title(title, fontsize=9.5, loc="left", color=theme.ink)
        _bare(axes, theme)
        axes.set_xticks([])
    return figure


def race(theme: Theme) -> Figure:
    """Draw the race between a block that clears and blocks that add, and its mend."""
    figure = _figure(theme, 3.1, "Zeros that arrive late erase what was added")
    starts = (2.1, 0.2, 0.9, 1.5, 0.5)
    for place, title in enumerate(("cleared by block (0, 0)", "cleared before the launch")):
        axes = figure.add_axes((0.115 + 0.455 * place, 0.2, 0.41, 0.57))
        shift = 1.1 * place
        clear = (starts[0], 0) if place == 0 else (0.1, None)
        for block in range(BLOCKS):
            start = starts[block] + shift
            if place == 0 and block == 0:
                axes.barh(block, 0.8, left=start, color=theme.faint, height=0.55)
                axes.text(start + 0.4, block, "zeros", **_inside(theme))
                start += 0.8
            axes.barh(block, 1.5, left=start, color=theme.track, height=0.55)
            added = start + 1.1
            lost = place == 0 and added < clear[0] + 0.8
            axes.plot(
                added,
                block,
                marker="X" if lost else "o",
                color=theme.ours if lost else theme.peer,
                markersize=8,
                linestyle="none",
            )
        if place == 1:
            axes.barh((BLOCKS - 1) / 2, 0.9, left=0.1, color=theme.faint, height=BLOCKS - 0.4)
            axes.text(0.55, (BLOCKS - 1) / 2, "zeros", **_inside(theme))
        axes.set_xlim(0, 5.2)
        axes.set_ylim(BLOCKS - 0.4, -0.6)
        names = ["block (0, 0)", *(f"block {i}" for i in range(1, BLOCKS))]
        axes.set_yticks(range(BLOCKS), names if place == 0 else [""] * BLOCKS)
        axes.set_title(title, fontsize=9.5, loc="left", color=theme.ink)
        axes.text(5.2, BLOCKS - 0.15, "time \u2192", fontsize=8.5, color=theme.faint, ha="right")
        _bare(axes, theme)
    handles = [
        matplotlib.lines.Line2D([], [], color=color, marker=marker, linestyle="none", markersize=8)
        for color, marker in ((theme.ours, "X"), (theme.peer, "o"))
    ]
    figure.legend(
        handles,
        ["an addition that is lost", "an addition that counts"],
        loc="lower left",
        ncols=2,
        frameon=False,
        fontsize=9,
        labelcolor=theme.ink,
    )
    return figure


def _inside(theme: Theme) -> dict[str, Any]:
    """Return how a word is written on a filled bar."""
    color = "#ffffff" if theme.background != "none" else "#0d1117"
    return {"ha": "center", "va": "center", "fontsize": 8.5, "color": color}


def _figure(theme: Theme, height: float, title: str) -> Figure:
    figure = Figure(figsize=(8, height), facecolor=theme.background)
    FigureCanvasAgg(figure)
    figure.text(0.012, 1 - 0.11 / height, title, fontsize=12.5, fontweight="bold", va="top")
    return figure


def _bare(axes: Any, theme: Theme) -> None:
    axes.set_facecolor("none")
    axes.set_xticks([])
    axes.tick_params(colors=theme.ink, labelsize=9, length=0)
    if not axes.get_yticklabels() or axes.images:
        axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)


FIGURES: dict[str, Callable[[Theme], Figure]] = {"cost": cost, "jacobian": jacobian, "race": race}


if __name__ == "__main__":
    sys.exit(main())
