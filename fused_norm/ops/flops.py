"""Tells PyTorch's FlopCounterMode how many operations the ops take.

It copies a registry whenever it is created. The registry's module imports Triton, which takes a
quarter of a second, so formulas are registered only once something else has imported it.
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
        name: The op.
        formula: Returns the floating-point operations of a call from its arguments.
    """
    _formulas[name] = formula


def tell_counters() -> None:
    """Register the formulas, and add them to counters that are already running."""
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
