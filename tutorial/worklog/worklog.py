"""Check and time the steps of docs/worklog.md on a Hopper GPU.

    python tutorial/worklog/worklog.py --list              name the steps
    python tutorial/worklog/worklog.py --step 4 --step 5   check and time some of them
    python tutorial/worklog/worklog.py --together          time those of a size in the same rounds
    python tutorial/worklog/worklog.py                     all of that
    python tutorial/worklog/worklog.py --page              rewrite the page's tables and figures

A step is compared with float64 first, at its sizes and at ragged ones, and is timed only if it is
right. Measured is the device time of one call, in microseconds: medians of rounds of CUDA-graph
replays, in which the step, `torch.mm` and PyTorch eager are interleaved in random order, over
inputs that do not fit the cache. The page's first table has the times of `--together`: its steps
share their rounds, and so the clocks and cuBLAS. Times go to
benchmarks/results/worklog.json as soon as they are there. Of several steps, each runs in a
process of its own: one that fails, or hangs, says so, and the next one begins with a GPU in order.
Without a Hopper GPU all is SKIPPED.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment
from benchmarks.timing import Budget
from tutorial.worklog import worklog_rounds
from tutorial.worklog.worklog_steps import GROUPS, STEPS, Kind, Sizes, Step, find, work

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/worklog.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for and return an exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step", action="append", type=_step, help="number or name; repeatable")
    parser.add_argument("--together", action="store_true", help="all of a size in the same rounds")
    parser.add_argument("--list", action="store_true", help="name the steps and where they are")
    parser.add_argument("--page", action="store_true", help="rewrite the page, measure nothing")
    parser.add_argument("--check", action="store_true", help="compare with float64, time nothing")
    parser.add_argument("--seconds", type=float, default=0.15, help="for each provider and size")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a step (of several)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="where there is no checkout to ask")
    options = parser.parse_args(arguments)
    steps: Sequence[Step] = options.step or STEPS
    if options.list:
        for step in steps:
            print(f"{step.number:2} {step.name:13} {step.title} ({step.source})")
        return 0
    if options.page:
        from tutorial.worklog import worklog_page

        return worklog_page.main()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("SKIPPED: needs a Hopper GPU")
        return 0
    if options.together:
        return int(not _run_together(options))
    run = _run if len(steps) == 1 else _run_step_apart
    failed = [step.name for step in steps if not run(step, options)]
    if not options.step and not options.check and not _run_apart("together", options):
        failed.append("together")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


def _step(text: str) -> Step:
    try:
        return find(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _run_step_apart(step: Step, options: argparse.Namespace) -> bool:
    return _run_apart(step.name, options, "--step", step.name)


def _run_apart(name: str, options: argparse.Namespace, *what: str) -> bool:
    """Check and time in another process what the words say, and return whether all went well."""
    command = [sys.executable, str(Path(__file__).resolve()), *(what or ("--together",))]
    command += ["--seconds", str(options.seconds), "--out", str(options.out)]
    command += ["--check"] if options.check else []
    command += ["--commit", options.commit] if options.commit else []
    try:
        return subprocess.run(command, check=False, timeout=options.limit).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"  FAILED: {name} took more than {options.limit:.0f} s", flush=True)
        return False


def _run_together(options: argparse.Namespace) -> bool:
    """Time the steps of each group in the same rounds, and return whether all went well."""
    budget = Budget(options.seconds, options.seconds / 2, fewest=9)
    well = True
    for name, steps in GROUPS.items():
        print(f"together: {', '.join(step.name for step in steps)}", flush=True)
        with torch.no_grad():
            measured, failures = worklog_rounds.together(steps, budget)
        for step, failure in failures.items():
            well = False
            print(f"  FAILED: {step}: {failure}", flush=True)
        for provider, us in measured["us"].items():
            print(f"  {provider}: {us:.1f} us", flush=True)
        found = {"environment": _environment(options.commit), **measured}
        _write(options.out, "together", name, found)
        torch.cuda.empty_cache()
    ceiling = dataclasses.asdict(environment.ceiling(torch.bfloat16, torch.device("cuda")))
    _write(options.out, "ceilings", "bfloat16", ceiling)
    return well


def _run(step: Step, options: argparse.Namespace) -> bool:
    """Check and time a step, and return whether all went well."""
    print(f"{step.number} {step.title}", flush=True)
    budget = Budget(options.seconds, options.seconds / 2, fewest=9)
    found: list[dict[str, Any]] = []
    try:
        with torch.no_grad():
            from tutorial.worklog.worklog_cases import check

            for sizes in step.checked:
                check(step, sizes)
            for sizes in step.sizes:
                errors = check(step, sizes)
                if options.check:
                    print(f"  {sizes}: right, error {errors['step']:.2e}", flush=True)
                    continue
                found.append(worklog_rounds.measured(step, sizes, budget) | {"errors": errors})
                print(f"  {line(step.kind, found[-1])}", flush=True)
                write(options.out, step, found, options.commit)
    except Exception:
        # Whatever a kernel's build or launch raises, the sizes before it are worth their times.
        traceback.print_exc()
        print(f"  FAILED: {step.name}", flush=True)
        return False
    finally:
        torch.cuda.empty_cache()
    return True


def line(kind: Kind, measured: dict[str, Any]) -> str:
    """Return what was measured at some sizes in a line.

    Args:
        kind: What was computed.
        measured: As in the file.
    """
    sizes = Sizes(*(measured[name] for name in Sizes._fields))
    own, cublas, eager = (measured["us"][name] for name in worklog_rounds.PROVIDERS)
    return (
        f"{sizes}: {own:.1f} us, {work(kind, sizes) / own / 1e6:.0f} TFLOP/s, "
        f"{cublas / own:.1%} of cuBLAS, {eager / own:.1%} of cuBLAS + LayerNorm"
    )


def write(path: Path, step: Step, measured: list[dict[str, Any]], commit: str | None) -> None:
    """Replace what the file has of a step by its new measurements.

    Args:
        path: The file.
        step: The step.
        measured: Its times by sizes.
        commit: The git commit, None to ask git.
    """
    found = {"environment": _environment(commit), "measured": measured}
    _write(path, "steps", step.name, found)


def _write(path: Path, kind: str, name: str, found: dict[str, Any]) -> None:
    content: dict[str, Any] = {"ceilings": {}, "together": {}, "steps": {}}
    content |= json.loads(path.read_text()) if path.is_file() else {}
    content[kind][name] = found
    order = [each.name for each in STEPS]
    content["steps"] = dict(sorted(content["steps"].items(), key=lambda item: order.index(item[0])))
    path.parent.mkdir(parents=True, exist_ok=True)
    # A file is whole or not there, whenever this ends.
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)


@functools.cache
def _environment(commit: str | None) -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    described = dataclasses.asdict(environment.describe(device, commit))
    return described | {"command": " ".join(["python tutorial/worklog/worklog.py", *sys.argv[1:]])}


if __name__ == "__main__":
    sys.exit(main())
