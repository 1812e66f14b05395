"""The front page's picture and figures: whole blocks, and where we are faster and where not.

Everything is made from committed runs. `poe bench-page` writes it, into `docs/images` and between
the marks `<!-- begin: NAME -->` and `<!-- end: NAME -->` of the README; `poe bench-page --check`
compares.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from benchmarks import markdown, runs
from benchmarks.blocks import EVERY
from benchmarks.png import description, digest
from benchmarks.regret import of_eager
from benchmarks.runs import Measurement, Run
from fused_norm.devices.costs import DIRECTIONS, Measured

BLOCKS = "benchmarks/results/h200-blocks.json"
FAMILY = "benchmarks/results/h200-family.json"
FAMILY_DTYPES = "benchmarks/results/h200-family-dtypes.json"
MODELS = "benchmarks/results/h200-models.json"
MODEL_TITLES = {
    "vit": "ViT-L",
    "llama": "LLaMA 1B",
    "whisper": "Whisper large",
    "dit": "DiT-XL",
}
ROW_OP = "layer_norm"
CPUS = {
    "AMX": "benchmarks/results/ops/cpu-xeon.json",
    "AVX-512": "benchmarks/results/cpu-avx512.json",
}
# Calls of sizes drawn at random.
RANDOM = {"EPYC, Zen 3": "benchmarks/results/cpu-regret-amd-zen3.json"}
IMAGES = "docs/images"
PAGE = "README.md"
MODES = {"forward": "Inference", "train": "Training step"}
PEER = "compile"


@dataclass(frozen=True)
class Theme:
    """Colors that can be told apart on the page that they are for."""

    background: str
    ink: str
    faint: str
    track: str
    ours: str
    peer: str


THEMES = {
    "light": Theme("#ffffff", "#1f2328", "#59636e", "#e4e8ec", "#c8324a", "#2478ab"),
    "dark": Theme("none", "#e6edf3", "#9aa4af", "#30363d", "#ff6b81", "#58b4e8"),
}


def draw(run: Run, theme: Theme) -> Figure:
    """Draw the blocks of a run over eager: ours, torch.compile, products and attention alone.

    Args:
        run: A run of blocks on a GPU.
        theme: The colors.
    """
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "text.color": theme.ink}):
        figure = Figure(figsize=(8, 4.05), facecolor=theme.background)
        FigureCanvasAgg(figure)
        axes_of_modes = figure.subplots(1, len(MODES), sharey=True)
        figure.subplots_adjust(left=0.165, right=0.985, top=0.755, bottom=0.165, wspace=0.05)
        for axes, (mode, title) in zip(axes_of_modes, MODES.items(), strict=True):
            found = [m for m in run.measurements if m.mode == mode]
            _rows(axes, run, found, theme)
            axes.set_title(title, fontsize=10, color=theme.ink, loc="left", pad=6)
            # Both columns over the same range, so that they compare.
            ratios = [r.vs_eager["graph"] for m in run.measurements for r in m.results]
            axes.set_xlim(min(ratios) - 0.04, max(ratios) + 0.03)
        title = "Whole transformer blocks: time over PyTorch eager"
        figure.text(0.012, 0.955, title, fontsize=13, fontweight="bold", va="top")
        where = f"{run.environment.gpu}, bfloat16, device time. Left is faster; eager is 1."
        figure.text(0.012, 0.885, where, fontsize=9, color=theme.faint, va="top")
        handles, labels = axes_of_modes[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(0.0, -0.005),
            ncols=3,
            frameon=False,
            fontsize=9,
            labelcolor=theme.ink,
            handletextpad=0.2,
            columnspacing=1.6,
        )
    return figure


def _rows(axes: Any, run: Run, measurements: Sequence[Measurement], theme: Theme) -> None:
    """Draw one line for each block, and what is measured on it."""
    looks: dict[str, dict[str, Any]] = {
        "floor": {"color": theme.faint, "marker": "|", "markersize": 11, "markeredgewidth": 2},
        "peer": {"color": theme.peer, "marker": "s", "markersize": 7.5},
        "ours": {"color": theme.ours, "marker": "o", "markersize": 8.5},
    }
    names = {
        "floor": "products and attention by PyTorch",
        "peer": "torch.compile",
        "ours": 'torch.compile(backend="fused_norm")',
    }
    for row, measurement in enumerate(measurements):
        # The first provider of a role counts: others are variants of it.
        ratios = {
            run.role(measurement.op, result.provider): result.vs_eager["graph"]
            for result in reversed(measurement.results)
        }
        axes.plot((ratios["floor"], 1), (row, row), color=theme.track, linewidth=5, zorder=1)
        for order, role in enumerate(("floor", "peer", "ours")):
            label = names[role] if row == 0 else None
            place = {"linestyle": "none", "zorder": 2 + order, "label": label}
            axes.plot(ratios[role], row, **looks[role], **place)
        text = {"fontsize": 8.5, "fontweight": "bold", "color": theme.ours, "ha": "center"}
        axes.annotate(
            f"{ratios['ours']:.2f}",
            (ratios["ours"], row),
            xytext=(0, 6.5),
            textcoords="offset points",
            **text,
        )
    axes.axvline(1, color=theme.ink, linewidth=1, zorder=1)
    titles = [EVERY[m.op].title for m in measurements]
    axes.set_yticks(range(len(titles)), titles, fontsize=9.5)
    axes.set_ylim(len(titles) - 0.5, -0.75)
    axes.xaxis.set_major_locator(MultipleLocator(0.1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.1f}"))
    axes.set_facecolor("none")
    axes.tick_params(colors=theme.ink, labelsize=9, length=0)
    axes.grid(True, axis="x", color=theme.track, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def gain(run: Run) -> str:
    """Return what the backend gains on the blocks of a run, in two sentences.

    Args:
        run: A run of blocks on a GPU.
    """

    def words(role: str, metric: str) -> str:
        forward, train = (_range(_ratios(run, mode, metric, role)) for mode in MODES)
        return f"{forward} of eager's time in inference and {train} in training"

    versus = [_ratios(run, mode, "graph", "ours", PEER) for mode in MODES]
    count = len({m.op for m in run.measurements})
    middles = " and ".join(f"{median(found):.2f}" for found in versus)
    return (
        f"On an {run.environment.gpu} in bfloat16, whole blocks of {count} transformers take\n"
        f"**{words('ours', 'graph')}**, measured on the device;\n"
        f"`torch.compile` alone takes {words('peer', 'graph')}.\n"
        f"Against `torch.compile` the median is {middles}.\n"
    )


def table(root: Path) -> str:
    """Return what one gets, and where not, from all committed runs.

    Args:
        root: The repository.
    """
    blocks, family = (runs.load(root / path) for path in (BLOCKS, FAMILY))
    gpu = f"{blocks.environment.gpu.removeprefix('NVIDIA ')}, bfloat16"
    lines = [
        ["a block, in a CUDA graph", gpu, *_pairs(blocks, "graph"), ""],
        ["a block, launched", gpu, *_pairs(blocks, "launch"), ""],
        *_models(root / MODELS),
        ["a call, in a CUDA graph", gpu, *_pairs(family, "graph"), ""],
        ["a call, launched", gpu, *_pairs(family, "launch"), ""],
    ]
    for name, path in CPUS.items():
        run = runs.load(root / path)
        for dtype in ("bfloat16", "float32"):
            kept = [m for m in run.measurements if m.op != ROW_OP and m.dtype == dtype]
            place = f"Xeon, {name}, {run.environment.threads} threads, {dtype}"
            pairs = _pairs(replace(run, measurements=kept), "wall")
            lines.append(["a call", place, *pairs, ""])
    for name, path in RANDOM.items():
        content = json.loads((root / path).read_text())
        calls = [Measured(*each) for each in content["calls"]]
        for dtype in ("bfloat16", "float32"):
            place = f"{name}, {content['environment']['threads']} threads, {dtype}"
            cells = []
            for direction in DIRECTIONS:
                alike = [c for c in calls if (c.dtype, c.direction) == (dtype, direction)]
                cells += [_cell([of_eager(call) for call in alike]), ""]
            lines.append(["a call of random size", place, *cells, ""])
    header = ["what", "where", "inference", "compile", "training", "compile", "memory"]
    return markdown.table(header, lines, right=range(2, len(header)))


def _pairs(run: Run, metric: str) -> list[str]:
    """Return the cells of ours and of `torch.compile`, in inference and in training."""
    cells = []
    for mode in MODES:
        ours, peer = (_ratios(run, mode, metric, role) for role in ("ours", "peer"))
        # A peer in some of the rows alone would not compare.
        peer = peer if len(peer) == len(ours) else []
        cells += [_cell(ours, peer), f"{median(peer):.2f}" if peer else ""]
    return cells


def _models(path: Path) -> list[list[str]]:
    """Return a line for each whole model: times and peak memory over eager's."""
    run = json.loads(path.read_text())
    place = f"{run['environment']['gpu'].removeprefix('NVIDIA ')}, {run['dtype']}"
    lines = []
    for model, title in MODEL_TITLES.items():
        cells, memory = [], []
        for mode in MODES:
            (found,) = (m for m in run["measurements"] if (m["model"], m["mode"]) == (model, mode))
            results = found["results"]

            def ratio(name: str, results: dict[str, Any] = results) -> float:
                times = (results[n]["timings"]["launch"]["median"] for n in (name, "eager"))
                return float(next(times) / next(times))

            ours, peer = ratio("fused_norm"), ratio(PEER)
            text = f"{ours:.2f}"
            if "fused_norm-frozen" in results:
                text += f", frozen {ratio('fused_norm-frozen'):.2f}"
            cells += [f"**{text}**" if ours < peer else text, f"{peer:.2f}"]
            peaks = [results[name]["peak bytes"] for name in ("fused_norm", "eager")]
            memory.append(f"{peaks[0] / peaks[1]:.2f}")
        lines.append([title, place, *cells, " / ".join(memory)])
    return lines


