"""Kernels that stand in for those of products: C functions that hand a record to Python."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from strategies import told_by

from fused_norm.chain import kernels, library

EIGHT_BITS = ("quantize", "maxima", "quantize_by_maxima", "normalize", "linear", "linears")
FUNCTIONS = (
    *("linear", "input_gradient", "weight_gradient"),
    *("products", "input_gradients", "passed_rows"),
)
SOURCE = """
#include <stdint.h>
static int64_t (*hook)(const char*, void*);
void set_hook(int64_t (*given)(const char*, void*)) { hook = given; }
"""
FUNCTION = 'int64_t {1}_{0}(void* call) {{ return hook("{0}", call); }}\n'
_Hook = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p)


@contextmanager
def standing_in(
    folder: Path, run: Callable[[str, int], None], functions: Sequence[str] = FUNCTIONS
) -> Iterator[None]:
    """Have products be asked of a function, by their name and the address of the record.

    Args:
        folder: Where C is compiled.
        run: The function; what it raises is raised at the end.
        functions: Those that there are; for each, the function is asked for `plan_...`, too.
            Those of `EIGHT_BITS` have no plans, and are on a CPU what else Hopper alone has.
    """
    if (compiler := library.compiler()) is None:
        pytest.skip("there is no C++ compiler")
    is_eight_bits = functions is EIGHT_BITS
    prefix = "fp8" if is_eight_bits else "norm_linear"
    plans = () if is_eight_bits else tuple(f"plan_{function}" for function in functions)
    source, built = folder / "stand_in.c", folder / "stand_in.so"
    source.write_text(
        SOURCE + "".join(FUNCTION.format(name, prefix) for name in (*functions, *plans))
    )
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
        if is_eight_bits:
            if question.is_eight_bits:
                answer.product = file
            return
        # Nobody's on a CPU is as good as ours; a GPU has products of its own, or none.
        if not question.invariant and (question.is_cpu or answer.product):
            answer.product = file

    with told_by("find", found):
        yield
    if raised:
        raise raised[0]
