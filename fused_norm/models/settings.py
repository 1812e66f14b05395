"""The user's settings of the backend: `options` and `mode` of `torch.compile`, validated."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fused_norm.models.fuse import Options
from fused_norm.ops.autocast_fp8 import chosen

_OWN = ("then", "rounding", "small", "freeze", "fp8", "skip")


@dataclass(frozen=True)
class Settings:
    """What to do with a graph.

    Attributes:
        then: Name of the next backend.
        fusing: The options of the pass.
        freezes: Whether the parameters of runs without gradients are frozen.
        following: Options of the next backend.
    """

    then: str
    fusing: Options
    freezes: bool
    following: dict[str, Any]


def settings(options: Mapping[str, Any] | None, mode: str | None) -> Settings:
    """Return the settings in `options` and `mode`.

    Args:
        options: As `torch.compile` takes them for this backend.
        mode: A mode of `torch.compile`.

    Raises:
        ValueError: If an option is unknown, or its value is wrong.
        RuntimeError: If both are given, or the mode is unknown.
    """
    if options and mode:
        raise RuntimeError(
            "Either mode or options can be specified, but both can't be specified at the same time."
        )
    given = dict(options or {})
    own = {name: given.pop(name) for name in _OWN if name in given}
    then = own.get("then", "inductor")
    known = _known(then) if given else ()
    for name in given:
        _check(name, known, then)
    small = own.get("small")
    if small not in (None, True, False):
        raise ValueError(f"small must be True or False, got {small!r}")
    freezes = bool(own.get("freeze", False))
    if then == "inductor":
        from torch._inductor import list_mode_options

        given = {**(list_mode_options(mode) if mode else {}), **given}
        freezes = freezes or _inductor_freezes(given)
        if small is None:
            small = bool(given.get("triton.cudagraphs"))
    recipe = own["fp8"] if "fp8" in own else chosen(None)
    fusing = Options(own.get("rounding", "once"), small, recipe, own.get("skip", ()))
    return Settings(then, fusing, freezes, given)


def _known(then: str) -> Iterable[str] | None:
    """Return the names of a backend's own options, None if it accepts any."""
    if then == "eager":
        return ()
    if then == "inductor":
        from torch._inductor import list_options

        names: list[str] = list_options()
        return names
    from torch._dynamo.backends.registry import lookup_backend

    parameters = list(inspect.signature(lookup_backend(then)).parameters.values())[2:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters]


def _check(name: str, known: Iterable[str] | None, then: str) -> None:
    plain = {each.replace("-", "_") for each in known or ()}
    near = difflib.get_close_matches(name, [*_OWN, *sorted(plain)], n=1)
    # Misspelled options of ours are not passed on to a backend that accepts any option.
    if name.replace("-", "_") in plain or (known is None and not near):
        return
    meant = f"; did you mean {near[0]!r}?" if near else "."
    own = ", ".join(map(repr, _OWN))
    raise ValueError(
        f"unknown option {name!r} of the backend 'fused_norm'{meant} "
        f"Its own are {own}; the others are those of {then!r}."
    )


def _inductor_freezes(patches: Mapping[str, Any]) -> bool:
    import torch
    from torch._inductor import config

    return bool(patches.get("freezing", config.freezing)) and not torch.is_grad_enabled()
