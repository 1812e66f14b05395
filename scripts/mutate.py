"""Make small wrong edits to the library, one at a time, and see that its tests notice each.

    python scripts/mutate.py                 those that this machine can show
    python scripts/mutate.py --only "no eps"

For a GPU machine without a compiler, `--build nvidia:sm_90a` builds the wrong GPU kernels into
FUSED_NORM_CACHE_DIR, and `--prebuilt` there finds them.

Every edit is made in a copy of the checkout with kernels of its own. Results are kept in
docs/mutations.json, each with a hash of its edit: one whose text has changed since counts as not
run. What only a GPU can show keeps its result, or the lack of one, on a machine without. Exits with
1 if an edit went unnoticed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from mutations import KERNELS, MUTATIONS, Mutation
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "mutations.json"
COPIED = (
    *("fused_norm", "op", "tests", "scripts", "solutions", "problems", "benchmarks"),
    "tutorial",
    "pyproject.toml",
)
STYLES = {"noticed": "green", "unnoticed": "red", "broken": "red", "not run": "dim"}
LIMIT = 900  # seconds for the tests of an edit; a hang that is ended counts as noticed


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the edits and return an exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--build", metavar="TARGET", help="only build, for a GPU's architecture")
    parser.add_argument("--prebuilt", action="store_true", help="GPU edits alone, built before")
    options = parser.parse_args(arguments)
    if unknown := {*(options.only or ())} - {mutation.name for mutation in MUTATIONS}:
        parser.error(f"no edit is called {', '.join(sorted(unknown))}")
    if options.build:
        return build(options.build, options.only)
    console = Console()
    results = recorded()
    controls: dict[tuple[str, ...], dict[str, Any]] = {}
    for mutation in MUTATIONS:
        is_wanted = mutation.name in (options.only or [mutation.name])
        if not is_wanted or (mutation.target == "gpu" and not torch.cuda.is_available()):
            continue
        if options.prebuilt and mutation.target != "gpu":
            continue
        with console.status(mutation.name):
            if mutation.tests not in controls:
                # Without an edit the tests must pass in a copy too, or they say nothing.
                controls[mutation.tests] = tried(replace(mutation, new=mutation.old), True)
            outcome = dict(controls[mutation.tests])
            if outcome["result"] == "unnoticed":
                outcome = tried(mutation, options.prebuilt)
            elif outcome["result"] == "noticed":
                outcome |= {"result": "broken", "output": f"fails unedited: {outcome['failed']}"}
            results[mutation.name] = identity(mutation) | outcome
        result = results[mutation.name]
        style = STYLES[result["result"]]
        console.print(f"[{style}]{result['result']:<10}[/] {mutation.name}", highlight=False)
        if result["result"] == "broken":
            console.print(result.pop("output"), markup=False, highlight=False)
        RESULTS.write_text(json.dumps([results[m.name] for m in MUTATIONS], indent=1) + "\n")
    table = Table("edit", "target", "result", "noticed by")
    for result in results.values():
        first = result["failed"][0] if result["failed"] else ""
        more = f" and {len(result['failed']) - 1} more" if len(result["failed"]) > 1 else ""
        style = STYLES[result["result"]]
        cell = f"[{style}]{result['result']}[/]"
        table.add_row(result["name"], result["target"], cell, first.replace("[", r"\[") + more)
    console.print(table)
    return int(any(r["result"] in ("unnoticed", "broken") for r in results.values()))


def identity(mutation: Mutation) -> dict[str, Any]:
    """Return what a result has of its edit: name, target, file, and a hash of all its text."""
    edit = asdict(mutation)
    text = json.dumps(edit).encode()
    named = {name: edit[name] for name in ("name", "target", "file")}
    return named | {"edit": hashlib.sha256(text).hexdigest()[:16]}


def recorded() -> dict[str, dict[str, Any]]:
    """Return the result of each edit, for those that are as they were when it was recorded."""
    earlier = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    by_name = {result["name"]: result for result in earlier}
    results = {}
    for mutation in MUTATIONS:
        edit = identity(mutation)
        result = by_name.get(mutation.name, {})
        is_same = edit.items() <= result.items()
        results[mutation.name] = result if is_same else edit | {"result": "not run", "failed": []}
    return results


def build(target: str, only: Sequence[str] | None) -> int:
    """Build the wrong kernels for a GPU into the cache and return how many could not be."""
    return sum(
        build_one(each, target)
        for each in MUTATIONS
        if each.target == "gpu"
        and each.file.endswith(".mojo")
        and each.name in (only or [each.name])
    )


def build_one(mutation: Mutation, target: str) -> int:
    """Build the wrong kernels of an edit into the cache and return how many could not be."""
    script = "import sys; from pathlib import Path; from fused_norm.native.build import *\n"
    script += "target, name, dtype, *folder = sys.argv[1:]\n"
    script += "build(Extension(name, dtype, target, *(Path(each).resolve() for each in folder)))"
    failed = 0
    with edited(mutation) as copy:
        for kernels in KERNELS[mutation.tests]:
            command = [sys.executable, "-c", script, target, *kernels]
            failed += subprocess.run(command, cwd=copy, env=environment_of(copy)).returncode != 0
    return failed


@contextlib.contextmanager
def edited(mutation: Mutation) -> Iterator[Path]:
    """Give a copy of the checkout with an edit.

    Raises:
        ValueError: If the text to replace does not occur once.
    """
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name)
            else:
                shutil.copy(ROOT / name, copy / name)
        file = copy / mutation.file
        text = file.read_text()
        if text.count(mutation.old) != 1:
            raise ValueError(f"{mutation.file} has {text.count(mutation.old)} of: {mutation.old}")
        file.write_text(text.replace(mutation.old, mutation.new))
        yield copy


def environment_of(copy: Path) -> dict[str, str]:
    """Return the environment in which Python finds a copy before the checkout."""
    path = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def lend_kernels(copy: Path, environment: dict[str, str]) -> None:
    """Let a copy find the checkout's kernels for what was not built with its edit."""
    script = "import sys; from pathlib import Path; from fused_norm.native.build import Extension\n"
    script += "for folder in (None, Path('tests/mojo').resolve()):\n"
    script += "    print(Extension('', '', sys.argv[1], folder).path)"
    target = "nvidia:sm_{}{}a".format(*torch.cuda.get_device_capability())
    command = [sys.executable, "-c", script, target]
    of_checkout, of_copy = (
        subprocess.run(command, cwd=folder, env=where, check=True, capture_output=True, text=True)
        for folder, where in ((ROOT, environment_of(ROOT)), (copy, environment))
    )
    for old, new in zip(of_checkout.stdout.split(), of_copy.stdout.split(), strict=True):
        for file in Path(old).parent.glob(f"*{Path(old).stem.rpartition('-')[2]}.*"):
            lent = file.name.replace(
                Path(old).stem.rpartition("-")[2], Path(new).stem.rpartition("-")[2]
            )
            if not file.with_name(lent).exists():
                file.with_name(lent).hardlink_to(file)


