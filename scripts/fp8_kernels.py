"""The FP8 kernels of an extension that `fp8_gpu.py` has packed, and operands for them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_norm.call.record import Call
from fused_norm.native import runtime
from fused_norm.recipes import Cast, quantize

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
# What the record calls the two, 0 standing for neither.
NUMBERS = {E4M3: 4, E5M2: 5}
EPS = 1e-5


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


def sqnr(found: Tensor, exact: Tensor) -> float:
    """Return the ratio of signal to error in dB."""
    noise = (found.double() - exact).square().sum()
    return float(10 * torch.log10(exact.square().sum() / noise))


def rows_of(v: Tensor, dtype: torch.dtype = E4M3, power_of_two: bool = False) -> Any:
    """Return rows in FP8 and their scales [M, 1]."""
    return quantize(v, Cast(dtype, "row"), power_of_two)


def operands(M: int, K: int, N: int, dtype: torch.dtype = E4M3) -> tuple[Any, Any, Tensor]:
    """Return rows, a weight, and the float64 product of their values."""
    a, a_scale = rows_of(torch.randn(M, K, device="cuda") * torch.rand(M, 1, device="cuda"), dtype)
    b, b_scale = rows_of(torch.randn(N, K, device="cuda") / K**0.5)
    exact = (a.double() * a_scale.double()) @ (b.double() * b_scale.double()).t()
    return (a, a_scale), (b, b_scale), exact


def empty(M: int) -> Tensor:
    """Return float32 [M] that nothing has written."""
    return torch.full((M,), float("nan"), device="cuda")
