"""Tells PyTorch's FlopCounterMode what the ops' products take.

It asks a registry that it copies as it is made. Its module imports Triton, which takes a quarter of
a second. Importing this package does not: formulas are registered once that module is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_formulas: dict[str, Callable[..., int]] = {}


def count_flops(name: str, formula: Callable[..., int]) -> None:
    """Keep the formula of an op.

    Args:
        name: Of the op.
        formula: Returns the floating-point operations of a call from its arguments.
    """
    _formulas[name] = formula


def tell_counters() -> None:
    """Register the formulas, also with the counters that are running."""
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    registries = [module.flop_registry]
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, module._FlopCounterMode):
            registries.append(mode.counter.flop_registry)
    for name, formula in _formulas.items():
        packet = getattr(torch.ops.fused_norm, name)
        for registry in registries:
            if packet not in registry:
                registry[packet] = _raw(formula)


def _raw(formula: Callable[..., int]) -> Callable[..., int]:
    def count(*arguments: Any, out_val: Any = None, **_: Any) -> int:
        return formula(*arguments)

    return count
