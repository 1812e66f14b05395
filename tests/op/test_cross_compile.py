"""Every GPU kernel compiles without a warning, also where there is no GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from mojo_programs import mojo

from fused_norm.native import build, levels

ROOT = Path(__file__).resolve().parents[2]

# What the names of the compiled kernels begin with.
KERNELS = [
    b"op_puzzle_layernorm_layernorm",
    b"op_puzzle_transpose_transpose",
    b"op_puzzle_linear_matmul_idiom",
    b"op_puzzle_linear_add_bias",
    b"op_puzzle_fused_minimal_fused",
    b"op_puzzle_fused_backward_mini",
]
EXTENSION_KERNELS = {
    "passes_gpu": [
        b"op_rows_gpu_row_kernel",
        b"op_rows_columns_column_ker",
        b"op_rows_columns_panel_kern",
        b"op_rows_columns_total_kern",
        b"op_passes_gpu_modulation_kern",
        b"op_rotary_dense_dense_kernel",
        b"op_rotary_caches_caches_kerne",
    ],
    "rows_gpu": [b"op_rows_gpu_row_kernel", b"op_rows_op_gpu_add_up_kernel"],
}


@pytest.mark.parametrize(
    "target", ["nvidia:sm_90", pytest.param("amdgpu:gfx942", marks=pytest.mark.slow)]
)
def test_gpu_kernels_compile(target: str, tmp_path: Path) -> None:
    program = tmp_path / "puzzle_kernels"
    mojo(
        "build",
        *("--target-accelerator", target, "-I", "."),
        *("tests/mojo/puzzle_kernels.mojo", "-o", str(program)),
    )
    code = program.read_bytes()
    missing = [kernel for kernel in KERNELS if kernel not in code]
    assert not missing


@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param("passes_gpu", "nvidia:sm_80", marks=pytest.mark.slow),
        pytest.param("passes_gpu", "amdgpu:gfx942", marks=pytest.mark.slow),
        pytest.param("rows_gpu", "nvidia:sm_80", marks=pytest.mark.slow),
        ("rows_gpu", "amdgpu:gfx942"),
    ],
)
def test_gpu_extensions_compile(name: str, target: str, tmp_path: Path) -> None:
    library = tmp_path / "extension.so"
    mojo(
        *("build", f"fused_norm/native/{name}.mojo", "-I", ".", "-D", "dtype=bfloat16"),
        *("--target-accelerator", target, "--emit", "shared-lib", "-o", str(library)),
    )
    code = library.read_bytes()
    missing = [kernel for kernel in EXTENSION_KERNELS[name] if kernel not in code]
    assert not missing


# Feature sets of CPUs that this machine may not be: half the registers of AVX-512, all of them
# without instructions for bfloat16, with its products (Zen 4 and 5), tiles, and NEON with its own.
CPUS = {
    "avx2": ["--target-cpu", "x86-64-v3"],
    "avx512": ["--target-cpu", "x86-64-v4"],
    "avx512_bf16": ["--target-cpu", "x86-64-v4", "--target-features", "+avx512bf16,+sse4a"],
    "amx": [
        *("--target-cpu", "x86-64-v4"),
        *("--target-features", "+amx-tile,+amx-bf16,+avx512bf16"),
    ],
    "neon": ["--target-triple", "aarch64-unknown-linux-gnu", "--target-cpu", "neoverse-v1"],
}
# An instruction that only these kernels have.
INSTRUCTIONS = {"avx512_bf16": "vdpbf16ps", "amx": "tdpbf16ps", "neon": "fmla"}


# Where this machine has no other instructions, all tests run what is compiled for these.
OWN = {"v3": "avx2"}.get(next((level.name for level in levels.of_this_cpu()), ""))
# A function for each number, where the CPU has no instruction that rounds to bfloat16.
BY_FUNCTION = "__truncsfbf2"


@pytest.mark.parametrize(
    "target",
    [pytest.param(name, marks=() if name == "avx2" != OWN else pytest.mark.slow) for name in CPUS],
)
def test_cpu_kernels_compile(target: str, tmp_path: Path) -> None:
    """For CPUs that cannot be tried here, this is all that is known of them."""
    text = tmp_path / "kernels.s"
    mojo(
        *("build", "fused_norm/native/norm_linear_cpu.mojo", "-I", ".", "-D", "dtype=bfloat16"),
        *(*CPUS[target], "--emit", "asm", "-o", str(text)),
    )
    code = text.read_text()
    assert INSTRUCTIONS.get(target, "vfmadd") in code
    assert BY_FUNCTION not in code


def test_this_machine_s_kernels_round_by_instructions() -> None:
    path = build.build(build.Extension("norm_linear_cpu", "bfloat16"))
    assert BY_FUNCTION.encode() not in path.read_bytes()


def test_problem_parses_without_warnings(tmp_path: Path) -> None:
    """As `op` does, which tests of MAX graphs precompile."""
    mojo("precompile", "problems/p22/op", "-o", str(tmp_path / "op.mojoc"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.skipif(shutil.which("mojo") is None, reason="no Mojo compiler on this machine")
def test_gpu_kernels_agree_with_the_cpu() -> None:
    """Prints SKIPPED, and passes, where the compiler knows no such GPU."""
    result = subprocess.run(
        ["mojo", "run", "-I", ".", "tests/mojo/puzzle_kernels.mojo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    if "SKIPPED" in result.stdout:
        pytest.skip("no GPU")
    assert "all correct" in result.stdout
