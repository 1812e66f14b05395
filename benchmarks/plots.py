"""Plots of a run: ratio to eager over shapes, time against size with the roofline, memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.blocks import EVERY
from benchmarks.report import duration, roofline, size
from benchmarks.runs import Measurement, Result, Run

INK, FAINT, GRID = "#222222", "#8a8a8a", "#e6e6e6"
OURS = "#d1495b"
# Distinct for color-blind eyes too; markers distinguish what colors do not.
PEERS = {
    "linear": ("#5f6b76", "|"),
    "compile": ("#2e86ab", "s"),
    "compile-max-autotune": ("#7fb7d2", "D"),
    "fla": ("#3a9d6e", "^"),
    "liger": ("#e0a030", "v"),
    "quack": ("#b5679a", "X"),
    "transformer-engine": ("#8e6bbf", "P"),
    "max-fused": ("#a0785a", "<"),
    "max-unfused": ("#c9a98f", ">"),
    "formula": ("#3a9d6e", "^"),
    "fused_norm-composed": ("#e58b97", "o"),
}
LABELS = {"linear": "bare linear (the floor)"}
METRICS = {
    "wall": "time of a call",
    "graph": "device time, CUDA graphs",
    "launch": "time of a call, launched one by one",
    "host": "host time of a call",
}
# Microseconds: below it a call is all launch, and the axis would be too long.
LEAST_SHOWN = 0.1
Value = Callable[[Measurement, Result], float | None]


@dataclass(frozen=True)
class _Group:
    """The measurements of one op in one dtype, by mode."""

    run: Run
    op: str
    dtype: str
    modes: dict[str, list[Measurement]]

    @property
    def machine(self) -> str:
        """The machine in a few words."""
        e = self.run.environment
        return e.gpu if e.device == "cuda" else f"{e.cpu}, {e.threads} threads"

    def providers(self) -> list[str]:
        """Return everyone who was timed, ours last so that it is drawn on top."""
        names: dict[str, None] = {}
        for measurements in self.modes.values():
            for measurement in measurements:
                names |= dict.fromkeys(r.provider for r in measurement.results if r.timings)
        return sorted(names, key=lambda name: self.run.role(self.op, name) == "ours")


def write(run: Run, folder: Path, prefix: str = "", metadata: str = "") -> list[Path]:
    """Draw everything that a run has, and return the files.

    Args:
        run: The run.
        folder: Where to write PNG files.
        prefix: What their names begin with.
        metadata: A text to keep inside each file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for group in _groups(run):
        metrics = ("graph", "launch") if run.environment.device == "cuda" else ("wall",)
        figures = {f"ratio-{metric}": _ratio_figure(group, metric) for metric in metrics}
        figures["time"] = _time_figure(group, metrics[0])
        figures["memory"] = _memory_figure(group)
        for name, figure in figures.items():
            if figure is not None:
                path = folder / f"{prefix}{group.op}-{group.dtype}-{name}.png"
                # The version would make the file differ where the picture does not.
                text = {"Software": None, "Description": metadata or None}
                figure.savefig(path, dpi=144, metadata=text)
                written.append(path)
    return written


def _groups(run: Run) -> list[_Group]:
    groups: dict[tuple[str, str], _Group] = {}
    for measurement in run.measurements:
        key = measurement.op, measurement.dtype
        group = groups.setdefault(key, _Group(run, *key, {}))
        group.modes.setdefault(measurement.mode, []).append(measurement)
    return list(groups.values())


def _ratio_figure(group: _Group, metric: str) -> Figure | None:
    def value(measurement: Measurement, result: Result) -> float | None:
        return result.vs_eager.get(metric)

    title = f"{EVERY[group.op].title}: time over PyTorch eager's"
    return _ratios(group, value, title, METRICS[metric], ("faster", "slower"))


def _memory_figure(group: _Group) -> Figure | None:
    def value(measurement: Measurement, result: Result) -> float | None:
        eager = measurement.of("eager")
        if eager is None or not eager.peak_bytes or result.peak_bytes is None:
            return None
        return result.peak_bytes / eager.peak_bytes

    def remark(measurement: Measurement) -> str:
        eager = measurement.of("eager")
        return f"eager: {size(eager.peak_bytes)}" if eager and eager.peak_bytes else ""

    title = f"{EVERY[group.op].title}: peak memory over PyTorch eager's"
    subtitle = "beyond the inputs of a call"
    return _ratios(group, value, title, subtitle, ("less", "more"), remark)


