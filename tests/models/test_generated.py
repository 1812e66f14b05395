"""Random graphs: what the backend makes of each is what PyTorch makes of it, in every respect."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from devices import GPU
from generate import PARAMETERS, Program, compiled_source
from torch import Tensor

from fused_norm.models import Site, backend

# Programs in each test.
_BATCH = 50
_IN_CI, _WITH_ALL = 150, 3150
# Roundings, relative to a tensor's norm, that PyTorch makes where we make others.
_FLOOR = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


class Outcome(NamedTuple):
    """What a program leaves behind."""

    outputs: list[Tensor]
    inputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


def leave(function: Any, program: Program, dtype: torch.dtype, batch: int) -> Outcome:
    """Run a program and its backward."""
    generator = torch.Generator().manual_seed(program.seed)
    given = {}
    for name, shape in PARAMETERS.items():
        shape = (batch, *shape[1:]) if len(shape) > 2 else shape
        each = 0.5 * torch.randn(shape, generator=generator) + (name in "gh")
        each = each.to(program.device, dtype)
        given[name] = each.requires_grad_(name not in program.frozen)
    torch.manual_seed(program.seed)
    outputs = list(function(*given.values()))
    roots = [y for y in outputs if y.requires_grad]
    dys = [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in roots]
    if roots:
        torch.autograd.backward(roots, dys)
    return Outcome(outputs, given, {name: each.grad for name, each in given.items()})


def aliases(outcome: Outcome) -> list[tuple[int, int]]:
    """Return which results and inputs lie in the same memory, and where in it."""
    tensors = [*outcome.outputs, *outcome.inputs.values()]
    memory = [t.untyped_storage().data_ptr() for t in tensors]
    return [(memory.index(at), t.storage_offset()) for at, t in zip(memory, tensors, strict=True)]


def look(t: Tensor | None) -> Any:
    return t if t is None else (t.dtype, tuple(t.shape), t.stride(), t.requires_grad)


def difference(program: Program, found: Outcome, expected: Outcome, exact: Outcome) -> str:
    """Return what differs, in words; nothing where all is alike."""
    if aliases(found) != aliases(expected):
        return f"aliases {aliases(found)} instead of {aliases(expected)}"
    for part in ("outputs", "inputs", "gradients"):
        own: Any = getattr(expected, part)
        names = own if isinstance(own, dict) else range(len(own))
        for name in names:
            a, b, c = (getattr(each, part)[name] for each in (found, expected, exact))
            if look(a) != look(b):
                return f"{part} {name}: {look(a)} instead of {look(b)}"
            if a is None:
                continue
            a, b, c = (each.detach().double() for each in (a, b, c))
            error, bar = (a - b).norm().item(), (b - c).norm().item()
            floor = _FLOOR[dtype_of(program)] * b.norm().item() + 1e-12
            # Kept casts round the same rows alike, except for the few next to a tie.
            is_kept = program.rounds or program.is_narrow
            is_kept &= not program.is_narrow or keeps_rounding(program)
            bound = (0.25 if is_kept else 4.0) * bar + 4 * floor
            if not torch.equal(a.isnan(), b.isnan()) or (a - b).nan_to_num().norm() > bound:
                return f"{part} {name}: off by {error:.1e}, where PyTorch is off by {bar:.1e}"
    return ""


def keeps_rounding(program: Program) -> bool:
    """Return whether a program runs with the roundings that a model makes."""
    return program.seed % 4 == 3


def dtype_of(program: Program) -> torch.dtype:
    """Return the dtype of a program's parameters."""
    return torch.bfloat16 if program.seed % 7 == 3 else torch.float32


def is_dynamic(program: Program) -> bool:
    """Return whether a program is compiled once for batches of any size, and runs with two."""
    return program.seed % 5 == 1


def defect(program: Program, sites: list[Site]) -> str | None:
    """Return what is wrong with a program's graph, None where PyTorch itself refuses it."""
    function = compiled_source(program.source())
    # In float64 all the roundings to 16 bits are left out that are not asked for.
    wide = compiled_source(program.source().replace(".bfloat16()", "").replace(_EIGHT, ""))
    dtype, batches = dtype_of(program), (2, 3) if is_dynamic(program) else (2,)
    try:
        expected = [leave(function, program, dtype, batch) for batch in batches]
        exact = [leave(wide, program, torch.float64, batch) for batch in batches]
    except (RuntimeError, TypeError):
        return None
    options = {"then": "eager", "rounding": "model" if keeps_rounding(program) else "once"}
    how = functools.partial(backend, options=options, sites=sites)
    compiled = torch.compile(function, backend=how, dynamic=is_dynamic(program) or None)
    try:
        found = [leave(compiled, program, dtype, batch) for batch in batches]
    except Exception as error:
        if is_refused_by_dynamo(function, program):
            return None
        # Whatever else is raised is a defect, and is reported with its program.
        return f"{type(error).__name__}: {str(error)[:300]}"
    return next(
        filter(None, map(functools.partial(difference, program), found, expected, exact)), ""
    )


def is_refused_by_dynamo(function: Any, program: Program) -> bool:
    """Return whether PyTorch's tracing fails on a program whatever the backend."""
    torch._dynamo.reset()
    traced = torch.compile(function, backend="eager", dynamic=is_dynamic(program) or None)
    try:
        leave(traced, program, dtype_of(program), 2)
    except torch._dynamo.exc.InternalTorchDynamoError:
        return True
    return False


_EIGHT = ".to(torch.float8_e4m3fn)"


def hold(seeds: range, device: str = "cpu") -> None:
    """Hold as many programs as there are seeds; fail with those that differ, as programs."""
    torch._dynamo.reset()
    logging.getLogger("torch").setLevel(logging.ERROR)
    wrong, held, sites = [], 0, list[Site]()
    for program in (Program(seed, device) for seed in seeds):
        found = defect(program, sites)
        held += found is not None
        if found:
            wrong.append(f"# seed {program.seed}: {found}\n{program.source()}")
    assert not wrong, f"{len(wrong)} of {held}\n\n" + "\n".join(wrong)
    # A generator of what PyTorch refuses, or what the pass leaves, would show nothing.
    assert held > len(seeds) // 3
    # A Triton kernel may write anything that it is given.
    fates = Counter("fused" if site.fused else site.reason for site in sites)
    assert fates["fused"] > len(seeds) // (4 if device == "cpu" else 10), fates


@pytest.mark.parametrize("first", range(0, _IN_CI, _BATCH))
def test_random_graphs(first: int) -> None:
    hold(range(first, first + _BATCH))


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("first", [0, _BATCH])
def test_random_graphs_with_triton_kernels(first: int, device: str) -> None:
    """The kernels write rows, their views and buffers, as no schema tells of."""
    hold(range(first, first + _BATCH), device)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(_IN_CI, _IN_CI + _WITH_ALL, _BATCH))
def test_more_random_graphs(first: int) -> None:
    hold(range(first, first + _BATCH))
