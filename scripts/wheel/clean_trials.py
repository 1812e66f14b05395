"""Install a release's files into clean environments, run them there, and log what they print.

    python scripts/wheel/clean_trials.py WHEEL ... [--python 3.12 ...] [--torch 2.11 ...]
        [--emulator COMMAND] [--commit COMMIT] [--output TO]

Each wheel is installed with the newest PyTorch for every `--python`, and for this Python with
every `--torch` too. The commands see an empty `PATH`, so neither a C++ compiler nor Mojo, and an
empty cache. A trial fails where a command does, or where an output or gradient differs from
PyTorch's in float64. A wheel without kernels has to say so: `doctor` exits with 1 there. A wheel
for Arm is tried once, by a Python for Arm that the emulator's COMMAND starts:
`qemu-aarch64 -cpu neoverse-v1 -L /ROOT /ROOT/usr/bin/python3.13`. The JSON has every command with
its seconds, exit status, and what it printed; of wheels that are not tried now it keeps what it
had. docs/guide/install.md gets the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import environment, markdown

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guide" / "install.md"
BLOCK = "clean"
# What Python for Arm's wheels are taken for: that of Debian 12.
ARM = "aarch64-manylinux_2_36"
# Of PyTorch's own error against float64: each of ours may be this many times that.
FACTOR = 4
USE = f"""
import json, platform, torch, fused_norm as fn
torch.manual_seed(0)
norm, linear = torch.nn.LayerNorm(256), torch.nn.Linear(256, 512)
exact = torch.nn.Sequential(norm, linear).double()
x, dy = torch.randn(300, 256).double(), torch.randn(300, 512).double()
def run(call, dtype):
    leaves = [t.detach().to(dtype).requires_grad_() for t in (x, *exact.parameters())]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]
def eager(x, g, b, w, c):
    z = torch.nn.functional.layer_norm(x, (256,), g, b)
    return torch.nn.functional.linear(z, w, c)
truth = run(eager, torch.float64)
def error(found):
    pairs = zip(found, truth, strict=True)
    return [((a - t).abs().max() / t.abs().max()).item() for a, t in pairs]
ours = error(run(fn.fused_layernorm_linear, torch.float32))
theirs = error(run(eager, torch.float32))
ratio = max(a / b for a, b in zip(ours, theirs, strict=True))
print(json.dumps({{"python": platform.python_version(), "torch": torch.__version__,
                  "error": max(ours), "of_pytorch": ratio}}))
