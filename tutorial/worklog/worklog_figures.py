"""The figures of docs/worklog.md, drawn from committed numbers or from the arithmetic they show.

`worklog_page.py` draws them. Each names the files that its numbers come from, and carries a
digest of what it took from there, so that a test notices a figure that is out of date.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tutorial.worklog.worklog_diagrams import bands, naive, ring, swizzle
from tutorial.worklog.worklog_steps import HEADLINE, LARGE, STEPS, Sizes, work
from tutorial.worklog.worklog_style import FAINT, INK, OURS, THEIRS, THIRD, axes, legend, new_figure
from tutorial.worklog.worklog_trials import (
    activation,
    backward,
    epilogue,
    few_rows,
    hidden_pass,
    ping_pong,
    statistics,
)

Data = dict[str, Any]
Draw = Callable[[Data], Figure]
DIGEST = "Comment"


def draw(name: str, data: Data, path: Path) -> None:
    """Draw a figure into a file.

    Args:
        name: Of the figure.
        data: What is in the files, by name.
        path: The PNG to write.
    """
    function, _ = FIGURES[name]
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "font.size": 9}):
        figure = function(data)
        FigureCanvasAgg(figure)
        figure.savefig(path, dpi=160, metadata={"Software": None, DIGEST: digest(name, data)})


def digest(name: str, data: Data) -> str:
    """Return a digest of what a figure shows.

    Args:
        name: Of the figure.
        data: What is in the files, by name.
    """
    _, parts = FIGURES[name]
    content = json.dumps([data[part] for part in parts], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def ladder(data: Data) -> Figure:
    """Show every product at the headline's shape in percent of cuBLAS, timed in the same rounds."""
    figure = new_figure(3.0)
    ax = axes(figure)
    rows = [row for row in data["table"] if row["kind"] == "product"]
    known = [100 * (row["of_cublas"] or 0.0) for row in rows]
    ax.bar(range(len(rows)), known, 0.7, color=OURS)
    for place, row in enumerate(rows):
        text = f"{known[place]:.1f}" if row["of_cublas"] else "not measured yet"
        color = INK if row["of_cublas"] else FAINT
        ax.annotate(
            text, (place, known[place]), (0, 3), textcoords="offset points", ha="center",
            fontsize=8, color=color,
        )  # fmt: skip
    ax.axhline(100, color=THEIRS, lw=1, ls="--")
    ax.annotate(
        "cuBLAS", (-0.45, 100), (0, 2), textcoords="offset points", fontsize=8, color=THEIRS
    )
    ax.set_xticks(range(len(rows)), [f"{row['number']} {row['name']}" for row in rows])
    ax.set_ylabel("% of cuBLAS")
    ax.set_ylim(0, 115)
    ax.grid(axis="x", visible=False)
    ax.set_title(f"The product at {_shape(HEADLINE)}, bfloat16", loc="left", fontsize=10)
    return figure


def roofline(data: Data) -> Figure:
    """Show the two ceilings, and what the work at hand asks of them."""
    figure = new_figure(3.4)
    ax = axes(figure)
    peak = data["ceiling"]["flops_per_second"] / 1e12
    rate = data["ceiling"]["bytes_per_second"] / 1e12
    ridge = peak / rate
    places = [0.3, ridge, 40000]
    ax.loglog(places, [min(peak, rate * place) for place in places], color=INK, lw=1.6)
    ax.annotate(
        f"{rate:.2f} TB/s", (3, rate * 3), (-6, 8), textcoords="offset points", rotation=33,
        fontsize=8,
    )  # fmt: skip
    ax.annotate(f"{peak:.0f} TFLOP/s", (6000, peak), (0, 4), textcoords="offset points", fontsize=8)
    few, narrow = Sizes(64, 4096, 4096), LARGE[3]
    for label, intensity, color, side, height in (
        ("LayerNorm alone", 8 / 4, OURS, "left", 1.3),
        (f"product, {_shape(few)}", _intensity(few), THIRD, "right", 4),
        (f"product, {_shape(narrow)}", _intensity(narrow), THEIRS, "right", 1.3),
        (f"product, {_shape(HEADLINE)}", _intensity(HEADLINE), THEIRS, "left", 12),
    ):
        top = min(peak, rate * intensity)
        ax.plot([intensity, intensity], [0.8, top], color=color, lw=1, ls=":")
        ax.plot([intensity], [top], "o", color=color, ms=5)
        ax.annotate(
            f"{label}\n{intensity:.0f} FLOP a byte", (intensity, height),
            (4 if side == "left" else -4, 0), textcoords="offset points", fontsize=8, color=color,
            ha=side,
        )  # fmt: skip
    ax.set_xlim(0.3, 40000)
    ax.set_ylim(0.8, 1800)
    ax.set_xlabel("FLOP for each byte that has to cross the memory bus")
    ax.set_ylabel("TFLOP/s")
    ax.set_title(f"What an {data['gpu']} can do at most, measured", loc="left", fontsize=10)
    return figure


def _intensity(sizes: Sizes) -> float:
    M, K, N = sizes
    return work("product", sizes) / (2 * (M * K + N * K + M * N))


