"""The sections of the benchmarks' pages: runs of `poe bench` as tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks import markdown, report, runs
from benchmarks.blocks import EVERY
from benchmarks.case import MODE_DESCRIPTIONS
from benchmarks.runs import Measurement, Run

ROOT = Path(__file__).resolve().parents[2]
FOLDED = "ours, folds kept"
PROVIDERS = {
    **{"ours": ("fused_norm",), FOLDED: ("fused_norm-compile-inductor-frozen",)},
    **{"floor": ("floor", "linear"), "compile": ("compile",)},
}
NAMES = {"floor": "products"}
SEAM_COLUMNS = [
    *(("graph", "ours"), ("graph", FOLDED), ("launch", "ours"), ("graph", "floor")),
    *(("graph", "compile"), ("launch", "compile")),
]


def whole(path: Path, run: Run, title: str, images: Sequence[str]) -> list[str]:
    """Return everything that was measured in a run of `poe bench`.

    Args:
        path: Its file.
        run: The run.
        title: The heading.
        images: Its plots, as paths from the page.
    """
    parts = [*_machine(path, run, title), *_slower(run)]
    for op in dict.fromkeys(m.op for m in run.measurements):
        parts.append(f"### {EVERY[op].title}\n")
        names = {image: Path(image).stem.removeprefix(f"{path.stem}-") for image in images}
        parts += [
            f"![{name.replace('-', ', ')}]({image})\n"
            for image, name in names.items()
            if name.startswith(f"{op}-")
        ]
        parts += _tables(run, op)
    return parts + _interference(run) + _untimed(run)


def _machine(path: Path, run: Run, title: str) -> list[str]:
    rows = [[name, value] for name, value in report.head(run)]
    rows += [
        [f"`{p.name}` ({p.op})", f"{p.description}: {p.problem or p.versions}".replace("*", "\\*")]
        for p in run.providers
    ]
    return [
        f"## {title}\n",
        f"From `benchmarks/results/ops/{path.name}`, which has the command.\n",
        markdown.table(["", ""], rows),
    ]


def members(path: Path, title: str) -> list[str]:
    """Return a run of blocks or of the family's members as one table.

    Args:
        path: The file of the run.
        title: The heading.
    """
    run = runs.load(path)
    titles = [f"{NAMES.get(role, role)}, {m}" for m, role in SEAM_COLUMNS]
    header = ["what", "MxKxN", "mode", "eager", *titles]
    rows = []
    for m in run.measurements:
        eager = m.of("eager")
        cells = [EVERY[m.op].title, _shape(m), m.mode]
        cells.append(report.duration(eager.timings["graph"].median) if eager else "-")
        for metric, role in SEAM_COLUMNS:
            name = PROVIDERS[role]
            result = next((r for r in m.results if r.provider.startswith(name)), None)
            found = result.vs_eager.get(metric) if result else None
            text = "-" if found is None else f"{found:.2f}"
            cells.append(f"**{text}**" if role == "ours" else text)
        rows.append(cells)
    measured = [i for i in range(len(header)) if any(row[i] != "-" for row in rows)]
    header, *rows = ([row[i] for i in measured] for row in (header, *rows))
    return [
        f"## {title}\n",
        f"{run.environment.gpu}, torch {run.environment.torch}, bfloat16, {run.environment.date}. "
        "Times of eager are device times; the rest are ratios to eager, on the device (*graph*) "
        f"and launched one by one (*launch*).\nFrom `{path.relative_to(ROOT)}`, which has the "
        "command.\n",
        markdown.table(header, rows, right=range(3, len(header))),
    ]


def dtypes(path: Path, title: str) -> list[str]:
    """Return a run as one table of ours, whose columns are dtypes.

    Args:
        path: The file of the run.
        title: The heading.
    """
    run = runs.load(path)
    on_gpu = run.environment.device == "cuda"
    metric = "graph" if on_gpu else "wall"
    place = f"{run.environment.cpu}, {run.environment.threads} threads"
    if on_gpu:
        place = f"{run.environment.gpu}, device times, {run.environment.tf32}"
    names = list(dict.fromkeys(m.dtype for m in run.measurements))
    found: dict[tuple[str, str, str], dict[str, Measurement]] = {}
    for m in run.measurements:
        found.setdefault((m.op, _shape(m), m.mode), {})[m.dtype] = m
    rows = []
    for (op, shape, mode), of_dtypes in found.items():
        cells = [EVERY[op].title, shape, mode]
        for dtype in names:
            result = of_dtypes[dtype].of("fused_norm") if dtype in of_dtypes else None
            ratio = result.vs_eager.get(metric) if result else None
            cells.append("-" if ratio is None else f"**{ratio:.2f}**")
        rows.append(cells)
    return [
        f"## {title}\n",
        f"{place}, torch {run.environment.torch}, {run.environment.date}. "
        "Ratios to eager in the same run.\n"
        f"From `{path.relative_to(ROOT)}`, which has the command.\n",
        markdown.table(["what", "MxKxN", "mode", *names], rows, right=range(3, 3 + len(names))),
    ]


def _slower(run: Run) -> list[str]:
    """List every measurement in which ours is slower than eager, or was not timed."""
    found = []
    for measurement in run.measurements:
        where = f"{measurement.op} {measurement.mode} {measurement.dtype} {_shape(measurement)}"
        for result in measurement.results:
            if run.role(measurement.op, result.provider) != "ours":
                continue
            if not result.timings:
                found.append((float("inf"), [where, result.provider, result.status, ""]))
            for metric, ratio in result.vs_eager.items():
                if ratio > 1:
                    spread = f"{result.timings[metric].spread:.0%}"
                    row = [where, f"{result.provider}, {metric}", f"{ratio:.2f}", spread]
                    found.append((ratio, row))
    heading = "### Where we are slower than PyTorch eager\n"
    if not found:
        return [heading, "Nowhere in this run.\n"]
    found.sort(key=lambda item: -item[0])
    count = sum(len(m.results) > 0 for m in run.measurements)
    introduction = f"{len(found)} times in {count} measurements, worst first.\n"
    header = ["measurement", "provider, metric", "ratio", "spread"]
    return [heading, introduction, markdown.table(header, [row for _, row in found])]


def _tables(run: Run, op: str) -> list[str]:
    parts = []
    keys = dict.fromkeys((m.mode, m.dtype) for m in run.measurements if m.op == op)
    metrics = ("graph", "launch", "host") if run.environment.device == "cuda" else ("wall",)
    for mode, dtype in keys:
        measurements = [m for m in run.measurements if (m.op, m.mode, m.dtype) == (op, mode, dtype)]
        names = list(dict.fromkeys(r.provider for m in measurements for r in m.results))
        others = [name for name in names if name != "eager"]
        text = next(text for name, text in MODE_DESCRIPTIONS.items() if name == mode)
        for metric in metrics:
            label = "" if metric == "wall" else f", {metric}"
            parts.append(f"**{mode}, {dtype}{label}** ({text})\n")
            header = ["MxKxN", "eager", *others]
            rows = [_row(run, m, metric, others) for m in measurements]
            parts.append(markdown.table(header, rows, right=range(1, len(header))))
    return parts


def _row(run: Run, measurement: Measurement, metric: str, others: Sequence[str]) -> list[str]:
    name = _shape(measurement)
    if not measurement.is_past_cache:
        name += " *in cache*"
    eager = measurement.of("eager")
    known = eager is not None and metric in eager.timings
    cells = [name, report.duration(eager.timings[metric].median) if eager and known else "-"]
    for other in others:
        result = measurement.of(other)
        if result is None:
            cells.append("-")
        elif metric not in result.vs_eager:
            cells.append("-" if result.status in ("ok", "unsupported") else result.status)
        else:
            text = f"{result.vs_eager[metric]:.2f}"
            is_ours = run.role(measurement.op, other) == "ours"
            cells.append(f"**{text}**" if is_ours else text)
    return cells


def _untimed(run: Run) -> list[str]:
    """List what was not timed, and why."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for measurement in run.measurements:
        for result in measurement.results:
            if result.message:
                key = result.provider, result.status, result.message
                found.setdefault(key, []).append(f"{measurement.mode} {_shape(measurement)}")
    if not found:
        return []
    rows = [
        [
            *key,
            where[0] if len(where) == 1 else f"{where[0]} and {len(where) - 1} more",
        ]
        for key, where in found.items()
    ]
    header = ["provider", "status", "what it said", "where"]
    return ["### Remarks\n", markdown.table(header, rows)]


def _interference(run: Run) -> list[str]:
    if not run.interference:
        return []
    rows = [report.interference_cells(found) for found in run.interference]
    header = ["MxKxN", "dtype", *report.INTERFERENCE]
    return [
        "### PyTorch's `F.linear` after another op\n",
        "How much our calls slow a PyTorch op that runs between them.\n",
        markdown.table(header, rows, right=range(2, len(header))),
    ]


def _shape(measurement: Measurement) -> str:
    return "x".join(map(str, measurement.shape))
