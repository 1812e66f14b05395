"""CPU levels that kernels are prebuilt for: their required flags, and how to compile for them.

A machine takes the first level whose flags it has, whatever the name of its model.
"""

from __future__ import annotations

import functools
import platform
from typing import NamedTuple

from fused_norm.native.cpu_features import flags, has_tiles

_ALL = ("float32", "bfloat16", "float16", "float64")
_V3 = "avx avx2 bmi1 bmi2 f16c fma movbe"
# Arm's cloud CPUs since Neoverse N1: Graviton 2, Altra, Grace.
_NEON = "asimd fphp asimdhp asimddp atomics"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"


class Level(NamedTuple):
    """A set of instructions.

    Attributes:
        name: Its name in file names.
        machine: The architecture, as `platform.machine` names it.
        flags: Linux's flags of a CPU that has it.
        arguments: The compiler's arguments.
        dtypes: Names of the dtypes for which it makes a difference.
        extensions: Names of the extensions for which it does, None for all.
    """

    name: str
    machine: str
    flags: frozenset[str]
    arguments: tuple[str, ...]
    dtypes: tuple[str, ...] = _ALL
    extensions: tuple[str, ...] | None = None

    def changes(self, extension: str, dtype: str) -> bool:
        """Return whether an extension has a build for it.

        Args:
            extension: Its name.
            dtype: Name of its dtype.
        """
        return dtype in self.dtypes and (self.extensions is None or extension in self.extensions)


def _features(cpu: str, *features: str) -> tuple[str, ...]:
    return ("--target-cpu", cpu, "--target-features", ",".join(f"+{name}" for name in features))


# The best first. Instructions for bfloat16 are only for products: other kernels would round
# subnormal numbers to zero with them, unlike PyTorch.
LEVELS = (
    Level(
        "amx",
        "x86_64",
        frozenset(f"{_V4} avx512_bf16 amx_tile amx_bf16".split()),
        _features("x86-64-v4", "avx512bf16", "amx-tile", "amx-bf16"),
        ("bfloat16",),
        ("norm_linear_cpu",),
    ),
    Level("v4", "x86_64", frozenset(_V4.split()), ("--target-cpu", "x86-64-v4")),
    Level("v3", "x86_64", frozenset(_V3.split()), ("--target-cpu", "x86-64-v3")),
    Level(
        "neon",
        "aarch64",
        frozenset(_NEON.split()),
        ("--target-triple", "aarch64-unknown-linux-gnu", "--target-cpu", "neoverse-n1"),
    ),
)


@functools.cache
def of_this_cpu() -> tuple[Level, ...]:
    """Return the levels that this CPU has, the best first."""
    machine = platform.machine().replace("AMD64", "x86_64")
    return tuple(
        level
        for level in LEVELS
        if level.machine == machine
        and level.flags <= flags()
        and ("amx_tile" not in level.flags or has_tiles())
    )
