"""Write docs/benchmarks.md, its plots, and the README's picture and figures from committed results.

    poe bench-page            write them
    poe bench-page --check    exit 1 if they are not what the results give

Every number comes from a file in benchmarks/, which `poe bench --json` made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import front, markdown, plots, report, runs
from benchmarks.blocks import EVERY
from benchmarks.case import MODE_DESCRIPTIONS
from benchmarks.png import description, digest
from benchmarks.runs import Measurement, Run

ROOT = Path(__file__).resolve().parents[2]
IMAGES = "images/benchmarks"
SEAMS = {
    front.BLOCKS: "Whole blocks",
    front.FAMILY: "The family",
}
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
INTRODUCTION = """\
# Benchmarks

`poe bench-page` writes this page from the files in `benchmarks/`, which `poe bench` wrote; do not
edit it. To measure your shapes on your machine: `uv run poe bench --shape 2048,768,3072`.

How it is measured:

- Every provider is first compared with float64: the output and all gradients. One whose error is
  more than three times PyTorch eager's is reported and not timed.
- All providers of a row are timed in the same rounds, in a new random order each round, so that
  each call runs between other providers' calls. Times are medians over the rounds.
- Inputs are random, and calls rotate through sets of them that together exceed twice the
  last-level cache. Small shapes cannot; those rows are marked *in cache*.
- On a GPU, *graph* is the device time of calls replayed in a CUDA graph, *launch* is the time of a
  call among calls made one by one from Python, and *host* is the part of that before the call
  returns. Ratios compare like with like. `torch.compile` runs without CUDA graphs of its own.
- Ratios are to PyTorch eager in the same run; below 1 is faster. `linear` is the bare `F.linear`
  without the LayerNorm: what a perfect fusion would reach by hiding the LayerNorm behind PyTorch's
  own matrix product. *products* are those of a block and its attention, by PyTorch, alone.
- Nothing is kept between calls, and a CUDA graph of `fused_norm` notices a change of the weights;
  `fused_norm-frozen` was captured under `frozen_parameters`, where the caller promises not to
  change them, and reads weights folded beforehand.
