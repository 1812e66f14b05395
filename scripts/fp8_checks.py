"""Checks of `fp8_gpu.py`: products against float64, quantized rows against the reference."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fp8_kernels import BF16, E4M3, E5M2, EPS, Kernels, empty, operands, rows_of, sqnr
from torch import Tensor


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
                residual = torch.randn(M, N, device="cuda").to(BF16)
                added = exact + bias.double() + residual.double()
                wanted["residual"] = ({"bias": bias, "residual": residual}, added)
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
    # Rows of a warp and of a block, many and few, in one load of a thread and more; longer ones.
    short = [(333, 144), (7, 16), (9001, 648), (4999, 1024), (2100, 1160), (300, 2560)]
    for M, K in [*short, (8192, 4096), (700, 7168), (64, 14336), (20, 16384), (9, 20480)]:
        x = (torch.randn(M, K, device="cuda") * 3 + torch.randn(M, 1, device="cuda") * 2).to(BF16)
        x[0] = 0
        x[1, 3] = 1000 * x[1].float().abs().max()
        for dtype in (E4M3, E5M2):
            for power_of_two in (False, True):
                q, scale = torch.empty(M, K, device="cuda", dtype=dtype), empty(M)
                kernels.quantize(x, q, scale, power_of_two=power_of_two)
                want, want_scale = rows_of(x, dtype, power_of_two)
                wrong["scale"] += int((scale != want_scale[:, 0]).sum())
                wrong["q"] += int((q.view(torch.uint8) != want.view(torch.uint8)).sum())
        gamma, beta = (torch.randn(K, device="cuda").to(BF16) for _ in range(2))
        residual = torch.randn(M, K, device="cuda").to(BF16)
        for kind in (0, 1):
            for added in (None, residual):
                out = [torch.empty(M, K, device="cuda", dtype=E4M3), *(empty(M) for _ in range(3))]
                q, scale, mean, rstd = out
                fields = {"gamma": gamma, "beta": beta, "power_of_two": 1}
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


CHECKS: dict[str, Callable[[Kernels], dict[str, Any]]] = {
    "rows": check_rows,
    "products": check_products,
}
