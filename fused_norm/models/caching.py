"""Lets PyTorch keep compiled graphs that contain our calls from one process to the next.

PyTorch caches the compiled forward and backward of graphs that call only its own functions, or
functions that are named to it, each with a key of everything except the arguments that decides how
it is traced. It does not look into the bodies of checkpoints, so their functions need keys, too.
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

# Inductor's option that names functions, each with its key.
OPTION = "unsafe_marked_cacheable_functions"


def with_keys(
    options: Mapping[str, Any], nodes: Iterable[Node], example_inputs: Iterable[Any]
) -> dict[str, Any]:
    """Return Inductor's options, extended by the names of our functions in a graph.

    Args:
        options: The user's.
        nodes: All nodes of the graph and of its checkpoints' graphs.
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
    """Return the name of our function, or of our package if it has none; `""` for others."""
    target: Any = node.target
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", "")
    if node.op != "call_function" or str(module).split(".")[0] != build.PACKAGE.name:
        return ""
    is_found = getattr(sys.modules.get(str(module)), name, None) is target
    return f"{module}.{name}" if is_found else build.PACKAGE.name


def _key(devices: Collection[str]) -> str:
    """Return what decides how a call is traced, except its arguments: sources, modes, kernels.

    Args:
        devices: The devices of a graph.
    """
    modes: list[Any] = [invariance.state(), autocast_fp8.state()]
    for kind in sorted({torch.device(device).type for device in devices}):
        # In some releases, PyTorch's own key only says whether there is any.
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
    """Return a digest of the package's Python sources."""
    digest = hashlib.sha256()
    for path in sorted(build.PACKAGE.rglob("*.py")):
        digest.update(
            path.relative_to(build.PACKAGE).as_posix().encode() + b"\0" + path.read_bytes()
        )
    return digest.hexdigest()
