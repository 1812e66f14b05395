"""Brings Mojo's runtime into a wheel, and has the wheel's kernels load that and no other.

The four libraries get names of their own, so that a process which has loaded another Mojo's, of an
installed `max`, keeps the two separate.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
from pathlib import Path

import wheel_cross

# What a built extension loads, itself or through another of these: 3.4 MB.
LIBRARIES = (
    "libMSupportGlobals.so",
    "libAsyncRTRuntimeGlobals.so",
    "libKGENCompilerRTShared.so",
    "libAsyncRTMojoBindings.so",
)
# The texts that its license asks to be passed on, in the wheel of `max`.
LICENSES = ("LICENSE", "Third-Party-Notices")


def folder(machine: str) -> Path:
    """Return where the runtime for an instruction set is: installed, or fetched.

    Args:
        machine: As `platform.machine` names it.
    """
    if machine == platform.machine():
        return _installed()
    return wheel_cross.runtime(machine, LIBRARIES)


def bundle(to: Path, machine: str) -> dict[str, str]:
    """Copy the runtime into a folder and return the new name of each library.

    Args:
        to: The folder.
        machine: The instruction set, as `platform.machine` names it.
    """
    names = {}
    for name in LIBRARIES:
        content = (folder(machine) / name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()[:8]
        names[name] = f"{Path(name).stem}-fused_norm-{digest}.so"
        (to / names[name]).write_bytes(content)
    for name in names.values():
        _patchelf("--set-soname", name, to / name)
        find(to / name, names, "$ORIGIN")
    return names


def find(library: Path, names: dict[str, str], place: str) -> None:
    """Have a library load the bundled runtime.

    Args:
        library: The file to change.
        names: The new name of each library of the runtime.
        place: Folder of those, from its own.
    """
    renamed = [part for pair in names.items() for part in ("--replace-needed", *pair)]
    _patchelf("--set-rpath", place, *renamed, library)


def licenses() -> dict[str, bytes]:
    """Return the texts to ship with the runtime, under the names that they get."""
    distribution = importlib.metadata.distribution("max")
    texts = {}
    for name in LICENSES:
        text = distribution.read_text(name)
        if text is None:
            raise FileNotFoundError(f"the wheel of max has no {name}")
        texts[f"{name}-MAX.txt"] = text.encode()
    return texts


def _installed() -> Path:
    spec = importlib.util.find_spec("modular")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "lib").is_dir():
            return Path(folder) / "lib"
    raise FileNotFoundError("there is no Mojo runtime: install max")


def patchelf() -> str:
    """Return the path of the tool that names the libraries of a wheel.

    Raises:
        FileNotFoundError: If it is not installed.
    """
    tool = shutil.which("patchelf")
    if tool is None:
        raise FileNotFoundError("there is no patchelf: install it")
    return tool


def _patchelf(*arguments: str | Path) -> None:
    subprocess.run([patchelf(), *map(str, arguments)], check=True)
