"""Compare what calls take on a GPU in two checkouts, in processes that alternate.

    python scripts/measure/gpu_times.py BEFORE AFTER [--limit 150] [--json FILE]
    python scripts/measure/gpu_times.py --table FILE        print a file's table in Markdown

Each process imports one checkout. In every round, each process times each of its providers in one
turn, in a new random order, and waits while the other works. Calls are timed as they are launched,
with the host's time, and in CUDA graphs. PyTorch's eager composition, timed in both processes, says
how much the machine itself varied.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from host_times import commit_of

SIDES = ("before", "after")
OPS = ("layernorm_linear", "rms_norm_linear")
SIZES = (
    *((16, 8, 16), (16, 768, 3072), (128, 1024, 1024)),
    *((512, 1024, 4096), (2048, 768, 3072), (8192, 4096, 4096)),
)
BLOCKS = ("vit-l", "gpt2-xl", "llama-8b")
MODES = ("forward", "train")
OURS, COMPILED = "fused_norm", "fused_norm-compile-inductor"
METRICS = {"launch": "launched", "graph": "in a graph", "wall": "on a CPU"}
FEWEST_ROUNDS = 5
# Relative norm of a difference that several roundings to bfloat16 explain.
MOST_DEVIATION = 0.05


def main() -> int:
    """Print a line for each row, and return 1 if one is slower than allowed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("after", type=Path, nargs="?")
    parser.add_argument("--commits", nargs=2, help="of the two, where they are no repositories")
    parser.add_argument("--seconds", type=float, default=0.8, help="for each row (default: 0.8)")
    parser.add_argument("--limit", type=float, default=150, help="seconds after which none starts")
    parser.add_argument("--most", type=float, default=1.02, help="of before that is allowed")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path, help="write the times, in microseconds, to a file")
    parser.add_argument("--table", type=Path, help="print the table of such a file")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return 0
    if options.after is None:
        parser.error("name two checkouts, or a file with --table")
    end = time.monotonic() + options.limit
    chosen = random.Random(0)
    with contextlib.ExitStack() as stack:
        processes = {
            side: stack.enter_context(Process(getattr(options, side), options.device))
            for side in SIDES
        }
        found: list[dict[str, Any]] = []
        run = described(options) | {
            "libraries": {side: process.ask("describe") for side, process in processes.items()},
            "rows": found,
        }
        for row in rows(options.device):
            if time.monotonic() > end:
                row["error"] = "the time was over"
            else:
                row["dtype"] = options.dtype
                try:
                    row |= measured(processes, row, options.seconds, chosen)
                except RuntimeError as error:
                    row["error"] = str(error)
            found.append(row)
            print("\n".join(lines(row)) or f"{row}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(run, indent=1) + "\n")
    ratios = [line["after / before"] for row in found for line in compared(row)]
    return int(any("error" in row for row in found) or max(ratios, default=0) > options.most)


def rows(device: str) -> Iterator[dict[str, Any]]:
    """Yield what is measured: ops at each size, blocks by functions, and blocks compiled by us.

    Args:
        device: Blocks and large calls are left out on a CPU, which is there to try this program.
    """
    for op, size, mode in itertools.product(OPS, SIZES, MODES):
        if device == "cuda" or size[0] <= 128:
            yield {"op": op, "shape": size, "mode": mode, "providers": [OURS, "eager"]}
    for ours, block, mode in itertools.product((OURS, COMPILED), BLOCKS, MODES):
        if device == "cuda":
            yield {"op": block, "shape": [], "mode": mode, "providers": [ours, "eager"]}


class Process:
    """A process that imports one checkout and times its calls.

    Args:
        checkout: The checkout.
        device: `cuda` or `cpu`.
    """

    def __init__(self, checkout: Path, device: str) -> None:
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        ours = str(Path(__file__).resolve().parents[2])
        path = [str(checkout.resolve()), *(p for p in inherited if p and p != ours)]
        # A backend's graphs must not come from the other's cache.
        self._cache = tempfile.TemporaryDirectory(prefix="gpu-times-")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path),
            "TORCHINDUCTOR_CACHE_DIR": self._cache.name,
        }
        program = str(Path(__file__).with_name("gpu_times_side.py"))
        command = [sys.executable, program, str(checkout), device]
        self._process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._requests: Any = self._process.stdin
        self._answers: Any = self._process.stdout

    def ask(self, name: str, **arguments: Any) -> Any:
        """Return the answer to a request.

        Args:
            name: A method of `gpu_times_side.Side`.
            **arguments: Of the method.

        Raises:
            RuntimeError: What the method raised, or that the process has ended.
        """
        print(json.dumps([name, arguments]), file=self._requests, flush=True)
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"a process ended on {name} {arguments}")
        answer, error = json.loads(line)
        if error:
            raise RuntimeError(error)
        return answer

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *raised: object) -> None:
        self._requests.close()
        self._process.wait(20)
        self._answers.close()
        self._cache.cleanup()


