"""The machine and the software, for the head of every report."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.nn.functional as F

import fused_norm
from benchmarks.case import dtype_name
from benchmarks.runs import Ceiling, Environment
from fused_norm import doctor
from fused_norm.chain import library
from fused_norm.devices.machine import cache_bytes
from fused_norm.native import build


def describe(device: torch.device, commit: str | None = None) -> Environment:
    """Return what this machine is and runs.

    Args:
        device: The device that is measured.
        commit: The git commit, where there is no checkout to ask.
    """
    gpu = driver = ""
    memory, cache = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), cache_bytes()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu, memory, cache = properties.name, properties.total_memory, properties.L2_cache_size
        driver = doctor.nvidia_smi("driver_version") or ""
    return Environment(
        device=device.type,
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _cores(),
        threads=torch.get_num_threads(),
        load=os.getloadavg()[0],
        memory_bytes=memory,
        cache_bytes=cache,
        gpu=gpu,
        driver=driver,
        clocks=clocks(device),
        tf32=_tf32(),
        os=platform.platform(),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=f"ROCm {torch.version.hip}" if torch.version.hip else torch.version.cuda or "",
        max=version("max"),
        mojo=version("mojo-compiler"),
        fused_norm=version("fused-norm") + (", its C++ node" if library.load_node() else ""),
        commit=checkout() if commit is None else commit,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        command=" ".join(["python -m benchmarks", *map(_without_folder, sys.argv[1:])]),
    )


def clocks(device: torch.device) -> str:
    """Return a GPU's clocks as nvidia-smi reads them now, or an empty string."""
    if device.type != "cuda":
        return ""
    # PyTorch's first GPU need not be the first that nvidia-smi lists.
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = "clocks.sm,clocks.mem,clocks.max.sm,power.limit"
    return doctor.nvidia_smi(query, f"--id={name}") or ""


@functools.cache
def ceiling(dtype: torch.dtype, device: torch.device) -> Ceiling:
    """Measure what the machine reaches with PyTorch's own matrix product and copy, once a process.

    Args:
        dtype: Dtype of the product.
        device: Where to measure.
    """
    on_gpu = device.type == "cuda"
    size, elements = (8192, 2**28) if on_gpu else (1536, 2**24)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = _fastest(lambda: F.linear(a, b), device)
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    copy = _fastest(lambda: target.copy_(source), device)
    return Ceiling(dtype_name(dtype), 2 * size**3 / product, 2 * 4 * elements / copy)


def _fastest(step: object, device: torch.device) -> float:
    assert callable(step)
    found = []
    for _ in range(5):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found)


def _without_folder(argument: str) -> str:
    """Shorten an absolute path: results are published, folders of this machine are not."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def _cores() -> int:
    return os.cpu_count() or 1


def _cpu() -> str:
    """Return the CPU's model: its name, and the family and model that say more of some."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    name = fields.get("model name") or platform.machine()
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return name


def _tf32() -> str:
    precision = torch.get_float32_matmul_precision()
    allowed = "TF32" if torch.backends.cuda.matmul.allow_tf32 else "IEEE float32"
    return f"{allowed} (float32_matmul_precision {precision})"


def version(package: str) -> str:
    """Return the version of a package, or an empty string.

    Args:
        package: Name of its distribution.
    """
    if package == "fused-norm":
        # Also for a checkout that is on the path but not installed.
        return fused_norm.__version__
    return doctor.version(package) or ""


def checkout() -> str:
    """Return the checkout's commit, with `-dirty` if its files differ, or an empty string."""
    root = build.source_root()
    if not (root / ".git").exists() or shutil.which("git") is None:
        return ""
    git = ["git", "-C", str(root)]
    found = subprocess.run(
        [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        return ""
    changes = subprocess.run(
        [*git, "status", "--porcelain", "--untracked-files=no"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() + ("-dirty" if changes.stdout.strip() else "")
