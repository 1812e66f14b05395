"""A stand-in for Hopper's kernels for 8 bits on a CPU: from record to record, by `recipes.py`."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from stand_in import EIGHT_BITS, standing_in
from torch import Tensor

from fused_norm import composition, recipes
from fused_norm.activations import ACTIVATIONS, activated, activation_gradient, is_gate
from fused_norm.call.record import MOST_MATRICES, Call, Matrix, Part
from fused_norm.composition import Operands, Spec
from fused_norm.norms import NORMS, by_number
from fused_norm.recipes import E4M3, E5M2, Cast

BF16, F32 = torch.bfloat16, torch.float32
TYPES = {4: E4M3, 5: E5M2}
BLOCKS = {1: "1x128", 2: "128x128"}


def at(address: int, dtype: torch.dtype, *shape: int, multiple: int = 16) -> Tensor:
    """Return the tensor at an address, a multiple of what kernels read together."""
    assert address
    assert address % multiple == 0
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    memory = (ctypes.c_char * count).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def same_numbers(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(-1), other.nan_to_num(-1))


def store(address: int, values: Tensor) -> None:
    at(address, values.dtype, *values.shape).copy_(values)


def quantize(call: Any) -> None:
    x = at(call.x, BF16, call.M, call.K)
    if call.block_scales:
        quantize_blocks(call, x)
        return
    q, scale = recipes.quantize(x, Cast(TYPES[call.eight_bits], "row"), bool(call.power_of_two))
    store(call.z, q)
    store(call.z_scale, scale)


def quantize_blocks(call: Any, x: Tensor) -> None:
    cast, rounds = Cast(TYPES[call.eight_bits], BLOCKS[call.block_scales]), bool(call.power_of_two)
    if call.z:
        q, scale = recipes.quantize(x, cast, rounds)
        store(call.z, q)
        store(call.z_scale, scale)
    if call.zt:
        assert cast == Cast(E4M3, "128x128")
        assert call.pitch == call.M + -call.M % 16
        padded = F.pad(x, (0, 0, 0, call.pitch - call.M))
        q, scale = recipes.quantize(padded.t(), cast, rounds)
        store(call.zt, q)
        store(call.zt_scale, scale)


def bits_of_maxima(x: Tensor, is_one: bool, of_rows: bool) -> Tensor:
    size = x.float().abs()
    if is_one:
        return size.amax().reshape(1)
    columns = size.amax(0)
    return torch.cat([columns, size.amax(1)]) if of_rows else columns


def name_of(activation: int) -> str:
    return next((name for name, a in ACTIVATIONS.items() if a.number == activation), "")


def normalized(call: Any, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the norm of rows in bfloat16, whose gamma and beta are so as well, mean and rstd."""
    gamma, beta = (at(a, BF16, call.K) if a else None for a in (call.gamma, call.beta))
    spec = Spec(by_number(call.normalization), eps=call.eps, weight_offset=call.weight_offset)
    z = composition.normalized(spec, x, Operands(x, None, gamma, beta))
    mean, rstd = NORMS[spec.normalization].statistics(x.float(), call.eps)
    assert bool(call.mean) == (mean is not None)
    return z, mean, rstd


def matrices_of(call: Any) -> list[Any]:
    """Return the matrices of a call, as many as kernels take."""
    if not call.parts:
        own = (call.x, call.workspace, call.z, call.z_scale, call.zt, call.zt_scale, call.pitch)
        return [Matrix(call.M, call.K, *own)]
    assert 1 < call.part_count <= MOST_MATRICES
    return [*(Matrix * call.part_count).from_address(call.parts)]