def _ratios(run: Run, mode: str, metric: str, role: str, to: str = "eager") -> list[float]:
    """Return the ratios of the first provider of a role, over all measurements of a mode."""
    found = []
    for measurement in run.measurements:
        if measurement.mode != mode:
            continue
        ours = next(
            (r for r in measurement.results if run.role(measurement.op, r.provider) == role), None
        )
        other = measurement.of(to)
        if ours and other and metric in ours.timings and metric in other.timings:
            found.append(ours.timings[metric].median / other.timings[metric].median)
    return found


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _cell(ratios: Sequence[float], peer: Sequence[float] = ()) -> str:
    """Return the median and the range, in bold where it is below eager's and the peer's."""
    if not ratios:
        return ""
    middle = f"{median(ratios):.2f}"
    is_faster = median(ratios) < min(1.0, median(peer) if peer else 1.0)
    return f"{f'**{middle}**' if is_faster else middle} ({_range(ratios)})"


def _fragments(root: Path) -> dict[str, str]:
    return {"gain": gain(runs.load(root / BLOCKS)), "table": table(root)}


def write(root: Path) -> list[Path]:
    """Write the pictures and the figures of the README, and return the files.

    Args:
        root: The repository.
    """
    page = root / PAGE
    page.write_text(markdown.filled(page.read_text(), _fragments(root)))
    run = runs.load(root / BLOCKS)
    for name, path in pictures(root).items():
        theme = THEMES[name]
        text = {"Software": None, "Description": digest(root / BLOCKS)}
        draw(run, theme).savefig(path, dpi=200, metadata=text, facecolor=theme.background)
    return [page, *pictures(root).values()]


def stale(root: Path) -> list[str]:
    """Return what is not as the committed runs have it.

    Args:
        root: The repository.
    """
    page = (root / PAGE).read_text()
    found = [] if page == markdown.filled(page, _fragments(root)) else [f"the figures of {PAGE}"]
    wanted = digest(root / BLOCKS)
    found += [
        str(path.relative_to(root))
        for path in pictures(root).values()
        if not path.is_file() or description(path) != wanted
    ]
    return [f"{name}: not what the results give; `poe bench-page` writes it" for name in found]


def pictures(root: Path) -> dict[str, Path]:
    """Return the files of the picture, by theme.

    Args:
        root: The repository.
    """
    return {name: root / IMAGES / f"blocks-{name}.png" for name in THEMES}
