"""How the figures of docs/worklog.md look: light panels that are readable in dark mode as well."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Of what worklog-trials.json has.
TRIED_ON = "measured on an H200"
INK, FAINT, GRID = "#222222", "#9aa5ae", "#e6e6e6"
# Distinct for color-blind eyes too.
OURS, THEIRS, THIRD = "#d1495b", "#2e86ab", "#e0a030"
WIDTH = 7.6


def new_figure(height: float) -> Figure:
    """Return a figure as wide as a page.

    Args:
        height: In inches.
    """
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    figure.subplots_adjust(left=0.09, right=0.985, top=0.89, bottom=0.15, wspace=0.16)
    return figure


def axes(figure: Figure, place: tuple[int, int, int] = (1, 1, 1)) -> Axes:
    """Return axes with a faint grid behind what is drawn.

    Args:
        figure: Where to put them.
        place: Rows, columns and index.
    """
    ax = figure.add_subplot(*place)
    ax.set_axisbelow(True)
    ax.grid(color=GRID, lw=0.8)
    ax.tick_params(length=0, labelsize=8, labelcolor=INK)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(FAINT)
    return ax


def canvas(figure: Figure, place: tuple[int, int, int] = (1, 1, 1)) -> Axes:
    """Return axes to draw a diagram on: no ticks, no frame, squares as squares.

    Args:
        figure: Where to put them.
        place: Rows, columns and index.
    """
    ax = figure.add_subplot(*place)
    ax.set_axis_off()
    ax.set_aspect("equal")
    return ax


def machine(figure: Figure, text: str = TRIED_ON) -> None:
    """Write in the corner what a figure was measured on.

    Args:
        figure: The figure.
        text: What to write.
    """
    figure.text(0.985, 0.99, text, ha="right", va="top", fontsize=7, color="#59636e")


def legend(ax: Axes, **options: Any) -> None:
    """Put the legend above the axes.

    Args:
        ax: The axes.
        options: For matplotlib.
    """
    ax.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=options.pop("ncols", 3),
        frameon=False,
        fontsize=8,
        handlelength=1.2,
        columnspacing=1.2,
        borderaxespad=0.2,
        **options,
    )
