"""Measure forwards on this GPU with each strategy, and fit the model that chooses for its kind.

    python scripts/measure/gpu_calls.py [--commit COMMIT] [--limit SECONDS] [--out FOLDER]
    python scripts/measure/gpu_calls.py --sizes FILE    add or replace sizes: lines "DTYPE M K N"
    python scripts/measure/gpu_calls.py --fit    fit again, every kind; this needs no GPU

Measurements are benchmarks/results/gpu-calls-KIND.json; what is fitted to them is
fused_norm/devices/data/KIND.json, which the library reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from mojo_program import printed

from benchmarks import document, environment
from fused_norm.devices import choice, costs, hopper, hopper_fit
from fused_norm.devices.hopper import GpuCall, Hopper, Terms
from fused_norm.devices.machine import hopper_kind
from fused_norm.tuning import gpu
from fused_norm.tuning.sizes import DTYPES, SEED, Size, draw_for_gpu

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
# Sizes of common models, in addition to random ones.
ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
WEIGHTS = (
    *((4096, 4096), (1024, 1024), (768, 2304), (4096, 12288)),
    *((2048, 2048), (1024, 4096), (1280, 5120)),
)
# The kind that was measured in every dtype.
LIKE = "nvidia-h100"
# How many random ones there are of each dtype.
RANDOM = {"bfloat16": 260, "float16": 90, "float32": 60}


def main() -> int:
    """Measure, write the file and return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--commit")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.04,
        help="for each strategy (default: 0.04)",
    )
    parser.add_argument("--limit", type=float, default=240, help="seconds of all (default: 240)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--sizes", type=Path, help='only those of a file, whose lines are "DTYPE M K N"'
    )
    parser.add_argument("--fit", action="store_true", help="only fit again")
    options = parser.parse_args()
    if options.fit:
        save_fitted(RESULTS, terms_of)
        return 0
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (
        9,
        0,
    ):
        print("SKIPPED: needs a Hopper GPU")
        return 0
    torch.backends.cuda.matmul.allow_tf32 = True
    calls, end = [], time.perf_counter() + options.limit
    for size in sizes() if options.sizes is None else sizes_of(options.sizes):
        if time.perf_counter() > end:
            print("the limit is reached")
            break
        call = gpu.measure(size, options.seconds)
        calls.append(call)
        eager = call.graph["eager"]
        cells = (
            f"{strategy} {us / eager:.2f}"
            for strategy, us in call.graph.items()
            if strategy != "eager"
        )
        name = f"{call.dtype} {call.M}x{call.K}x{call.N}"
        print(f"{name}: eager {eager:.1f} us, {', '.join(cells)}", flush=True)
    name = f"gpu-calls-{hopper_kind(0)}.json"
    before = {} if options.sizes is None else json.loads((RESULTS / name).read_text())
    write(options.out / name, options.commit, calls, before)
    save_fitted(options.out, lambda _: gpu.model_terms(0))
    return 0


def save_fitted(folder: Path, counted: Callable[[Sequence[GpuCall]], Terms]) -> None:
    """Write what is fitted to a folder's measurements where the library reads it."""
    for kind, device in fitted(folder, counted).items():
        costs.save(device, choice.SHIPPED / f"{kind}.json")
        print(f"{kind}: {device.about}, {len(device.exceptions)} exceptions")


def fitted(folder: Path, counted: Callable[[Sequence[GpuCall]], Terms]) -> dict[str, Hopper]:
    """Return the devices of all kinds by a folder of measurements."""
    found = {}
    for path in sorted(folder.glob("gpu-calls-*.json")):
        kind = path.stem.removeprefix("gpu-calls-")
        content = json.loads(path.read_text())
        calls = [GpuCall(*each) for each in content["calls"]]
        env = content["environment"]
        added = [each["environment"]["date"] for each in content.get("added", [])]
        about = {
            "measured": ", ".join([env["date"], *added]),
            "gpu": env["gpu"],
            "driver": env["driver"],
        }
        about |= {"torch": env["torch"], "calls": len(calls)}
        # Of kernels that are no longer there, times say nothing.
        if "left_out" in content:
            about["estimated"] = content["left_out"]["estimated"]
        found[kind] = hopper_fit.fit(kind, about, calls, counted(calls))
    like = found.get(LIKE)
    if like is None:
        return found
    for device in found.values():
        # In a dtype that nobody has measured, calls go as on the kind whose SMs are the same.
        missing = [d for d in hopper.DTYPES if f"{d} composed" not in device.costs]
        if missing:
            device.about["estimated"] = f"in {' and '.join(missing)}, as {LIKE}"
        device.costs.update({n: c for n, c in like.costs.items() if n.split(" ")[0] in missing})
        device.exceptions.extend(e for e in like.exceptions if e[0] in missing)
    return found


def terms_of(calls: Sequence[GpuCall]) -> Terms:
    """Return the terms of forwards, by the kernels' own model."""
    sizes = list(dict.fromkeys((call.M, call.K, call.N) for call in calls))
    numbers = itertools.chain.from_iterable(sizes)
    lines = printed("scripts/measure/sm90_terms.mojo", numbers)
    rows = [list(map(int, line.split())) for line in lines]
    starts = [product * hopper.TERMS for product in range(len(hopper.PRODUCTS))]
    found = {
        size: [row[start : start + hopper.TERMS] for start in starts]
        for size, row in zip(sizes, rows, strict=True)
    }
    return lambda M, K, N: found[M, K, N]


def sizes() -> list[Size]:
    """Return what is measured, in an order of which any part is as good as it can be."""
    grid = [Size("bfloat16", "", M, K, N) for (K, N), M in itertools.product(WEIGHTS, ROWS)]
    drawn = [draw_for_gpu(count, SEED, [dtype]) for dtype, count in RANDOM.items()]
    turns = itertools.zip_longest(*drawn, grid)
    return [size for turn in turns for size in turn if size is not None]


def sizes_of(path: Path) -> list[Size]:
    """Return the sizes of a file.

    Raises:
        ValueError: If a line is not of a dtype, M, K and N.
    """
    found = []
    for line in path.read_text().splitlines():
        dtype, M, K, N = line.split()
        if dtype not in DTYPES:
            raise ValueError(f"{dtype} is none of {', '.join(DTYPES)}")
        found.append(Size(dtype, "", int(M), int(K), int(N)))
    return found


def write(path: Path, commit: str | None, calls: list[GpuCall], before: dict[str, Any]) -> None:
    """Write measurements.

    Args:
        path: Of the file.
        commit: What was measured, where there is no repository.
        calls: The measurements.
        before: A file's content that these are added to; those of the same sizes are replaced.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    described = dataclasses.asdict(environment.describe(device, commit))
    head = {"environment": described, "fields": GpuCall._fields}
    merged = {call[:4]: call for call in calls}
    if before:
        added = [*before.get("added", []), {"calls": len(calls), "environment": described}]
        head = {**before, "added": added}
        old = [GpuCall(*each) for each in head.pop("calls")]
        merged = {call[:4]: call for call in old} | merged
    document.write_rows(path, head, "calls", merged.values())


if __name__ == "__main__":
    raise SystemExit(main())
