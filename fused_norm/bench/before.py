"""The package of another checkout as one more provider: before and after a change in one run."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from fused_norm.bench import providers

NAME = "before"
_PACKAGE = "fused_norm"
_COPY = "fused_norm_before"


def add(checkout: Path) -> None:
    """Add the ops of a checkout to the providers, under a name of its own.

    The copy keeps the kernels' sources as they are, so that kernels built in the checkout serve.

    Args:
        checkout: A folder that holds `fused_norm/` and `op/`.

    Raises:
        ValueError: If it holds something else.
    """
    if not (checkout / _PACKAGE / "__init__.py").is_file() or not (checkout / "op").is_dir():
        raise ValueError(f"{checkout} is no checkout of fused_norm")
    folder = Path(tempfile.mkdtemp(prefix="fused-norm-before-"))
    shutil.copytree(checkout / _PACKAGE, folder / _COPY)
    shutil.copytree(checkout / "op", folder / "op")
    for path in (folder / _COPY).rglob("*.py"):
        # Imports and the namespace of the ops; not messages, nor names of folders.
        text = re.sub(rf"(from |import |\.ops\.){_PACKAGE}\b", rf"\g<1>{_COPY}", path.read_text())
        path.write_text(re.sub(rf'"{_PACKAGE}("|::|\.)', rf'"{_COPY}\1', text))
    sys.path.append(str(folder))
    for op, name in (
        ("layernorm_linear", "fused_layernorm_linear"),
        ("layer_norm", "trainable_eps_layer_norm"),
    ):
        provider = providers.Provider(
            NAME, op, "peer", f"{name} of another checkout", _loader(name), providers.as_function
        )
        providers.PROVIDERS[op, NAME] = provider


def _loader(name: str) -> Any:
    return lambda: getattr(importlib.import_module(_COPY), name)
