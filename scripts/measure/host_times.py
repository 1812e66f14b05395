"""Compare what small calls cost the host in two checkouts, in alternating processes.

    python scripts/measure/host_times.py BEFORE AFTER [--rounds 6] [--json FILE]

Each process imports the library of one checkout, as a process can hold only one, and times calls so
small that kernels take no time. Of each case the fastest median of all rounds counts: other
programs only slow a call. PyTorch's eager composition, timed in the same processes, says how much
the machine itself varied.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CALLS = 200
REPEATS = 30
# The autograd function of each process: the compiled node, or Python's.
FUNCTIONS = ("node", "python")


def main() -> int:
    """Print a line for each case, and return 1 if one is slower than allowed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--most", type=float, default=1.02, help="of before that is allowed")
    parser.add_argument("--json", type=Path, help="write the times, in microseconds, to a file")
    options = parser.parse_args()
    fastest: dict[tuple[str, str], float] = {}
    for _ in range(options.rounds):
        for side in ("before", "after"):
            for function in FUNCTIONS:
                for case, median in measured(getattr(options, side), function).items():
                    key = (side, f"{case} ({function})")
                    fastest[key] = min(median, fastest.get(key, float("inf")))
    slower = 0
    for side, case in fastest:
        if side == "before":
            before, after = fastest["before", case], fastest["after", case]
            slower += after > options.most * before and not case.startswith("eager")
            print(f"{case:44} {before:7.2f} {after:7.2f} us  {after / before:.3f}")
    if options.json:
        write(options, fastest)
    return int(slower > 0)


def write(options: argparse.Namespace, fastest: dict[tuple[str, str], float]) -> None:
    """Write what was measured, and of which commits, to a file."""
    # Not in the processes that import another checkout.
    from benchmarks import environment

    sides = {side: getattr(options, side) for side in ("before", "after")}
    commits = {side: commit_of(checkout) for side, checkout in sides.items()}
    described = environment.describe(torch.device("cpu"), commits["after"])
    command = shlex.join(["python", "scripts/measure/host_times.py", *sys.argv[1:]])
    content = {
        "environment": dataclasses.asdict(described) | {"threads": 1, "command": command},
        "commits": commits,
        "rounds": options.rounds,
        "us": {
            side: {case: round(us, 3) for (s, case), us in fastest.items() if s == side}
            for side in sides
        },
    }
    options.json.write_text(json.dumps(content, indent=1) + "\n")


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.check_output(command, cwd=checkout, text=True).strip()


def measured(checkout: Path, function: str) -> dict[str, float]:
    """Return the median time of each case in microseconds, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    if function == "python":
        environment["FUSED_NORM_AUTOGRAD"] = "python"
    command = [sys.executable, __file__, "--child"]
    text = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(text.stdout.splitlines()[-1])
    return found


def child() -> None:
    """Time the cases of this process and print them."""
    import torch.nn.functional as F

    import fused_norm as fn

    torch.set_num_threads(1)
    x = torch.randn(4, 32)
    w, b, g, h = (torch.randn(*s) for s in ((32, 32), (32,), (32,), (32,)))
    up, o, r = torch.randn(64, 32), torch.tensor([0.3]), torch.randn(4, 32)

    def eager(x: Any, w: Any) -> Any:
        return F.linear(F.layer_norm(x, (32,), g, h), w, b)

    def plain(x: Any, w: Any) -> Any:
        return fn.fused_layernorm_linear(x, g, h, w, b)

    def swiglu(x: Any, w: Any) -> Any:
        options: Any = {"normalization": "rms_norm", "activation": "swiglu"}
        return fn.norm_linear(x, up, norm_weight=w[0], **options)

    def grouped(x: Any, w: Any) -> Any:
        return fn.norm_linear(x, (w, w), norm_weight=g)[0]

    def linear_add(x: Any, w: Any) -> Any:
        return fn.linear_add(x, w, b, r)[0]

    def eps_norm(x: Any, w: Any) -> Any:
        return fn.trainable_eps_layer_norm(x, o)

    def centered(x: Any, w: Any) -> Any:
        return fn.composed.mean(x)

    found = {}
    for call in (eager, plain, swiglu, grouped, linear_add, eps_norm, centered):
        for case, run in cases(call, x, w).items():
            found[f"{call.__name__}, {case}"] = median(run)
    print(json.dumps(found))


def cases(call: Callable[..., Any], x: Any, w: Any) -> dict[str, Callable[[], Any]]:
    """Return a call without gradients, with them, and with its backward."""
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]

    def inference() -> None:
        with torch.no_grad():
            call(x, w)

    def step() -> None:
        y = call(*leaves)
        torch.autograd.backward(y, torch.ones_like(y), inputs=leaves[:1])

    return {"no grad": inference, "forward": lambda: call(*leaves), "forward, backward": step}


def median(run: Callable[[], Any]) -> float:
    """Return the median time of a call in microseconds."""
    for _ in range(CALLS):
        run()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(times)


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        child()
    else:
        sys.exit(main())
