"""Check and time the FP8 kernels on a Hopper GPU that has PyTorch and no Mojo.

    python scripts/fp8_gpu.py pack .dev/fp8          here: the extension and Mojo's runtime
    PYTHONPATH=. python3 scripts/fp8_gpu.py run .dev/fp8 OUT.json
                                                     there: checks, then times, in about a minute

Products are checked against the float64 product of the dequantized operands, quantized rows bit by
bit against `fused_norm.recipes`. Times are of CUDA graphs, interleaved, the order drawn in every
round, in microseconds; `_scaled_mm` is PyTorch's, with fast accumulation.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm.call.record import Call
from fused_norm.native import build, runtime
from fused_norm.recipes import Cast, quantize

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
# What the record calls the two, 0 standing for neither.
NUMBERS = {E4M3: 4, E5M2: 5}
SIZES = [(8192, 4096, 6144), (8192, 2048, 2048), (16384, 1024, 3072), (64, 4096, 6144)]
MORE_SIZES = [(8192, 4096, 4096), (8192, 4096, 28672), (8192, 14336, 4096), (16384, 1024, 1024)]
ROWS = [(8192, 4096), (8192, 2048), (16384, 1024), (8192, 14336), (64, 4096)]
EPS = 1e-5


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack or run and return an exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("folder", type=Path)
    running = commands.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("out", type=Path)
    running.add_argument("--rounds", type=int, default=12)
    running.add_argument("--check", action="store_true", help="time nothing")
    options = parser.parse_args(arguments)
    if options.command == "pack":
        return pack(options.folder)
    if "FP8_GPU_RUNTIME" in os.environ:
        return run(options)
    # The loader looks at this variable when a process begins.
    with tempfile.TemporaryDirectory() as runtime:
        with tarfile.open(options.folder / "runtime.tar.xz") as archive:
            archive.extractall(runtime, filter="data")
        libraries = os.pathsep.join([f"{runtime}/lib", os.environ.get("LD_LIBRARY_PATH", "")])
        environment = os.environ | {"LD_LIBRARY_PATH": libraries, "FP8_GPU_RUNTIME": runtime}
        command = [sys.executable, __file__, *(sys.argv[1:] if arguments is None else arguments)]
        return subprocess.run(command, env=environment, check=False).returncode


def pack(folder: Path) -> int:
    """Build the extension for Hopper into a folder, with the libraries that it needs."""
    from gpu_round import _pack_runtime

    folder.mkdir(parents=True, exist_ok=True)
    extension = build.Extension(build.FP8_EXTENSION, "bfloat16", "nvidia:sm_90a")
    shutil.copy(build.build(extension), folder / "fp8_sm90.so")
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout
    (folder / "commit").write_text(commit)
    _pack_runtime(folder / "runtime.tar.xz")
    return 0


class Kernels:
    """The extension, on one stream."""

    def __init__(self, folder: Path, stream: int) -> None:
        runtime.load()
        self.module = runtime.import_from("fp8_sm90", folder / "fp8_sm90.so")
        self.context = runtime.new_launcher(self.module, 0, stream, True)

    def _call(self, name: str, **fields: Any) -> None:
        call = Call(context=self.context)
        for field, value in fields.items():
            setattr(call, field, value.data_ptr() if isinstance(value, Tensor) else value or 0)
        getattr(self.module, name)(ctypes.addressof(call))

    def linear(self, q: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor, **fields: Any) -> Any:
        """Queue y = (q scale) (w w_scale)^T, with what else the record has."""
        (M, K), N = q.shape, fields.pop("N", w.shape[0])
        fields.setdefault("eight_bits", NUMBERS[q.dtype])
        operands = {"z": q, "z_scale": scale, "weight": w, "weight_scale": w_scale}
        self._call("linear", M=M, N=N, K=K, **operands, **fields)

    def norm(self, kind: int, x: Tensor, out: Sequence[Tensor], **fields: Any) -> None:
        """Queue norm and quantization: out is q, scale, mean and rstd."""
        M, K = x.shape
        q, scale, mean, rstd = out
        fields |= {"z": q, "z_scale": scale, "mean": mean, "rstd": rstd, "eps": EPS, "x": x}
        self._call("normalize", M=M, K=K, normalization=kind, **fields)

    def quantize(self, x: Tensor, q: Tensor, scale: Tensor, **fields: Any) -> None:
        """Queue the quantization of rows."""
        M, K = x.shape
        kind = {"eight_bits": NUMBERS[q.dtype], "x": x, "z": q, "z_scale": scale}
        self._call("quantize", M=M, K=K, **kind, **fields)


def run(options: argparse.Namespace) -> int:
    """Check, then time, write what was found, and return 0 if all checks held."""
    torch.manual_seed(0)
    random.seed(0)
    properties = torch.cuda.get_device_properties(0)
    driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found: dict[str, Any] = {
        "device": properties.name,
        "torch": torch.__version__,
        "driver": subprocess.run(driver, capture_output=True, text=True).stdout.strip(),
        "commit": (options.folder / "commit").read_text().strip(),
    }
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        kernels = Kernels(options.folder, stream.cuda_stream)
        for name, check in CHECKS.items():
            found[name] = check(kernels)
            print(name, json.dumps(found[name]), flush=True)
        if not options.check:
            for name, (measure, sizes) in TIMES.items():
                found[name] = {}
                for size in sizes:
                    times = measure(kernels, size, stream, options.rounds)
                    found[name][",".join(map(str, size))] = times
                    print(name, size, json.dumps(times), flush=True)
                    torch.cuda.empty_cache()
    held = all(found[name]["held"] for name in CHECKS)
    print("all held" if held else "NOT ALL HELD")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if held else 1


def sqnr(found: Tensor, exact: Tensor) -> float:
    """Return the ratio of signal to error in dB."""
    noise = (found.double() - exact).square().sum()
    return float(10 * torch.log10(exact.square().sum() / noise))


def rows_of(v: Tensor, dtype: torch.dtype = E4M3, power_of_two: bool = False) -> Any:
    """Return rows in FP8 and their scales [M, 1]."""
    return quantize(v, Cast(dtype, "row"), power_of_two)


def operands(M: int, K: int, N: int, dtype: torch.dtype = E4M3) -> tuple[Any, Any, Tensor]:
    """Return rows, a weight, and the float64 product of what they stand for."""
    a, a_scale = rows_of(torch.randn(M, K, device="cuda") * torch.rand(M, 1, device="cuda"), dtype)
    b, b_scale = rows_of(torch.randn(N, K, device="cuda") / K**0.5)
    exact = (a.double() * a_scale.double()) @ (b.double() * b_scale.double()).t()
    return (a, a_scale), (b, b_scale), exact


def check_products(kernels: Kernels) -> dict[str, Any]:
    """Compare products of many sizes, with all that follows them, with float64."""
    sizes = [(200, 208, 336), (1, 16, 16), (17, 144, 48), (777, 1040, 1008), (64, 4096, 6144)]
    sizes += [(33, 1024, 3072), (1000, 16384, 512), (4096, 4096, 4096), (300, 272, 4096)]
    sizes += [
        (random.randint(1, 2000), 16 * random.randint(1, 150), 16 * random.randint(1, 150))
        for _ in range(20)
    ]
    worst: dict[str, float] = {}
    same, inside = True, True
    for M, K, N in sizes:
        for dtype in (E4M3, E5M2):
            a, b, exact = operands(M, K, N, dtype)
            bias = torch.randn(N, device="cuda").to(BF16)
            wanted: dict[str, tuple[dict[str, Any], Tensor]] = {"plain": ({}, exact)}
            if dtype is E4M3:
                wanted["bias"] = ({"bias": bias}, exact + bias.double())
                gelu = F.gelu(exact + bias.double())
                wanted["gelu"] = ({"bias": bias, "activation": 2, "h": True}, gelu)
                if N % 32 == 0:
                    gate, up = (exact + bias.double()).chunk(2, -1)
                    wanted["swiglu"] = ({"bias": bias, "activation": 13}, F.silu(gate) * up)
            for name, (fields, expected) in wanted.items():
                found = []
                for _ in range(2):
                    room = torch.full((M + 8, expected.shape[1]), float("nan"), device="cuda")
                    room = room.to(BF16)
                    extra: dict[str, Any] = dict(fields)
                    if "h" in extra:
                        extra["h"] = torch.full((M, N), float("nan"), device="cuda").to(BF16)
                    if name == "swiglu":
                        half = N // 2
                        extra |= {"up": b[0][half:], "up_scale": b[1][half:], "N": half}
                        extra["up_bias"] = bias[half:]
                    kernels.linear(*a, *b, y=room, **extra)
                    found.append(room)
                    if "h" in extra:
                        key = "h of gelu"
                        error = sqnr(extra["h"], exact + bias.double())
                        worst[key] = min(worst.get(key, 1e9), error)
                y = found[0][:M]
                same &= torch.equal(y, found[1][:M])
                inside &= bool(found[0][M:].isnan().all())
                key = f"{name} {str(dtype).split('_')[-1]}"
                error = sqnr(y, expected)
                if not error > 38:
                    print("product", (M, K, N), key, error, flush=True)
                worst[key] = min(worst.get(key, 1e9), error)
    held = same and inside and all(v > 38 for v in worst.values())
    return {"held": held, "repeat": same, "inside": inside, "least dB": worst}


def check_rows(kernels: Kernels) -> dict[str, Any]:
    """Compare quantized rows with the reference bit by bit."""
    wrong = {"q": 0, "scale": 0, "q of norms, of a million": 0.0}
    errors = {"mean": 0.0, "rstd": 0.0, "scale of norms": 0.0}
    for M, K in [(333, 144), (8192, 4096), (7, 16), (64, 14336), (20, 16384), (9, 20480)]:
        x = (torch.randn(M, K, device="cuda") * 3 + torch.randn(M, 1, device="cuda") * 2).to(BF16)
        x[0] = 0
        x[1, 3] = 1000 * x[1].float().abs().max()
        for dtype in (E4M3, E5M2):
            for power_of_two in (False, True):
                for strategy in (1, 2):
                    q, scale = torch.empty(M, K, device="cuda", dtype=dtype), empty(M)
                    kernels.quantize(x, q, scale, power_of_two=power_of_two, strategy=strategy)
                    want, want_scale = rows_of(x, dtype, power_of_two)
                    wrong["scale"] += int((scale != want_scale[:, 0]).sum())
                    wrong["q"] += int((q.view(torch.uint8) != want.view(torch.uint8)).sum())
        gamma, beta = (torch.randn(K, device="cuda").to(BF16) for _ in range(2))
        residual = torch.randn(M, K, device="cuda").to(BF16)
        for kind in (0, 1):
            for strategy, added in ((1, None), (2, None), (0, residual)):
                out = [torch.empty(M, K, device="cuda", dtype=E4M3), *(empty(M) for _ in range(3))]
                q, scale, mean, rstd = out
                fields = {"gamma": gamma, "beta": beta, "power_of_two": 1, "strategy": strategy}
                total = x
                if added is not None:
                    total = torch.empty_like(x)
                    fields |= {"residual": added, "sum": total}
                kernels.norm(kind, x, out, **fields)
                if added is not None:
                    wrong["q"] += int((total != x + added).sum())
                exact = total.double()
                mu = exact.mean(-1, keepdim=True) if kind == 0 else 0 * exact[:, :1]
                deviation = ((exact - mu).square().mean(-1) + EPS).rsqrt()
                z = (exact - mu) * deviation[:, None] * gamma.double() + beta.double()
                want, want_scale = rows_of(z.float(), E4M3, True)
                if kind == 0:
                    far = ((mean.double() - mu[:, 0]) * deviation).abs().max()
                    errors["mean"] = max(errors["mean"], float(far))
                errors["rstd"] = max(errors["rstd"], float((rstd / deviation - 1).abs().max()))
                off = (scale / want_scale[:, 0] - 1).abs()
                errors["scale of norms"] = max(errors["scale of norms"], float(off.max()))
                # z is rounded otherwise here, and some z lie between two numbers of 8 bits.
                different = q.view(torch.uint8) != want.view(torch.uint8)
                share = float(different[off == 0].float().mean()) * 1e6
                wrong["q of norms, of a million"] = max(wrong["q of norms, of a million"], share)
    # Rows that are not numbers stay rows.
    x = torch.randn(4, 256, device="cuda").to(BF16)
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    q, scale = torch.empty(4, 256, device="cuda", dtype=E4M3), empty(4)
    kernels.quantize(x, q, scale)
    stands_for = q.float() * scale[:, None]
    seen = bool(stands_for[1].isnan().all() and not stands_for[2, 7].isfinite())
    seen &= bool(stands_for[[0, 3]].isfinite().all())
    held = seen and wrong["q"] == 0 and wrong["scale"] == 0 and max(errors.values()) < 2.5e-6
    held &= wrong["q of norms, of a million"] < 200
    return {"held": held, "wrong": wrong, "errors": errors, "not numbers are seen": seen}


def empty(M: int) -> Tensor:
    """Return float32 [M] that nothing has written."""
    return torch.full((M,), float("nan"), device="cuda")


CHECKS: dict[str, Callable[[Kernels], dict[str, Any]]] = {
    "rows": check_rows,
    "products": check_products,
}


def time_all(runs: dict[str, Callable[[int], Any]], sets: int, stream: Any, rounds: int) -> Any:
    """Return medians in microseconds of graph replays, the order drawn in each round."""
    graphs: dict[str, Any] = {}
    for name, run in runs.items():
        for i in range(sets):
            run(i)
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for i in range(2 * sets):
            run(i % sets)
        end.record()
        torch.cuda.synchronize()
        each = start.elapsed_time(end) / (2 * sets)
        count = min(400, max(sets, int(3.0 / each) // sets * sets))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                run(i % sets)
        graph.replay()
        graphs[name] = graph, count
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name in random.sample(list(graphs), len(graphs)):
            graph, count = graphs[name]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / count)
    return {name: round(statistics.median(each), 2) for name, each in times.items()}


def sets_for(size: int) -> int:
    """Return how many sets of buffers exceed the L2 cache."""
    return max(2, min(8, -(-150_000_000 // size)))


def scaled_mm(a: Any, b: Any) -> Tensor:
    """Return PyTorch's product."""
    found: Tensor = torch._scaled_mm(
        a[0], b[0].t(), a[1], b[1].t(), out_dtype=BF16, use_fast_accum=True
    )
    return found


