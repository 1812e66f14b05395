"""Test and measure on a GPU machine that has PyTorch but neither Mojo nor a network.

    python scripts/gpu_round.py pack .dev/gpu        here: kernels, runtime, peers into a folder
    python3 scripts/gpu_round.py run .dev/gpu OUT    there: tests, then the benchmark, into OUT

`pack` builds every kernel for the GPU's architecture. `run` needs a checkout and the folder, and no
compiler of Mojo. Both steps of `run` can be had alone (`--only tests`), and other things in their
place: the ops of the family, a JSON each (`--only family`, of which `--op` chooses some), the
steps of docs/worklog.md (`--only worklog`), a training on all GPUs (`--only train`), the head alone
(`--only head`), wrong edits (`--only mutate`), or any program of the checkout (`--only script --
PROGRAM ARGUMENT...`, OUT standing for the folder of results, COMMIT for the commit). Each ends in
time (`--limit`). The benchmark goes on with OUT/NAME.json or FOLDER/NAME.json if it exists,
that of the family with OUT/NAME-OP.json or FOLDER/NAME-OP.json.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from gpu_pack import pack

ROOT = Path(__file__).resolve().parent.parent
# The shapes that say most come first, with all peers; max-autotune compiles too long for the rest.
FIRST = ("--op", "layernorm_linear", "--shapes", "llama")
OTHER_DTYPES = ("--dtype", "float16", "--dtype", "float32")
LATER_PROVIDERS = ("eager", "linear", "compile", "fla", "liger", "formula")
MODES = ("forward", "forward_grad", "backward", "train")
OURS = ("fused_norm", "fused_norm-frozen", "fused_norm-composed")
# The ops that say most come first; max-autotune compiles too long for them.
FAMILY = (
    *("rms_norm_linear", "residual_rms_norm_linear", "norm_qkv", "norm_swiglu", "norm_mlp"),
    *("norm_gelu", "adaln_linear", "norm_qkv_equal"),
)
FAMILY_PROVIDERS = ("linear", "compile", "fla", "liger", "transformer-engine", "fused_norm")


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack or run and return an exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="prepare the folder, with network and compiler")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--target", default="sm_90a", help="GPU architecture (default: sm_90a)")
    packing.add_argument("--python", default="3.12", help="Python there (default: 3.12)")
    packing.add_argument("--only", choices=["head"], help="only the kernels of the head")
    running = commands.add_parser("run", help="use the folder, on the GPU machine")
    running.add_argument("folder", type=Path)
    running.add_argument("out", type=Path)
    running.add_argument("--name", default="h200", help="stem of the results (default: h200)")
    kinds = ("tests", "bench", "family", "train", "mutate", "worklog", "head", "script")
    running.add_argument("--only", choices=kinds)
    running.add_argument("--op", action="append", choices=FAMILY, help="of --only family")
    running.add_argument("--no-compile", action="store_true", help="in --only family")
    running.add_argument("--limit", type=float, default=570, help="seconds for all of it")
    running.add_argument("--seconds", type=float, default=0.2, help="for each provider and shape")
    running.add_argument("--steps", type=int, default=100, help="of each training (default: 100)")
    running.add_argument(
        "--workers", type=int, default=0, help="processes that test at once, by pytest-xdist"
    )
    running.add_argument("--test", action="append", help="only these, as pytest takes them")
    running.add_argument("--no-autotune", action="store_true", help="leave max-autotune out")
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    options.script = words[end + 1 :]
    if options.command == "pack":
        return pack(options.folder, options.target, options.python, options.only)
    return run(options)


def run(options: argparse.Namespace) -> int:
    """Run the tests and the benchmark and return an exit status of 0 if both passed.

    Args:
        options: Of the command line.
    """
    began = time.perf_counter()
    # A background job ignores Ctrl-C, and so would what it starts; this undoes it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options.out.mkdir(parents=True, exist_ok=True)
    # Not kept: nothing of it outlives the machine, and another run may be of other kernels.
    site = Path(tempfile.mkdtemp(prefix="gpu-round-"))
    with tarfile.open(options.folder / "runtime.tar.xz") as archive:
        archive.extractall(site, filter="data")
    for wheel in (options.folder / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as content:
            content.extractall(site)
    # A stub for the compiler: if one is installed, its version is part of a kernel's key.
    (site / "mojo").mkdir(exist_ok=True)
    (site / "mojo" / "__init__.py").touch()
    # Registers the backend with torch.compile, as if the checkout were installed.
    installed = site / "fused_norm-0.dist-info"
    installed.mkdir(exist_ok=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: fused-norm\nVersion: 0\n")
    entry = "fused_norm = fused_norm.models:backend\n"
    (installed / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{entry}")
    # A copy: loading a kernel locks its file, and the folder may be read-only.
    # With this user's modes: a folder that came with others' is refused.
    shutil.copytree(options.folder / "kernels", site / "kernels", copy_function=shutil.copyfile)
    (site / "kernels").chmod(0o700)
    environment = os.environ | {
        "FUSED_NORM_CACHE_DIR": str(site / "kernels"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)]),
        "LD_LIBRARY_PATH": os.pathsep.join(
            [str(site / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
        ),
        "PYTHONUNBUFFERED": "1",
    }
    # A node in C++ is for the PyTorch there; it may have been built before, or not be to be had.
    if options.only in ("bench", "family", "train", "script"):
        build = [sys.executable, "-m", "fused_norm", "build", "--autograd"]
        subprocess.run(build, env=environment, cwd=ROOT, check=False)
    failed = []
    if options.only == "train":
        left = options.limit - (time.perf_counter() - began)
        if _train(options.out, environment, left, options.steps):
            failed.append("training")
    if options.only == "mutate":
        # Uses the kernels that `mutate.py --build` has added to those of `pack`.
        command = [sys.executable, "scripts/mutate.py", "--prebuilt"]
        if _logged(command, environment, options.out / "mutate.log", options.limit - 30):
            failed.append("mutate")
        shutil.copy(ROOT / "docs" / "mutations.json", options.out)
    if options.only == "worklog":
        command = [sys.executable, "tutorial/worklog/worklog.py", "--out"]
        command += [str(options.out.resolve() / "worklog.json")]
        command += ["--commit", _commit(options)]
        if _logged(command, environment, options.out / "worklog.log", options.limit - 30):
            failed.append("worklog")
    if options.only == "script":
        named = {"OUT": str(options.out.resolve()), "COMMIT": _commit(options)}
        command = [sys.executable]
        for word in options.script:
            command.append(functools.reduce(lambda w, n: w.replace(n, named[n]), named, word))
        left = options.limit - (time.perf_counter() - began)
        if _logged(command, environment, options.out / "script.log", left):
            failed.append("script")
    if options.only in (None, "tests"):
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        # Tests share the GPU; what they do on the host takes most of their time.
        if options.workers:
            # Another pytest plugin warns if this one is active, and warnings are errors.
            command += ["-n", str(options.workers), "--dist", "loadfile", "-p", "no:benchmark"]
        command += options.test or []
        command += _tests_beyond_this_machine()
        if _logged(command, environment, options.out / "tests.log", options.limit - 30):
            failed.append("tests")
    if options.only in (None, "bench"):
        left = options.limit - (time.perf_counter() - began)
        if _benchmark(options, environment, left):
            failed.append("benchmark")
    if options.only == "head":
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        command += options.test or ["tests/head"]
        if _logged(command, environment, options.out / "tests.log", options.limit / 2):
            failed.append("tests")
        command = [sys.executable, "-m", "benchmarks.head", "--seconds", str(options.seconds)]
        command += ["--json", str(options.out / f"{options.name}-head.json")]
        command += ["--commit", _commit(options)]
        left = options.limit - (time.perf_counter() - began)
        if _logged(command, environment, options.out / "bench-head.log", left):
            failed.append("benchmark")
    if options.only == "family":
        left = options.limit - (time.perf_counter() - began)
        if _family(options, environment, left):
            failed.append("family")
    print(f"{', '.join(failed) or 'nothing'} failed; all is in {options.out}")
    return 1 if failed else 0


def _commit(options: argparse.Namespace) -> str:
    text: str = (options.folder / "commit").read_text()
    return text.strip()


def _train(out: Path, environment: dict[str, str], limit: float, steps: int) -> int:
    """Train on one GPU, and on all of them with DDP and FSDP2 where there are several."""
    gpus = len(subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout.splitlines())
    runs = {"train": [sys.executable]}
    if gpus > 1:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(gpus)]
        runs = {"ddp": launch, "fsdp": launch}
    status = 0
    for name, launch in runs.items():
        command = [*launch, "scripts/train.py", "--size", "large", "--steps", str(steps)]
        command += ["--folder", str(out / name)]
        if name in ("ddp", "fsdp"):
            command += ["--parallel", name]
        status = _logged(command, environment, out / f"{name}.log", limit / len(runs)) or status
        for checkpoint in (out / name).glob("*.pt"):
            checkpoint.unlink()
    return status


def _benchmark(options: argparse.Namespace, environment: dict[str, str], limit: float) -> int:
    command = _bench_command(options, options.name)
    modes = [part for mode in MODES for part in ("--mode", mode)]
    later = [part for provider in (*LATER_PROVIDERS, *OURS) for part in ("--provider", provider)]
    ops = ("--op", "layernorm_linear", "--op", "layer_norm")
    stages = [
        [*FIRST, *modes, *(later if options.no_autotune else ())],
        [*ops, *modes, *later],
        [*FIRST, *OTHER_DTYPES, "--mode", "forward", "--mode", "train", *later],
    ]
    end = time.perf_counter() + limit
    status = 0
    for index, stage in enumerate(stages):
        log = options.out / f"bench-{index + 1}.log"
        status = _stage([*command, *stage], environment, log, end) or status
    return status


def _family(options: argparse.Namespace, environment: dict[str, str], limit: float) -> int:
    """Measure the op family at the named shapes in bfloat16, a file of results each."""
    names = [name for name in FAMILY_PROVIDERS if name != "compile" or not options.no_compile]
    measured = ["--shapes", "named", "--dtype", "bfloat16", "--mode", "forward", "--mode", "train"]
    measured += [part for name in names for part in ("--provider", name)]
    end = time.perf_counter() + limit
    status = 0
    for op in options.op or FAMILY:
        command = _bench_command(options, f"{options.name}-{op}")
        log = options.out / f"bench-{op}.log"
        status = _stage([*command, "--op", op, *measured], environment, log, end) or status
    return status


def _bench_command(options: argparse.Namespace, stem: str) -> list[str]:
    """Return a benchmark's command line, which goes on with earlier results where there are any."""
    name = options.out / stem
    earlier = options.folder / f"{stem}.json"
    if earlier.is_file() and not Path(f"{name}.json").exists():
        shutil.copy(earlier, f"{name}.json")
    commit = _commit(options)
    command = [sys.executable, "-m", "benchmarks", "--device", "cuda", "--resume"]
    command += ["--json", f"{name}.json", "--csv", f"{name}.csv", "--commit", commit]
    return [*command, "--seconds", str(options.seconds), "--tf32"]


def _stage(command: Sequence[str], environment: dict[str, str], log: Path, end: float) -> int:
    """Run a benchmark that ends in time, if there is any left."""
    left = end - time.perf_counter()
    # A case that begins in time may end most of a minute later.
    if left <= 60:
        print(f"no time left for {log.stem}")
        return 0
    return _logged([*command, "--time-limit", f"{left - 45:.0f}"], environment, log, left)


def _tests_beyond_this_machine() -> list[str]:
    """Leave out the tests that need MAX where it is not installed."""
    needs = []
    if importlib.util.find_spec("max") is None:
        needs += ["tutorial.puzzle import max_ops", "\nfrom max."]
    return [
        f"--ignore={path.relative_to(ROOT)}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if any(text in path.read_text() for text in needs)
    ]


def _logged(command: Sequence[str], environment: dict[str, str], log: Path, limit: float) -> int:
    """Run a command, show and keep what it prints, and return its exit status.

    At the limit it gets a Ctrl-C, on which it writes what it has.
    """
    print("$", " ".join(command), flush=True)
    with (
        log.open("w") as file,
        subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        timer = threading.Timer(max(limit - 15, 1), process.send_signal, (signal.SIGINT,))
        timer.start()
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
        timer.cancel()
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
