"""The figures of docs/worklog.md that show trials of the log: worklog-trials.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tutorial.worklog.worklog_steps import LARGE
from tutorial.worklog.worklog_style import (
    FAINT,
    INK,
    OURS,
    THEIRS,
    THIRD,
    axes,
    legend,
    machine,
    new_figure,
)

Data = dict[str, Any]


def bars(
    ax: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float]], colors: Sequence[str]
) -> None:
    """Draw groups of bars, with the value over each."""
    width = 0.8 / len(series)
    for index, ((label, values), color) in enumerate(zip(series.items(), colors, strict=False)):
        places = [i + (index - (len(series) - 1) / 2) * width for i in range(len(groups))]
        ax.bar(places, values, width * 0.92, color=color, label=label)
        for place, value in zip(places, values, strict=True):
            ax.annotate(
                f"{value:g}" if value >= 5 else f"{value:.2f}",
                (place, value),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=INK,
                bbox={"fc": "white", "ec": "none", "pad": 0.3, "alpha": 0.85},
            )
    names = [group.replace(",", " × ") for group in groups]
    if len(groups) > 5:
        # One line of each would run into the next.
        names = [name.replace(" × ", " ×\n", 1) for name in names]
    ax.set_xticks(range(len(groups)), names)
    ax.grid(axis="x", visible=False)


def ratios(
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    colors: Sequence[str],
    label: str,
    top: float,
) -> Figure:
    """Return a figure of ratios: groups of bars, and a line at 1."""
    figure = new_figure(3.0)
    ax = axes(figure)
    bars(ax, groups, series, colors)
    ax.axhline(1, color=INK, lw=0.8)
    ax.set_ylabel(label)
    ax.set_ylim(0, top)
    legend(ax, ncols=max(3, len(series)))
    machine(figure)
    return figure


def epilogue(data: Data) -> Figure:
    """Show the forward's time next to the product's, at five shapes."""
    rows = [row for row in data["trials"]["where it stands"]["rows"] if int(row["shape"][0]) > 0]
    rows = [row for row in rows if row["shape"] in map(str, LARGE)]
    series = {
        "our product": [float(row["gemm_of_cublas"]) for row in rows],
        "with LayerNorm and bias": [float(row["forward_of_cublas"]) for row in rows],
        "PyTorch: F.linear(F.layer_norm(x))": [
            float(row["eager_us"]) / float(row["cublas_us"]) for row in rows
        ],
    }
    shapes = [row["shape"] for row in rows]
    return ratios(shapes, series, (THIRD, OURS, THEIRS), "time / cuBLAS's product", 2.1)


def statistics(data: Data) -> Figure:
    """Show the forward by where the rows' statistics are computed."""
    figure = new_figure(3.0)
    trial = data["trials"]["statistics"]
    colors = (THEIRS, FAINT, OURS)
    for index, shape in enumerate(trial["shapes"]):
        ax = axes(figure, (1, 2, index + 1))
        values = [float(row[index]) for row in trial["rows"].values()]
        ax.bar(range(len(values)), values, 0.7, color=colors)
        for place, value in enumerate(values):
            ax.annotate(f"{value:g} µs", (place, value), (0, 2), textcoords="offset points",
                        ha="center", fontsize=8)  # fmt: skip
        names = [name.replace(" of ", "\nof ").replace(", by", ",\nby") for name in trial["rows"]]
        ax.set_xticks(range(len(values)), names, fontsize=8)
        ax.set_ylim(0, max(values) * 1.15)
        ax.set_title(shape.replace(",", " × "), loc="left", fontsize=10)
        ax.grid(axis="x", visible=False)
        if index == 0:
            ax.set_ylabel("forward, µs")
    figure.subplots_adjust(bottom=0.2)
    machine(figure)
    return figure


def few_rows(data: Data) -> Figure:
    """Show the forward for few rows in four versions, and the time to read the weight once."""
    figure = new_figure(3.0)
    ax = axes(figure)
    trial = data["trials"]["few rows"]
    rows: dict[str, list[float]] = {
        name: [float(v) for v in values] for name, values in trial["rows"].items()
    }
    bars(ax, [f"{n} rows" if n != "1" else "1 row" for n in trial["rows_of_x"]], rows,
         (FAINT, "#b9c3cb", THIRD, OURS))  # fmt: skip
    floor = float(trial["weight alone"])
    ax.axhline(
        floor, color=INK, lw=1, ls="--", label=f"reading the weight once: {floor} µs"
    )  # fmt: skip
    ax.set_ylabel("forward, µs")
    ax.set_ylim(0, 54)
    legend(ax, ncols=3)
    figure.subplots_adjust(top=0.84)
    machine(figure)
    return figure


def backward(data: Data) -> Figure:
    """Show a training step over eager's, and what three products alone would take."""
    trial = data["trials"]["training"]
    rows = {name: [float(v) for v in values] for name, values in trial["rows"].items()}
    series = {
        "our norm around torch.mm": rows["torch.mm for both products"],
        "our products": rows["this"],
        "three products alone": rows["three products alone"],
    }
    colors = (THEIRS, OURS, FAINT)
    return ratios(trial["shapes"], series, colors, "training step / eager's", 1.2)


def hidden_pass(data: Data) -> Figure:
    """Show what the pass over rows adds to a training step, separate and hidden."""
    figure = new_figure(3.0)
    ax = axes(figure)
    trial = data["trials"]["hidden pass"]
    for offset, (name, label, color) in enumerate(
        (("apart", "as a kernel of its own", THEIRS), ("hidden", "in the product's kernel", OURS))
    ):
        for place, text in enumerate(trial[name]):
            least, _, most = text.partition("-")
            low, high = float(least), float(most or least)
            at = place + (offset - 0.5) * 0.36
            ax.bar(at, max(high - low, 1.2), 0.3, low, color=color,
                   label=label if place == 0 else None)  # fmt: skip
            ax.annotate(text.replace("-", "–"), (at, high), (0, 3), textcoords="offset points",
                        ha="center", fontsize=8)  # fmt: skip
    shapes = [shape.replace(",", " × ") for shape in trial["shapes"]]
    ax.set_xticks(range(len(shapes)), shapes)
    ax.set_ylabel("added to a step, µs")
    ax.set_ylim(0, 120)
    ax.grid(axis="x", visible=False)
    legend(ax)
    machine(figure)
    return figure


def activation(data: Data) -> Figure:
    """Show what an activation in the epilogue costs, over eager's time."""
    trial = data["trials"]["activation"]
    names = {
        "no activation": "none",
        "erf to its last bits": "GELU, erf to its last bits",
        "h p(h²), hardware reciprocal": "GELU, cubic in h² (kept)",
        "a gate (SwiGLU)": "SwiGLU (kept)",
    }
    rows = {names[name]: [float(v) for v in values] for name, values in trial["rows"].items()}
    return ratios(trial["shapes"], rows, (FAINT, THEIRS, OURS, THIRD), "time / eager's", 1.25)


def ping_pong(data: Data) -> Figure:
    """Show a product over PyTorch's, by consumers that share a tile and by ping-pong."""
    trial = data["trials"]["taking turns"]
    names = {
        "a tile for both": "both multiply one tile, then store it",
        "its own of 128x192": "ping-pong, tiles of 128 x 192",
        "its own of 128x128": "ping-pong, tiles of 128 x 128",
    }
    rows = {names[name]: [float(v) for v in values] for name, values in trial["rows"].items()}
    return ratios(trial["shapes"], rows, (THEIRS, FAINT, OURS), "time / F.linear's", 1.25)
