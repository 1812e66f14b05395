"""Write the tables of docs/worklog.md between their markers, and draw its figures.

    python scripts/worklog_page.py

The prose is written by hand; what stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->` is
made of the files that `SOURCES` names, and "not measured yet" where none of them has a number.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from worklog_steps import HEADLINE, STEPS, Sizes, Step, work

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/worklog.md"
IMAGES = ROOT / "docs/images/worklog"
SOURCES = {
    "results": ROOT / "benchmarks/h200-worklog.json",
    "trials": ROOT / "benchmarks/worklog-trials.json",
    "bench": ROOT / "benchmarks/results/h200.json",
    "sass": ROOT / "benchmarks/worklog-sass.json",
    "numerics": ROOT / "benchmarks/worklog-numerics.json",
}
NOT_YET = "not measured yet"
# Where another file has times of what a step computes: provider and mode of benchmarks/results.
BENCHED = {
    "statistics": ("fused_norm-frozen", "forward"),
    "fold": ("fused_norm", "forward"),
    "few-rows": ("fused_norm-frozen", "forward"),
    "hidden-pass": ("fused_norm", "train"),
}

Data = dict[str, Any]


def main() -> int:
    """Write the page and its figures, and return an exit status."""
    import worklog_figures

    data = load()
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name in worklog_figures.FIGURES:
        worklog_figures.draw(name, data, IMAGES / f"{name}.png")
    PAGE.write_text(rendered(PAGE.read_text(), data))
    return 0


def load() -> Data:
    """Return what the files hold, the rows of the table, and the machine's ceiling."""
    data: Data = {
        name: json.loads(path.read_text()) if path.is_file() else {}
        for name, path in SOURCES.items()
    }
    (data["ceiling"],) = [c for c in data["bench"]["ceilings"] if c["dtype"] == "bfloat16"]
    data["table"] = [row(step, data) for step in STEPS]
    return data


def rendered(text: str, data: Data) -> str:
    """Return the page with what is between its markers made anew.

    Args:
        text: The page.
        data: As `load` returns it.
    """
    for name, make in BLOCKS.items():
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
        count = text.count(begin)
        if count != 1 or end not in text:
            raise ValueError(f"{PAGE.name} has {count} places for {name}")
        before, rest = text.split(begin)
        text = before + begin + make(data) + end + rest.split(end, 1)[1]
    return text


def row(step: Step, data: Data) -> Data:
    """Return what is known of a step: rates, or None, and which file they are from.

    Args:
        step: The step.
        data: The files.
    """
    found: Data = {"number": step.number, "name": step.name, "kind": step.kind, "mark": ""}
    measured = data["results"].get("steps", {}).get(step.name, {}).get("measured", [])
    times = next((m["us"] for m in measured if _sizes(m) == step.sizes[0]), None)
    if times is None:
        times, found["mark"] = _elsewhere(step, data)
    own, cublas, eager = (times.get(name) for name in ("step", "cublas", "eager"))
    ratio = times.get("of_eager")
    found["us"] = own
    found["tflops"] = step.flops / own / 1e6 if own else None
    found["of_cublas"] = cublas / own if own and cublas else None
    found["of_eager"] = eager / own if own and eager else 1 / ratio if ratio else None
    if step.kind == "product":
        # It leaves out the half of the work that this column is about.
        found["of_eager"] = None
    return found


def _sizes(measured: Data) -> Sizes:
    return Sizes(*(measured[name] for name in Sizes._fields))


def _elsewhere(step: Step, data: Data) -> tuple[Data, str]:
    """Return the times of a step that other files have, and their mark in the table."""
    M, K, N = step.sizes[0]
    if step.name in BENCHED:
        provider, mode = BENCHED[step.name]
        for measurement in data["bench"]["measurements"]:
            if (
                measurement["op"] == "layernorm_linear"
                and measurement["dtype"] == "bfloat16"
                and measurement["mode"] == mode
                and measurement["shape"] == [M, K, N]
            ):
                medians = {
                    result["provider"]: result["timings"]["graph"]["median"]
                    for result in measurement["results"]
                    if "graph" in result["timings"]
                }
                names = {"step": provider, "cublas": "linear", "eager": "eager"}
                return {name: medians[its] for name, its in names.items()}, " †"
    trials = data["trials"]
    if step.name == "no-spills":
        (stands,) = [r for r in trials["where it stands"]["rows"] if r["shape"] == str(HEADLINE)]
        cublas = float(stands["cublas_us"])
        return {"step": cublas * float(stands["gemm_of_cublas"]), "cublas": cublas}, " ‡"
    if step.name == "epilogue":
        trial = trials["statistics"]
        at = trial["shapes"].index(str(HEADLINE))
        return {"step": float(trial["rows"]["a kernel of its own"][at])}, " ‡"
    if step.name == "backward":
        training = trials["training"]["rows"]
        return {"of_eager": float(training["this"][0])}, " ‡"
    if step.name == "activation":
        kept = trials["activation"]["rows"]["h p(h²), hardware reciprocal"]
        return {"of_eager": float(kept[0])}, " ‡"
    return {}, ""


