"""Find what docs/worklog.md shows and no GPU is needed for: machine code, and numerics on a CPU.

    python tutorial/worklog/worklog_facts.py --sass        needs ptxas
    python tutorial/worklog/worklog_facts.py --numerics

They write worklog-sass.json and worklog-numerics.json in benchmarks/results.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm.native import build, compiler
from tutorial.worklog.worklog_steps import STEPS, Step

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts/measure"))

import kernel_resources  # noqa: E402

FOLDER = ROOT / "tutorial/worklog"
SASS = ROOT / "benchmarks/results/worklog-sass.json"
NUMERICS = ROOT / "benchmarks/results/worklog-numerics.json"
EPS = 1e-5
# Rows, features and outputs, and the means of x in its standard deviations.
SIZES = (256, 4096, 256)
MEANS = (0, 1, 10, 100, 1000)
# The kernels that multiply tiles of 128 by 256, or all of a step.
KERNEL = re.compile(r"naive|tiled|tensor_core|ring|cluster|128x256_plain")
# A trial: step 5 with its sums stored by a loop that is not unrolled.
ROLLED = "clusters, stored by a loop"
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.+?)\s*;", re.M)
LABEL = re.compile(r"^(\.L_x_\d+):")
BRANCH = re.compile(r"\bBRA\S*\s+`\((\.L_x_\d+)\)")


def main() -> int:
    """Write what is asked for and return an exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sass", action="store_true")
    parser.add_argument("--numerics", action="store_true")
    options = parser.parse_args()
    if options.sass:
        _write(SASS, sass())
    if options.numerics:
        _write(NUMERICS, numerics())
    return 0


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def sass() -> dict[str, Any]:
    """Return what the kernel of each product takes, and the loop that its time is spent in."""
    found = {}
    for step in STEPS:
        if step.kind == "product":
            found[step.name] = _facts(step, ())
            if step.name == "clusters":
                found[ROLLED] = _facts(step, ("-D", "rolled_store=1"))
    version = subprocess.run(["ptxas", "--version"], capture_output=True, text=True, check=True)
    release = re.search(r"V[\d.]+", version.stdout)
    assert release
    return {"ptxas": release[0], "target": "sm_90a", "kernels": found}


def _facts(step: Step, flags: tuple[str, ...]) -> dict[str, Any]:
    assert step.extension
    extension = build.Extension(step.extension, "bfloat16", "nvidia:sm_90a", FOLDER)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "step.so"
        compiler.run(extension, [*build.compile_arguments(extension), *flags], library)
        (text,) = [text for text in kernel_resources.ptx(library) if KERNEL.search(_name(text))]
    _, took = kernel_resources.assemble(text, "sm_90a")
    return {
        "registers": took.registers,
        "spill_bytes": took.spills,
        "stack_bytes": took.stack,
        "instructions": took.instructions,
        "loop": main_loop(disassembled(text)),
    }


def _name(text: str) -> str:
    entry = re.search(r"\.entry ([^\s(]+)", text)
    assert entry
    return entry[1]


def disassembled(text: str) -> str:
    """Return the machine code of a kernel as text.

    Args:
        text: Its PTX.
    """
    spec = importlib.util.find_spec("triton")
    (folder,) = (spec.submodule_search_locations if spec else None) or [""]
    with tempfile.TemporaryDirectory() as scratch:
        source, cubin = Path(scratch) / "kernel.ptx", Path(scratch) / "kernel.cubin"
        source.write_text(text)
        command = ["ptxas", "-arch=sm_90a", "-O3", str(source), "-o", str(cubin)]
        subprocess.run(command, check=True, capture_output=True)
        tool = Path(folder) / "backends" / "nvidia" / "bin" / "nvdisasm"
        result = subprocess.run(
            [str(tool), "-c", str(cubin)], capture_output=True, text=True, check=True
        )
    return result.stdout


def main_loop(code: str) -> list[str]:
    """Return the instructions of the shortest loop with a k block's products in it.

    Args:
        code: Of a kernel, as `nvdisasm -c` prints it.
    """
    lines = code.splitlines()
    labels = {m[1]: number for number, line in enumerate(lines) if (m := LABEL.match(line))}
    loops = []
    for number, line in enumerate(lines):
        branch = BRANCH.search(line)
        start = labels.get(branch[1], number + 1) if branch else number + 1
        body = INSTRUCTION.findall("\n".join(lines[start : number + 1]))
        products = [each for each in body if "HGMMA" in each or "FFMA" in each]
        if len(products) > 3:
            loops.append(body)
    return [re.sub(r"\s+", " ", each) for each in min(loops, key=len)]


def numerics() -> dict[str, Any]:
    """Return the relative errors of folds and of PyTorch's way, products summed in float32."""
    table = {}
    for kind in ("signed", "positive"):
        rows = {}
        for mean in MEANS:
            rows[str(mean)] = {name: float(f"{error:.2e}") for name, error in _errors(kind, mean)}
        table[kind] = rows
    return {"sizes": SIZES, "torch": torch.__version__, "dtype": "bfloat16", "errors": table}


def _errors(kind: str, mean: float) -> list[tuple[str, float]]:
    generator = torch.Generator().manual_seed(0)
    M, K, N = SIZES

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    w = normal(N, K) / K**0.5
    tensors = (normal(M, K) + mean, 1 + 0.2 * normal(K), 0.2 * normal(K), w, 0.2 * normal(N))
    if kind == "positive":
        tensors = (*tensors[:3], w.abs(), tensors[4])
    x, gamma, beta, weight, bias = (_rounded(tensor) for tensor in tensors)
    exact = F.linear(F.layer_norm(x, (K,), gamma, beta, EPS), weight, bias)
    center = x.mean(1, keepdim=True)
    rstd = (x.var(1, keepdim=True, correction=0) + EPS).rsqrt()
    constants = bias + weight @ beta
    scaled = weight * gamma
    centered = scaled - scaled.mean(1, keepdim=True)

    def folded(matrix: Tensor, sums: Tensor) -> Tensor:
        product = _summed(x, _rounded(matrix))
        return rstd.float() * (product - center.float() * sums.float()) + constants.float()

    products: dict[str, Callable[[], Tensor]] = {
        "normalized rows (PyTorch)": lambda: (
            _summed(_rounded((x - center) * rstd * gamma + beta), weight) + bias.float()
        ),
        "fold, sums of the exact weight": lambda: folded(scaled, scaled.sum(1)),
        "fold, sums of the rounded weight": lambda: folded(scaled, _rounded(scaled).sum(1)),
        "centered fold": lambda: folded(centered, _rounded(centered).sum(1)),
    }
    return [
        (name, float((_rounded(product()) - exact).norm() / exact.norm()))
        for name, product in products.items()
    ]


def _rounded(tensor: Tensor) -> Tensor:
    """Round to bfloat16, and go on in float64."""
    return tensor.to(torch.bfloat16).double()


def _summed(a: Tensor, b: Tensor) -> Tensor:
    """Multiply values of bfloat16, whose products are exact, and sum them in float32."""
    return a.float() @ b.float().t()


if __name__ == "__main__":
    sys.exit(main())
