"""Compiles C++ for the PyTorch versions that a wheel serves: the chain once, a node for each.

PyTorch's headers are the same for all machines. For another one than this, its compiler (Debian's
g++-aarch64-linux-gnu) links with empty libraries of the names of PyTorch's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

from fused_norm.chain import library
from fused_norm.chain.library import CHAIN, NODE, Binary
from fused_norm.native.cache import BuildError, build, cache_dir, make_folder

VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")
_LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch_python.so")
# What the node may ask of Python: functions and objects of the stable ABI of 3.10.
STABLE = frozenset(
    """
    PyArg_ParseTuple PyBool_FromLong PyBool_Type PyBytes_AsString PyBytes_FromStringAndSize
    PyBytes_Size PyErr_Clear PyErr_Fetch
    PyErr_Format PyErr_NormalizeException PyErr_Occurred PyErr_Restore PyErr_SetObject
    PyErr_SetString PyErr_WarnEx PyErr_WriteUnraisable PyEval_RestoreThread PyEval_SaveThread
    PyExc_RuntimeError PyFloat_AsDouble PyFloat_FromDouble PyFloat_Type PyGILState_Check
    PyGILState_Ensure PyGILState_Release PyList_Append PyList_GetItem PyList_New PyList_SetItem
    PyList_Size
    PyLong_AsLong PyLong_AsLongLong PyLong_AsSize_t PyLong_AsVoidPtr PyLong_FromLong
    PyLong_FromLongLong
    PyLong_FromSize_t PyLong_Type PyModule_AddStringConstant PyModule_Create2 PyObject_CallFunction
    PyObject_CallFunctionObjArgs PyObject_CallNoArgs PyObject_CallObject PyObject_GetAttrString
    PyObject_IsTrue PyObject_Str PySequence_GetItem PyTuple_GetItem PyTuple_New PyTuple_SetItem
    PyTuple_Size PyType_GetFlags PyUnicode_AsEncodedString PyUnicode_AsUTF8AndSize
    PyUnicode_FromString PyUnicode_FromStringAndSize Py_DecRef Py_IncRef _Py_Dealloc
    _Py_FalseStruct _Py_NoneStruct _Py_TrueStruct
    """.split()  # noqa: SIM905 - one name to a line would be forty lines
)


def compiler(machine: str) -> str:
    """Return the C++ compiler for an instruction set.

    Args:
        machine: As `platform.machine` names it.

    Raises:
        BuildError: If there is none.
    """
    if machine == platform.machine():
        if found := library.compiler():
            return found
        raise BuildError("C++ needs a compiler: install g++, or name one in CXX")
    if found := shutil.which(_tool(machine, "g++")):
        return found
    raise BuildError(
        f"C++ for {machine} needs {_tool(machine, 'g++')} (Debian, Ubuntu: "
        f"apt-get install g++-{machine}-linux-gnu); --no-nodes leaves C++ out"
    )


def _tool(machine: str, name: str) -> str:
    return name if machine == platform.machine() else f"{machine}-linux-gnu-{name}"


def compile_kept(version: str, binary: Binary = NODE, machine: str = platform.machine()) -> Path:
    """Return the node for a version of PyTorch, compiled unless that has been done.

    Args:
        version: Such as `2.15`.
        binary: The node, or another library that is compiled with that version's headers.
        machine: The instruction set, as `platform.machine` names it.

    Raises:
        BuildError: If there is no compiler, it fails, or the library asks for more than is stable.
    """
    # Wherever the checkout is.
    told = [part for part in library.command(binary, [], []) if not part.endswith(binary.source)]
    digest = hashlib.sha256(repr(told).encode())
    for source in binary.sources():
        digest.update(source.read_bytes())
    stem = Path(binary.source).stem
    stem = stem if machine == platform.machine() else f"{stem}-{machine}"
    path = cache_dir() / "wheel" / f"{stem}-torch-{version}-{digest.hexdigest()[:16]}.so"
    name = f"{binary.name} for PyTorch {version}"
    build(path, name, lambda out: _compile(binary, version, machine, out), force=False)
    return path


def compile_chain(machine: str = platform.machine()) -> Path:
    """Return the chain, compiled with the headers of the oldest PyTorch that it serves.

    Args:
        machine: The instruction set, as `platform.machine` names it.
    """
    return compile_kept(VERSIONS[0], CHAIN, machine)


def _undefined(library: Path, machine: str) -> str:
    return _run(_tool(machine, "nm"), "-D", "--undefined-only", str(library))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def stable_symbols(library: Path, machine: str = platform.machine()) -> set[str]:
    """Return what a library asks of PyTorch that is no C function of its stable ABI: nothing.

    Args:
        library: The file.
        machine: The instruction set that it is for.
    """
    said = _undefined(library, machine)
    asked = set(
        re.findall(r" U (\S*(?:aoti_torch|torch_|c10|at::|_ZN[0-9]*(?:2at|3c10|5torch))\S*)", said)
    )
    return {name for name in asked if not re.match(r"(aoti_torch|torch)_\w+$", name)}


def python_symbols(library: Path, machine: str = platform.machine()) -> set[str]:
    """Return what a library asks of Python.

    Args:
        library: The file.
        machine: The instruction set that it is for.
    """
    return set(re.findall(r" U (_?Py\w+)", _undefined(library, machine)))


def _compile(binary: Binary, version: str, machine: str, output: Path) -> None:
    found = compiler(machine)
    folder = _pytorch(version)
    includes = [str(folder / "include"), str(folder / "include/torch/csrc/api/include")]
    includes.append(sysconfig.get_paths()["include"])
    linked = folder / "lib" if machine == platform.machine() else _stand_ins(found, output.parent)
    command = [found, *library.command(binary, includes, [str(linked)]), "-o", str(output)]
    # An empty library gives nothing that is asked for, and has to be loaded anyway.
    command.insert(1, "-Wl,--no-as-needed")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(f"{found} failed on PyTorch {version}:\n{result.stderr[-4000:]}")
    said = _run(_tool(machine, "readelf"), "-d", str(output))
    if missing := [name for name in binary.libraries if f"[lib{name}.so]" not in said]:
        raise BuildError(f"{binary.name} would not load {', '.join(missing)} of PyTorch")
    if other := python_symbols(output, machine) - STABLE:
        raise BuildError(f"no part of Python's stable ABI: {', '.join(sorted(other))}")
    if binary is CHAIN and (other := stable_symbols(output, machine)):
        raise BuildError(f"no part of PyTorch's stable ABI: {', '.join(sorted(other))}")


def _stand_ins(compiler: str, folder: Path) -> Path:
    """Write libraries of PyTorch's names, of which a linker takes no more, and return where."""
    for name in _LIBRARIES:
        command = [compiler, "-shared", "-nostdlib", f"-Wl,-soname,{name}", "-x", "c", "/dev/null"]
        subprocess.run([*command, "-o", str(folder / name)], check=True)
    return folder


def _pytorch(version: str) -> Path:
    """Return a folder with PyTorch's headers and libraries: the installed one's, or fetched."""
    if torch.__version__.startswith(f"{version}."):
        return Path(torch.__file__).parent
    kept = cache_dir() / "wheel" / f"torch-{version}"
    if kept.is_dir():
        return kept
    make_folder(kept.parent)
    with tempfile.TemporaryDirectory(dir=kept.parent) as name:
        command = [*_installer(), "--quiet", "--no-deps", "--target", name]
        subprocess.run([*command, f"torch=={version}.*"], check=True)
        package = Path(name) / "torch"
        kept_parts = Path(name) / "kept"
        (kept_parts / "lib").mkdir(parents=True)
        (package / "include").rename(kept_parts / "include")
        for library in _LIBRARIES:
            (package / "lib" / library).rename(kept_parts / "lib" / library)
        kept_parts.rename(kept)
    return kept


def _installer() -> list[str]:
    if uv := os.environ.get("UV") or shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install"]
    raise BuildError("neither uv nor pip is there to fetch PyTorch's headers with")
