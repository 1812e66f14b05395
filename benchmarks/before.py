"""The package of another checkout as one more provider: before and after a change in one run."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks import ops, provider, providers

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
    members = [providers.ours(member, _COPY, NAME) for member in ops.MEMBERS]
    rows = providers.PROVIDERS[ops.LAYER_NORM.name, "fused_norm"]
    row = dataclasses.replace(
        rows, name=NAME, role="peer", load=provider.imported("trainable_eps_layer_norm", _COPY)
    )
    for each in (*members, row):
        described = dataclasses.replace(each, description=f"{each.description}, another checkout")
        providers.PROVIDERS[each.op, NAME] = described