def time_product(kernels: Kernels, size: Any, stream: Any, rounds: int) -> dict[str, Any]:
    """Time products of one size beside PyTorch's, with what may follow them."""
    M, K, N = size
    half = N // 2
    sets = sets_for(M * K + K * N + 2 * M * N)
    a = [rows_of(torch.randn(M, K, device="cuda")) for _ in range(sets)]
    b = [rows_of(torch.randn(N, K, device="cuda") / K**0.5) for _ in range(sets)]
    e = [(v[0].to(E5M2), v[1]) for v in a]
    y = [torch.empty(M, N, device="cuda", dtype=BF16) for _ in range(sets)]
    up = [{"up": q[half:], "up_scale": scale[half:]} for q, scale in b]
    bias = torch.randn(N, device="cuda").to(BF16)

    def ours(rows: Any = a, **fields: Any) -> Callable[[int], Any]:
        return lambda i: kernels.linear(*rows[i], *b[i], y=y[i], **fields)

    runs = {
        "_scaled_mm": lambda i: scaled_mm(a[i], b[i]),
        "ours": ours(),
        "ours, e5m2": ours(e),
        "ours, bias": ours(bias=bias),
        "ours, gelu": ours(activation=2),
        "ours, swiglu": lambda i: kernels.linear(
            *a[i], *b[i], y=y[i], N=half, activation=13, **up[i]
        ),
    }
    return dict(time_all(runs, sets, stream, rounds))


