"""Kernels that stand in for Hopper's on a CPU: C functions that hand a record to Python."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fused_norm.chain import kernels, library

DOORS = (
    *("linear", "input_gradient", "weight_gradient"),
    *("products", "input_gradients", "passed_rows"),
)
SOURCE = """
#include <stdint.h>
static int64_t (*hook)(const char*, void*);
void set_hook(int64_t (*given)(const char*, void*)) { hook = given; }
"""
DOOR = 'int64_t norm_linear_{0}(void* call) {{ return hook("{0}", call); }}\n'
_Hook = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p)


@contextmanager
def standing_in(folder: Path, run: Callable[[str, int], None]) -> Iterator[None]:
    """Have products be asked of a function, by their name and the address of the record.

    Args:
        folder: Where C is compiled.
        run: The function; what it raises is raised at the end.
    """
    if (compiler := library.compiler()) is None:
        pytest.skip("there is no C++ compiler")
    names = [name for door in DOORS for name in (door, f"plan_{door}")]
    source, built = folder / "stand_in.c", folder / "stand_in.so"
    source.write_text(SOURCE + "".join(map(DOOR.format, names)))
    command = [compiler, "-x", "c", "-shared", "-fPIC", str(source), "-o", str(built)]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(built))
    raised: list[BaseException] = []

    @_Hook
    def hook(name: bytes, place: int) -> int:
        try:
            run(name.decode(), place)
        except BaseException as error:
            raised.append(error)
            return 1
        return 0

    loaded.set_hook(hook)
    find, file = kernels.find, str(built).encode()

    def found(question: Any, answer: Any) -> None:
        find(question, answer)
        if not question.invariant:
            answer.product = file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "find", found)
        _tell()
        yield
    _tell()
    if raised:
        raise raised[0]


def _tell() -> None:
    if (chain := library.load()) is not None:
        kernels.tell(chain)
