"""Building, caching and loading of native extensions, on one small enough to build often."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from accuracy import eager, make_inputs
from processes import assert_same_after_a_fork, run_python

import fused_norm as fn
from fused_norm.__main__ import main
from fused_norm.chain.kernels import hopper_extension
from fused_norm.native import build, cache
from fused_norm.norms import LAYER_NORM, NORMALIZATIONS, NORMS

TINY = """
from std.os import abort
from std.python import PythonObject
from std.python.bindings import PythonModuleBuilder


def answer() raises -> PythonObject:
    return PythonObject(42)


@export
def PyInit_tiny() abi("C") -> PythonObject:
    try:
        var builder = PythonModuleBuilder("tiny")
        builder.def_function[answer]("answer", docstring="The answer.")
        return builder.finalize()
    except error:
        abort(t"{error}")
"""
THING = """
@fieldwise_init
struct Thing(Movable, Writable):
    var value: Int

    @staticmethod
    def py_init(
        out self: Thing, args: PythonObject, kwargs: PythonObject
    ) raises:
        self = Self(Int(py=args[0]))

    def write_to(self, mut writer: Some[Writer]):
        writer.write("Thing")

    def write_repr_to(self, mut writer: Some[Writer]):
        writer.write("Thing")

"""
LOAD = """
import sys
from pathlib import Path
from fused_norm.native import build
build.PACKAGE = Path(sys.argv[1])
print(build.load(build.Extension("tiny", "float32")).answer())
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one small extension, and an empty cache."""
    (tmp_path / "package/native").mkdir(parents=True)
    (tmp_path / "package/op").mkdir()
    (tmp_path / "package/native/tiny.mojo").write_text(TINY)
    monkeypatch.setattr(build, "PACKAGE", tmp_path / "package")
    monkeypatch.setenv("FUSED_NORM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "load", build.load.__wrapped__)
    build._key.cache_clear()
    yield tmp_path / "package"
    build._key.cache_clear()


def tiny() -> build.Extension:
    return build.Extension("tiny", "float32")


def load_elsewhere(package: Path, *flags: str, **kwargs: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *flags, "-c", LOAD, str(package)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def test_builds_once_and_says_so(package: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert not build.is_built(tiny())
    assert build.load(tiny()).answer() == 42
    assert "building tiny (float32, cpu), kept in" in capfd.readouterr().err
    assert build.load(tiny()).answer() == 42
    assert capfd.readouterr().err == ""
    assert [p.suffix for p in sorted(cache.cache_dir().iterdir())] == [".lock", ".sha256", ".so"]


@pytest.mark.parametrize(
    "damage",
    [
        "truncated",
        *(pytest.param(d, marks=pytest.mark.slow) for d in ("changed", "without checksum")),
    ],
)
def test_damaged_file_is_built_again(package: Path, damage: str) -> None:
    path = build.build(tiny())
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "changed":
        path.write_bytes(content[:-100] + bytes(100))
    else:
        path.with_suffix(".sha256").unlink()
    assert not build.is_built(tiny())
    process = load_elsewhere(package)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out.strip()) == (0, "42"), err
    assert build.is_built(tiny())


def test_changed_source_is_another_build(package: Path) -> None:
    before = tiny().path
    (package / "op/kernel.mojo").write_text("# a kernel")
    build._key.cache_clear()
    assert tiny().path != before


def test_compiler_errors_are_shown(package: Path) -> None:
    (package / "native/tiny.mojo").write_text(TINY + "\nnonsense here\n")
    with pytest.raises(cache.BuildError, match=r"(?s)compiler failed on tiny.*nonsense"):
        build.build(tiny())
    assert not list(cache.cache_dir().glob(".build-*"))


def test_missing_compiler(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODULAR_MOJO_MAX_DRIVER_PATH", "/nonexistent/mojo")
    with pytest.raises(cache.BuildError, match=r"needs the Mojo compiler.*fused-norm\[compiler\]"):
        build.build(tiny())


def test_unwritable_cache(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Permissions do not hold root back, a file in the folder's place does.
    monkeypatch.setenv("FUSED_NORM_CACHE_DIR", str(package / "native/tiny.mojo/cache"))
    with pytest.raises(cache.BuildError, match="Set FUSED_NORM_CACHE_DIR to a folder"):
        build.build(tiny())


def test_relative_folder(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(package)
    monkeypatch.setenv("FUSED_NORM_CACHE_DIR", "some/cache")
    assert build.load(tiny()).answer() == 42
    assert tiny().path.is_relative_to(package)


def test_full_disk(package: Path) -> None:
    # A limit on the size of files stands in for the end of a disk.
    script = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))" + LOAD
    result = run_python("-c", script, str(package), timeout=600, PYTHONDONTWRITEBYTECODE="1")
    assert result.returncode == 1
    assert "fused_norm.native.cache.BuildError" in result.stderr
    assert not build.is_built(tiny())


def test_two_processes_build_once(package: Path) -> None:
    processes = [load_elsewhere(package) for _ in range(2)]
    results = [process.communicate(timeout=600) for process in processes]
    assert [out.strip() for out, _ in results] == ["42", "42"], results
    assert sum(err.count("fused_norm: building") for _, err in results) == 1


def test_interrupted_build_leaves_nothing_behind(package: Path) -> None:
    process = load_elsewhere(package, start_new_session=True)
    while not list(cache.cache_dir().glob(".build-*")):
        time.sleep(0.02)
        assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in err
    assert not list(cache.cache_dir().glob(".build-*"))
    assert build.load(tiny()).answer() == 42


@pytest.mark.slow
def test_loads_where_warnings_are_errors(package: Path) -> None:
    """Regression: a type made in Mojo has no __module__; the warning of it ended the process."""
    typed = TINY.replace("def answer", THING + "def answer").replace(
        "        return builder.finalize()",
        '        _ = builder.add_type[Thing]("Thing").def_py_init[Thing.py_init]()\n'
        "        return builder.finalize()",
    )
    (package / "native/tiny.mojo").write_text(typed)
    out, err = load_elsewhere(package, "-W", "error::DeprecationWarning").communicate(timeout=600)
    assert out.strip() == "42", err


def test_command_line_builds_ahead(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "CPU_EXTENSIONS", ("tiny",))
    assert main(["build", "--target", "cpu", "--dtype", "float32"]) == 0
    assert str(tiny().path) in capsys.readouterr().out
    assert build.is_built(tiny())
    (package / "native/tiny.mojo").write_text("nonsense")
    build._key.cache_clear()
    assert main(["build", "--target", "cpu", "--dtype", "float32"]) == 1


def test_doctor_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    out = capsys.readouterr().out
    for line in ("torch", torch.__version__.split("+")[0], "mojo compiler", "cache", "built"):
        assert line in out


def test_loading_is_quick() -> None:
    """A process whose kernels are built already pays less than 0.1 s for them."""
    fn.fused_layernorm_linear(*make_inputs(4, 8, 16))
    script = """
    import time, torch
    from fused_norm.native import build
    start = time.process_time()
    build.load(build.Extension("norm_linear_cpu", "float32"))
    print(time.process_time() - start)
    """
    out = subprocess.check_output([sys.executable, "-c", textwrap.dedent(script)], text=True)
    assert float(out) < 0.1


def test_importing_does_nothing() -> None:
    """Importing builds, loads and prints nothing, and leaves the MAX engine alone."""
    script = """
    import sys, warnings
    filters = list(warnings.filters)
    import torch
    filters = list(warnings.filters)
    import fused_norm
    assert warnings.filters == filters
    assert not any(name.split(".")[0] in ("max", "mojo", "rich") for name in sys.modules)
    """
    result = run_python("-c", textwrap.dedent(script))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_works_after_fork() -> None:
    """Regression: a child that waits for the parent's OpenMP workers waits forever."""
    setup = """
    x, w = torch.randn(200, 256, requires_grad=True), torch.randn(128, 256, requires_grad=True)
    grad_output = torch.randn(200, 128)

    def step():
        y = fn.fused_layernorm_linear(x, None, None, w)
        return [y, *torch.autograd.grad(y, (x, w), grad_output)]
    """
    assert_same_after_a_fork(setup, "step()")


