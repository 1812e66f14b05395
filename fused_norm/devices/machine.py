"""The kind of a device, under which its measurements are filed."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import torch

from fused_norm.native.cpu_features import CPU_VARIABLE, flags, has_tiles

# AMD's numbers of CPU families.
_ZEN_3_AND_4, _ZEN_5 = 25, 26

# Hopper's kinds begin with this; unknown ones are taken for the first.
HOPPER = "nvidia-h"
_HOPPERS = ("nvidia-h100", "nvidia-h200")


@functools.cache
def cpu_kind() -> str | None:
    """Return the kind of this CPU, which names files in `data`; None if it is like none of them."""
    if platform.machine() in ("aarch64", "arm64"):
        return "arm-neon"
    found = flags()
    if "avx2" not in found:
        return None
    is_amd = "sse4a" in found
    if os.environ.get(CPU_VARIABLE) == "x86-64-v3" or "avx512f" not in found:
        return "amd-zen3" if is_amd else "intel-avx2"
    if is_amd:
        return "amd-zen5" if _family() >= _ZEN_5 else "amd-zen4"
    return "intel-amx" if has_tiles() else "intel-avx512"


@functools.cache
def hopper_kind(device: int) -> str:
    """Return the kind of a Hopper GPU, by its index."""
    name = torch.cuda.get_device_name(device)
    return next((kind for kind in _HOPPERS if kind[-4:].upper() in name), _HOPPERS[0])


def cache_bytes() -> int:
    """Return the size of the last-level cache, or 32 MiB if Linux does not report it."""
    found = [
        path.read_text().strip()
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    units = {"K": 2**10, "M": 2**20}
    return max((int(t[:-1]) * units[t[-1]] for t in found if t[-1:] in units), default=2**25)


def _family() -> int:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return _ZEN_3_AND_4
    return next((int(v.split(":")[1]) for v in lines if v.startswith("cpu family")), _ZEN_3_AND_4)
