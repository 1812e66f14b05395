"""Times of `fp8_gpu.py`: products, norms that quantize, and both, compared with PyTorch's."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from fp8_kernels import BF16, E4M3, E5M2, EPS, Kernels, empty, rows_of, sqnr
from torch import Tensor

SIZES = [(8192, 4096, 6144), (8192, 2048, 2048), (16384, 1024, 3072), (64, 4096, 6144)]
MORE_SIZES = [(8192, 4096, 4096), (8192, 4096, 28672), (8192, 14336, 4096), (16384, 1024, 1024)]
ROWS = [(8192, 4096), (8192, 2048), (16384, 1024), (8192, 14336), (64, 4096)]


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
    """Time products of one size and PyTorch's, with the ops that may follow them."""
    M, K, N = size
    half = N // 2
    sets = sets_for(M * K + K * N + 2 * M * N)
    a = [rows_of(torch.randn(M, K, device="cuda")) for _ in range(sets)]
    b = [rows_of(torch.randn(N, K, device="cuda") / K**0.5) for _ in range(sets)]
    residual = [torch.randn(M, N, device="cuda").to(BF16) for _ in range(sets)]
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
        "ours, residual": lambda i: kernels.linear(*a[i], *b[i], y=y[i], residual=residual[i]),
        "ours, then a sum by PyTorch": lambda i: (ours()(i), y[i].add_(residual[i])),
        "ours, gelu": ours(activation=2),
        "ours, swiglu": lambda i: kernels.linear(
            *a[i], *b[i], y=y[i], N=half, activation=13, **up[i]
        ),
    }
    return dict(time_all(runs, sets, stream, rounds))


def time_norm(kernels: Kernels, size: Any, stream: Any, rounds: int) -> dict[str, Any]:
    """Time norm and quantization, and a copy of as many bytes."""
    M, K = size
    sets = sets_for(3 * M * K)
    x = [torch.randn(M, K, device="cuda").to(BF16) for _ in range(sets)]
    q = [torch.empty(M, K, device="cuda", dtype=E4M3) for _ in range(sets)]
    rest = [empty(M) for _ in range(3)]
    target = [torch.empty(3 * M * K // 2, device="cuda", dtype=torch.uint8) for _ in x]
    source = [t.clone() for t in target]
    gamma, beta = (torch.ones(K, device="cuda", dtype=BF16) for _ in range(2))

    def norm(kind: int, **fields: Any) -> Callable[[int], Any]:
        return lambda i: kernels.norm(kind, x[i], [q[i], *rest], **fields)

    runs = {
        "copy": lambda i: target[i].copy_(source[i]),
        "rms": norm(1, gamma=gamma),
        "layer with beta": norm(0, gamma=gamma, beta=beta),
        "residual, rms": norm(1, gamma=gamma, residual=x[0], sum=torch.empty_like(x[0])),
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