def _ratios(
    group: _Group,
    value: Value,
    title: str,
    subtitle: str,
    sides: tuple[str, str],
    remark: Callable[[Measurement], str] = lambda measurement: "",
) -> Figure | None:
    """Draw one row for each shape, one column for each mode, one dot for each provider."""
    modes = {
        mode: measurements
        for mode, measurements in group.modes.items()
        if any(value(m, r) for m in measurements for r in m.results)
    }
    if not modes:
        return None
    names = list(dict.fromkeys(_name(m) for found in modes.values() for m in found))
    rows = len(names)
    height = 1.75 + 0.32 * rows
    figure = _figure(3.0 + 2.9 * len(modes), height)
    columns = figure.subplots(1, len(modes), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (mode, measurements) in zip(columns, modes.items(), strict=True):
        _style(axes, mode)
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        for provider in group.providers():
            points = [
                (found, names.index(_name(measurement)))
                for measurement in measurements
                if (result := measurement.of(provider)) is not None
                and (found := value(measurement, result))
            ]
            if points and provider != "eager":
                axes.plot(*zip(*points, strict=True), **_look(group, provider))
            if provider == "fused_norm":
                _label(axes, points)
        for measurement in measurements:
            row = names.index(_name(measurement))
            place = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
            style = {"fontsize": 6.5, "color": FAINT, "va": "center", "ha": "right"}
            axes.annotate(remark(measurement), (1, row), xytext=(-2, 6), **place, **style)
        axes.set_yticks(range(rows), names)
        axes.set_ylim(rows - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.axvline(1, color=INK, linewidth=1.2, zorder=1)
        words = f"\u2190 {sides[0]}    eager = 1    {sides[1]} \u2192"
        axes.set_xlabel(words, color=FAINT, fontsize=8)
    low, high = columns[0].get_xlim()
    has_remarks = any(remark(m) for found in modes.values() for m in found)
    low, high = min(low, 0.45), max(high, 1.4) * (1.5 if has_remarks else 1)
    span = high / low
    ticks = (1,) if span > 200 else (1, 2, 5) if span > 20 else (1, 1.5, 2, 3, 5, 7)
    for axes in columns:
        axes.set_xlim(low, high)
        axes.axvspan(low, 1, color="#f2f7f2", zorder=0)
        axes.xaxis.set_major_locator(LogLocator(base=10, subs=ticks))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.3g}"))
    _finish(figure, group, title, subtitle, height)
    return figure


def _label(axes: Any, points: list[tuple[float, int]]) -> None:
    """Write the ratio above each dot."""
    for found, row in points:
        place = {"xytext": (0, 5.5), "textcoords": "offset points", "ha": "center"}
        style = {"fontsize": 7, "color": OURS, "fontweight": "bold"}
        axes.annotate(f"{found:.2f}", (found, row), **place, **style)


def _time_figure(group: _Group, metric: str) -> Figure | None:
    modes = {
        mode: found
        for mode, measurements in group.modes.items()
        if (found := [m for m in measurements if any(metric in r.timings for r in m.results)])
    }
    if not modes:
        return None
    height = 4.4
    figure = _figure(1.6 + 3.4 * len(modes), height)
    axes_of_modes = figure.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    for axes, (mode, measurements) in zip(axes_of_modes, modes.items(), strict=True):
        _style(axes, mode)
        axes.set_xscale("log")
        axes.set_yscale("log")
        bounds = {
            _name(measurement): least
            for measurement in measurements
            if (least := roofline(group.run, measurement)) and least >= LEAST_SHOWN
        }
        for provider in group.providers():
            points = [
                (bounds[_name(measurement)], result.timings[metric].median)
                for measurement in measurements
                if (result := measurement.of(provider)) is not None
                and metric in result.timings
                and _name(measurement) in bounds
            ]
            if points:
                look = _look(group, provider)
                look["markersize"] *= 0.75
                axes.plot(*zip(*points, strict=True), **look)
        if bounds:
            ends = min(bounds.values()), max(bounds.values())
            style = {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 1.2, "zorder": 1}
            axes.plot(ends, ends, label="roofline", **style)
        axes.set_xlabel("size: least time at the best rates of the run", color=FAINT, fontsize=8)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda t, _: duration(t)))
            axis.set_minor_formatter(NullFormatter())
    title = f"{EVERY[group.op].title}: time against size"
    subtitle = f"{METRICS[metric]}; on the roofline a call would take its least time"
    _finish(figure, group, title, subtitle, height)
    return figure


def _look(group: _Group, provider: str) -> dict[str, Any]:
    label = LABELS.get(provider, provider)
    common = {"label": label, "linestyle": "none", "clip_on": False}
    if provider == "eager":
        return common | {"color": INK, "marker": "o", "markersize": 4.5, "zorder": 3}
    if provider == "fused_norm":
        return common | {"color": OURS, "marker": "o", "markersize": 7, "zorder": 5}
    color, marker = PEERS.get(provider, (FAINT, "x"))
    look = common | {"color": color, "marker": marker, "markersize": 5.5, "zorder": 4}
    if group.run.role(group.op, provider) == "floor":
        look |= {"markersize": 10, "markeredgewidth": 2.2, "zorder": 2}
    return look


def _name(measurement: Measurement) -> str:
    return " \u00d7 ".join(map(str, measurement.shape))


def _figure(width: float, height: float) -> Figure:
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "font.size": 9}):
        figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
    return figure


def _style(axes: Any, mode: str) -> None:
    axes.set_title(mode, fontsize=9.5, color=INK, loc="left")
    axes.grid(True, which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=8, which="both", color=FAINT)


def _finish(figure: Figure, group: _Group, title: str, subtitle: str, height: float) -> None:
    """Add the title and one legend for all columns."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    # Inches for the two lines above and the legend below, as shares of the height.
    top, bottom = 0.55 / height, 0.35 / height
    layout = figure.get_layout_engine()
    assert isinstance(layout, ConstrainedLayoutEngine)
    layout.set(rect=(0, bottom, 1, 1 - top - bottom), wspace=0.06)
    figure.text(0.012, 1 - 0.06 / height, title, fontsize=12, fontweight="bold", va="top")
    where = f"{subtitle} \u00b7 {group.dtype} \u00b7 {group.machine}"
    figure.text(0.012, 1 - 0.31 / height, where, fontsize=8, color=FAINT, va="top")
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="lower left",
        bbox_to_anchor=(0.005, 0.0),
        ncols=min(len(handles), 6),
        frameon=False,
        fontsize=8,
        handletextpad=0.3,
        columnspacing=1.4,
    )
