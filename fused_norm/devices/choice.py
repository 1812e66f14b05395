"""Which measurements this machine's calls are chosen by: its own, or those of its kind."""

from __future__ import annotations

import functools
import os
import warnings
from array import array
from pathlib import Path

from fused_norm.devices import costs
from fused_norm.devices.machine import cpu_kind
from fused_norm.native import cache

SHIPPED = Path(__file__).parent / "data"
# Whether this machine's own measurements are used, where there are some: 0 or 1.
SWITCH = "FUSED_NORM_TUNE"


def tuned_path() -> Path:
    """Return the file that `tune` writes: this machine's own measurements."""
    return cache.cache_dir() / f"tuned-{cpu_kind() or 'cpu'}.json"


@functools.cache
def path() -> Path | None:
    """Return the file that is in use; None where nothing like this CPU was measured."""
    tuned = tuned_path()
    if os.environ.get(SWITCH, "1") != "0" and tuned.is_file() and _is_whole(tuned):
        return tuned
    shipped = SHIPPED / f"{cpu_kind()}.json"
    return shipped if shipped.is_file() else None


@functools.cache
def device() -> costs.Device | None:
    """Return what is in use; None where nothing like this CPU was measured."""
    found = path()
    return None if found is None else costs.load(found)


def _is_whole(tuned: Path) -> bool:
    """Return whether `tune` of this version has written a file; else say what is the matter."""
    try:
        costs.load(tuned)
    except (OSError, ValueError) as error:
        warnings.warn(
            f"fused_norm goes by the shipped measurements: {error}. "
            "`python -m fused_norm tune` measures anew",
            stacklevel=2,
        )
        return False
    return True


# Kept for good: a call may still read what it was given before `forget`.
_arrays: list[array[float]] = []


@functools.cache
def address(dtype: str) -> int:
    """Return the address of what the chain reads of a dtype, 0 where nothing was measured."""
    found = device()
    _arrays.append(array("d") if found is None else found.as_array(dtype))
    return _arrays[-1].buffer_info()[0] if _arrays[-1] else 0


def forget() -> None:
    """Read the files anew when the chain asks next."""
    for each in (path, device, address):
        each.cache_clear()
