"""`python -m fused_norm tune`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from fused_norm.devices import choice
from fused_norm.parser import Parser
from fused_norm.tuning import tune


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure this machine, print where the result is, and return an exit status."""
    parser = Parser(
        prog="python -m fused_norm tune",
        description="Measure this machine's CPU or GPU, so that later calls use the fastest "
        f"strategy. {choice.SWITCH}=0 returns to the shipped measurements.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="how long to measure (default: 120)"
    )
    parser.add_argument(
        "--sizes", metavar="M,K,N", action="append", default=[], help="sizes to include; repeatable"
    )
    parser.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="a model to include: a function that returns a model and its arguments",
    )
    options = parser.parse_args(arguments)
    try:
        sizes = [_size(text) for text in options.sizes]
        model, example = _model(options.model) if options.model else (None, ())
        path = tune(model, *example, seconds=options.seconds, sizes=sizes, device=options.device)
    except (ValueError, ImportError, AttributeError) as error:
        parser.error(str(error))
    except RuntimeError as error:
        print(error)
        return 1
    device = choice.load(path)
    console = Console()
    console.print(
        f"{device.about['calls']} calls measured on {device.name}; {len(device.exceptions)} are "
        f"exceptions to the model. Later calls use {path}.",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _size(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(p.isdecimal() and int(p) for p in parts):
        raise ValueError(f"a size is M,K,N, three positive integers: got {text!r}")
    M, K, N = map(int, parts)
    return M, K, N


def _model(text: str) -> tuple[torch.nn.Module, Sequence[Any]]:
    module, _, factory = text.partition(":")
    if not factory:
        raise ValueError(f"a model is MODULE:FACTORY, got {text!r}")
    made = getattr(importlib.import_module(module), factory)()
    if not (isinstance(made, (tuple, list)) and made and isinstance(made[0], torch.nn.Module)):
        raise ValueError(f"{text} must return a model and its arguments, not {made!r:.60}")
    model, *example = made
    return model, example
