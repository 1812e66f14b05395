"""What tests of native kernels share: extensions, guarded memory, errors against float64."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fused_norm.native import build

ROOT = Path(__file__).resolve().parents[2]

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
        ],
    ),
]
"""Parametrize a test that has no fixture for it."""

GUARD = 7.0
"""Fills the memory around a tensor."""


def extension(name: str, dtype: torch.dtype, folder: str = "", *, gpu: bool = False) -> ModuleType:
    """Load an extension of the library, or one in a folder of the repository."""
    accelerator = build.accelerator_of(torch.device("cuda", 0)) if gpu else None
    where = ROOT / folder if folder else None
    return build.load(build.Extension(name, build.DTYPES[dtype], accelerator, where))


class Guarded:
    """A tensor with a band of known values before and after it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str, shift: int = 0):
        """Make a tensor of NaN that starts `shift` elements after a multiple of 256 bytes."""
        count = torch.Size(shape).numel()
        pad = 256 // dtype.itemsize
        self.whole = torch.full((count + 2 * pad + shift,), GUARD, dtype=dtype, device=device)
        self.start, self.end = pad + shift, pad + shift + count
        self.tensor = self.whole[self.start : self.end].view(shape)
        self.tensor.fill_(float("nan") if dtype.is_floating_point else 255)

    @classmethod
    def of(cls, values: torch.Tensor, shift: int = 0) -> Guarded:
        """Copy a tensor between guards."""
        guarded = cls(tuple(values.shape), values.dtype, values.device.type, shift)
        guarded.tensor.copy_(values)
        return guarded

    def checked(self) -> torch.Tensor:
        """Return the tensor after a look at the bands."""
        assert (self.whole[: self.start] == GUARD).all(), "written before the start"
        assert (self.whole[self.end :] == GUARD).all(), "written beyond the end"
        return self.tensor


def address(tensor: torch.Tensor | None) -> int:
    """Return where a tensor starts, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error in the Euclidean norm; infinite if a NaN is misplaced."""
    value, exact = value.double().cpu(), exact.double().cpu()
    difference, size = (value - exact).norm().item(), exact.norm().item()
    # A finite norm is one of finite numbers: most are, and looking at each takes much longer.
    if not math.isfinite(difference):
        if not torch.equal(value.isnan(), exact.isnan()):
            return float("inf")
        is_finite = exact.isfinite()
        difference = torch.where(is_finite, value - exact, 0.0).nan_to_num().norm().item()
        size = torch.where(is_finite, exact, 0.0).norm().item()
    return difference / size if size else difference


def assert_as_exact(
    value: torch.Tensor, peer: torch.Tensor, exact: torch.Tensor, name: str
) -> None:
    """Assert that the error is at most twice the peer's, give or take one rounding of the type."""
    ours, theirs = error(value, exact), error(peer, exact)
    # float64 is its own reference, and the error of one number is a matter of luck
    is_own = value.dtype == torch.float64 or value.numel() < 16
    floor = torch.finfo(value.dtype).eps * (64 if is_own else 0.25)
    assert ours <= 2 * theirs + floor, f"{name}: error {ours:.2e}, PyTorch's {theirs:.2e}"
