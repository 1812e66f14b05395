"""The H100's page, sections that the H200's has too, and what guides say of the H100."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import benchmark_tables
import benchmark_trainings

from benchmarks import markdown, regret_gpu
from fused_norm.devices.hopper import GpuCall

ROOT = Path(__file__).resolve().parents[2]
FP8 = "benchmarks/results/h100-fp8-kernels.json"
WHOLE = "benchmarks/results/h100-blocks.json"
BLOCKS = "benchmarks/results/h100-fp8-blocks.json"
HEAD = "benchmarks/results/h100-head.json"
# Made by `python -m benchmarks.head --from-json FILE --plot docs/images/head.png`.
HEAD_PLOT = "images/head.png"
DECODING = "benchmarks/results/h100-decode.json"
REGRET = "benchmarks/results/gpu-regret-nvidia-h100.json"
REGRET_TRAINING = "benchmarks/results/gpu-regret-training-nvidia-h100.json"
BFLOAT16, PEER, OURS = "bf16", "torch.compile, _scaled_mm", "ours"
# What the file calls them, and what the page does.
EPILOGUES = {
    "_scaled_mm": "`_scaled_mm`",
    "ours": "ours",
    "ours, bias": "+ bias",
    "ours, gelu": "GELU",
    "ours, swiglu": "SwiGLU",
}
HEADS = {
    "eager": "eager",
    "compile": "torch.compile",
    "liger": "Liger",
    "cut-cross-entropy": "cut-cross-entropy",
    "quack": "quack",
    "fused_norm": "**ours**",
    "fused_norm-small": '**ours, `chunk_rows="small"`**',
}


def sections() -> list[str]:
    """Return all sections as headings, sentences and tables in Markdown."""
    whole = benchmark_tables.members(ROOT / WHOLE, "Whole blocks")
    last = [*_head(_load(HEAD)), *benchmark_trainings.sections()]
    last += regret({"forward": REGRET, "training": REGRET_TRAINING})
    return [*whole, *decoding(DECODING), *_fp8(_load(FP8)), *blocks(BLOCKS), *last]


def sentences() -> dict[str, dict[str, str]]:
    """Return what the guides say, by page and by the name of the marks around it."""
    times = [found["us"] for found in _load(FP8)["both"].values()]
    ours, peer = (_range([us[name] / us[BFLOAT16] for us in times]) for name in (OURS, PEER))
    cases = [case["results"] for case in _load(HEAD)["cases"]]
    step, of_compile, of_eager = (
        _range([found["fused_norm"]["ms"] / found[name]["ms"] for found in cases])
        for name in ("products", "compile", "eager")
    )
    memory = [found["fused_norm"]["gib"] / found["eager"]["gib"] for found in cases]
    trainings = benchmark_trainings.sentences()
    return {
        "docs/guide/fp8.md": {
            "h100": "On an H100, RMSNorm and a product with a scale for each row take "
            f"{ours} of bfloat16's\ntime, and `torch.compile` with `torch._scaled_mm` {peer}. "
            "[All sizes, and blocks](../benchmarks/h100.md#products-in-fp8).\n",
            **trainings["docs/guide/fp8.md"],
        },
        "docs/guide/head.md": {
            "h100": f"On an H100, with RMSNorm and all gradients, the kernels take {of_eager} of "
            f"eager's time,\n{of_compile} of `torch.compile`'s, and {step} of the three products "
            f"alone;\nmemory is {_range(memory)} of eager's. "
            "[All sizes, Liger, cut-cross-entropy and quack]"
            "(../benchmarks/h100.md#a-language-models-head).\n",
            **trainings["docs/guide/head.md"],
        },
    }


def _load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / name).read_text())
    return content


def _range(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _fp8(run: dict[str, Any]) -> list[str]:
    rows = []
    for size, found in run["both"].items():
        base, peer, ours = (found["us"][name] for name in (BFLOAT16, PEER, OURS))
        cells = [f"{base:.0f} us", f"{peer / base:.2f}", f"**{ours / base:.2f}**"]
        rows.append([_sizes(size), *cells, f"{found['dB']['ours']:.1f} dB"])
    both = ["MxKxN", "bfloat16", "torch.compile, `_scaled_mm`", "ours", "SQNR"]
    products = []
    for size, found in run["product"].items():
        base = found["_scaled_mm"]
        ratios = [f"{found[name] / base:.2f}" for name in EPILOGUES if name != "_scaled_mm"]
        products.append([_sizes(size), f"{base:.0f} us", *ratios])
    where = f"{run['device']}, torch {run['torch']}, driver {run['driver']}, {run['commit']}"
    return [
        "## Products in FP8\n",
        f"{where}, CUDA graphs. From `{FP8}`, made by `scripts/fp8_gpu.py`. What FP8 does, and how "
        "to have it, is in [the guide](../guide/fp8.md).\n",
        "**RMSNorm and a product with a scale for each row**, ratios to bfloat16, and the "
        "signal-to-noise ratio of the output:\n",
        markdown.table(both, rows, right=range(1, len(both))),
        "**The product alone**, ratios to `torch._scaled_mm`, which has no epilogue:\n",
        markdown.table(
            ["MxKxN", *EPILOGUES.values()], products, right=range(1, 1 + len(EPILOGUES))
        ),
    ]


def blocks(path: str) -> list[str]:
    """Return a section on blocks in FP8, from a file of results in the checkout."""
    run = _load(path)
    cases = run["cases"]
    names = list(dict.fromkeys(name for case in cases for name in case["results"]))
    rows = []
    for name in names:
        cells = []
        for case in cases:
            result = case["results"].get(name, {})
            ratio = result.get("us", 0) / case["results"]["eager"]["us"]
            cells.append(f"{ratio:.2f}" if "us" in result else "")
        rows.append([f"**{name}**" if name.startswith("fused_norm") else name, *cells])
    header = ["", *(f"{case['block']}, {case['mode']}" for case in cases)]
    e, versions = run["environment"], run["versions"]
    commits = ", ".join(dict.fromkeys(f"{case['date']} {case['commit']}" for case in cases))
    return [
        "### Blocks in FP8\n",
        f"{e['gpu']}, torch {e['torch']}, torchao {versions['torchao']}, driver {e['driver']}, "
        f"{commits}, CUDA graphs. From `{path}`, made by "
        "`poe bench --fp8`. Ratios to eager bfloat16; `products` are `torch._scaled_mm` of "
        "operands quantized before, and attention. Weights are random: hidden rows of a frozen "
        "gate stay in 8 bits, which [trained weights may not allow](../guide/fp8.md).\n",
        markdown.table(header, rows, right=range(1, len(header))),
        f"![Blocks in FP8: time over eager bfloat16](../{_picture(path)})\n",
    ]


def _picture(path: str) -> str:
    """Return what `poe bench --fp8 --from-json PATH --plot docs/PICTURE` writes."""
    return f"images/{Path(path).stem}.png"


def decoding(path: str) -> list[str]:
    """Return a section on decoding, from a file of results in the checkout."""
    run = _load(path)
    names = list(dict.fromkeys(name for case in run["cases"] for name in case["results"]))
    rows = []
    for case in run["cases"]:
        us = {name: result["us"] for name, result in case["results"].items() if "us" in result}
        ratios = [f"{us[name] / us['eager']:.2f}" if name in us else "" for name in names[1:]]
        rows.append([str(case["batch"]), f"{us['eager']:.0f} us", *ratios])
    titles = [f"**{name}**" if name.startswith("fused_norm") else name for name in names]
    header = ["sequences", *titles]
    e = run["environment"]
    return [
        "## Decoding\n",
        f"{e['gpu']}, bfloat16, torch {e['torch']}, driver {e['driver']}, {e['date']}, "
        f"{e['commit']}, CUDA graphs. From `{path}`, made by `poe bench --decode`.\n",
        "One token of each sequence through eight blocks of LLaMA-8B with a cache of 1024 "
        "positions: ratios to eager. `products` are the products alone, by PyTorch; `weights` is "
        "the time in which a copy moves as many bytes as the weights have.\n",
        markdown.table(header, rows, right=range(1, len(header))),
    ]


def regret(paths: dict[str, str]) -> list[str]:
    """Return a section on choices, from a file of results in the checkout for each direction."""
    rows, runs = [], {direction: _load(path) for direction, path in paths.items()}
    for direction, run in runs.items():
        calls = [GpuCall(*call) for call in run["calls"]]
        for dtype, is_launched in itertools.product(regret_gpu.DTYPES, (False, True)):
            each = [call for call in calls if call.dtype == dtype]
            if not each:
                continue
            how = "launched" if is_launched else "in a CUDA graph"
            cells = [direction, dtype, how, str(len(each))]
            for ratio in (regret_gpu.regret, regret_gpu.of_eager):
                ratios = [ratio(call, "chosen", is_launched) for call in each]
                cells += [f"{statistics.median(ratios):.3f}", f"{max(ratios):.2f}"]
            rows.append(cells)
    header = ["direction", "dtype", "", "sizes", "of the fastest strategy: median", "worst"]
    header += ["of eager: median", "worst"]
    machines = "; ".join(
        f"`{paths[name]}`: {e['gpu']}, torch {e['torch']}, driver {e['driver']}, {e['date']}, "
        f"{e['commit']}"
        for name, e in ((name, run["environment"]) for name, run in runs.items())
    )
    by = ", with `--training` for the last" if "training" in paths else ""
    return [
        "## Choices at sizes drawn at random\n",
        f"{machines}. Made by `poe bench --regret --device cuda`{by}: LayerNorm and a product, the "
        "time of what users get over that of the fastest strategy of the forward and of eager. "
        "[How calls are chosen](../guide/install.md#how-calls-are-chosen).\n",
        markdown.table(header, rows, right=range(3, len(header))),
    ]


def _head(run: dict[str, Any]) -> list[str]:
    rows = []
    # What was not installed is in no case.
    names = [name for name in HEADS if name in run["cases"][0]["results"]]
    for case in run["cases"]:
        found = case["results"]
        base = found["products"]["ms"]
        cells = [f"{base:.1f} ms"]
        for name in names:
            if "error" in found[name]:
                cells.append("error")
                continue
            ratio, gib = found[name]["ms"] / base, found[name]["gib"]
            cells.append(f"{ratio:.2f} ({gib:.1f})")
        rows.append([_sizes(case["size"]), *cells])
    header = ["rows x K x vocabulary", "products", *(HEADS[name] for name in names)]
    e, versions = run["environment"], run["versions"]
    packages = ("liger-kernel", "cut-cross-entropy", "quack-kernels", "triton")
    peers = ", ".join(f"{name} {versions[name]}" for name in packages if versions[name])
    return [
        "## A language model's head\n",
        f"{run['device']}, bfloat16, torch {e['torch']}, driver {e['driver']}, {e['date']}, "
        f"{e['commit']}; {peers}. From `{HEAD}`, made by `python -m benchmarks.head`.\n",
        "RMSNorm, the product with the vocabulary, cross entropy and all gradients: ratios to the "
        "three products alone, by PyTorch, and in parentheses GiB beyond inputs and gradients. "
        "[The guide](../guide/head.md) says what is computed.\n",
        markdown.table(header, rows, right=range(1, len(header))),
        f"![Time of the head over its memory, at each size](../{HEAD_PLOT})\n",
    ]


def _sizes(size: str | list[int]) -> str:
    return "x".join(size.split(",") if isinstance(size, str) else map(str, size))
