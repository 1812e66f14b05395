"""Has PyTorch keep what it compiled of graphs with calls of ours from one process to the next.

PyTorch keeps compiled forwards and backwards of graphs that call its own functions alone, and those
of others that are named to it, each with a key of all that decides what its trace leaves beside its
arguments. It does not look into the bodies of checkpoints, so that theirs have to have one, too.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node

from fused_norm.chain import library
from fused_norm.native import build
from fused_norm.ops import autocast_fp8, invariance

# The option of Inductor that names functions, each with its key.
OPTION = "unsafe_marked_cacheable_functions"


def with_keys(
    options: Mapping[str, Any], nodes: Iterable[Node], example_inputs: Iterable[Any]
) -> dict[str, Any]:
    """Return Inductor's options, which name the functions of ours that a graph calls.

    Args:
        options: Those that a user gave.
        nodes: All nodes of the graph and of the bodies that it holds.
        example_inputs: Its inputs.
    """
    from torch._inductor import config

    names = sorted({name for node in nodes if (name := _name(node))})
    known = getattr(config, OPTION, None)
    if not names or known is None:
        return dict(options)
    given = {**known, **options.get(OPTION, {})}
    devices = {str(each.device) for each in example_inputs if isinstance(each, torch.Tensor)}
    key = _key(devices)
    return {**options, OPTION: {**given, **dict.fromkeys(names, key)}}


def _name(node: Node) -> str:
    """Return the name of a function of ours, of the package where it has none, `""` for others."""
    target: Any = node.target
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", "")
    if node.op != "call_function" or str(module).split(".")[0] != build.PACKAGE.name:
        return ""
    is_found = getattr(sys.modules.get(str(module)), name, None) is target
    return f"{module}.{name}" if is_found else build.PACKAGE.name


def _key(devices: Collection[str]) -> str:
    """Return what decides beside a call's arguments what its trace leaves: sources, modes, kernels.

    Args:
        devices: Where a graph runs.
    """
    modes: list[Any] = [invariance.state(), autocast_fp8.state()]
    for kind in sorted({torch.device(device).type for device in devices}):
        # Of which PyTorch's own key says no more than whether there is any, in some releases.
        modes.append((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)))
    built = [
        (device, name, build.is_at_hand(torch.device(device), dtype))
        for device in sorted(devices)
        for dtype, name in build.DTYPES.items()
    ]
    switches = sorted(pair for pair in os.environ.items() if pair[0].startswith("FUSED_NORM_"))
    return repr((_sources(), modes, library.is_at_hand(), built, switches))


@functools.cache
def _sources() -> str:
    """Return a digest of the package's Python."""
    digest = hashlib.sha256()
    for path in sorted(build.PACKAGE.rglob("*.py")):
        digest.update(
            path.relative_to(build.PACKAGE).as_posix().encode() + b"\0" + path.read_bytes()
        )
    return digest.hexdigest()