- `uv run poe bench --schema` documents every field of the JSON.
- What the numbers do not show: several streams and other clocks. Whole models are on
  [their page](models.md#speed), and two GPUs on [another](adopting.md#tensor-parallel).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page and return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/ops")
    parser.add_argument("--docs", type=Path, help="where to write; the README is left alone then")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if it is stale")
    options = parser.parse_args(arguments)
    docs, is_ours = options.docs or ROOT / "docs", options.docs is None
    files = sorted(options.results.glob("*.json"))
    if not files:
        print(f"no results in {options.results}", file=sys.stderr)
        return 1
    if options.check:
        stale = check(files, docs) + (front.stale(ROOT) if is_ours else [])
        for problem in stale:
            print(problem, file=sys.stderr)
        return 1 if stale else 0
    for path in files:
        folder = docs / IMAGES
        for old in folder.glob(f"{path.stem}-*.png"):
            old.unlink()
        plots.write(runs.load(path), folder, f"{path.stem}-", digest(path))
    page = docs / "benchmarks.md"
    page.write_text(render(files, docs))
    written = [page, *(front.write(ROOT) if is_ours else [])]
    print(f"wrote {', '.join(map(str, written))}")
    return 0


def check(files: Sequence[Path], docs: Path) -> list[str]:
    """Return what on the page is not what the results give.

    Args:
        files: The results.
        docs: The folder of the page.
    """
    page = docs / "benchmarks.md"
    stale = []
    for path in files:
        images = _images(path, docs)
        if not images:
            stale.append(f"{path.name} has no plots")
        stale += [
            f"{image} was not drawn from {path.name}"
            for image in images
            if description(image) != digest(path)
        ]
    if not page.is_file() or page.read_text() != render(files, docs):
        stale.append(f"{page} is not what the results give; `poe bench-page` writes it")
    return stale


def render(files: Sequence[Path], docs: Path) -> str:
    """Return the page.

    Args:
        files: The results.
        docs: The folder of the page, which has the plots.
    """
    parts = [INTRODUCTION]
    for name, title in SEAMS.items():
        parts += _seams(ROOT / name, title)
    parts += _dtypes(ROOT / front.FAMILY_DTYPES, "The family in float16 and float32")
    for name, place in front.CPUS.items():
        if ROOT / place not in files:
            parts += _dtypes(ROOT / place, f"The family on a Xeon with {name}")
    for path in files:
        run = runs.load(path)
        parts += _machine(path, run)
        parts += [f"![{image.stem}]({image.relative_to(docs)})\n" for image in _images(path, docs)]
        parts += _slower(run)
        for op in dict.fromkeys(m.op for m in run.measurements):
            parts += _tables(run, op)
        parts += _interference(run)
        parts += _untimed(run)
    return "\n".join(parts)


def _images(path: Path, docs: Path) -> list[Path]:
    """Return the plots of a file of results, those of the ratios first."""
    found = (docs / IMAGES).glob(f"{path.stem}-*.png")
    return sorted(found, key=lambda image: ("-ratio-" not in image.stem, image.stem))


def _machine(path: Path, run: Run) -> list[str]:
    e = run.environment
    title = e.gpu if e.device == "cuda" else f"{e.cpu}, {e.threads} threads"
    rows = [[name, value] for name, value in report.head(run)]
    rows += [
        [f"`{p.name}` ({p.op})", f"{p.description}: {p.problem or p.versions}"]
        for p in run.providers
    ]
    return [
        f"## {title}\n",
        f"From `benchmarks/results/ops/{path.name}`, made by `{e.command}`.\n",
        markdown.table(["", ""], rows),
    ]


def _seams(path: Path, title: str) -> list[str]:
    """Return a run of blocks or of the family's members as one table."""
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
        f"and launched one by one (*launch*).\nFrom `{path.relative_to(ROOT)}`, made by "
        f"`{run.environment.command}`.\n",
        markdown.table(header, rows, right=range(3, len(header))),
    ]


def _dtypes(path: Path, title: str) -> list[str]:
    """Return a run as one table of ours, whose columns are dtypes."""
    run = runs.load(path)
    on_gpu = run.environment.device == "cuda"
    metric = "graph" if on_gpu else "wall"
    place = f"{run.environment.cpu}, {run.environment.threads} threads"
    if on_gpu:
        place = f"{run.environment.gpu}, device times, {run.environment.tf32}"
    dtypes = list(dict.fromkeys(m.dtype for m in run.measurements))
    found: dict[tuple[str, str, str], dict[str, Measurement]] = {}
    for m in run.measurements:
        found.setdefault((m.op, _shape(m), m.mode), {})[m.dtype] = m
    rows = []
    for (op, shape, mode), of_dtypes in found.items():
        cells = [EVERY[op].title, shape, mode]
        for dtype in dtypes:
            result = of_dtypes[dtype].of("fused_norm") if dtype in of_dtypes else None
            ratio = result.vs_eager.get(metric) if result else None
            cells.append("-" if ratio is None else f"**{ratio:.2f}**")
        rows.append(cells)
    return [
        f"## {title}\n",
        f"{place}, torch {run.environment.torch}, {run.environment.date}. "
        "Ratios to eager in the same run.\n"
        f"From `{path.relative_to(ROOT)}`, made by `{run.environment.command}`.\n",
        markdown.table(["what", "MxKxN", "mode", *dtypes], rows, right=range(3, 3 + len(dtypes))),
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
    parts = [f"### {EVERY[op].title}\n"]
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
        [*key, where[0] if len(where) == 1 else f"{where[0]} and {len(where) - 1} more"]
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


if __name__ == "__main__":
    sys.exit(main())
