"""Who is measured: PyTorch, its compiler, other projects' kernels and ours.

A provider is an entry of `PROVIDERS`. It imports what it needs only when it is asked for; where
that fails it is named as not installed, with what the import said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from benchmarks.blocks import BLOCKS
from benchmarks.case import Case, Formula, Op
from benchmarks.ops import LAYER_NORM, MEMBERS, Member
from benchmarks.parts import BARE
from benchmarks.peers import PEERS
from benchmarks.provider import (
    Bind,
    Bound,
    Provider,
    as_function,
    compiled,
    compiled_by_us,
    given,
    imported,
    needs_gpu,
    through,
)
from fused_norm import frozen_parameters, reference


def _of_member(member: Member) -> Iterator[Provider]:
    """Give the providers of a member, the baseline first."""
    op = member.op
    eager, bare = given(op.reference), partial(member.formula, BARE)
    what = f"{op.title} by PyTorch's ops"
    yield Provider("eager", op.name, "baseline", what, eager, as_function)
    floor = "products and attention" if member.is_block else "the bare F.linear"
    yield Provider(
        "floor" if member.is_block else "linear",
        op.name,
        "floor",
        f"{floor}, without what is around it",
        given(bare),
        as_function,
        formula=bare,
    )
    yield Provider("compile", op.name, "peer", "torch.compile", eager, compiled(None))
    yield Provider(
        "compile-max-autotune",
        op.name,
        "peer",
        # The benchmark captures the graphs itself, in the same way for every provider.
        "torch.compile(mode='max-autotune-no-cudagraphs')",
        eager,
        compiled("max-autotune-no-cudagraphs"),
    )
    for name in member.peers:
        yield PEERS[name](member)
    yield ours(member)
    if member.is_block:
        for then in ("inductor", "eager"):
            yield _by_backend(op, then)
        yield replace(
            _by_backend(op, "inductor"),
            name="fused_norm-compile-inductor-frozen",
            description="the same; CUDA graphs are captured under frozen_parameters",
            refuse=needs_gpu,
            capture=frozen_parameters,
            modes=("forward",),
        )
        # Norms that are left to PyTorch unless a model runs in CUDA graphs.
        yield replace(
            _by_backend(op, "inductor", small=True),
            name="fused_norm-compile-inductor-small",
            modes=("train",),
        )


def _by_backend(op: Op, then: str, **options: Any) -> Provider:
    options = {"then": then, **options}
    return Provider(
        f"fused_norm-compile-{then}",
        op.name,
        "ours",
        f"torch.compile(backend='fused_norm', options={options})",
        partial(_with_backend, op.reference),
        compiled_by_us(options),
        packages=("fused-norm", "torch"),
    )


def _with_backend(function: Formula) -> tuple[Any, Formula]:
    from fused_norm.models import backend

    return backend, function


def ours(member: Member, package: str = "fused_norm", name: str = "fused_norm") -> Provider:
    """Return the provider that is our function for a member.

    Args:
        member: The member.
        package: Whose function it is.
        name: What `--provider` calls it.
    """
    return Provider(
        name,
        member.op.name,
        "ours" if package == "fused_norm" else "peer",
        f"{package}'s {member.function}",
        imported(member.function, package),
        through(member.ours),
        packages=("fused-norm",),
    )


def _bind_f_layer_norm(function: Formula, case: Case) -> Bind:
    def bind(inputs: list[Tensor]) -> Bound:
        x, o = inputs
        eps = o.item() ** 2
        return Bound(partial(function, x, (case.shape.K,), None, None, eps), inputs)

    return bind


def _without_gradient_of_o(x: Tensor, o: Tensor) -> Tensor:
    return reference.trainable_eps_layer_norm(x, o.detach())


def _composed_formula(x: Tensor, o: Tensor) -> Tensor:
    return reference.composed_layer_norm(x)


_ALL = (
    *_of_member(MEMBERS[0]),
    Provider(
        "fused_norm-frozen",
        "layernorm_linear",
        "ours",
        "the same; CUDA graphs are captured under frozen_parameters, and keep folded weights",
        imported("fused_layernorm_linear", "fused_norm"),
        as_function,
        packages=("fused-norm",),
        refuse=needs_gpu,
        capture=frozen_parameters,
        modes=("forward",),
    ),
    Provider(
        "eager",
        LAYER_NORM.name,
        "baseline",
        "F.layer_norm without parameters: no gradient of the trained eps",
        given(F.layer_norm),
        _bind_f_layer_norm,
        formula=_without_gradient_of_o,
    ),
    Provider(
        "formula",
        LAYER_NORM.name,
        "peer",
        "v = x - mean(x); v / sqrt(o*o + mean(v*v)) in PyTorch",
        given(LAYER_NORM.reference),
        as_function,
    ),
    Provider(
        "compile",
        LAYER_NORM.name,
        "peer",
        "torch.compile of that formula",
        given(LAYER_NORM.reference),
        compiled(None),
    ),
    Provider(
        "fused_norm",
        LAYER_NORM.name,
        "ours",
        "trainable_eps_layer_norm, one row program",
        imported("trainable_eps_layer_norm", "fused_norm"),
        as_function,
        packages=("fused-norm",),
    ),
    Provider(
        "fused_norm-composed",
        LAYER_NORM.name,
        "ours",
        "composed.layer_norm: mean, norm and div as ops of their own, eps of 0",
        imported("layer_norm", "fused_norm.composed"),
        through(lambda function, x, o: function(x)),
        packages=("fused-norm",),
        formula=_composed_formula,
    ),
    *(provider for member in (*MEMBERS[1:], *BLOCKS) for provider in _of_member(member)),
)
PROVIDERS: dict[tuple[str, str], Provider] = {(p.op, p.name): p for p in _ALL}
NAMES: tuple[str, ...] = tuple(dict.fromkeys(p.name for p in _ALL))


def of_op(op: str) -> list[Provider]:
    """Return the providers of an op, the baseline first."""
    return [provider for provider in PROVIDERS.values() if provider.op == op]