def tiled(data: Data) -> Figure:
    """Show how the bytes that a tile has to fetch for a FLOP shrink with its size."""
    figure = new_figure(2.8)
    ax = axes(figure)
    tiles = {
        "1 × 1": (1, 1), "16 × 16": (16, 16), "64 × 64": (64, 64), "128 × 128": (128, 128),
        "128 × 256": (128, 256), "256 × 256\n(cluster of 2)": (256, 256),
    }  # fmt: skip
    values = [rows * columns / (rows + columns) for rows, columns in tiles.values()]
    ax.bar(range(len(tiles)), values, 0.7, color=[OURS if i in (3, 4, 5) else FAINT
                                                  for i in range(len(tiles))])  # fmt: skip
    for place, value in enumerate(values):
        inside = value > 1
        ax.annotate(
            f"{value:.3g}", (place, value), (0, -11 if inside else 2), ha="center", fontsize=8,
            textcoords="offset points", color="white" if inside else INK,
        )  # fmt: skip
    ceiling = data["ceiling"]
    ridge = ceiling["flops_per_second"] / ceiling["bytes_per_second"]
    ax.axhline(ridge, color=INK, lw=1, ls="--")
    ax.annotate(f"{ridge:.0f}: what memory alone could feed", (-0.4, ridge), (0, 3),
                textcoords="offset points", fontsize=8)  # fmt: skip
    ax.set_yscale("log")
    ax.set_ylim(0.3, 500)
    ax.set_xticks(range(len(tiles)), list(tiles))
    ax.set_ylabel("FLOP for each byte fetched")
    ax.set_title("A tile of c is worth what its two edges cost", loc="left", fontsize=10)
    ax.grid(axis="x", visible=False)
    return figure


def spills(data: Data) -> Figure:
    """Show how many instructions a k block takes, and what they are."""
    figure = new_figure(2.8)
    figure.subplots_adjust(left=0.22)
    ax = axes(figure)
    steps = {
        name: found
        for name, found in data["sass"]["kernels"].items()
        if any("HGMMA" in line for line in found["loop"])
    }
    products = [sum("HGMMA" in line for line in found["loop"]) for found in steps.values()]
    others = [len(f["loop"]) - p for f, p in zip(steps.values(), products, strict=True)]
    names = list(steps)
    ax.barh(names, products, color=OURS, label="products")
    ax.barh(names, others, left=products, color=FAINT, label="everything else")
    for place, (name, found) in enumerate(steps.items()):
        text = (
            f"{len(found['loop'])} instructions; whole kernel {found['instructions']}, "
            f"{found['stack_bytes']} bytes of stack"
        )
        ax.annotate(text, (len(steps[name]["loop"]), place), (4, 0), textcoords="offset points",
                    va="center", fontsize=8)  # fmt: skip
    ax.invert_yaxis()
    ax.set_xlim(0, max(map(len, (f["loop"] for f in steps.values()))) * 2.4)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("instructions of the main loop, for one k block of 64")
    legend(ax)
    return figure


def numerics(data: Data) -> Figure:
    """Show the error against float64 as the mean of the rows grows."""
    figure = new_figure(3.2)
    colors = (THEIRS, FAINT, THIRD, OURS)
    for index, (kind, by_mean) in enumerate(data["numerics"]["errors"].items()):
        ax = axes(figure, (1, 2, index + 1))
        names = list(next(iter(by_mean.values())))
        for name, color, marker in zip(names, colors, "so^D", strict=True):
            ax.plot(
                range(len(by_mean)), [by_mean[mean][name] for mean in by_mean], marker + "-",
                color=color, lw=1.4, ms=4, label=name,
            )  # fmt: skip
        ax.set_yscale("log")
        ax.set_ylim(1e-3, 12)
        ax.set_xticks(range(len(by_mean)), list(by_mean))
        ax.set_xlabel("mean of a row / its standard deviation")
        ax.set_title(f"weights of {'both signs' if kind == 'signed' else 'one sign'}",
                     loc="left", fontsize=9, y=0.9, x=0.03)  # fmt: skip
        if index == 0:
            ax.set_ylabel("relative error of y")
            legend(ax, ncols=2)
    figure.subplots_adjust(top=0.83)
    return figure


def _shape(sizes: Sizes) -> str:
    return " × ".join(map(str, sizes))


# Each with what its numbers are of.
FIGURES: dict[str, tuple[Draw, tuple[str, ...]]] = {
    "ladder": (ladder, ("table",)),
    "roofline": (roofline, ("ceiling", "gpu")),
    "naive": (naive, ()),
    "tiled": (tiled, ("ceiling",)),
    "tensor-cores": (swizzle, ()),
    "ring": (ring, ("trials",)),
    "clusters": (bands, ()),
    "no-spills": (spills, ("sass",)),
    "epilogue": (epilogue, ("trials",)),
    "statistics": (statistics, ("trials",)),
    "fold": (numerics, ("numerics",)),
    "few-rows": (few_rows, ("trials",)),
    "backward": (backward, ("trials",)),
    "hidden-pass": (hidden_pass, ("trials",)),
    "activation": (activation, ("trials",)),
    "ping-pong": (ping_pong, ("trials",)),
}
assert set(FIGURES) == {"ladder", "roofline", *(step.name for step in STEPS)}
