"""The figures of docs/worklog.md that show how a kernel works, by the kernel's own arithmetic."""

from __future__ import annotations

from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tutorial.worklog.worklog_steps import HEADLINE
from tutorial.worklog.worklog_style import FAINT, GRID, INK, OURS, THIRD, axes, canvas, new_figure

Spans = list[tuple[int, int]]
# Cycles of a k block of a 128 x 256 tile: its FLOP over those of an SM's tensor cores in a cycle.
MULTIPLY = 2 * 128 * 256 * 64 // 4096
# How long a copy takes from its start to its end in the drawing; not a measurement.
COPY = 1500
CLUSTERS = 66


def naive(data: dict[str, Any]) -> Figure:
    """Show what one thread reads, and what its neighbor reads again."""
    figure = new_figure(2.0)
    ax = canvas(figure)
    size = 12
    for left, label, rows, columns in (
        (0, "a [M, K]", (4,), None),
        (16, "b [N, K]", (7, 8), None),
        (32, "c [M, N]", (4,), (7, 8)),
    ):
        for row in range(size):
            for column in range(size):
                color = "white"
                if row in rows and (columns is None or column in columns):
                    second = (columns is None and row == 8) or (columns is not None and column == 8)
                    color = THIRD if second else OURS
                ax.add_patch(_square(left + column, size - 1 - row, color))
        ax.annotate(label, (left + size / 2, size + 0.5), ha="center", fontsize=9)
    ax.annotate("×", (14, size / 2), ha="center", va="center", fontsize=14)
    ax.annotate("=", (30, size / 2), ha="center", va="center", fontsize=14)
    ax.annotate(
        "two neighbors: the same row of a, read twice\n"
        "for each product 2 + 2 bytes and 2 FLOP",
        (45.5, size / 2), va="center", fontsize=9,
    )  # fmt: skip
    ax.set_xlim(-0.5, 80)
    ax.set_ylim(-0.5, size + 2)
    return figure


def swizzle(data: dict[str, Any]) -> Figure:
    """Show in which banks eight rows of a tile lie, as stored and swizzled by TMA."""
    figure = new_figure(2.9)
    colors = matplotlib.colormaps["viridis"].resampled(8)
    for index, (title, swizzled) in enumerate(
        (("as in memory: a column is in one group of banks", False),
         ("as TMA swizzles it: in all eight", True))
    ):  # fmt: skip
        ax = canvas(figure, (1, 2, index + 1))
        for row in range(8):
            for chunk in range(8):
                place = chunk ^ row if swizzled else chunk
                ax.add_patch(_square(place, 7 - row, colors(chunk)))
                ax.annotate(
                    str(chunk), (place + 0.5, 7.5 - row), ha="center", va="center", fontsize=8,
                    color="white" if chunk < 5 else INK,
                )  # fmt: skip
        ax.set_title(title, fontsize=9, loc="left")
        ax.set_xlim(-0.2, 8.2)
        ax.set_ylim(-0.2, 8.2)
    figure.text(
        0.5, 0.04, "eight rows of 128 bytes, in 16-byte groups of banks; a number is the column of "
        "the matrix that is there", ha="center", fontsize=8,
    )  # fmt: skip
    return figure