def wholes_of(call: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yield a record of each whole matrix, and the matrix, whose parts follow one another."""
    rest = matrices_of(call)
    while rest:
        own, parts = rest[0], list[Tensor]()
        whole, skipped = own.whole or own.K, 0
        while skipped < whole:
            part = rest.pop(0)
            assert part.K % 8 == 0
            assert (part.whole, part.skipped) == (own.whole, skipped)
            common = ("M", "maxima", "z", "z_scale", "zt", "zt_scale", "pitch")
            assert all(getattr(part, name) == getattr(own, name) for name in common)
            parts.append(at(part.x, BF16, part.M, part.K))
            skipped += part.K
        assert skipped == whole
        yield own, torch.cat(parts, 1)


def maxima(call: Any) -> None:
    """Write the maxima of each x as numbers in float32, where kernels have bits of bfloat16."""
    is_one, of_rows = bool(call.one_scale), bool(call.z)
    if not (call.rstd or call.activation):
        for own, x in wholes_of(call):
            keep(own.maxima, bits_of_maxima(x, is_one, bool(own.z)))
        return
    assert call.K % 8 == 0
    assert not call.parts
    if call.rstd:
        assert not call.activation
        z, mean, rstd = normalized(call, at(call.x, BF16, call.M, call.K))
        matrices = [z]
        store(call.rstd, rstd)
        if mean is not None:
            store(call.mean, mean)
    else:
        da = at(call.da, BF16, call.M, call.K)
        matrices = before_activation(call, da, call.x)
    keep_all(call.workspace, matrices, is_one, of_rows)


def before_activation(call: Any, da: Tensor, address: int) -> list[Tensor]:
    """Write the gradient before an activation, and return that of each layer."""
    name = name_of(call.activation)
    halves = 2 if is_gate(name) else 1
    h = at(call.h, BF16, call.M, halves * da.shape[1])
    assert call.part_count in (1, halves)
    parts = activation_gradient(name, da, h).chunk(call.part_count, 1)
    matrices = [part.contiguous() for part in parts]
    store(address, torch.cat([m.flatten() for m in matrices]))
    return matrices


def keep_all(address: int, matrices: list[Tensor], is_one: bool, of_rows: bool) -> None:
    """Write the maxima of matrices, each set where kernels read four of it together."""
    found = [bits_of_maxima(m, is_one, of_rows) for m in matrices]
    pitch = len(found[0]) + -len(found[0]) % 4
    for i, each in enumerate(found):
        keep(address + 4 * pitch * i, each)


def keep(address: int, found: Tensor) -> None:
    place = at(address, F32, len(found))
    assert not place.any()
    place.copy_(found)


def quantize_by_maxima(call: Any) -> None:
    cast = Cast(TYPES[call.eight_bits], "tensor" if call.one_scale else "row")
    rounds = bool(call.power_of_two)
    for own, x in wholes_of(call):
        if call.rstd:
            assert cast.dtype is E4M3
            x, mean, rstd = normalized(call, x)
            for address, numbers in ((call.mean, mean), (call.rstd, rstd)):
                assert numbers is None or same_numbers(at(address, F32, own.M), numbers)
        expected = bits_of_maxima(x, bool(call.one_scale), bool(own.z))
        assert same_numbers(at(own.maxima, F32, len(expected)), expected)
        if own.z:
            q, scale = recipes.quantize(x, cast, rounds)
            store(own.z, q)
            store(own.z_scale, scale.expand(own.M, 1))
        if own.zt:
            q, scale = recipes.quantize(x.t(), cast, rounds)
            assert own.pitch == own.M + -own.M % 16
            zt = at(own.zt, cast.dtype, x.shape[1], own.pitch)
            zt.zero_()
            zt[:, : own.M] = q
            store(own.zt_scale, scale.expand(x.shape[1], 1))


def normalize(call: Any) -> None:
    size = (call.M, call.K)
    x = at(call.x, BF16, *size)
    if call.residual:
        x = x + at(call.residual, BF16, *size)
        store(call.sum, x)
    kind = F32 if call.norm_is_float32 else BF16
    gamma, beta = (at(a, kind, call.K).float() if a else None for a in (call.gamma, call.beta))
    if gamma is not None:
        gamma = gamma + call.weight_offset
    rows = x.float()
    if call.normalization == 0:
        z = F.layer_norm(rows, (call.K,), gamma, beta, call.eps)
    else:
        z = F.rms_norm(rows, (call.K,), gamma, call.eps)
    cast = Cast(E4M3, BLOCKS.get(call.block_scales, "row"))
    q, scale = recipes.quantize(z, cast, bool(call.power_of_two))
    store(call.z, q)
    store(call.z_scale, scale)


def product(call: Any, N: int, weight: int, scale: int, bias: int) -> Tensor:
    rows = at(call.z, TYPES[call.eight_bits], call.M, call.K), at(call.z_scale, F32, call.M, 1)
    by = at(weight, E4M3, N, call.K), at(scale, F32, N, 1)
    y = recipes.product(rows, "row", by, "row")
    return y + at(bias, BF16, N).float() if bias else y


def block_product(call: Any, weight: int, scale: int, bias: int) -> Tensor:
    blocks = -(-call.K // 128)
    rows = at(call.z, E4M3, call.M, call.K), at(call.z_scale, F32, call.M, blocks)
    # Kernels read one of these after another.
    scales = at(scale, F32, -(-call.N // 128), blocks, multiple=4)
    y = recipes.product(rows, "1x128", (at(weight, E4M3, call.N, call.K), scales), "128x128")
    return y + at(bias, BF16, call.N).float() if bias else y


def added(call: Any, y: Tensor) -> Tensor:
    """Return y in bfloat16, plus the residual before it is rounded."""
    if call.residual:
        assert not call.activation
        y = y + at(call.residual, BF16, call.M, call.N).float()
    return y.to(BF16)


def block_linear(call: Any) -> None:
    """Write y, with a row stride of `pitch`, and a bias and a residual; or activated in 8 bits."""
    assert TYPES[call.eight_bits] is E4M3
    assert not call.h
    y = block_product(call, call.weight, call.weight_scale, call.bias)
    if call.y_scale:
        assert call.activation
        assert not call.pitch
        assert not call.residual
        name = name_of(call.activation)
        assert is_gate(name) == bool(call.up)
        if call.up:
            y = torch.cat([y, block_product(call, call.up, call.up_scale, call.up_bias)], 1)
        a = activated(name, y).to(BF16)
        q, scale = recipes.quantize(a, Cast(E4M3, "1x128"), bool(call.power_of_two))
        store(call.y, q)
        store(call.y_scale, scale)
        return
    assert not any((call.up, call.activation))
    assert call.pitch >= call.N
    whole = at(call.y, BF16, (call.M - 1) * call.pitch + call.N)
    whole.as_strided((call.M, call.N), (call.pitch, 1)).copy_(added(call, y))


def linear(call: Any) -> None:
    if call.block_scales:
        block_linear(call)
        return
    if call.dh:
        assert not any((call.y, call.bias, call.up, call.residual, call.y_scale))
        # Kernels round once less: this rounds as the pass does that they replace.
        da = product(call, call.N, call.weight, call.weight_scale, 0).to(BF16)
        keep_all(call.workspace, before_activation(call, da, call.dh), bool(call.one_scale), True)
        return
    if call.dweight:
        others = (call.y, call.bias, call.up, call.residual, call.y_scale, call.activation)
        assert not any(others)
        dweight = product(call, call.N, call.weight, call.weight_scale, 0).to(BF16)
        parts = (Part * call.part_count).from_address(call.parts)
        assert call.dweight == parts[0].y
        assert not any(part.N % 16 for part in parts[:-1])
        for part, own in zip(parts, dweight.split([p.N for p in parts]), strict=True):
            store(part.y, own)
        return
    h = product(call, call.N, call.weight, call.weight_scale, call.bias)
    if call.up:
        h = torch.cat([h, product(call, call.N, call.up, call.up_scale, call.up_bias)], 1)
    if call.h:
        store(call.h, h.to(BF16))
    a = added(call, activated(name_of(call.activation), h))
    if not call.y_scale:
        store(call.y, a)
        if call.workspace:
            assert call.activation
            keep(call.workspace, bits_of_maxima(a, bool(call.one_scale), True))
        return
    assert not call.workspace
    assert not call.h
    assert is_gate(name_of(call.activation)) == bool(call.up)
    assert TYPES[call.eight_bits] is E4M3
    assert call.activation
    # It is a power of two, whose reciprocal has all its bits in bfloat16.
    mantissa, exponent = math.frexp(call.y_one_scale)
    assert mantissa == 0.5
    assert abs(exponent) < 126
    q, scale = recipes.quantize_within(a, Cast(E4M3, "row"), call.y_one_scale)
    store(call.y, q)
    store(call.y_scale, scale)


def linears(call: Any) -> None:
    parts = (Part * call.part_count).from_address(call.parts)
    assert sum(part.N for part in parts) == call.N
    for part in parts:
        y = product(call, part.N, part.weight, part.scale, part.bias)
        store(part.y, y.to(BF16))


class Ran(list[tuple[str, int]]):
    """The names and strategies of what ran, and how many matrices each kernel was given."""

    def __init__(self) -> None:
        """Start with nothing."""
        super().__init__()
        self.matrices = Counter[str]()

    def clear(self) -> None:
        """Forget what ran."""
        super().clear()
        self.matrices.clear()


@contextmanager
def running(folder: Path) -> Iterator[Ran]:
    """Have the chain run these for bfloat16 on a CPU; gives what ran.

    Args:
        folder: Where C is compiled.
    """
    ran = Ran()
    functions = (quantize, maxima, quantize_by_maxima, normalize, linear, linears)
    kernels = dict(zip(EIGHT_BITS, functions, strict=True))

    def run(name: str, place: int) -> None:
        call = Call.from_address(place)
        ran.append((name, call.strategy))
        if name in ("quantize", "maxima", "quantize_by_maxima"):
            ran.matrices[name] += call.part_count if call.parts else 1
        kernels[name](call)

    with standing_in(folder, run, EIGHT_BITS):
        yield ran
