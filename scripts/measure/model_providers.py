"""Who computes a whole model for `whole_models.py`: PyTorch, this library, and torchao in FP8."""

from __future__ import annotations

import copy
import functools
from importlib import import_module
from typing import Any

import torch
from torch import nn

from fused_norm.freeze import freeze
from fused_norm.models import Site, backend

OURS = "fused_norm"
FROZEN = "fused_norm-frozen"
SMALL = "fused_norm-small"
FP8, TORCHAO = "fused_norm-rowwise", "torchao-rowwise"
PROVIDERS = ("eager", "compile", OURS, FROZEN, SMALL, TORCHAO, FP8)
# The last layer stays in bfloat16, as everybody has it.
RECIPE, LAST = "rowwise", "lm_head"


def default(mode: str) -> list[str]:
    """Return the providers of a mode that are measured unless others are named."""
    return ["eager", "compile", OURS, *([FROZEN] if mode == "forward" else [])]


def has_own(provider: str, mode: str) -> bool:
    """Return whether a provider's parameters are its own: frozen, or in FP8."""
    return provider in (FROZEN, TORCHAO) or (provider == FP8 and mode == "forward")


def provided(provider: str, model: nn.Module, mode: str, then: str, sites: list[Site]) -> Any:
    """Return what a provider calls.

    Args:
        provider: One of PROVIDERS.
        model: The model, which a provider that has its own copies.
        mode: `"forward"`, where weights are quantized once, or `"train"`.
        then: What follows this library's pass.
        sites: What this library's pass found is added to it, of OURS.

    Returns:
        The model that has the parameters, and what is called.
    """
    if has_own(provider, mode):
        model = copy.deepcopy(model)
    if provider == "eager":
        return model, model
    if provider == TORCHAO:
        _convert(model, mode)
    if provider in ("compile", TORCHAO):
        return model, torch.compile(model)
    if has_own(provider, mode):
        freeze(model.eval(), offload=True)
    options: dict[str, Any] = {"then": then}
    if provider == SMALL:
        options["small"] = True
    if provider == FP8:
        options |= {"fp8": RECIPE, "skip": [LAST]}
    ours: Any = functools.partial(backend, options=options, sites=sites if provider == OURS else [])
    return model, torch.compile(model, backend=ours)


def _convert(model: nn.Module, mode: str) -> None:
    """Replace a model's Linear layers by torchao's in FP8, except the last."""

    def is_converted(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and not name.endswith(LAST)

    if mode == "train":
        float8 = import_module("torchao.float8")
        config = float8.Float8LinearConfig.from_recipe_name(RECIPE)
        float8.convert_to_float8_training(model, config=config, module_filter_fn=is_converted)
        return
    quantization = import_module("torchao.quantization")
    how = quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())
    quantization.quantize_(model, how, filter_fn=is_converted)