def ring(data: dict[str, Any]) -> Figure:
    """Show copies and products over time, with one slot and with four, and what was measured."""
    figure = new_figure(3.3)
    ax = figure.add_axes((0.06, 0.12, 0.52, 0.74))
    for top, slots in ((3.4, 1), (1.1, 4)):
        copies, products = schedule(slots, 5 if slots == 1 else 10)
        for lane, spans, color in ((0.75, copies, FAINT), (0, products, OURS)):
            for block, (start, end) in enumerate(spans):
                # Copies that are in flight together are next to each other.
                height = 0.62 if lane == 0 else 0.62 / slots
                at = top + lane + (0 if lane == 0 else (block % slots) * 0.62 / slots)
                ax.add_patch(Rectangle((start, at), end - start, height, fc=color, ec="white"))
        ax.annotate(f"{slots} slot{'s' if slots > 1 else ''}", (0, top + 1.5), fontsize=9)
    for left, text, color in ((4200, "copies", FAINT), (6600, "products", OURS)):
        ax.add_patch(Rectangle((left, 4.93), 350, 0.25, fc=color))
        ax.annotate(text, (left + 500, 4.92), fontsize=8)
    ax.set_xlim(0, 14200)
    ax.set_ylim(0.6, 5.3)
    ax.set_yticks([])
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.tick_params(labelsize=8)
    ax.set_xlabel(f"cycles, if a copy takes {COPY:,}", fontsize=8)
    trial = data["trials"]["product"]
    beside = axes(figure, (1, 2, 2))
    beside.set_position((0.66, 0.2, 0.33, 0.66))
    names = ("two stages, no cluster", "four stages, no cluster")
    for offset, (name, color) in enumerate(zip(names, (FAINT, OURS), strict=True)):
        values = [float(value) for value in trial["rows"][name]]
        places = [i + (offset - 0.5) * 0.4 for i in range(len(values))]
        beside.bar(places, values, 0.36, color=color, label=name.split(",")[0])
        for middle, value in zip(places, values, strict=True):
            beside.annotate(f"{value:.2f}", (middle, value), (0, 2), textcoords="offset points",
                            ha="center", fontsize=6.5)  # fmt: skip
    beside.axhline(1, color=INK, lw=0.8)
    shapes = [shape.replace(",", "\n") for shape in trial["shapes"]]
    beside.set_xticks(range(len(shapes)), shapes, fontsize=7)
    beside.set_ylim(0, 1.75)
    beside.grid(axis="x", visible=False)
    beside.set_title("time / cuBLAS's, on an H200", fontsize=9, loc="left")
    beside.legend(loc="upper right", frameon=False, fontsize=7.5, ncols=2, handlelength=1)
    return figure


def schedule(slots: int, blocks: int) -> tuple[Spans, Spans]:
    """Return when copies and products of k blocks start and end, in cycles.

    Args:
        slots: Of the ring: a copy waits for the product that reads its slot.
        blocks: How many.
    """
    copies: Spans = []
    products: Spans = []
    for block in range(blocks):
        free = products[block - slots][1] if block >= slots else 0
        copies.append((free, free + COPY))
        start = max(copies[-1][1], products[-1][1] if products else 0)
        products.append((start, start + MULTIPLY))
    return copies, products


def bands(data: dict[str, Any]) -> Figure:
    """Show the tiles of c that are computed at the same time, row by row and in bands."""
    figure = new_figure(2.6)
    rows, columns = HEADLINE.M // 256, HEADLINE.N // 256
    for index, band in enumerate((1, 8)):
        ax = canvas(figure, (1, 2, index + 1))
        first = [tile(place, rows, columns, band) for place in range(CLUSTERS)]
        for row in range(rows):
            for column in range(columns):
                color = OURS if (row, column) in first else "white"
                ax.add_patch(_square(row, columns - 1 - column, color))
        count = len({row for row, _ in first}) + len({column for _, column in first})
        megabytes = count * 256 * HEADLINE.K * 2 / 1e6
        name = "row by row" if band == 1 else "in bands of 8"
        ax.set_title(
            f"{name}: {CLUSTERS} clusters need {megabytes:.0f} MB of a and b",
            fontsize=9, loc="left",
        )  # fmt: skip
        ax.set_xlim(-0.3, rows + 0.3)
        ax.set_ylim(-0.3, columns + 0.3)
    figure.text(
        0.5, 0.06, f"across: {rows} tiles of 256 rows of c; down: {columns} of 256 columns; "
        "filled: what runs first", ha="center", fontsize=8,
    )  # fmt: skip
    return figure


def tile(index: int, rows: int, columns: int, band: int) -> tuple[int, int]:
    """Return a tile of the walk, as `at` in op/gemm/sm90/tiles.mojo does.

    Args:
        index: Its place in the walk.
        rows: Tile rows.
        columns: Tile columns.
        band: Tile rows in a band.
    """
    per_band = band * columns
    top = index // per_band * band
    rest = index % per_band
    height = min(band, rows - top)
    return top + rest % height, rest // height


def _square(x: float, y: float, color: Any) -> Rectangle:
    return Rectangle((x, y), 1, 1, fc=color, ec=GRID if color == "white" else "white", lw=0.8)
