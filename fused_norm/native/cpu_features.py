"""What the CPU has instructions for: read from its flags, not from the name of a model."""

from __future__ import annotations

import functools
from pathlib import Path

# PyTorch's own product (oneDNN) multiplies bfloat16 with these; ours multiplies it as float32.
_BFLOAT16_PRODUCTS = ("amx_bf16", "avx512_bf16", "bf16")


@functools.cache
def flags() -> frozenset[str]:
    """Return the CPU's flags as Linux lists them, nothing where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = (line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Feat")))
    return frozenset(next(found, ()))


def bfloat16_product() -> str | None:
    """Return the flag of the instructions that multiply bfloat16, None where there are none.

    With them PyTorch's products take a sixth of the time of ours (AMX) or half of it (AVX-512), so
    that calls in bfloat16 are left to PyTorch's own ops.
    """
    return _first_flag(_BFLOAT16_PRODUCTS)


# As torch.compiler.assume_constant_result does, which imports the compiler: it would trace on into
# the reading of the flags.
bfloat16_product.__dict__["_dynamo_marked_constant"] = True


@functools.cache
def _first_flag(names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in flags()), None)
