"""Shows on one screen what this machine has for the kernels, and how to get what it lacks."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import textwrap
from collections.abc import Callable

import torch

from fused_norm.chain import library
from fused_norm.chain.kernels import is_hopper
from fused_norm.devices import choice
from fused_norm.devices.machine import cpu_kind, hopper_kind
from fused_norm.native import build, cache, compiler, prebuilt
from fused_norm.native.cpu_features import bfloat16_product, has_tiles, without_tiles

# The versions that the kernels are written for; pyproject.toml requires these.
COMPILERS = ("1.1", "1.2")
# The first of CUDA 12.3, which the kernels need. MAX itself refuses drivers before 580.
OLDEST_NVIDIA_DRIVER = 545
OLDEST_OF_MAX = 580
TUNE = "`python -m fused_norm tune`"


class Advice:
    """What to do: to have kernels at all, and what else helps."""

    def __init__(self) -> None:
        self.must: list[str] = []
        self.may: list[str] = []


def report(as_json: bool = False) -> int:
    """Print the report and return 0 if the kernels can run here, else 1.

    Args:
        as_json: Print an object with `facts`, `usable`, `must` and `may` instead of text.
    """
    advice = Advice()
    facts = _facts(advice)
    usable = not advice.must
    if as_json:
        found = {"facts": facts, "usable": usable, "must": advice.must, "may": advice.may}
        print(json.dumps(found, indent=1))
    else:
        _print(facts, advice)
    return 0 if usable else 1


def _facts(advice: Advice) -> dict[str, str]:
    facts = {
        "fused_norm": version("fused_norm") or "not installed",
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": torch.__version__,
        "prebuilt": _prebuilt(),
        "mojo compiler": _compiler(advice),
        "max": version("max") or "none; MAX graphs and Puzzle 22 need fused-norm[max]",
        "cpu threads": _threads(),
        "cpu kernels": _cpu_dtypes(),
        "choices": _choices(advice),
        "gpu": _gpus(advice),
        "batch_invariant": _batch_invariant(),
        "cache": _folder(advice),
    }
    parts: dict[str, Callable[[Advice], str]] = {"built": _built, "C++": _chain}
    try:
        for name, found in (parts | {"autograd": _autograd}).items():
            facts[name] = found(advice)
    except cache.BuildError:
        # The folder is refused, as the advice says.
        facts["built"] = "unknown"
    return facts


def _print(facts: dict[str, str], advice: Advice) -> None:
    # Imported late: it takes as long as this whole package.
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in facts.items():
        table.add_row(name, text)
    console = Console(markup=False)
    console.print(table)
    said = "The kernels cannot be used yet" if advice.must else "The kernels can be used"
    todo = [*advice.must, *(f"(optional) {line}" for line in advice.may)]
    print(f"\n{said}. {'What to do:' if todo else 'There is nothing to do.'}")
    for line in todo:
        # Commands are not broken, so that they can be copied.
        whole = re.sub("`[^`]*`", lambda found: found[0].replace(" ", "\N{NO-BREAK SPACE}"), line)
        wrapped = textwrap.fill(
            whole,
            console.width,
            initial_indent="- ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        print(wrapped.replace("\N{NO-BREAK SPACE}", " "))


def version(package: str) -> str | None:
    """Return the version of an installed distribution, None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _prebuilt() -> str:
    if prebuilt.folder() is None:
        return f"set aside by {prebuilt.SWITCH}" if prebuilt.FOLDER.is_dir() else "none"
    levels: dict[str, list[str]] = {}
    for dtype in build.DTYPES.values():
        found = build.Extension(build.CPU_EXTENSIONS[0], dtype).prebuilt
        if found:
            levels.setdefault(found.stem.rsplit("-", maxsplit=1)[1], []).append(dtype)
    names = [f"{level} ({', '.join(dtypes)})" for level, dtypes in levels.items()]
    return f"for this CPU {', '.join(names)}" if names else "none for this CPU"


def _compiler(advice: Advice) -> str:
    found = compiler.version()
    if found is None:
        return f"none; `{compiler.INSTALL}` installs it"
    if found.rpartition(".")[0] not in COMPILERS:
        known = " and ".join(COMPILERS)
        advice.may.append(f"Mojo {found} is installed, the kernels are written for {known}")
    return found


def _threads() -> str:
    kind = "PyTorch's OpenMP team" if build.gomp_parallel() else "Mojo's own threads"
    return f"{torch.get_num_threads()} of {os.cpu_count()}, {kind}"


def _cpu_dtypes() -> str:
    """Return the strategy of calls in each dtype, and why."""
    chosen = "our product"
    if choice.path(cpu_kind()):
        chosen += ", or PyTorch's where that is faster"
    lines = [f"{name}: {chosen}" for name in ("float32", "float16")]
    if has_tiles():
        lines.append(f"bfloat16: {chosen}; both use amx_bf16")
    elif instructions := bfloat16_product():
        lines.append(
            f"bfloat16: PyTorch's own ops, whose products use {instructions}; "
            f"ours have no tiles: {without_tiles()}"
        )
    else:
        lines.append(f"bfloat16: {chosen}; ours in float32, whose rate is at least bfloat16's here")
    return "\n".join([*lines, "float64: our product"])


def _choices(advice: Advice) -> str:
    """Return the measurements by which strategies are chosen, and their age."""
    kinds = [cpu_kind()]
    if torch.cuda.is_available():
        gpus = filter(is_hopper, range(torch.cuda.device_count()))
        kinds += dict.fromkeys(hopper_kind(gpu) for gpu in gpus)
    return "\n".join(_chosen_by(kind, advice) for kind in kinds)


