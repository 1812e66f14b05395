"""The front page's picture and figures: whole blocks, and where we are faster and where not.

Everything is made from committed runs. `poe bench-page` writes it, into `docs/images` and between
the marks `<!-- begin: NAME -->` and `<!-- end: NAME -->` of the README; `poe bench-page --check`
compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from benchmarks import markdown, runs
from benchmarks.blocks import EVERY
from benchmarks.front_table import BLOCKS, gain, of_role, short, table
from benchmarks.png import description, digest
from benchmarks.runs import Measurement, Run

IMAGES = "docs/images"
PAGE = "README.md"
MODES = {"forward": "Inference", "train": "Training step"}


@dataclass(frozen=True)
class Theme:
    """Colors that are distinct on the page that they are for."""

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


@dataclass(frozen=True)
class Form:
    """How a picture is laid out.

    Attributes:
        size: Its width and height in inches.
        panels: Rows and columns of panels.
        margins: Where the panels are, as `subplots_adjust` takes them.
        title: What stands above, in lines.
        heights: Of the title and of the line below it.
        columns: Of the legend.
    """

    size: tuple[float, float]
    panels: tuple[int, int]
    margins: dict[str, float]
    title: str
    heights: tuple[float, float]
    columns: int


WIDE = Form(
    (8, 4.4),
    (1, 2),
    {"left": 0.185, "right": 0.985, "top": 0.775, "bottom": 0.15, "wspace": 0.05},
    "Whole transformer blocks: time over PyTorch eager",
    (0.955, 0.89),
    3,
)
# For screens that are narrower than the text of a wide one could be read on.
NARROW = Form(
    (4.2, 8.3),
    (2, 1),
    {"left": 0.31, "right": 0.97, "top": 0.872, "bottom": 0.115, "hspace": 0.16},
    "Whole transformer blocks:\ntime over PyTorch eager",
    (0.988, 0.927),
    1,
)
FORMS = {"wide": WIDE, "narrow": NARROW}


def draw(run: Run, theme: Theme, form: Form) -> Figure:
    """Draw the blocks of a run over eager: ours, torch.compile, products and attention alone.

    Args:
        run: A run of blocks on a GPU.
        theme: The colors.
        form: The layout.
    """
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "text.color": theme.ink}):
        figure = Figure(figsize=form.size, facecolor=theme.background)
        FigureCanvasAgg(figure)
        axes_of_modes = figure.subplots(*form.panels, sharey=True)
        figure.subplots_adjust(**form.margins)
        for axes, (mode, title) in zip(axes_of_modes, MODES.items(), strict=True):
            found = [m for m in run.measurements if m.mode == mode]
            _rows(axes, run, found, theme)
            axes.set_title(title, fontsize=10, color=theme.ink, loc="left", pad=6)
            # Both columns over the same range, so that they compare.
            ratios = [r.vs_eager["graph"] for m in run.measurements for r in m.results]
            axes.set_xlim(min(ratios) - 0.04, max(ratios) + 0.03)
        head: dict[str, Any] = {
            "fontsize": 13,
            "fontweight": "bold",
            "va": "top",
            "linespacing": 1.25,
        }
        figure.text(0.012, form.heights[0], form.title, **head)
        where = f"{short(run.environment.gpu)}, bfloat16, device time. Left is faster; eager is 1."
        figure.text(0.012, form.heights[1], where, fontsize=9, color=theme.faint, va="top")
        handles, labels = axes_of_modes[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(0.0, -0.005),
            ncols=form.columns,
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
        ratios = {
            role: result.vs_eager["graph"]
            for role in names
            if (result := of_role(run, measurement, role))
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
    for (theme, form), path in pictures(root).items():
        text = {"Software": None, "Description": digest(root / BLOCKS)}
        figure = draw(run, THEMES[theme], FORMS[form])
        figure.savefig(path, dpi=200, metadata=text, facecolor=THEMES[theme].background)
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


def pictures(root: Path) -> dict[tuple[str, str], Path]:
    """Return the files of the picture, by theme and form.

    Args:
        root: The repository.
    """
    return {
        (theme, form): root / IMAGES / f"blocks-{theme}{'-narrow' if form == 'narrow' else ''}.png"
        for theme in THEMES
        for form in FORMS
    }
