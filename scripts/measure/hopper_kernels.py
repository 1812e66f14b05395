"""Record what Hopper's kernels take, which no numerical test sees: registers, spills, memory.

    python scripts/measure/hopper_kernels.py [NAME ...]   compile (all), check, and write the record

Needs Mojo and ptxas, and no GPU; all of it takes minutes. The record has a digest of the sources of
each extension, so that a test in seconds says whether it is of these sources.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts/measure"))

import kernel_resources  # noqa: E402

RECORD = ROOT / "benchmarks/results/hopper-kernels.json"
# The operands of wgmma in each extension.
EXTENSIONS = {
    "norm_linear_sm90 bfloat16": "bf16.bf16",
    "norm_linear_sm90 float16": "f16.f16",
    "norm_linear_sm90 float32": "tf32.tf32",
    "fp8_sm90 bfloat16": "e[45]m[32].e[45]m[32]",
    "head_sm90 bfloat16": "bf16.bf16",
}
# Not solved (docs/hopper-log.md): these have no register to spare, and three go to memory.
SPILLED = {"passes_on": 20}
IMPORT = re.compile(r"^from (\.*)([\w.]*) import (?:\(([^)]*)\)|([^\n]*))", re.MULTILINE)


def main() -> int:
    """Compile, check and write; return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", choices=[[], *EXTENSIONS], metavar="NAME")
    found = json.loads(RECORD.read_text()) if RECORD.exists() else {"extensions": {}}
    found |= {"mojo": version("mojo"), "ptxas": kernel_resources.version()}
    for name in parser.parse_args().names or EXTENSIONS:
        taken = compiled(name)
        if wrong := faults(name, taken):
            print("\n".join(wrong), file=sys.stderr)
            return 1
        found["extensions"][name] = {"sources": digest(name), "kernels": taken}
        print(f"{name}: {len(taken)} kernels", flush=True)
        write(found)
    return 0


def write(found: dict[str, Any]) -> None:
    """Write the record, each kernel on its line."""
    lines = [f' "{key}": {json.dumps(found[key])},' for key in ("mojo", "ptxas")]
    each = []
    for name, extension in sorted(found["extensions"].items()):
        kernels = (f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in extension["kernels"].items())
        head = f'  "{name}": {{\n   "sources": "{extension["sources"]}",\n   "kernels": {{\n'
        each.append(head + ",\n".join(kernels) + "\n   }\n  }")
    text = "\n".join(["{", *lines, ' "extensions": {', ",\n".join(each), " }", "}"])
    RECORD.write_text(text + "\n")


def modules() -> dict[str, set[str]]:
    """Return the modules of the Mojo package and its extensions that each of them imports."""
    found = {}
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in _sources()}
    for name, path in names.items():
        here, imports = name.split("."), set[str]()
        for dots, module, several, one in IMPORT.findall(path.read_text()):
            base = here[: len(here) - len(dots)] if dots else []
            full = ".".join([*base, *filter(None, module.split("."))])
            parts = (part.strip() for part in (several or one).split(","))
            candidates = [full, *(f"{full}.{part}" for part in parts)]
            imports |= {candidate for candidate in candidates if candidate in names}
        found[name] = imports - {name}
    return found


def _sources() -> list[Path]:
    return [*(ROOT / "op").rglob("*.mojo"), *(ROOT / "fused_norm/native").glob("*.mojo")]


def digest(name: str) -> str:
    """Return a digest of an extension's sources: its file, and all that it imports."""
    imports, found = modules(), set[str]()
    left = [f"fused_norm.native.{name.split(' ')[0]}"]
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            left += imports[module]
    each = hashlib.sha256()
    for module in sorted(found):
        each.update((ROOT / module.replace(".", "/")).with_suffix(".mojo").read_bytes())
    return each.hexdigest()[:16]


def compiled(name: str) -> dict[str, list[Any]]:
    """Compile an extension's kernels.

    Returns:
        By kernel: registers a thread, bytes spilled, of the stack and shared, instructions, and
        whether it multiplies on tensor cores with the extension's operands.
    """
    source, dtype = name.split(" ")
    with tempfile.TemporaryDirectory() as folder:
        said = subprocess.run(
            [
                *("mojo", "build", "-I", ".", "-D", f"dtype={dtype}", "--emit", "asm"),
                *("--target-accelerator", "nvidia:sm_90a", "-o", f"{folder}/host.s"),
                f"fused_norm/native/{source}.mojo",
            ],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
        ).stderr
        if "warning" in said:
            raise RuntimeError(said)
        texts = [path.read_text() for path in sorted(Path(folder).glob("*fused_norm_*.ptx"))]
    multiplies = re.compile(rf"\.f32\.{EXTENSIONS[name]} ")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        took = list(pool.map(lambda text: kernel_resources.assemble(text, "sm_90a"), texts))
    rows: list[tuple[str, list[Any]]] = [
        (kernel, [*each, bool(multiplies.search(text))])
        for (kernel, each), text in zip(took, texts, strict=True)
    ]
    seen, found = Counter[str](), dict[str, list[Any]]()
    for kernel, each in sorted(rows):
        seen[kernel] += 1
        found[f"{kernel} #{seen[kernel]}" if seen[kernel] > 1 else kernel] = each
    return found


def faults(name: str, taken: dict[str, list[Any]]) -> list[str]:
    """Return what is wrong with an extension's kernels: spills, or products by other operands."""
    found = [] if taken else [f"{name} has no kernels"]
    for kernel, (_, spills, _, _, _, multiplies) in taken.items():
        most = next((most for part, most in SPILLED.items() if part in kernel), 0)
        if spills > most:
            found.append(f"{name}: {kernel} spills {spills} bytes")
        if multiplies != ("matrix" in kernel or "few_rows" in kernel):
            found.append(f"{name}: {kernel} has other products than its name says")
    return found


if __name__ == "__main__":
    sys.exit(main())
