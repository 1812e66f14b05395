"""Use a wheel as a machine without Mojo does: forward, backward, module, compiler, on each device.

    python scripts/wheel/try_wheel.py [WHEEL]

Tries the installed package, or a wheel that it unpacks and that need not be installed. Where `max`
and `mojo` are installed, they are out of reach. Prints what each device has, how long the import
and the first calls took, and fails where a result differs from PyTorch's or nothing came prebuilt.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import time
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

OUT_OF_REACH = ("max", "mojo", "modular")
# Of the largest value: far above what rounding makes, far below what a wrong kernel does.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# Rows, features in and out, of the first call that is tried and of another.
SMALL = (120, 64, 96)
LARGE = {"cpu": (300, 256, 512), "cuda": (4096, 1024, 3072)}


def main() -> int:
    """Try the wheel and return an exit status."""
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(OUT_OF_REACH))
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[1:]:
            with zipfile.ZipFile(sys.argv[1]) as archive:
                archive.extractall(folder)
            sys.path.insert(0, folder)
        # PyTorch's own first backward imports much.
        F.layer_norm(torch.ones(4, 8, requires_grad=True), (8,)).sum().backward()
        used, start = time.process_time(), time.perf_counter()
        import fused_norm

        # Whichever tells less of what else this machine does.
        took = min(time.process_time() - used, time.perf_counter() - start)
        said: dict[str, Any] = {"file": fused_norm.__file__, "import_s": took}
        said |= {"python": platform.python_version(), "torch": torch.__version__}
        devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        for device in devices:
            said[device] = {name: try_dtype(device, name) for name in came(device)}
            for name in said[device]:
                # Where kernels are chosen that a small call does not reach.
                try_dtype(device, name, *LARGE[device])
        from fused_norm.chain import library

        said["node"] = getattr(library.load_node(), "__file__", None)
        said["runtime"] = sorted({p for p in libraries() if "AsyncRT" in p})
        print(json.dumps(said))
        return 0 if all(said[device] for device in devices) else 1


def came(device: str) -> list[str]:
    """Return the names of the dtypes that have prebuilt kernels on a device.

    Args:
        device: `cpu` or `cuda`.
    """
    from fused_norm.native import build

    target = "cpu" if device == "cpu" else build.accelerator_of(torch.device(device, 0))
    return [
        name
        for name in build.DTYPES.values()
        if (found := build.extensions(target, [name])) and all(e.prebuilt for e in found)
    ]


def try_dtype(
    device: str, name: str, m: int = SMALL[0], k: int = SMALL[1], n: int = SMALL[2]
) -> dict[str, float]:
    """Use the library in a dtype, and return how long its first calls took.

    Args:
        device: `cpu` or `cuda`.
        name: Of the dtype.
        m: Rows.
        k: Features in.
        n: Features out.
    """
    import fused_norm as fn

    dtype = getattr(torch, name)
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    norm, linear = torch.nn.LayerNorm(k, **options), torch.nn.Linear(k, n, **options)
    layer = torch.nn.Sequential(norm, linear)
    x = torch.randn(3, m // 3, k, **options)
    gamma, beta, weight, bias = (p.detach() for p in layer.parameters())
    inputs: list[Any] = [t.clone().requires_grad_() for t in (x, gamma, beta, weight, bias)]
    expected = layer(x.requires_grad_())
    grad_output = torch.randn_like(expected)
    expected.backward(grad_output)
    start = time.perf_counter()
    with warnings.catch_warnings():
        # One would say that PyTorch's ops compute it.
        warnings.simplefilter("error")
        y = fn.fused_layernorm_linear(*inputs)
        synchronize(device)
        first = time.perf_counter() - start
        y.backward(grad_output)
        synchronize(device)
        step = time.perf_counter() - start
    compare("forward", y, expected)
    for mine, theirs in zip(inputs, (x, *layer.parameters()), strict=True):
        compare("gradient", mine.grad, theirs.grad)
    fused = fn.LayerNormLinear.from_modules(norm, linear)
    compare("module", fused(x), expected)
    torch.compiler.reset()  # Each dtype is compiled again, and there is a limit.
    compiled = torch.compile(fn.fused_layernorm_linear, backend="aot_eager", fullgraph=True)
    compare("compiled", compiled(x.detach(), gamma, beta, weight, bias), expected)
    product = F.linear(F.rms_norm(x, (k,), gamma, 1e-5), weight, bias)
    gate, up = product.chunk(2, -1)
    for activation, theirs in (("gelu", F.gelu(product)), ("swiglu", F.silu(gate) * up)):
        family = fn.norm_linear(
            x, weight, bias, normalization="rms_norm", norm_weight=gamma, activation=activation
        )
        compare(activation, family, theirs)
    v = x.double() - x.double().mean(-1, keepdim=True)
    eps = fn.trainable_eps_layer_norm(x.detach(), torch.ones(1, **options))
    compare("rows", eps, v / (1 + (v * v).mean(-1, keepdim=True)).sqrt())
    return {"first_s": first, "step_s": step}


def compare(name: str, mine: Tensor | None, theirs: Tensor | None) -> None:
    """Raise where results differ by more than rounding makes.

    Args:
        name: What it is.
        mine: Of the library.
        theirs: Of PyTorch.

    Raises:
        AssertionError: If they do.
    """
    assert mine is not None
    assert theirs is not None
    error = (mine.double() - theirs.double()).abs().max() / theirs.double().abs().max()
    limit = TOLERANCES[mine.dtype]
    if not error.item() < limit:
        raise AssertionError(f"{name} in {mine.dtype}: error {error.item()}, at most {limit}")


def synchronize(device: str) -> None:
    """Wait for the device.

    Args:
        device: `cpu` or `cuda`.
    """
    if device == "cuda":
        torch.cuda.synchronize()


def libraries() -> list[str]:
    """Return the files that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[-1] for line in lines]


if __name__ == "__main__":
    sys.exit(main())