def time_norm(kernels: Kernels, size: Any, stream: Any, rounds: int) -> dict[str, Any]:
    """Time norm and quantization beside a copy of as many bytes."""
    M, K = size
    sets = sets_for(3 * M * K)
    x = [torch.randn(M, K, device="cuda").to(BF16) for _ in range(sets)]
    q = [torch.empty(M, K, device="cuda", dtype=E4M3) for _ in range(sets)]
    rest = [empty(M) for _ in range(3)]
    target = [torch.empty(3 * M * K // 2, device="cuda", dtype=torch.uint8) for _ in x]
    source = [t.clone() for t in target]
    gamma, beta = (torch.ones(K, device="cuda", dtype=BF16) for _ in range(2))

    def norm(kind: int, strategy: int, **fields: Any) -> Callable[[int], Any]:
        return lambda i: kernels.norm(kind, x[i], [q[i], *rest], strategy=strategy, **fields)

    runs = {
        "copy": lambda i: target[i].copy_(source[i]),
        "rms, a block a row": norm(1, 1, gamma=gamma),
        "rms, rows in turn": norm(1, 2, gamma=gamma),
        "rms": norm(1, 0, gamma=gamma),
        "layer with beta, a block a row": norm(0, 1, gamma=gamma, beta=beta),
        "layer with beta": norm(0, 0, gamma=gamma, beta=beta),
        "residual, rms": norm(1, 0, gamma=gamma, residual=x[0], sum=torch.empty_like(x[0])),
        "quantize": lambda i: kernels.quantize(x[i], q[i], rest[0]),
    }
    return dict(time_all(runs, sets, stream, rounds))


def _peer(x: Tensor, g: Tensor) -> Any:
    return rows_of(F.rms_norm(x, g.shape, g, EPS))


def time_both(kernels: Kernels, size: Any, stream: Any, rounds: int) -> dict[str, Any]:
    """Time RMSNorm, quantization and product on a quantized weight, with errors against float64."""
    M, K, N = size
    compiled = torch.compile(_peer, dynamic=False)
    sets = sets_for(2 * M * K + K * N + 2 * M * N)
    x = [torch.randn(M, K, device="cuda").to(BF16) for _ in range(sets)]
    w = [(torch.randn(N, K, device="cuda") / K**0.5).to(BF16) for _ in range(sets)]
    b = [rows_of(v) for v in w]
    y = [torch.empty(M, N, device="cuda", dtype=BF16) for _ in range(sets)]
    q = [torch.empty(M, K, device="cuda", dtype=E4M3) for _ in range(sets)]
    rest = [empty(M) for _ in range(3)]
    g = (torch.randn(K, device="cuda") / 4 + 1).to(BF16)

    def ours(i: int) -> Tensor:
        kernels.norm(1, x[i], [q[i], *rest], gamma=g)
        kernels.linear(q[i], rest[0], *b[i], y=y[i], strategy=1)
        return y[i]

    runs: dict[str, Callable[[int], Any]] = {
        "bf16": lambda i: F.linear(F.rms_norm(x[i], g.shape, g, EPS), w[i]),
        "torch.compile, _scaled_mm": lambda i: scaled_mm(compiled(x[i], g), b[i]),
        "ours": ours,
    }
    exact = F.rms_norm(x[0][:256].double(), g.shape, g.double(), EPS) @ w[0].double().t()
    errors = {n: round(sqnr(run(0)[:256], exact), 2) for n, run in runs.items()}
    return {"us": time_all(runs, sets, stream, rounds), "dB": errors}


TIMES: dict[str, tuple[Callable[..., dict[str, Any]], Sequence[Any]]] = {
    "product": (time_product, SIZES + MORE_SIZES),
    "norm": (time_norm, ROWS),
    "both": (time_both, SIZES),
}

if __name__ == "__main__":
    sys.exit(main())
