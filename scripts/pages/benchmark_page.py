"""Write docs/benchmarks.md, a page for each device, their plots, and the README's figures.

    poe bench-page            write them
    poe bench-page --check    exit 1 if they are not what the results give

Every number comes from a file in benchmarks/results, which a benchmark made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import benchmark_h100
import benchmark_tables
import benchmark_trainings

from benchmarks import front, front_table, markdown, plots, runs
from benchmarks.png import description, digest
from benchmarks.runs import Run

ROOT = Path(__file__).resolve().parents[2]
IMAGES = "images/benchmarks"
ENTRY = "benchmarks.md"
RESULTS = "benchmarks/results"
GENERATED = "<!-- `poe bench-page` writes this page from benchmarks/results; do not edit it. -->\n"
INTRODUCTION = """\
# Benchmarks

What fused_norm was measured on, and how. [The table of the README](../README.md#what-you-get) sums
it up. To measure your own shapes, run `uv run poe bench --shape 2048,768,3072`.
"""
METHOD = """\
[Whole models](models.md#speed) and [two GPUs](adopting.md#tensor-parallel) are on other pages.

## How it is measured

- The output and all gradients of each implementation are first compared with float64. If an error
  is more than three times PyTorch eager's, the implementation is reported and not timed.
- All implementations of a row are timed in the same rounds, in a new random order each round. Times
  are medians over the rounds.
- Ratios are to PyTorch eager in the same run; below 1 is faster.
- Inputs are random. Calls rotate through sets of inputs that together exceed twice the last-level
  cache. Rows whose shapes are too small for that are marked *in cache*.
- On a GPU, *graph* is the device time of calls replayed in a CUDA graph; *launch* is the time of a
  call that is launched from Python, one after another; *host* is the part of it before the call
  returns. Each is compared with its like. `torch.compile` runs without CUDA graphs of its own.
- `linear` is `F.linear` without the LayerNorm. A fused op is as fast if its LayerNorm costs nothing
  and its matrix product is as fast as PyTorch's. *products* are the matrix products and the
  attention of a block alone, by PyTorch.
- `fused_norm` keeps nothing between calls, and its CUDA graph reads the current weights.
  `fused_norm-frozen` was captured under `frozen_parameters`: the caller promises not to change the
  weights, so gamma is multiplied into them beforehand.
- Several streams, and other clocks, were not measured.
- `uv run poe bench --schema` documents every field of the JSON.
"""


class Page(NamedTuple):
    """A device's page: its title, what the entry page says of it, and its sections."""

    title: str
    what: str
    sections: Callable[[], list[str]]
    holds: Callable[[Run], bool]


def _cpus() -> list[str]:
    parts = []
    for name, place in front_table.CPUS.items():
        path = ROOT / place
        if path.parent.name != "ops":
            parts += benchmark_tables.dtypes(path, f"A Xeon with {name}")
    return parts


def _h200() -> list[str]:
    return [
        *benchmark_tables.members(ROOT / front_table.OTHER_BLOCKS, "Whole blocks"),
        *benchmark_h100.decoding(f"{RESULTS}/h200-decode.json"),
        *benchmark_h100.blocks(f"{RESULTS}/h200-fp8-blocks.json"),
        *benchmark_trainings.models(f"{RESULTS}/h200-fp8-models.json"),
        *benchmark_trainings.curve(),
        *benchmark_tables.members(ROOT / front_table.FAMILY, "Each op"),
        *benchmark_tables.dtypes(
            ROOT / front_table.FAMILY_DTYPES, "Each op in float16 and float32"
        ),
        *benchmark_h100.regret(
            {
                "forward": f"{RESULTS}/gpu-regret-nvidia-h200.json",
                "forward, seed 4177": f"{RESULTS}/gpu-regret-nvidia-h200-seed-4177.json",
                "forward, seed 7331": f"{RESULTS}/gpu-regret-nvidia-h200-seed-7331.json",
                "forward, seed 9241": f"{RESULTS}/gpu-regret-nvidia-h200-seed-9241.json",
                "forward, seed 12007": f"{RESULTS}/gpu-regret-nvidia-h200-seed-12007.json",
                "forward, seed 15511": f"{RESULTS}/gpu-regret-nvidia-h200-seed-15511.json",
                "forward, seed 20011": f"{RESULTS}/gpu-regret-nvidia-h200-seed-20011.json",
                "training": f"{RESULTS}/gpu-regret-training-nvidia-h200.json",
            }
        ),
    ]


PAGES = {
    "h200": Page(
        "NVIDIA H200",
        "whole blocks, also in FP8; decoding; each op; LayerNorm + Linear in all shapes and dtypes",
        _h200,
        lambda run: "H200" in run.environment.gpu,
    ),
    "h100": Page(
        "NVIDIA H100",
        "whole blocks, in bfloat16 and in FP8; a language model's head with its loss",
        benchmark_h100.sections,
        lambda run: "H100" in run.environment.gpu,
    ),
    "cpus": Page(
        "CPUs",
        "two Xeons, with AMX and with AVX-512: each op",
        _cpus,
        lambda run: run.environment.device == "cpu",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the pages and return an exit status."""
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
        stale = check(files, docs)
        if is_ours:
            stale += front.stale(ROOT)
            stale += [str(page) for page, text in _guides().items() if page.read_text() != text]
        for problem in stale:
            print(problem, file=sys.stderr)
        return 1 if stale else 0
    for path in files:
        folder = docs / IMAGES
        for old in folder.glob(f"{path.stem}-*.png"):
            old.unlink()
        plots.write(runs.load(path), folder, f"{path.stem}-", digest(path))
    written = front.write(ROOT) if is_ours else []
    for page, text in (render(files, docs) | (_guides() if is_ours else {})).items():
        page.parent.mkdir(exist_ok=True)
        page.write_text(text)
        written.append(page)
    print(f"wrote {', '.join(map(str, written))}")
    return 0


def check(files: Sequence[Path], docs: Path) -> list[str]:
    """Return what on the pages is not what the results give.

    Args:
        files: The results.
        docs: The folder of the entry page.
    """
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
    for page, text in render(files, docs).items():
        if not page.is_file() or page.read_text() != text:
            stale.append(f"{page} is not what the results give; `poe bench-page` writes it")
    return stale


def render(files: Sequence[Path], docs: Path) -> dict[Path, str]:
    """Return the text of each page.

    Args:
        files: The results of `poe bench` of which everything is shown.
        docs: The folder of the entry page, which has the plots.
    """
    folder = docs / Path(ENTRY).stem
    found, rows = {}, []
    loaded = {path: runs.load(path) for path in files}
    for name, page in PAGES.items():
        parts = [GENERATED, f"# Benchmarks: {page.title}\n"]
        parts.append(f"[How it is measured](../{ENTRY}#how-it-is-measured). Below 1 is faster.\n")
        parts += page.sections()
        for path, run in loaded.items():
            if page.holds(run):
                images = [f"../{image.relative_to(docs)}" for image in _images(path, docs)]
                parts += benchmark_tables.whole(path, run, _title(path, run), images)
        found[folder / f"{name}.md"] = "\n".join(parts)
        rows.append([f"[{page.title}]({folder.name}/{name}.md)", page.what])
    entry = [GENERATED, INTRODUCTION, markdown.table(["device", "measured"], rows), METHOD]
    return {docs / ENTRY: "\n".join(entry), **found}


def _title(path: Path, run: Run) -> str:
    """Return what the machine of a run is called where all of the run is shown."""
    if run.environment.device == "cuda":
        return "All measurements"
    known = {ROOT / place: f"A Xeon with {name}" for name, place in front_table.CPUS.items()}
    return known.get(path, f"{run.environment.cpu}, {run.environment.threads} threads")


def _guides() -> dict[Path, str]:
    """Return the guides with the sentences that measurements give."""
    return {
        ROOT / name: markdown.filled((ROOT / name).read_text(), fragments)
        for name, fragments in benchmark_h100.sentences().items()
    }


def _images(path: Path, docs: Path) -> list[Path]:
    """Return the plots of a file of results, those of the ratios first."""
    found = (docs / IMAGES).glob(f"{path.stem}-*.png")
    return sorted(found, key=lambda image: ("-ratio-" not in image.stem, image.stem))


if __name__ == "__main__":
    sys.exit(main())