assert ratio < {FACTOR}, (ours, theirs)
"""
Trial = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Run the trials, print a table, and return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("wheel", type=Path, nargs="+")
    parser.add_argument("--python", action="append", help="a version or path; default: this one")
    parser.add_argument("--torch", action="append", default=[], help="such as 2.11")
    parser.add_argument("--emulator", type=shlex.split, help="what runs Python for Arm's wheels")
    parser.add_argument("--commit", help="that wheels were built from; default: this checkout's")
    parser.add_argument("--output", type=Path, help="JSON to write; the guide gets its table")
    options = parser.parse_args(arguments)
    pythons = options.python or [sys.executable]
    wanted = [(python, None) for python in pythons]
    wanted += [(sys.executable, version) for version in options.torch]
    console = Console()
    commit = options.commit or environment.checkout()
    trials = []
    for wheel in options.wheel:
        is_foreign = "none-any" not in wheel.name and not wheel.stem.endswith(platform.machine())
        if is_foreign and not options.emulator:
            parser.error(f"{wheel.name} needs --emulator")
        for python, version in [(options.emulator, None)] if is_foreign else wanted:
            with console.status(f"{wheel.name}, Python {python}, PyTorch {version or 'newest'}"):
                trials.append({"commit": commit, **trial(wheel, python, version)})
    console.print(table(trials))
    failed = sum(not each["held"] for each in trials)
    for each in trials:
        for step in each["commands"]:
            if step["status"] != step["expected"]:
                console.print(f"{step['command']}\n{step['printed']}", markup=False)
    if options.output:
        kept = json.loads(options.output.read_text())["trials"] if options.output.is_file() else []
        tried = {each["wheel"] for each in trials}
        trials += [each for each in kept if each["wheel"] not in tried]
        found = {"trials": trials}
        options.output.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text(markdown.filled(PAGE.read_text(), {BLOCK: page_table(found)}))
    return failed


def trial(wheel: Path, python: str | list[str], version: str | None) -> Trial:
    """Install a wheel into an environment of its own and return what its commands did.

    Args:
        wheel: The wheel.
        python: The interpreter, as uv names one, or the command that emulates one for Arm.
        version: Of PyTorch, such as `2.11`; None for the newest.

    Raises:
        RuntimeError: If there is no uv, or the wheel does not install.
    """
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise RuntimeError("there is no uv to install the wheel with")
    has_kernels = "none-any" not in wheel.name
    torch = f"torch=={version}.*" if version else "torch"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "empty").mkdir()
        bare = {"PATH": str(folder / "empty"), "HOME": name, "COLUMNS": "100"}
        if isinstance(python, str):
            inner = [str(folder / "venv/bin/python")]
            make = [uv, "venv", "--python", python, str(folder / "venv")]
            place = ["--python", inner[0]]
        else:
            inner, make = python, [*python, "--version"]
            place = ["--target", str(folder / "venv"), "--python-platform", ARM]
            place += ["--python-version", python[-1].rsplit("python", 1)[1]]
            bare["PYTHONPATH"] = str(folder / "venv")
        install = [uv, "pip", "install", *place, str(wheel.resolve()), torch]
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        steps = [run(make, folder, kept), run(install, folder, kept)]
        if failed := [step for step in steps if step["status"]]:
            raise RuntimeError(f"{failed[0]['command']}\n{failed[0]['printed']}")
        steps += [
            run([*inner, "-m", "fused_norm", "--version"], folder, bare),
            run([*inner, "-c", USE], folder, bare),
            run(
                [*inner, "-m", "fused_norm", "doctor"],
                folder,
                bare,
                expected=0 if has_kernels else 1,
            ),
        ]
        built = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.so"))
        built = [path for path in built if not path.startswith("venv/")]
    held = all(step["status"] == step["expected"] for step in steps) and not built
    printed = [line for line in steps[3]["printed"].splitlines() if line.startswith("{")]
    said = json.loads(printed[0]) if printed else {"python": python, "torch": version or "newest"}
    machine = {"machine": platform.machine(), "cpu": _cpu(), "emulated": inner is python}
    return {"wheel": wheel.name, "held": held, "built": built, **machine, **said, "commands": steps}


def run(command: list[str], folder: Path, env: dict[str, str], *, expected: int = 0) -> Trial:
    """Run a command, and return it with its seconds, exit status, and what it printed.

    Args:
        command: The command.
        folder: Where to run it. Its name is left out of what is kept.
        env: The whole environment.
        expected: The exit status that it should have.
    """
    start = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    took = time.perf_counter() - start
    shown = ["uv" if command[0].endswith("uv") else command[0], *command[1:]]
    shown = ["<check>" if part == USE else part for part in shown]
    inside = f"{folder}/"
    shown = [p if p.startswith(inside) or p[:1] != "/" else Path(p).name for p in shown]
    return {
        "command": " ".join(shown).replace(inside, ""),
        "seconds": round(took, 2),
        "status": done.returncode,
        "expected": expected,
        "printed": _plain(done.stdout, folder),
    }


def _plain(text: str, folder: Path) -> str:
    """Return the end of what was printed, without names of this machine's folders."""
    text = text.replace(f"{folder}/", "")
    return re.sub(r"(file://|(?<= at: ))\S*/(?=[\w.-]+)", "", text)[-4000:]


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), "")


def rows(trials: list[Trial]) -> list[list[str]]:
    """Return the cells of the table, a row for each trial."""
    found = []
    for each in trials:
        _, install, version, check, doctor = (step["seconds"] for step in each["commands"])
        ratio = each.get("of_pytorch")
        kind = "for Arm, emulated" if each.get("emulated") else "with kernels"
        found.append(
            [
                kind if "none-any" not in each["wheel"] else "sources alone",
                each["python"],
                each["torch"],
                "holds" if each["held"] else "FAILED",
                "–" if ratio is None else f"{ratio:.2f}",
                *(f"{seconds:.1f} s" for seconds in (install, version, check, doctor)),
            ]
        )
    return found


HEADER = ["wheel", "Python", "PyTorch", "result", "error / PyTorch's"]
HEADER += ["install", "--version", "check", "doctor"]


def table(trials: list[Trial]) -> Table:
    """Return the trials as a table for a terminal."""
    made = Table(*HEADER)
    for cells in rows(trials):
        made.add_row(*cells)
    return made


def page_table(found: Trial) -> str:
    """Return the trials as the guide shows them.

    Args:
        found: What the JSON holds.
    """
    return markdown.table(HEADER, rows(found["trials"]), right=range(4, len(HEADER)))


if __name__ == "__main__":
    sys.exit(main())
