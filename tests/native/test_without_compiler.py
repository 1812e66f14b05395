"""What is said where nothing came prebuilt and nothing can be built: once, who computes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from processes import run_python

from fused_norm.chain import library as chain

# Every dtype and kind of op, forward, backward and compiled, where no compiler can be imported.
NONE_AT_ALL = """
import sys, warnings
sys.modules.update(dict.fromkeys(("max", "mojo", "modular")))
import torch
import fused_norm as fn
from fused_norm.chain import library

assert library.load_node() is not None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x, w, u = (torch.randn(n, 8, dtype=dtype, requires_grad=True) for n in (4, 8, 8))
        g = torch.ones(8, dtype=dtype)
        layer = fn.LayerNormLinear(8, 6, dtype=dtype)
        for _ in range(3):
            for y in (
                fn.fused_layernorm_linear(x, g, None, w),
                fn.norm_linear(x, w, normalization="rms_norm", activation="silu"),
                torch.cat(fn.norm_linear(x, (w, u), norm_weight=g)),
                fn.norm_mlp(x, w, None, w, None, activation="gelu"),
                fn.linear_add(x, w, None, x)[0],
                fn.trainable_eps_layer_norm(x, torch.ones(1, dtype=dtype)),
                fn.composed.div(x, x),
                torch.compile(layer, backend="aot_eager")(x),
                layer(x),
            ):
                y.sum().backward()
        # Of one dtype by Inductor, which compiles for seconds.
        then = {} if dtype is torch.float32 else {"options": {"then": "aot_eager"}}
        torch.compile(layer, backend="fused_norm", **then)(x).sum().backward()
ours = [str(w.message) for w in caught if "fused_norm" in str(w.message)]
assert len(ours) == 1, ours
print(ours[0])
"""


# A compiler that is there and fails.
FAILING = """
import sys
import torch
import fused_norm as fn
from fused_norm.native import cache, compiler

def run(name, *_):
    raise cache.BuildError(f"the compiler failed on {name}: nonsense")

compiler.run = run
x = torch.randn(700, 256)
layer = fn.LayerNormLinear(256, 512).eval()
for freezes in (False, True):
    if freezes:
        fn.freeze(layer)
    for grads in (True, False):
        with torch.set_grad_enabled(grads):
            try:
                layer(x)
            except RuntimeError as error:
                assert "failed on norm_linear_cpu (float32, cpu): nonsense" in str(error), error
            else:
                sys.exit("no error")
"""


@pytest.mark.parametrize("function", ["node", "python"])
def test_a_compiler_that_fails_is_an_error_in_its_words(
    function: str, library: Path, tmp_path: Path
) -> None:
    """Regression: each call tried three times, and said that no kernels were at hand."""
    folder = cache_with(tmp_path / "cache", library)
    result = run(FAILING, folder, FUSED_NORM_AUTOGRAD=function)
    assert result.stderr.count("building norm_linear_cpu") == 4


def cache_with(folder: Path, library: Path) -> Path:
    """Return a cache that has the chain and its node."""
    folder.mkdir(mode=0o700)
    for built in (library, chain.CHAIN.path):
        for suffix in (".so", ".sha256"):
            shutil.copyfile(built.with_suffix(suffix), folder / f"{built.stem}{suffix}")
    return folder


def run(program: str, cache: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program with nothing prebuilt but what is in a cache."""
    variables |= {"FUSED_NORM_CACHE_DIR": str(cache), "FUSED_NORM_PREBUILT": "0"}
    result = run_python("-c", program, **variables)
    assert result.returncode == 0, result.stderr
    return result


def test_nothing_is_said_to_be_built_where_nothing_can_be(library: Path, tmp_path: Path) -> None:
    """Regression: each call said that it was building kernels, which no compiler was there for."""
    folder = cache_with(tmp_path / "cache", library)
    result = run(NONE_AT_ALL, folder)
    assert "fused_norm" not in result.stderr
    every = "torch.float32, torch.bfloat16, torch.float16, torch.float64"
    notice = f"fused_norm has no kernels for {every} on cpu: PyTorch's own ops compute them"
    how = "`pip install fused-norm[compiler]` installs what builds those"
    assert result.stdout.splitlines() == [f"{notice}. {how}"]
    assert {path.suffix for path in folder.iterdir()} == {".so", ".sha256"}
