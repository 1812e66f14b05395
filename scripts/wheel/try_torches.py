"""Try the checkout with the oldest and the newest PyTorch, and with a release candidate or nightly.

    python scripts/wheel/try_torches.py [--torch 2.11 ...] [--index URL ...]

Each trial is an environment of its own, gone afterwards, with the checkout and the compiler. In it
calls run with Python's autograd function, and with the node compiled for that version where that
succeeds, and are compared with PyTorch in float64. Without `--torch`, the versions are the oldest
that pyproject.toml allows and the newest. `--index` adds a trial of the newest pre-release there,
such as https://download.pytorch.org/whl/nightly/cpu. Exits with how many trials failed.

A new PyTorch fails here if the stable ABI no longer holds. A node that does not compile is reported
and fails nothing: calls then take Python's function.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEWEST = ""
# Of the largest value, far above what rounding makes.
TOLERANCE = 1e-4
TRIAL = """
import os, torch, torch.nn.functional as F
import fused_norm as fn
from fused_norm.chain import library
from fused_norm.ops import node
wants_node = os.environ.get("FUSED_NORM_AUTOGRAD") != "python"
assert library.is_at_hand() and wants_node == (node.module() is not None)
torch.manual_seed(0)
shapes = {"x": (7, 48), "w": (32, 48), "b": (32,), "g": (48,), "o": (1,)}
values = {name: torch.randn(*shape) for name, shape in shapes.items()}
CALLS = {
    "LayerNorm + Linear": (
        lambda x, w, b, g, o: fn.fused_layernorm_linear(x, g, None, w, b),
        lambda x, w, b, g, o: F.linear(F.layer_norm(x, (48,), g), w, b)),
    "RMSNorm + Linear + SwiGLU": (
        lambda x, w, b, g, o: fn.norm_linear(
            x, w, b, norm_weight=g, normalization="rms_norm", activation="swiglu"),
        lambda x, w, b, g, o: (lambda h: F.silu(h[:, :16]) * h[:, 16:])(
            F.linear(F.rms_norm(x, (48,), g, 1e-5), w, b))),
    "trainable eps": (
        lambda x, w, b, g, o: fn.trainable_eps_layer_norm(x, o),
        lambda x, w, b, g, o: F.layer_norm(x, (48,)) * ((x.var(-1, keepdim=True, correction=0)
            + 1e-5) / (x.var(-1, keepdim=True, correction=0) + o * o)).sqrt()),
}
for name, (ours, exact) in CALLS.items():
    for function in (ours, torch.compile(ours, backend="aot_eager")):
        found = []
        for f, dtype in ((function, torch.float32), (exact, torch.float64)):
            leaves = [v.to(dtype).requires_grad_() for v in values.values()]
            y = f(*leaves)
            grads = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
            found.append([y.detach(), *(g for g in grads if g is not None)])
        for one, other in zip(*found, strict=True):
            error = (one - other).abs().max() / other.abs().max()
            assert error < TOLERANCE, (name, float(error))
print("PyTorch", torch.__version__, "node" if wants_node else "Python's function", "holds")
"""


def main() -> int:
    """Run the trials and return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--torch", action="append", help="such as 2.11")
    parser.add_argument("--index", action="append", default=[], help="of pre-releases")
    options = parser.parse_args()
    wanted = [([f"torch=={v}.*"] if v else ["torch"]) for v in options.torch or [oldest(), NEWEST]]
    wanted += [["torch", "--pre", "--extra-index-url", url] for url in options.index]
    failed = 0
    for arguments in wanted:
        try:
            trial(arguments)
        except subprocess.CalledProcessError as error:
            failed += 1
            print(f"{' '.join(arguments)}: FAILED\n{error.output}")
    return failed


def oldest() -> str:
    """Return the oldest version of PyTorch that pyproject.toml allows."""
    found = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    return found[1]


def trial(arguments: list[str]) -> None:
    """Install PyTorch and the checkout into an environment of its own, and run the calls there.

    Args:
        arguments: What uv is told to install as PyTorch.

    Raises:
        CalledProcessError: If it does not install, or a result differs.
    """
    uv = os.environ.get("UV") or shutil.which("uv") or "uv"
    with tempfile.TemporaryDirectory() as name:
        run(uv, "venv", "--quiet", "--python", sys.executable, f"{name}/venv")
        python = f"{name}/venv/bin/python"
        package = ["-e", f"{ROOT}[compiler]"]
        run(uv, "pip", "install", "--quiet", "--python", python, *package, *arguments)
        cache = {"FUSED_NORM_CACHE_DIR": f"{name}/cache"}
        print(calls(python, {**cache, "FUSED_NORM_AUTOGRAD": "python"}), end="")
        try:
            run(python, "-m", "fused_norm", "build", "--autograd", **cache)
        except subprocess.CalledProcessError as error:
            print(f"the node does not compile:\n{error.output[-2000:]}")
        else:
            print(calls(python, cache), end="")


def calls(python: str, variables: dict[str, str]) -> str:
    """Run the calls by an interpreter and return what they print."""
    return run(
        python, "-W", "ignore", "-c", TRIAL.replace("TOLERANCE", str(TOLERANCE)), **variables
    )


def run(*command: str, **variables: str) -> str:
    """Run a command outside of this environment and return its output."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command,
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        cwd=tempfile.gettempdir(),
    )
    return done.stdout.splitlines()[-1] + "\n" if done.stdout else ""


if __name__ == "__main__":
    sys.exit(main())
