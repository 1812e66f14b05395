"""The head against its peers on a GPU: time and memory of RMSNorm, vocabulary, cross entropy.

    python -m benchmarks.head --json head.json --plot head.svg

Each round times every provider once, in a new random order, after a wait that lets the host get
ahead of the GPU, as it is in a training step. Memory is the peak of one call beyond
what was there before, the gradients of all parameters included.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fused_norm as fn
from benchmarks import document, parts
from benchmarks.case import EPS

# Rows, features, vocabulary: LLaMA-1B, LLaMA-8B, Qwen3-0.6B, GPT-2.
SIZES = ((8192, 2048, 128256), (8192, 4096, 128256), (16384, 1024, 151936), (16384, 768, 50304))
# A wait of 2 ms, longer than any provider's host needs for its first products.
WAIT_CYCLES = 4_000_000
PACKAGES = ("liger-kernel", "cut-cross-entropy", "quack-kernels", "triton")
Provider = Callable[..., Tensor]


def eager(x: Tensor, gamma: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return the loss by PyTorch's ops."""
    z = F.linear(F.rms_norm(x, x.shape[-1:], gamma, EPS), weight)
    return F.cross_entropy(z.float(), target)


def ours(**options: Any) -> Provider:
    """Return the loss by this package, with options."""

    def provider(x: Tensor, gamma: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        norm: dict[str, Any] = {"normalization": "rms_norm", "norm_weight": gamma, "eps": EPS}
        found: Tensor = fn.norm_linear_cross_entropy(x, weight, target, **norm, **options)
        return found

    return provider


def peers() -> dict[str, Provider]:
    """Return what can be had of others, by name; what is missing is told."""
    found: dict[str, Provider] = {"eager": eager, "compile": torch.compile(eager)}
    try:
        liger = import_module("liger_kernel.transformers.functional")
        found["liger"] = lambda x, g, w, t: liger.liger_fused_linear_cross_entropy(
            liger.liger_rms_norm(x, g, EPS), w, t
        )
    except ImportError as error:
        print(f"no liger: {error}", flush=True)
    try:
        cut = import_module("cut_cross_entropy")
        found["cut-cross-entropy"] = lambda x, g, w, t: cut.linear_cross_entropy(
            F.rms_norm(x, x.shape[-1:], g, EPS), w, t
        )
    except ImportError as error:
        print(f"no cut-cross-entropy: {error}", flush=True)
    try:
        found |= {"quack": quack(4096), "quack-small": quack(2048)}
    except ImportError as error:
        print(f"no quack: {error}", flush=True)
    return found


def quack(chunk_rows: int) -> Provider:
    """Return the loss by quack's kernels, in chunks of that many rows.

    Raises:
        ImportError: If it is not installed.
    """
    loss = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    rms_norm = parts.quack().rms_norm

    def provider(x: Tensor, gamma: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        # As many rows as features are an error of version 0.6.5: it cannot tell which are which.
        rows = chunk_rows if chunk_rows != x.shape[1] else 2 * chunk_rows
        found: Tensor = loss(rms_norm(x, gamma), weight, target, chunk_size=rows)
        return found

    return provider


def step(provider: Provider, tensors: Sequence[Tensor]) -> Callable[[], Any]:
    """Return what computes a loss and all gradients."""
    x, gamma, weight, target = tensors

    def run() -> Any:
        leaves = [v.detach().requires_grad_() for v in (x, gamma, weight)]
        return torch.autograd.grad(provider(*leaves, target), leaves)

    return run


def products(tensors: Sequence[Tensor], count: int) -> Callable[[], Any]:
    """Return the bare products: of the logits, and with 3 those of both gradients."""
    x, _, weight, _ = tensors
    z = torch.empty(len(x), len(weight), device=x.device, dtype=x.dtype)

    def run() -> None:
        torch.mm(x, weight.t(), out=z)
        if count == 3:
            torch.mm(z, weight)
            torch.mm(z.t(), x)

    return run


def loss_alone(provider: Provider, tensors: Sequence[Tensor]) -> Callable[[], Any]:
    """Return what computes a loss alone."""

    def run() -> Any:
        with torch.no_grad():
            return provider(*tensors)

    return run


def steps(tensors: Sequence[Tensor], others: dict[str, Provider]) -> dict[str, Callable[[], Any]]:
    """Return what is measured, by name."""
    mine = {"fused_norm": ours(), "fused_norm-small": ours(chunk_rows="small")}
    found = {"products": products(tensors, 3), "product": products(tensors, 1)}
    found |= {name: step(provider, tensors) for name, provider in (others | mine).items()}
    return found | {"loss": loss_alone(ours(), tensors), "loss-eager": loss_alone(eager, tensors)}


def measure(size: Sequence[int], seconds: float, device: torch.device) -> dict[str, Any]:
    """Return milliseconds and GiB of each provider at a size."""
    M, K, V = size
    torch.manual_seed(0)
    x = torch.randn(M, K, device=device, dtype=torch.bfloat16)
    weight = torch.randn(V, K, device=device, dtype=torch.bfloat16).mul_(K**-0.5)
    tensors = (x, torch.ones_like(x[0]), weight, torch.randint(0, V, (M,), device=device))
    found: dict[str, Any] = {}
    runs: dict[str, Callable[[], Any]] = {}
    for name, run in steps(tensors, peers()).items():
        try:
            run()
            gc.collect()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        except Exception as error:
            # Another project's loss may raise whatever it likes; the others go on.
            found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(name, found[name], flush=True)
            continue
        runs[name] = run
        found[name] = {"gib": peak / 2**30, "ms": []}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found["products"]["ms"]) < 5:
        for name in random.sample(list(runs), len(runs)):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(WAIT_CYCLES)
            start.record()
            runs[name]()
            stop.record()
            torch.cuda.synchronize()
            found[name]["ms"].append(start.elapsed_time(stop))
    for result in found.values():
        if "ms" in result:
            samples = sorted(result["ms"])
            result["ms"], result["rounds"] = statistics.median(samples), len(samples)
            result["spread"] = (samples[-len(samples) // 4] - samples[len(samples) // 4]) / (
                2 * result["ms"]
            )
    return {"size": list(size), "results": found}


def table(cases: Sequence[dict[str, Any]]) -> str:
    """Return a table of times, of the bare products', and of memory."""
    lines = []
    for case in cases:
        found = case["results"]
        lines.append(f"M, K, V = {case['size']}: products {found['products']['ms']:.2f} ms")
        for name, result in found.items():
            if "ms" not in result:
                lines.append(f"  {name:20} {result['error']}")
                continue
            base = "product" if name.startswith(("loss", "product ")) else "products"
            ratio = result["ms"] / found[base]["ms"]
            lines.append(
                f"  {name:20} {result['ms']:8.2f} ms  {ratio:5.2f} of {base:8}  "
                f"{result['gib']:6.2f} GiB  (+-{100 * result['spread']:.0f} %)"
            )
    return "\n".join(lines)


def plot(cases: Sequence[dict[str, Any]], path: Path) -> None:
    """Write time over memory, a panel for each size."""
    from matplotlib.figure import Figure

    from benchmarks import plots

    figure = Figure(figsize=(3.2 * len(cases), 3.6), layout="constrained")
    panels = figure.subplots(1, len(cases), sharey=True, squeeze=False)[0]
    looks = {**plots.PEERS, "eager": ("#5f6b76", "o"), "cut-cross-entropy": ("#8e6bbf", "P")}
    looks["quack-small"] = looks["quack"]
    looks |= {"fused_norm": (plots.OURS, "o"), "fused_norm-small": ("#e58b97", "o")}
    for panel, case in zip(panels, cases, strict=True):
        found = case["results"]
        base = found["products"]["ms"]
        for name, (color, marker) in looks.items():
            if "ms" in (result := found.get(name, {})):
                at = ([result["gib"]], [result["ms"] / base])
                panel.plot(*at, marker, color=color, markersize=7, label=name)
        M, K, V = case["size"]
        panel.set_title(f"{M} x {K} x {V}", fontsize=9.5, color=plots.INK, loc="left")
        panel.set(xscale="log", xlabel="GiB beyond inputs")
        panel.axhline(1, color=plots.FAINT, linewidth=0.8)
        panel.grid(True, color=plots.GRID, linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
    panels[0].set_ylabel("time, of the three products")
    handles = {h.get_label(): h for panel in panels for h in panel.get_lines()[::-1]}
    named = [handles[name] for name in looks if name in handles]
    figure.legend(handles=named, loc="outside lower left", ncols=7, frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="file of results")
    parser.add_argument("--plot", type=Path, help="file of a plot, which needs matplotlib")
    parser.add_argument("--from-json", type=Path, help="show results instead of measuring")
    parser.add_argument("--seconds", type=float, default=8, help="for each size (default: 8)")
    parser.add_argument("--commit", help="what is measured, where there is no repository")
    options = parser.parse_args(arguments)
    if options.from_json:
        found = json.loads(options.from_json.read_text())
    elif not torch.cuda.is_available():
        print("SKIPPED: the head is measured on GPUs")
        return 0
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        found = {"device": torch.cuda.get_device_name(device)}
        found |= document.new(device, options.commit, "torch", *PACKAGES)
        for size in SIZES:
            found["cases"].append(measure(size, options.seconds, device))
            print(table(found["cases"][-1:]), flush=True)
            document.write(found, options.json)
    if options.from_json:
        print(table(found["cases"]))
    if options.plot:
        plot(found["cases"], options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
