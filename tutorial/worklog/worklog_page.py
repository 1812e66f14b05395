"""Write the tables of docs/worklog.md between their markers, and draw its figures.

    python tutorial/worklog/worklog_page.py

The prose is written by hand; what stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->` is
made of the files that `SOURCES` names, and "not measured yet" where none of them has a number.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import markdown
from tutorial.worklog import worklog_model
from tutorial.worklog.worklog_steps import GROUPS, HEADLINE, STEPS, Sizes, Step, work

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/worklog.md"
IMAGES = ROOT / "docs/images/worklog"
SOURCES = {
    "results": ROOT / "benchmarks/results/worklog.json",
    "trials": ROOT / "benchmarks/results/worklog-trials.json",
    "sass": ROOT / "benchmarks/results/worklog-sass.json",
    "numerics": ROOT / "benchmarks/results/worklog-numerics.json",
    "fp8": ROOT / "benchmarks/results/h100-fp8-kernels.json",
}
NOT_YET = "not measured yet"
# The steps that compute the forward without its fold.
FORWARDS = ("epilogue", "statistics", "ping-pong")
TIMES = ("step", "cublas", "eager")
# The first step that keeps the tensor cores busy.
RING = 4
RATIOS = ["% of cuBLAS", "% of cuBLAS + LayerNorm"]
SPEEDS = ["TFLOP/s", *RATIOS]
Data = dict[str, Any]


def main() -> int:
    """Write the page and its figures, and return an exit status."""
    from tutorial.worklog import worklog_figures

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
    data["ceiling"] = data["results"]["ceilings"]["bfloat16"]
    data["gpu"] = _gpu(data["results"])
    data["table"] = [row(step, data) for step in STEPS]
    return data


def rendered(text: str, data: Data) -> str:
    """Return the page with what is between its marks written again.

    Args:
        text: The page.
        data: As `load` returns it.
    """
    return markdown.filled(text, {name: make(data) for name, make in BLOCKS.items()})


def row(step: Step, data: Data) -> Data:
    """Return what is known of a step at its first sizes: times and ratios, or None.

    Args:
        step: The step.
        data: The files.
    """
    measured = data["results"].get("steps", {}).get(step.name, {}).get("measured", [])
    alone: Data = next((m["us"] for m in measured if _sizes(m) == step.sizes[0]), {})
    its = times(step, step.sizes[0], alone, data)
    own, cublas, eager = (its.get(name) for name in ("step", "cublas", "eager"))
    if step.kind == "product":
        # It leaves out the half of the work that this column is about.
        eager = None
    return {
        **{"number": step.number, "name": step.name, "kind": step.kind},
        **{"us": own, "cublas_us": cublas},
        "tflops": step.flops / own / 1e6 if own else None,
        "of_cublas": cublas / own if own and cublas else None,
        "of_eager": eager / own if own and eager else None,
    }


def times(step: Step, sizes: Sizes, alone: Data, data: Data) -> Data:
    """Return the one set of times that the page shows of a step at some sizes.

    Those of the rounds that steps share, where it is among them, and their cuBLAS for every forward
    at the headline's sizes.

    Args:
        step: The step.
        sizes: Of its inputs.
        alone: Its times where it was timed by itself.
        data: The files.
    """
    together = data["results"].get("together", {})
    group = next((name for name, steps in GROUPS.items() if step in steps), None)
    if group and sizes == step.sizes[0]:
        its = together.get(group, {}).get("us", {})
        eager = "eager-activation" if step.kind == "activation" else "eager"
        return {
            name: its.get(of) for name, of in zip(TIMES, (step.name, "cublas", eager), strict=True)
        }
    if sizes == HEADLINE and step.kind != "step":
        return alone | {"cublas": together.get("forward", {}).get("us", {}).get("cublas")}
    return alone


def _sizes(measured: Data) -> Sizes:
    return Sizes(*(measured[name] for name in Sizes._fields))


def table(data: Data) -> str:
    """Return the table of the numbered kernels."""
    header = ["#", "kernel", "computes", "at M, K, N", "µs", "TFLOP/s", *RATIOS]
    rows = []
    kinds = {
        "product": "product",
        "forward": "LayerNorm + Linear",
        "activation": "LayerNorm + Linear + GELU",
        "step": "training step",
    }
    for step, known in zip(STEPS, data["table"], strict=True):
        cells = [
            f"{known['us']:.0f}" if known["us"] else NOT_YET,
            f"{known['tflops']:.0f}" if known["us"] else NOT_YET,
            f"{100 * known['of_cublas']:.1f}" if known["of_cublas"] else NOT_YET,
            f"{100 * known['of_eager']:.1f}" if known["of_eager"] else NOT_YET,
        ]
        if step.kind == "product":
            cells[-1] = "–"
        title = f"[{step.title}](#{anchor(step)})"
        rows.append([str(step.number), title, kinds[step.kind], str(step.sizes[0]), *cells])
    return markdown.table(header, rows, right=(0, *range(4, len(header))))


def _gpu(results: Data) -> str:
    """Return the short name of what all was measured on."""
    (name,) = {
        found["environment"]["gpu"]
        for kind in ("steps", "together")
        for found in results[kind].values()
    }
    return str(name).removeprefix("NVIDIA ").split()[0]


def rounds(data: Data) -> str:
    """Return what the steps of the table are divided by."""
    together = data["results"].get("together", {})
    if set(GROUPS) - set(together):
        return f"Steps in the same rounds: {NOT_YET}.\n"
    header = ["steps", "rounds", "cuBLAS, µs", "PyTorch, µs", "PyTorch with GELU, µs"]
    rows = []
    for name, steps in GROUPS.items():
        found = together[name]
        us = (found["us"].get(each) for each in ("cublas", "eager", "eager-activation"))
        cells = [str(found["rounds"]), *(f"{time:.1f}" if time else "–" for time in us)]
        rows.append([", ".join(str(step.number) for step in steps), *cells])
    return markdown.table(header, rows, right=range(1, len(header)))


def headline(data: Data) -> str:
    """Return how the forward and the product compare with cuBLAS and PyTorch."""
    known = {row["name"]: row for row in data["table"]}
    forwards, product = [known[name] for name in FORWARDS if known[name]["us"]], known["no-spills"]
    if not forwards:
        return f"The forward at {HEADLINE}: {NOT_YET}.\n"
    forward = max(forwards, key=lambda row: float(row["of_cublas"]))
    M, K, N = HEADLINE
    return (
        f"On one {data['gpu']}, LayerNorm and a Linear layer at M, K, N = {M}, {K}, {N} in "
        "bfloat16\n"
        f"takes {1 / forward['of_cublas']:.3f} of cuBLAS's time for the matrix product alone, and "
        f"{1 / forward['of_eager']:.3f} of PyTorch's time for\nboth. The product alone, written in "
        f"Mojo, takes {1 / product['of_cublas']:.3f} of cuBLAS's time.\n"
    )


def ceiling(data: Data) -> str:
    """Return what the GPU reached at most, and how many operations a byte that is."""
    rate, bandwidth = (
        data["ceiling"]["flops_per_second"] / 1e12,
        data["ceiling"]["bytes_per_second"] / 1e12,
    )
    return (
        f"On this {data['gpu']}, PyTorch's largest products run at {rate:.0f} TFLOP/s and "
        f"copies at\n{bandwidth:.2f} TB/s, so anything that does fewer than "
        f"{rate / bandwidth:.0f} operations for each byte waits for memory.\n"
    )


def power(data: Data) -> str:
    """Return the clocks that the GPU lowers itself to while large products run."""
    found = data["results"].get("steps", {})
    large = {"8192,4096,4096", "8192,4096,12288"}
    clocks = [
        m["mhz"]
        for step in STEPS
        if step.number >= RING and step.name in found
        for m in found[step.name]["measured"]
        if str(_sizes(m)) in large and m["mhz"]
    ]
    if not clocks:
        return f"Clocks: {NOT_YET}.\n"
    environment = found["ring"]["environment"]["clocks"].split(", ")
    most, limit = int(environment[2].split()[0]), float(environment[3].split()[0])
    return (
        f"Power is the other limit. While products of K = 4096 run, the GPU keeps to {limit:.0f} W "
        f"by lowering its clock from\n{most / 1e3:.2f} GHz to between {min(clocks) / 1e3:.2f} and "
        f"{max(clocks) / 1e3:.2f} GHz. A kernel that wastes energy, for example by moving "
        "registers\naround, slows down the tensor cores too.\n"
    )


def storing(data: Data) -> str:
    """Return by how much step 6 is faster than step 5, for each tile that an SM takes."""
    header = ["M, K, N", "tiles of an SM", "step 5, µs", "step 6, µs", "difference a tile, µs"]
    steps = data["results"].get("steps", {})
    if not {"clusters", "no-spills"} <= steps.keys():
        return f"Steps 5 and 6: {NOT_YET}.\n"
    before, after = (
        {_sizes(m): times(step, _sizes(m), m["us"], data)["step"] for m in measured}
        for step, measured in (
            (step, steps[step.name]["measured"])
            for step in STEPS
            if step.name in ("clusters", "no-spills")
        )
    )
    rows = []
    for size in sorted(before.keys() & after.keys(), key=lambda size: (size.K, size.N)):
        tiles = -(
            -(-(-size.M // worklog_model.TILE[0]) * -(-size.N // worklog_model.TILE[1]))
            // worklog_model.SMS
        )
        each = (before[size] - after[size]) / tiles
        cells = [f"{before[size]:.1f}", f"{after[size]:.1f}", f"{each:.1f}"]
        rows.append([str(size), str(tiles), *cells])
    return markdown.table(header, rows, right=range(1, len(header)))


def fp8(data: Data) -> str:
    """Return what products in FP8 reach, and norm and product together."""
    header = ["M, K, N", "µs", "TFLOP/s", "% of `_scaled_mm`", "norm and product, of bfloat16's"]
    rows = []
    for name, us in data["fp8"]["product"].items():
        M, K, N = map(int, name.split(","))
        both = data["fp8"]["both"].get(name, {}).get("us")
        cells = [f"{us['ours']:.1f}", f"{2 * M * K * N / us['ours'] / 1e6:.0f}"]
        cells.append(f"{100 * us['_scaled_mm'] / us['ours']:.1f}")
        cells.append(f"{both['ours'] / both['bf16']:.2f}" if both else "–")
        rows.append([name, *cells])
    machine = f"{data['fp8']['device']}, driver {data['fp8']['driver']}, "
    machine += f"PyTorch {data['fp8']['torch']}, commit {data['fp8']['commit']}.\n"
    return markdown.table(header, rows, right=range(1, len(header))) + "\n" + machine


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
        return f"Machine: {NOT_YET}.\n"
    # Each step is a process of its own, so that those of one run begin at different times.
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    fields = ("gpu", "driver", "torch", "mojo", "commit")
    together = data["results"].get("together", {})
    for name, found in (*steps.items(), *((f"together: {n}", f) for n, f in together.items())):
        key = tuple(found["environment"][f] for f in fields)
        groups.setdefault(key, {})[name] = found["environment"]["date"]
    header = ["steps", "GPU", "driver", "PyTorch", "Mojo", "commit", "from", "to"]
    rows = [
        [", ".join(dates), *key, min(dates.values()), max(dates.values())]
        for key, dates in groups.items()
    ]
    return markdown.table(header, rows)


def sizes(data: Data) -> str:
    """Return all that `poe worklog` measured, at every size."""
    header = ["step", "M, K, N", "µs", *SPEEDS, "error (PyTorch's)"]
    rows = []
    for step in STEPS:
        for m in data["results"].get("steps", {}).get(step.name, {}).get("measured", []):
            its = _sizes(m)
            us = times(step, its, m["us"], data)
            if not all(us.get(name) for name in TIMES):
                continue
            own, cublas, eager = (us[name] for name in TIMES)
            normed = "–" if step.kind == "product" else f"{100 * eager / own:.1f}"
            cells = [f"{own:.1f}", f"{work(step.kind, its) / own / 1e6:.0f}"]
            cells += [f"{100 * cublas / own:.1f}", normed]
            cells.append(f"{m['errors']['step']:.1e} ({m['errors']['peer']:.1e})")
            rows.append([f"{step.number} {step.name}", str(its), *cells])
    if not rows:
        return f"All sizes: {NOT_YET}.\n"
    return markdown.table(header, rows, right=range(2, len(header)))


def resources(data: Data) -> str:
    """Return what the kernels of the products take."""
    header = ["kernel", "registers", "stack, bytes", "instructions", "in the main loop"]
    header += ["products", "memory"]
    rows = []
    for name, found in data["sass"]["kernels"].items():
        loop = found["loop"]
        products = sum("HGMMA" in line or "FFMA" in line for line in loop)
        local = sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in loop)
        numbers = [found[name] for name in ("registers", "stack_bytes", "instructions")]
        rows.append([name, *map(str, [*numbers, len(loop), products, local])])
    return markdown.table(header, rows, right=range(1, len(header))) + (
        f"\nptxas {data['sass']['ptxas']}, {data['sass']['target']}. The last column counts loads "
        "and stores of local memory in the main loop.\n"
    )


def sass(data: Data) -> str:
    """Return the main loop of the last step's kernel as machine code."""
    loop = data["sass"]["kernels"]["no-spills"]["loop"]
    return "```text\n" + "\n".join(loop) + "\n```\n"


def numerics(data: Data) -> str:
    """Return the errors of folds as a table."""
    found = data["numerics"]
    tables = []
    for kind, by_mean in found["errors"].items():
        names = list(next(iter(by_mean.values())))
        signs = "both signs" if kind == "signed" else "one sign"
        header = [f"mean / std, weights of {signs}", *names]
        rows = [
            [mean, *(f"{errors[name]:.1e}" for name in names)] for mean, errors in by_mean.items()
        ]
        tables.append(markdown.table(header, rows, right=range(len(header))))
    return "\n".join(tables)


BLOCKS = {
    "table": table,
    "rounds": rounds,
    "headline": headline,
    "cycles": worklog_model.table,
    "ceiling": ceiling,
    "power": power,
    "storing": storing,
    "fp8": fp8,
    "machine": machine,
    "sizes": sizes,
    "resources": resources,
    "sass": sass,
    "numerics": numerics,
}

if __name__ == "__main__":
    sys.exit(main())
