"""Check and time the FP8 kernels on a Hopper GPU that has PyTorch and no Mojo.

    python scripts/fp8_gpu.py pack .dev/fp8          here: the extension and Mojo's runtime
    PYTHONPATH=. python3 scripts/fp8_gpu.py run .dev/fp8 OUT.json
                                                     there: checks, then times, in about a minute

Products are checked against the float64 product of the dequantized operands, quantized rows bit by
bit against `fused_norm.recipes`. Times are of CUDA graphs, interleaved, the order drawn in every
round, in microseconds; `_scaled_mm` is PyTorch's, with fast accumulation.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fp8_checks import CHECKS
from fp8_kernels import Kernels
from fp8_times import TIMES
from gpu_pack import pack_runtime

from benchmarks.environment import checkout
from fused_norm.doctor import nvidia_smi
from fused_norm.native import build


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack or run and return an exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("folder", type=Path)
    running = commands.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("out", type=Path)
    running.add_argument("--rounds", type=int, default=12)
    running.add_argument("--check", action="store_true", help="time nothing")
    options = parser.parse_args(arguments)
    if options.command == "pack":
        return pack(options.folder)
    if "FP8_GPU_RUNTIME" in os.environ:
        return run(options)
    # The loader looks at this variable when a process begins.
    with tempfile.TemporaryDirectory() as runtime:
        with tarfile.open(options.folder / "runtime.tar.xz") as archive:
            archive.extractall(runtime, filter="data")
        libraries = os.pathsep.join([f"{runtime}/lib", os.environ.get("LD_LIBRARY_PATH", "")])
        environment = os.environ | {"LD_LIBRARY_PATH": libraries, "FP8_GPU_RUNTIME": runtime}
        command = [sys.executable, __file__, *(sys.argv[1:] if arguments is None else arguments)]
        return subprocess.run(command, env=environment, check=False).returncode


def pack(folder: Path) -> int:
    """Build the extension for Hopper into a folder, with the libraries that it needs."""
    folder.mkdir(parents=True, exist_ok=True)
    extension = build.Extension(build.FP8_EXTENSION, "bfloat16", "nvidia:sm_90a")
    shutil.copy(build.build(extension), folder / "fp8_sm90.so")
    (folder / "commit").write_text(checkout())
    pack_runtime(folder / "runtime.tar.xz")
    return 0


def run(options: argparse.Namespace) -> int:
    """Check, then time, write what was found, and return 0 if all checks held."""
    torch.manual_seed(0)
    random.seed(0)
    properties = torch.cuda.get_device_properties(0)
    found: dict[str, Any] = {
        "device": properties.name,
        "torch": torch.__version__,
        "driver": nvidia_smi("driver_version"),
        "commit": (options.folder / "commit").read_text().strip(),
    }
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        kernels = Kernels(options.folder, stream.cuda_stream)
        for name, check in CHECKS.items():
            found[name] = check(kernels)
            print(name, json.dumps(found[name]), flush=True)
        if not options.check:
            for name, (measure, sizes) in TIMES.items():
                found[name] = {}
                for size in sizes:
                    times = measure(kernels, size, stream, options.rounds)
                    found[name][",".join(map(str, size))] = times
                    print(name, size, json.dumps(times), flush=True)
                    torch.cuda.empty_cache()
    held = all(found[name]["held"] for name in CHECKS)
    print("all held" if held else "NOT ALL HELD")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
