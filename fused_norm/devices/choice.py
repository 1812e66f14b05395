"""The measurements that decide for a device's calls: its own, or those of its kind."""

from __future__ import annotations

import functools
import os
import warnings
from array import array
from pathlib import Path

from fused_norm.devices import costs, hopper
from fused_norm.devices.machine import HOPPER
from fused_norm.native import cache

SHIPPED = Path(__file__).parent / "data"
# Whether this machine's own measurements are used, if there are any: 0 or 1.
SWITCH = "FUSED_NORM_TUNE"

Device = costs.Device | hopper.Hopper


def tuned_path(kind: str | None) -> Path:
    """Return the file that `tune` writes: this machine's own measurements of a kind of device."""
    return cache.cache_dir() / f"tuned-{kind or 'cpu'}.json"


@functools.cache
def path(kind: str | None) -> Path | None:
    """Return the file that is in use; None if nothing like the device was measured."""
    tuned = tuned_path(kind)
    if os.environ.get(SWITCH, "1") != "0" and tuned.is_file() and _is_whole(tuned):
        return tuned
    shipped = SHIPPED / f"{kind}.json"
    return shipped if shipped.is_file() else None


@functools.cache
def device(kind: str | None) -> Device | None:
    """Return the measurements in use; None if nothing like the device was measured."""
    found = path(kind)
    return None if found is None else load(found)


def load(found: Path) -> Device:
    """Read a file of either kind, by its name.

    Raises:
        ValueError: If the file has other contents.
    """
    return hopper.load(found) if HOPPER in found.name else costs.load(found)


def _is_whole(tuned: Path) -> bool:
    """Return whether `tune` of this version has written a file; otherwise say what is wrong."""
    try:
        load(tuned)
    except (OSError, ValueError) as error:
        warnings.warn(
            f"fused_norm uses the shipped measurements: {error}. "
            "`python -m fused_norm tune` measures again",
            stacklevel=2,
        )
        return False
    return True


# Never freed: a call may still read what it was given before `forget`.
_arrays: list[array[float]] = []


@functools.cache
def address(kind: str | None, dtype: str) -> int:
    """Return the address of a dtype's costs for a device's kernels, 0 without measurements."""
    found = device(kind)
    _arrays.append(array("d") if found is None else found.as_array(dtype))
    return _arrays[-1].buffer_info()[0] if _arrays[-1] else 0


def forget() -> None:
    """Read the files again when the next call asks."""
    for each in (path, device, address):
        each.cache_clear()
