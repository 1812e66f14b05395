"""The CPU's instruction sets, from its flags rather than the name of its model."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from pathlib import Path

# The CPU to compile for, such as x86-64-v3, instead of this one.
CPU_VARIABLE = "FUSED_NORM_TARGET_CPU"
# Features of tile products, as Linux and LLVM name them; LLVM takes a masked CPU for an older one.
_TILE_FEATURES = {"amx_tile": "amx-tile", "amx_bf16": "amx-bf16", "avx512_bf16": "avx512bf16"}
# With these, PyTorch's own product (oneDNN) multiplies bfloat16 faster than ours, which computes in
# float32 without tiles: with tiles, and with Arm's instructions. AVX-512's do not help: Intel's sum
# pairs of bfloat16 at half the rate of float32.
_BFLOAT16_PRODUCTS = ({"amx_bf16"}, {"bf16"})
# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): Linux grants tile registers on request.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@functools.cache
def flags() -> frozenset[str]:
    """Return the CPU's flags as Linux lists them, none on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = (line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Feat")))
    return frozenset(next(found, ()))


@functools.cache
def has_tiles() -> bool:
    """Return whether our bfloat16 products can use tile registers (AMX)."""
    return without_tiles() is None


def without_tiles() -> str | None:
    """Return why our products cannot use tile registers (AMX), None if they can."""
    if CPU_VARIABLE in os.environ:
        return f"{CPU_VARIABLE} names a CPU"
    missing = sorted(_TILE_FEATURES.keys() - flags())
    if missing:
        return f"the CPU lacks {', '.join(missing)}"
    return None if _permits_tiles() else "Linux does not grant the tile registers"


@functools.cache
def _permits_tiles() -> bool:
    """Ask Linux for the tile registers, and return whether this process may use them.

    So may its threads and its children.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    status: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return status == 0


def compiler_features(name: str) -> tuple[str, ...]:
    """Return the features to compile an extension for that the CPU's model does not imply.

    Extensions without products round like PyTorch, including subnormal numbers.

    Args:
        name: The extension.
    """
    is_product = name == "norm_linear_cpu"
    return tuple(_TILE_FEATURES.values()) if is_product and has_tiles() else ()


def bfloat16_product() -> str | None:
    """Return the flags with which PyTorch's bfloat16 products are faster than ours, None for none.

    With them, PyTorch's products take half the time of ours, so that calls in bfloat16 are left to
    PyTorch's own ops, unless our product uses tiles as well.
    """
    return None if has_tiles() else _fast_products()


# Like torch.compiler.assume_constant_result, which imports the compiler: otherwise the compiler
# would trace the reading of the flags.
bfloat16_product.__dict__["_dynamo_marked_constant"] = True


@functools.cache
def _fast_products() -> str | None:
    found = next((names for names in _BFLOAT16_PRODUCTS if names <= flags()), None)
    return None if found is None else " and ".join(sorted(found))