def test_norms_share_what_does_not_fold() -> None:
    """Each file of products for Hopper is a megabyte of a wheel and a minute of the compiler."""
    found = build.extensions("sm_90a", list(build.DTYPES.values()))
    hopper = [extension for extension in found if extension.name == build.HOPPER_EXTENSION]
    assert sorted((extension.dtype, extension.norm) for extension in hopper) == [
        *(("bfloat16", norm) for norm in NORMALIZATIONS),
        ("float16", LAYER_NORM),
        ("float32", LAYER_NORM),
    ]
    used = {
        hopper_extension(dtype, norm.number)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for norm in NORMS.values()
    }
    assert used == set(hopper)


def test_threads_share_the_op() -> None:
    from concurrent.futures import ThreadPoolExecutor

    inputs = make_inputs(200, 96, 40)
    expected = fn.fused_layernorm_linear(*inputs)
    torch.testing.assert_close(expected, eager(*inputs))
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda _: fn.fused_layernorm_linear(*inputs), range(200)))
    assert all(torch.equal(y, expected) for y in results)


def test_environment_is_left_alone(package: Path) -> None:
    """Regression: Mojo's runtime points PYTHONPATH and PYTHONEXECUTABLE at another Python."""
    before = subprocess.check_output(["env"])
    build.load(tiny())
    assert subprocess.check_output(["env"]) == before