def table(data: Data) -> str:
    """Return the table of the numbered kernels."""
    lines = [
        "| # | kernel | computes | at M, K, N | TFLOP/s | % of cuBLAS | % of cuBLAS + LayerNorm |",
        "|---:|---|---|---|---:|---:|---:|",
    ]
    kinds = {
        "product": "product",
        "forward": "LayerNorm + Linear",
        "activation": "LayerNorm + Linear + GELU",
        "step": "training step",
    }
    for step, known in zip(STEPS, data["table"], strict=True):
        nothing = "" if known["us"] or known["of_eager"] else NOT_YET
        cells = [
            f"{known['tflops']:.0f}" if known["tflops"] else NOT_YET,
            f"{known['of_cublas']:.1%}".replace("%", "") if known["of_cublas"] else NOT_YET,
            f"{known['of_eager']:.1%}".replace("%", "") if known["of_eager"] else NOT_YET,
        ]
        if step.kind == "product":
            cells[2] = "–"
        mark = "" if nothing else known["mark"]
        title = f"[{step.title}](#{anchor(step)}){mark}"
        lines.append(
            f"| {step.number} | {title} | {kinds[step.kind]} | {step.sizes[0]} "
            f"| {' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def anchor(step: Step) -> str:
    """Return what a link to the section of a step ends in, on GitHub and on the site.

    Args:
        step: The step.
    """
    heading = f"{step.number}. {step.title}".lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading))


def machine(data: Data) -> str:
    """Return what the numbers of `poe worklog` were measured on."""
    steps = data["results"].get("steps", {})
    if not steps:
        return (
            "`uv run poe worklog` has not run on a Hopper GPU yet; every number above is from one "
            "of the other two files.\n"
        )
    lines = [
        "| steps | GPU | driver | PyTorch | Mojo | commit | date |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, ...], list[str]] = {}
    fields = ("gpu", "driver", "torch", "mojo", "commit", "date")
    for name, found in steps.items():
        groups.setdefault(tuple(found["environment"][f] for f in fields), []).append(name)
    lines += [f"| {', '.join(names)} | {' | '.join(key)} |" for key, names in groups.items()]
    return "\n".join(lines) + "\n"


def sizes(data: Data) -> str:
    """Return all that `poe worklog` measured, at every size."""
    lines = [
        "| step | M, K, N | µs | TFLOP/s | % of cuBLAS | % of cuBLAS + LayerNorm "
        "| error (PyTorch's) |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for step in STEPS:
        for m in data["results"].get("steps", {}).get(step.name, {}).get("measured", []):
            own, cublas, eager = (m["us"][name] for name in ("step", "cublas", "eager"))
            its = _sizes(m)
            normed = "–" if step.kind == "product" else f"{100 * eager / own:.1f}"
            lines.append(
                f"| {step.number} {step.name} | {its} | {own:.1f} "
                f"| {work(step.kind, its) / own / 1e6:.0f} | {100 * cublas / own:.1f} | {normed} "
                f"| {m['errors']['step']:.1e} ({m['errors']['peer']:.1e}) |"
            )
    if len(lines) == 2:
        return f"All sizes: {NOT_YET}.\n"
    return "\n".join(lines) + "\n"


def resources(data: Data) -> str:
    """Return what the kernels of the products take."""
    lines = [
        "| kernel | registers | stack, bytes | instructions | in the main loop | products "
        "| memory |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, found in data["sass"]["kernels"].items():
        loop = found["loop"]
        products = sum("HGMMA" in line or "FFMA" in line for line in loop)
        local = sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in loop)
        lines.append(
            f"| {name} | {found['registers']} | {found['stack_bytes']} | {found['instructions']} "
            f"| {len(loop)} | {products} | {local} |"
        )
    lines.append(
        f"\nptxas {data['sass']['ptxas']}, {data['sass']['target']}. The last column counts loads "
        "and stores of local memory in the main loop."
    )
    return "\n".join(lines) + "\n"


def sass(data: Data) -> str:
    """Return the main loop of the last step's kernel as machine code."""
    loop = data["sass"]["kernels"]["no-spills"]["loop"]
    return "```text\n" + "\n".join(loop) + "\n```\n"


def numerics(data: Data) -> str:
    """Return the errors of folds as a table."""
    found = data["numerics"]
    lines = []
    for kind, by_mean in found["errors"].items():
        names = list(next(iter(by_mean.values())))
        signs = "both signs" if kind == "signed" else "one sign"
        lines += [f"| mean / std, weights of {signs} | {' | '.join(names)} |"]
        lines += ["|---:|" + "---:|" * len(names)]
        for mean, errors in by_mean.items():
            lines.append(f"| {mean} | {' | '.join(f'{errors[name]:.1e}' for name in names)} |")
        lines.append("")
    return "\n".join(lines)


BLOCKS = {
    "table": table,
    "machine": machine,
    "sizes": sizes,
    "resources": resources,
    "sass": sass,
    "numerics": numerics,
}

if __name__ == "__main__":
    sys.exit(main())