def _chosen_by(kind: str | None, advice: Advice) -> str:
    path, device = choice.path(kind), choice.device(kind)
    if path is None or device is None:
        advice.may.append(f"nothing like this CPU was measured: {TUNE} measures it")
        return "our product always: nothing like this CPU was measured"
    if path == choice.tuned_path(kind):
        return f"{kind}: this machine's own, {path}, measured {device.about['measured']}"
    estimate = device.about.get("estimated")
    if estimate and "measured" not in device.about:
        advice.may.append(f"the strategies for {device.name} are estimates: {TUNE} measures them")
        return f"{device.name}, estimated {estimate}"
    on = device.about.get("cpu") or device.about["gpu"]
    measured = f"{device.name}, measured {device.about['measured']} on {on}"
    return f"{measured}; estimated {estimate}" if estimate else measured


def _gpus(advice: Advice) -> str:
    driver = nvidia_smi("driver_version")
    if not torch.cuda.is_available():
        if driver:
            advice.must.append(
                f"there is an NVIDIA driver ({driver}) that this PyTorch cannot use: "
                f"it is built for CUDA {torch.version.cuda}. Install one for your driver"
            )
        return "none that PyTorch sees"
    if driver and int(driver.split(".")[0]) < OLDEST_NVIDIA_DRIVER:
        advice.must.append(
            f"update the NVIDIA driver: {driver} is older than {OLDEST_NVIDIA_DRIVER}"
        )
    elif driver and int(driver.split(".")[0]) < OLDEST_OF_MAX and version("max"):
        advice.may.append(
            f"MAX graphs on a GPU need a driver of at least {OLDEST_OF_MAX}: {driver}"
        )
    names = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(device)
        memory = properties.total_memory / 2**30
        names.append(f"{properties.name}, {memory:.0f} GiB, {build.accelerator_of(device)}")
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return "\n".join([*names, f"{runtime}, driver {driver or 'unknown'}"])


def _batch_invariant() -> str:
    """Return where batch-invariant calls are served."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    served = [torch.cuda.get_device_name(i) for i in range(count) if is_hopper(i)]
    return "; ".join(["cpu, in every dtype", *(f"{name}, 16 bits" for name in served)])


def nvidia_smi(query: str, *options: str) -> str | None:
    """Return what nvidia-smi says of the first GPU, None if it says nothing.

    Args:
        query: The fields to ask for, such as `driver_version`.
        options: Other arguments of its command line.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    return result.stdout.splitlines()[0].strip() if result.returncode == 0 else None


def _folder(advice: Advice) -> str:
    folder = cache.cache_dir()
    try:
        place = cache.check()
    except cache.BuildError as error:
        advice.must.append(str(error))
        return f"{folder} (not in use)"
    free = shutil.disk_usage(place).free / 2**30
    return f"{folder} ({free:.0f} GiB free)"


def _built(advice: Advice) -> str:
    lines = []
    for target in build.attached_targets():
        extensions = build.extensions(target, list(build.DTYPES.values()))
        came = [e for e in extensions if e.prebuilt]
        missing = [e for e in extensions if not build.is_built(e)]
        ready = f"{len(extensions) - len(missing)} of {len(extensions)} for {target}"
        lines.append(f"{ready}, {len(came)} of them prebuilt" if came else ready)
        if missing and compiler.version():
            advice.may.append(
                f"kernels for {target} are built on first use; "
                f"`python -m fused_norm build --target {target.split(':')[-1]}` builds them now"
            )
        elif missing:
            dtypes = ", ".join(sorted({e.dtype for e in missing}))
            where = advice.must if len(missing) == len(extensions) else advice.may
            where.append(
                f"PyTorch's own ops compute {dtypes} on {target}, for which no kernels came: "
                f"`{compiler.INSTALL}` installs what builds them"
            )
    return "\n".join(lines)


def _chain(advice: Advice) -> str:
    """Return the origin of the C++ that calls kernels, and what to do if there is none."""
    if library.prebuilt_path(library.CHAIN):
        return "prebuilt"
    if library.is_built(library.CHAIN):
        return "built"
    if cxx := library.compiler():
        return f"built on first use with {cxx}"
    advice.must.append(
        "PyTorch's own ops compute everything: the C++ that calls the kernels must be built "
        "first, and there is no compiler. Install g++ (Debian, Ubuntu: apt-get install g++), or a "
        "wheel"
    )
    return "none"


def _autograd(advice: Advice) -> str:
    node = library.NODE
    if library.is_built(node) or library.prebuilt_path(node):
        came = "" if library.is_built(node) else ", prebuilt"
        if library.load_node():
            return f"C++{came}"
        if os.environ.get(library.SWITCH):
            return f"Python, as {library.SWITCH} asks; C++ is there"
    cxx = library.compiler()
    command = "`python -m fused_norm build --autograd`"
    if library.is_node_compiled() and not library.has_failed():
        return f"C++, built on first use with {cxx}"
    if cxx and library.has_failed():
        advice.may.append(f"compiling the autograd node has failed: {command} shows how")
        return f"Python; C++ could not be built with {cxx}"
    if cxx:
        advice.may.append(
            f"{command} compiles the autograd node, in less than a minute; it makes small calls "
            "faster"
        )
        return f"Python; C++ can be built with {cxx}"
    return "Python; C++ needs a compiler, and there is none"