def tried(mutation: Mutation, is_built: bool) -> dict[str, Any]:
    """Make an edit in a copy and return what its tests say: which failed.

    Args:
        mutation: The edit.
        is_built: Whether its kernels are in the user's cache. Others stay out of there.
    """
    with edited(mutation) as copy:
        environment = environment_of(copy)
        if mutation.file.endswith(".mojo") and not is_built:
            environment["FUSED_NORM_CACHE_DIR"] = str(copy / "cache")
        elif is_built and torch.cuda.is_available():
            lend_kernels(copy, environment)
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider"]
        process = subprocess.Popen(
            [*command, *mutation.tests],
            cwd=copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return {"result": "noticed", "failed": ["a hang"]}
        finally:
            # A wrong library may leave processes behind that wait forever.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+(?: \S+\])*)", output, re.MULTILINE)
    if process.returncode and re.search("CUDA_ERROR_|CUDA error", output):
        # After an illegal access nothing works on the GPU, the tests' own fixtures included.
        return {"result": "noticed", "failed": failed or ["a crash"]}
    if process.returncode in (0, 1) and "BuildError" not in output:
        return {"result": "noticed" if process.returncode else "unnoticed", "failed": failed}
    return {"result": "broken", "failed": [], "output": output[-3000:]}


if __name__ == "__main__":
    sys.exit(main())
