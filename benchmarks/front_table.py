"""The figures of the front page: where we are faster and where not, from committed runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import markdown, runs
from benchmarks.regret import of_eager
from benchmarks.runs import Measurement, Result, Run
from fused_norm.devices.costs import DIRECTIONS, Measured

BLOCKS = "benchmarks/results/h100-blocks.json"
OTHER_BLOCKS = "benchmarks/results/h200-blocks.json"
FP8 = "benchmarks/results/h200-fp8-blocks.json"
HEAD = "benchmarks/results/h100-head.json"
DECODING = "benchmarks/results/h200-decode.json"
FAMILY = "benchmarks/results/h200-family.json"
FAMILY_DTYPES = "benchmarks/results/h200-family-dtypes.json"
MODELS = "benchmarks/results/h200-models.json"
MODEL_TITLES = {
    "vit": "ViT-L",
    "llama": "LLaMA 1B",
    "qwen3": "Qwen3 0.6B",
    "gpt2": "GPT-2 XL",
    "whisper": "Whisper large",
    "dit": "DiT-XL",
    "bert": "BERT-large",
    "modernbert": "ModernBERT",
    "siglip": "SigLIP",
}
ROW_OP = "layer_norm"
CPUS = {
    "AMX": "benchmarks/results/ops/cpu-xeon.json",
    "AVX-512": "benchmarks/results/cpu-avx512.json",
}
# Calls of sizes drawn at random.
RANDOM = {
    "Xeon, AMX": "benchmarks/results/cpu-regret-intel-amx.json",
    "EPYC, Zen 3": "benchmarks/results/cpu-regret-amd-zen3.json",
    "EPYC, Zen 5": "benchmarks/results/cpu-regret-amd-zen5.json",
}
MODES = ("forward", "train")
PEER = "compile"
# The result that represents us if a block is measured in several ways.
BACKEND = "fused_norm-compile-inductor"
FROZEN = f"{BACKEND}-frozen"
# That of decoding with weights in FP8.
EIGHT_BITS = "fused_norm FP8, frozen"


def short(gpu: str) -> str:
    """Return what people call a GPU."""
    return " ".join(gpu.removeprefix("NVIDIA ").split()[:1])


def of_role(run: Run, measurement: Measurement, role: str) -> Result | None:
    """Return the result of a role: for ours the backend's if it exists, otherwise the first.

    Args:
        run: A run.
        measurement: One of it.
        role: That of a provider, or its name.
    """
    named = BACKEND if role == "ours" else role
    for result in measurement.results:
        if result.provider == named:
            return result
    found = (r for r in measurement.results if run.role(measurement.op, r.provider) == role)
    return next(found, None)


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
        f"On an {short(run.environment.gpu)} in bfloat16, {count} kinds of blocks take\n"
        f"**{words('ours', 'graph')}**, measured on the device;\n"
        f"`torch.compile` alone takes {words('peer', 'graph')}.\n"
        f"Against `torch.compile` the median is {middles}.\n"
    )


def table(root: Path) -> str:
    """Return what one gets, and where not, from all committed runs.

    Args:
        root: The repository.
    """
    lines = []
    for path in (BLOCKS, OTHER_BLOCKS):
        run = runs.load(root / path)
        place = f"{short(run.environment.gpu)}, bfloat16"
        lines.append(["a block, in a CUDA graph", place, *_pairs(run, "graph"), ""])
        if path == BLOCKS:
            lines.append(["a block, launched", place, *_pairs(run, "launch"), ""])
            lines += [_eight_bits(root / FP8), _head(root / HEAD), *_decoding(root / DECODING)]
    lines += _models(root / MODELS)
    family = runs.load(root / FAMILY)
    place = f"{short(family.environment.gpu)}, bfloat16"
    lines += [
        ["a call, in a CUDA graph", place, *_pairs(family, "graph"), ""],
        ["a call, launched", place, *_pairs(family, "launch"), ""],
    ]
    for name, path in CPUS.items():
        if f"Xeon, {name}" in RANDOM:
            continue
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
        text = _cell(ours, peer)
        if frozen := _ratios(run, mode, metric, FROZEN):
            text += f", frozen {median(frozen):.2f}"
        cells += [text, f"{median(peer):.2f}" if peer else ""]
    return cells


def _eight_bits(path: Path) -> list[str]:
    """Return the line of blocks in FP8, over bfloat16's eager; the peer is torchao, compiled."""
    cells = []
    for mode in MODES:
        cases = [c["results"] for c in json.loads(path.read_text())["cases"] if c["mode"] == mode]
        ours, peer = (
            [found[f"{who} rowwise"]["us"] / found["eager"]["us"] for found in cases]
            for who in ("fused_norm", "torchao")
        )
        cells += [_cell(ours, peer), f"torchao {median(peer):.2f}"]
    where = json.loads(path.read_text())["environment"]
    return ["a block in FP8, rowwise", f"{short(where['gpu'])}, FP8", *cells, ""]


def _head(path: Path) -> list[str]:
    """Return the line of a language model's head with its loss."""
    run = json.loads(path.read_text())
    names = {"train": ("fused_norm", "compile", "eager"), "forward": ("loss", "", "loss-eager")}
    cells = []
    for mode in MODES:
        name, peer, eager = names[mode]
        ratios = [
            [c["results"][who]["ms"] / c["results"][eager]["ms"] for c in run["cases"]]
            for who in (name, peer)
            if who
        ]
        cells += [_cell(*ratios), f"{median(ratios[1]):.2f}" if peer else ""]
    memory = [
        median([c["results"][who]["gib"] / c["results"][eager]["gib"] for c in run["cases"]])
        for who, _, eager in (names[mode] for mode in MODES)
    ]
    place = f"{short(run['environment']['gpu'])}, bfloat16"
    return ["a head and its loss", place, *cells, " / ".join(f"{m:.2f}" for m in memory)]


def _decoding(path: Path) -> list[list[str]]:
    """Return a line for each number of sequences of which a token goes through blocks."""
    run = json.loads(path.read_text())
    gpu, lines = short(run["environment"]["gpu"]), []
    for case in run["cases"]:
        names = ("fused_norm", EIGHT_BITS, PEER)
        ours, eight, peer = (
            case["results"][name]["us"] / case["results"]["eager"]["us"] for name in names
        )
        text = f"**{ours:.2f}**" if ours < min(1.0, peer) else f"{ours:.2f}"
        count = case["batch"]
        what = f"decoding, {count} sequence{'s' if count > 1 else ''}"
        text += f", FP8 {eight:.2f}"
        lines.append([what, f"{gpu}, bfloat16", text, f"{peer:.2f}", "", "", ""])
    return lines


def _models(path: Path) -> list[list[str]]:
    """Return a line for each whole model: times and peak memory over eager's."""
    run = json.loads(path.read_text())
    place = f"{short(run['environment']['gpu'])}, {run['dtype']}"
    lines = []
    here = {m["model"] for m in run["measurements"]}
    for model, title in ((m, t) for m, t in MODEL_TITLES.items() if m in here):
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
    """Return the ratios of a role, over all measurements of a mode."""
    found = []
    for measurement in run.measurements:
        if measurement.mode != mode:
            continue
        ours, other = of_role(run, measurement, role), measurement.of(to)
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