def measured(
    processes: dict[str, Process], row: dict[str, Any], seconds: float, chosen: random.Random
) -> dict[str, Any]:
    """Time a row in both processes, in interleaved rounds.

    Args:
        processes: By side.
        row: What to time.
        seconds: How long, after all is prepared.
        chosen: Draws the order of turns.

    Returns:
        Medians in microseconds, by side, provider and metric, and what was found before.

    Raises:
        RuntimeError: If a result is not eager's, or what a process raised.
    """
    with concurrent.futures.ThreadPoolExecutor() as pool:
        # Not timed, so both may work.
        asked = {s: pool.submit(p.ask, "prepare", **row) for s, p in processes.items()}
        prepared = {side: answer.result() for side, answer in asked.items()}
    for side, answer in prepared.items():
        for provider, off in answer["deviations"].items():
            if not off <= MOST_DEVIATION:
                raise RuntimeError(f"{side}'s {provider} is {off:.3f} off eager in {row}")
    turns = list(itertools.product(SIDES, row["providers"]))
    samples: dict[tuple[str, str], dict[str, list[float]]] = {turn: {} for turn in turns}
    end, count = time.monotonic() + seconds, 0
    while count < FEWEST_ROUNDS or time.monotonic() < end:
        chosen.shuffle(turns)
        for side, provider in turns:
            times = processes[side].ask("sample", provider=provider, mode=row["mode"])
            for metric, us in times.items():
                samples[side, provider].setdefault(metric, []).append(us)
        count += 1
    us = {
        f"{side}, {provider}": {m: round(statistics.median(v), 3) for m, v in found.items()}
        for (side, provider), found in samples.items()
    }
    before_timing = {
        name: {side: answer[name] for side, answer in prepared.items()}
        for name in ("deviations", "problems")
    }
    return {"shape": prepared["after"]["shape"], "rounds": count, "us": us, **before_timing}


def compared(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a measured row's times by metric: eager's in the process after, and both of ours."""
    us = row.get("us", {})
    keys = {"eager": "after, eager"} | {side: f"{side}, {row['providers'][0]}" for side in SIDES}
    for metric in METRICS:
        times = {name: us[key].get(metric) for name, key in keys.items() if key in us}
        # No graph of one that cannot be captured.
        if times and all(times.values()):
            ratios = {
                f"after / {name}": times["after"] / times[name] for name in ("before", "eager")
            }
            yield {"metric": metric, **times, **ratios}


def lines(row: dict[str, Any]) -> list[str]:
    """Return a row's times as cells, a line for each metric."""
    what = f"{row['op']} {'x'.join(map(str, row['shape']))}"
    how = ", compiled" if row["providers"][0] == COMPILED else ""
    found = []
    for line in compared(row):
        cells = [f"{what}{how}", row["mode"], METRICS[line["metric"]]]
        cells += [f"{line[name]:.1f}" for name in ("eager", *SIDES)]
        cells += [f"{line[name]:.3f}" for name in ("after / before", "after / eager")]
        found.append("| " + " | ".join(cells) + " |")
    return found


def table(run: dict[str, Any]) -> str:
    """Return a run as a sentence and a table in Markdown.

    Args:
        run: What `--json` holds.
    """
    environment, commits = run["environment"], run["commits"]
    head = (
        f"{environment['gpu'] or environment['cpu']}, torch {environment['torch']}, driver "
        f"{environment['driver']}, {environment['date']}; before is {commits['before']}, after "
        f"{commits['after']}. Microseconds, medians of interleaved rounds."
    )
    titles = ("what", "mode", "", "eager", *SIDES, "after / before", "after / eager")
    marks = ["---"] * 3 + ["---:"] * 5
    rows = [line for row in run["rows"] for line in lines(row)]
    bars = ["| " + " | ".join(cells) + " |" for cells in (titles, marks)]
    return "\n".join([head, "", *bars, *rows])


def described(options: argparse.Namespace) -> dict[str, Any]:
    """Return the machine, and the commits of both checkouts."""
    # Not in the processes that import another checkout.
    from benchmarks import environment

    checkouts = (options.before, options.after)
    commits = options.commits or [commit_of(checkout) for checkout in checkouts]
    machine = environment.describe(torch.device(options.device), commits[1])
    command = shlex.join(["python", "scripts/measure/gpu_times.py", *sys.argv[1:]])
    return {
        "environment": dataclasses.asdict(machine) | {"command": command},
        "commits": dict(zip(SIDES, commits, strict=True)),
    }


if __name__ == "__main__":
    sys.exit(main())
