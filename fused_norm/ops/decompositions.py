"""The ops in terms of PyTorch's, for programs that run without this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_norm import composition, reference
from fused_norm.ops.followed import follow, refuse
from fused_norm.ops.linear_add import linear_add_by_pytorch
from fused_norm.ops.linear_gated_add import gated_by_pytorch
from fused_norm.ops.norm_linear_ops import unpacked
from fused_norm.ops.registration import when_exporting
from fused_norm.ops.rotary import both_by_pytorch, rotated_by_pytorch
from fused_norm.ops.statistics import add_by_pytorch, rows_by_pytorch
from fused_norm.ops.validation import by_pytorch_widened


def decompositions() -> Any:
    """Return PyTorch's default decompositions, and those of this package's ops into PyTorch's.

    An exported program contains this package's ops, and loads only after `import fused_norm`.
    `program.run_decompositions(fused_norm.decompositions())` returns one that loads anywhere.
    """
    table = torch.export.default_decompositions()
    for name, formula in _FORMULAS.items():
        table[getattr(torch.ops.fused_norm, name).default] = formula
    return table


def _norm_linear(*arguments: Any) -> Any:
    t, spec, keeps = unpacked(arguments)
    # An exported program cannot keep tensors for a backward.
    return NotImplemented if keeps else composition.compute(spec, t)


def _row_op(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *tensors: by_pytorch_widened(formula, *tensors)


_FORMULAS: dict[str, Callable[..., Any]] = {
    "norm_linear_forward": _norm_linear,
    "add_statistics": add_by_pytorch,
    "row_statistics": rows_by_pytorch,
    "rotary": rotated_by_pytorch,
    "rotary_of_both": both_by_pytorch,
    "linear_add": linear_add_by_pytorch,
    "linear_gated_add": gated_by_pytorch,
    "trainable_eps_layer_norm": _row_op(reference.trainable_eps_layer_norm),
    "composed_mean": _row_op(reference.mean),
    "composed_norm": _row_op(reference.norm),
    "composed_div": _row_op(reference.div),
}


def _follow() -> None:
    for name, formula in _FORMULAS.items():
        follow(name, formula)
    for name in (
        *("linear_cross_entropy", "fp8_norm", "fp8_linear", "fp8_linears", "fp8_layers"),
        *("fp8_hidden", "fp8_gated_mlp", "fp8_quantize"),
    ):
        refuse(name)


# A function of Python between the dispatcher and an op takes as long as a small call.
when_exporting(_follow)
