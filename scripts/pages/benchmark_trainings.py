"""Whole models on GPUs, for their pages of the benchmarks: steps with the head, and FP8."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks import markdown
from benchmarks.report import size as bytes_in_words

ROOT = Path(__file__).resolve().parents[2]
HEAD = "benchmarks/results/h100-head-training.json"
MODELS = "benchmarks/results/h100-fp8-models.json"
FP8 = "benchmarks/results/h200-fp8-curve.json"
CURVE = "docs/images/fp8-curve.png"
PROVIDERS = {
    "eager": "eager",
    "eager-head": "eager, the head called",
    "compile": "torch.compile",
    "compile-head": "torch.compile, the head called",
    "fused_norm": "**our backend**",
}
RUNS = {
    "bfloat16": "bfloat16, torch.compile",
    "bfloat16-again": "the same from another seed",
    "torchao": "torchao, torch.compile",
    "fused_norm": "**our backend**",
}


def sections() -> list[str]:
    """Return the sections of an H100 as headings, sentences and tables in Markdown."""
    return [*_head(json.loads((ROOT / HEAD).read_text())), *models(MODELS)]


def sentences() -> dict[str, dict[str, str]]:
    """Return what the guides say, by page and by the name of the marks around it."""
    head, fp8 = (json.loads((ROOT / name).read_text()) for name in (HEAD, FP8))
    (gpt2,) = (m for m in head["measurements"] if m["model"] == "gpt2")
    rates = {name: f"{r['tokens a second']:,.0f}" for name, r in gpt2["results"].items()}
    held = {name: r["peak bytes"] - gpt2["gradients"] for name, r in gpt2["results"].items()}
    sequences, tokens = gpt2["shape"]
    last, of = fp8["last"], fp8["tokens a second"]
    size, pages = fp8["size"], "../benchmarks"
    return {
        "docs/guide/head.md": {
            "training": f"Whole steps of GPT-2 124M, {sequences} x {tokens} tokens: "
            f"{rates['fused_norm']} tokens a second with the backend, which fuses the head\n"
            f"itself, {rates['compile-head']} with the head called under `torch.compile`, and "
            f"{rates['compile']} with `torch.compile` alone.\nActivations take "
            f"{held['fused_norm'] / held['compile']:.2f} of `torch.compile`'s memory and "
            f"{held['fused_norm'] / held['eager']:.2f} of eager's. "
            f"[All of it]({pages}/h100.md#training-steps-with-the-head).\n",
        },
        "docs/guide/fp8.md": {
            "training": f"A GPT of {size['layers']} layers of {size['width']:,} features, trained "
            f"for {size['steps']:,} steps in `{fp8['recipe']}`, ends at a loss of "
            f"{last['fused_norm']:.4f}\n(torchao {last['torchao']:.4f}, bfloat16 "
            f"{last['bfloat16']:.4f} and, from another seed, {last['bfloat16-again']:.4f}), at "
            f"{of['fused_norm']:,} characters a second\n(torchao {of['torchao']:,}, bfloat16 "
            f"{of['bfloat16']:,}). [The curves]({pages}/h200.md#a-training-in-fp8).\n",
        },
    }


def _head(run: dict[str, Any]) -> list[str]:
    rows = []
    for m in run["measurements"]:
        sequences, tokens = m["shape"]
        eager = m["results"]["eager"]
        for provider, found in m["results"].items():
            held = max(found["peak bytes"] - m["gradients"], 0)
            rows.append([
                m["model"],
                f"{sequences} x {tokens}",
                PROVIDERS[provider],
                f"{found['tokens a second']:,.0f}",
                f"{found['seconds'] / eager['seconds']:.2f}",
                bytes_in_words(held),
            ])  # fmt: skip
    header = ["model", "tokens", "", "tokens a second", "time, of eager's", "activations"]
    e = run["environment"]
    commits = ", ".join(dict.fromkeys(m["commit"] for m in run["measurements"]))
    return [
        "### Training steps with the head\n",
        f"{_machine(e | {'commit': commits})}. From `{HEAD}`, made by "
        "`scripts/measure/head_training.py`: forward, backward and AdamW. Activations are the peak "
        "less the gradients.\n",
        markdown.table(header, rows, right=(3, 4, 5)),
    ]


def models(path: str) -> list[str]:
    """Return a section on whole models in FP8, from a file of results in the checkout."""
    run, rows = json.loads((ROOT / path).read_text()), []
    for m in run["measurements"]:
        for provider, found in m["results"].items():
            seconds = found["timings"]["launch"]["median"] * 1e-6
            rows.append([
                f"{m['model']}, {m['mode']}",
                provider,
                f"{m['count'] / seconds:,.0f}",
                bytes_in_words(found["peak bytes"] + 2 * m["parameters"]),
                f"{20 * math.log10(1 / found['output error']):.1f} dB",
            ])  # fmt: skip
    header = ["model", "", "tokens a second", "peak memory, all of it", "SQNR of the logits"]
    return [
        "### Whole models in FP8\n",
        f"{_machine(run['environment'])}. From `{path}`, made by "
        "`scripts/measure/whole_models.py`: LLaMA 3.2 1B with random weights, against the model in "
        "float32, by `torch.compile` but for eager.\n",
        markdown.table(header, rows, right=(2, 3, 4)),
    ]


def curve() -> list[str]:
    """Return the section on a training in FP8."""
    run = json.loads((ROOT / FP8).read_text())
    size, last, rates = run["size"], run["last"], run["tokens a second"]
    rows = [[text, f"{last[name]:.4f}", f"{rates[name]:,}"] for name, text in RUNS.items()]
    image = Path(CURVE).relative_to("docs")
    return [
        "### A training in FP8\n",
        f"{_machine(run['environment'])}. From `{FP8}`, made by `scripts/fp8_curve.py`: a GPT of "
        f"{size['layers']} layers of {size['width']} features, {size['steps']:,} steps of "
        f"{size['batch'] * size['context']:,} characters, `{run['recipe']}`.\n",
        markdown.table(["", "loss of the last tenth", "characters a second"], rows, right=(1, 2)),
        f"![Losses over steps in bfloat16, in torchao's FP8 and in ours](../{image})\n",
    ]


def _machine(environment: dict[str, Any]) -> str:
    e = environment
    return f"{e['gpu']}, torch {e['torch']}, driver {e['driver']}, {e['date']}, {e['commit']}"
