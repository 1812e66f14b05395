"""Registers ops with PyTorch, and calls them at minimal cost.

The registered ops are functional; a `torch.autograd.Function` ties a forward and a backward
together. Those that exported programs hold also have gradients of their own (`followed.py`).
A call crosses PyTorch's dispatcher once; below it only kernels run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from fused_norm.chain import library
from fused_norm.composition import NAMED
from fused_norm.ops.flops import tell_counters

TENSORS_SCHEMA = (
    "Tensor x, "
    + "".join(f"Tensor? {name}, " for name in NAMED[1:])
    + "Tensor[] weights, Tensor?[] biases"
)
SPEC_SCHEMA = (
    "str normalization, str activation, float eps, float weight_offset, bool joined, "
    "bool returns_sum, bool returns_norm, bool recompute, bool batch_invariant"
)
_library = torch.library.Library("fused_norm", "DEF")
# Used until the chain is loaded, which registers its own.
_first = torch.library.Library("fused_norm", "IMPL")
library.before_loading.append(_first._destroy)


def define(
    schema: str,
    fake: Callable[..., Any] | None = None,
    by_python: Callable[..., Any] | None = None,
    rows: int = 0,
) -> Callable[..., Any]:
    """Define an op that the chain computes, and return a function that calls it.

    Args:
        schema: The op's name, arguments and results.
        fake: Returns results of the right shape and dtype from fake arguments; None for an op that
            is never traced.
        by_python: Computes what the chain leaves to Python, as the op `..._by_python`; None if it
            leaves nothing.
        rows: How many of the first arguments (and all results) have a row for each row of the first
            one, so that a batch of them is more rows. 0 if results are sums over the rows.
    """
    name = schema[: schema.index("(")]
    _define(schema, fake, rows)

    def first(*arguments: Any) -> Any:
        if library.load() is not None:
            return overload(*arguments)
        if by_python is None:
            raise RuntimeError(f"fused_norm::{name} needs a C++ compiler, and there is none")
        return by_python(*arguments)

    for key in ("CPU", "CUDA"):
        _first.impl(name, first, key)
    if by_python is not None:
        _library.define(f"{name}_by_python{schema[len(name) :]}")
        for key in ("CPU", "CUDA"):
            _library.impl(f"{name}_by_python", _telling(by_python), key)
    overload: Callable[..., Any] = getattr(torch.ops.fused_norm, name).default
    return _called(overload)


def define_in_python(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Define an op that Python computes, and return a function that calls it.

    A call that nothing watches runs the kernel directly: PyTorch's dispatcher costs as much as a
    small kernel, and more for each argument.

    Args:
        schema: The op's name, arguments and results.
        kernel: Computes the results.
        fake: Returns results of the right shape and dtype from fake arguments.
    """
    name = schema[: schema.index("(")]
    _define(schema, fake, 0)
    run = unseen(kernel)
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    dispatched = _called(getattr(torch.ops.fused_norm, name).default)

    def call(*arguments: Any) -> Any:
        if is_watched() or is_profiled() or not all(map(_is_plain, arguments)):
            return dispatched(*arguments)
        return run(*arguments)

    return call


def _is_plain(argument: Any) -> bool:
    """Return whether the dispatcher need not process an argument before a kernel."""
    if not isinstance(argument, Tensor):
        return True
    return (
        type(argument) in (Tensor, torch.nn.Parameter)
        and (argument.is_cuda or argument.is_cpu)
        and not (argument.is_neg() or argument._is_zerotensor())
    )


def unseen(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel in Python whose ops neither autograd nor autocast sees.

    Args:
        kernel: The kernel, whose first argument is a tensor.
    """

    def run(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            if not torch._C._is_any_autocast_enabled():
                return kernel(*arguments)
            with torch.autocast(arguments[0].device.type, enabled=False):
                return kernel(*arguments)

    return run


def _telling(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that reports its exceptions to the chain, which calls it."""

    def call(*arguments: Any) -> Any:
        try:
            return kernel(*arguments)
        except Exception as error:
            # Kept for the chain to raise again: PyTorch before 2.13 loses messages in C++.
            if (chain := library.load()) is not None:
                chain.chain_python_failed(str(error).encode())
            raise

    return call


_when_exporting: list[Callable[[], None]] = []


def when_exporting(run: Callable[[], None]) -> None:
    """Have a function called once, before the first op of an exported program is traced.

    Args:
        run: Registers what only such programs need, and other calls would pay for.
    """
    _when_exporting.append(run)


def _exported(fake: Callable[..., Any]) -> Callable[..., Any]:
    """Return a fake of an op that notices exports."""

    @functools.wraps(fake)
    def traced(*arguments: Any) -> Any:
        while _when_exporting and is_exporting():
            _when_exporting.pop()()
        return fake(*arguments)

    return traced


def _define(schema: str, fake: Callable[..., Any] | None, rows: int) -> None:
    name = schema[: schema.index("(")]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    if fake is not None:
        torch.library.register_fake(f"fused_norm::{name}", _exported(fake), lib=_library)
    if fake is not None and "!" not in schema:
        torch.library.register_vmap(f"fused_norm::{name}", _batched(name, rows), lib=_library)


def register_followed(name: str, followed: Callable[..., Any]) -> None:
    """Register what an op does where autograd would follow it, as in exported programs.

    Args:
        name: The op's name.
        followed: Returns the results, several in a tuple, with gradients, from a function that
            computes the op where autograd does not look, and its arguments.
    """
    overload = getattr(torch.ops.fused_norm, name).default
    # Of schemas with `Tensor[]`; those with several results return a tuple.
    is_list = len(overload._schema.returns) == 1

    def below(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*arguments)

    def run(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            results = followed(below, arguments)
            return list(results) if is_list and isinstance(results, tuple) else results
        return below(*arguments)

    _library.impl(name, run, "Autograd")
    # Tracers look an op's kernels up once.
    overload._dispatch_cache.clear()


def _called(overload: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        if is_compiling():
            return overload(*arguments)
        tell_counters()
        try:
            return overload(*arguments)
        except RuntimeError as error:
            # The stable ABI cannot pass on PyTorch's exception types.
            if type(error) is RuntimeError and "out of memory" in str(error):
                raise torch.OutOfMemoryError(str(error)) from None
            raise

    return call


def differentiable(function: type[torch.autograd.Function], count: int = 1) -> Callable[..., Any]:
    """Return a function that applies an autograd function and returns its first results.

    PyTorch looks up the signature of a `forward` that is split from `setup_context` on every call,
    which takes 20 us. Only transforms and compilers need the split, so other calls avoid it.

    Args:
        function: A function that has `setup_context`, and whose `forward` returns a tuple. Only the
            first results have gradients.
        count: The number of these; a single one is returned alone, several as a tuple.
    """
    which: Any = 0 if count == 1 else slice(count)

    class Eager(torch.autograd.Function):
        """The same function with setup in its forward."""

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            output: tuple[Tensor, ...] = function.forward(*arguments)
            function.setup_context(ctx, arguments, output)
            return output[which]

        backward = function.backward

    Eager.__name__ = Eager.__qualname__ = f"Eager{function.__name__}"
    # What `Eager.apply` does without an active transform, 3 us faster.
    eager = super(torch.autograd.Function, Eager).apply

    def apply(*arguments: Any) -> Any:
        if is_exporting():
            # Dynamo's programs hold the forward without gradients; an op itself has them.
            return function.forward(*arguments)[which]
        if is_watched():
            return function.apply(*arguments)[which]
        return eager(*arguments)

    return apply


def may_follow() -> bool:
    """Return whether a backward may follow: an exported program has none."""
    return torch.is_grad_enabled() and not is_exporting()


def is_exporting() -> bool:
    """Return whether a program is being exported.

    It reads the flag behind `torch.compiler.is_exporting`, which Dynamo of PyTorch 2.11 takes to be
    true in everything it compiles.
    """
    return torch.compiler._is_exporting_flag


def each_once(tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return an autograd function's tensors; when compiling, views of those that repeat.

    PyTorch's compiler gives an autograd function each tensor once: it breaks the graph if one
    comes twice, like the residual of an MLP, and 2.11 loses one of the gradients.
    """
    if not is_compiling():
        return tensors
    found: list[Tensor | None] = []
    for tensor in tensors:
        is_again = tensor is not None and any(tensor is other for other in found)
        found.append(tensor.view_as(tensor) if is_again and tensor is not None else tensor)
    return found


def is_forward_mode() -> bool:
    """Return whether tensors may carry tangents, for forward-mode derivatives."""
    return forward_ad._current_level >= 0


def without_none(gradients: list[Tensor | None], like: Tensor) -> list[Tensor]:
    """Return the gradients with empty tensors instead of None, which a schema does not allow."""
    return [like.new_empty(0) if g is None else g for g in gradients]


def _batched(name: str, rows: int) -> Callable[..., Any]:
    """Return a vmap rule: a batch of rows becomes more rows, other batches separate calls."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        op = getattr(torch.ops.fused_norm, name).default
        batched = [isinstance(dim, int) for dim in in_dims]
        if rows and not any(batched[rows:]):
            result = op(
                *(
                    t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
                    for t, dim in zip(arguments[:rows], in_dims, strict=False)
                ),
                *arguments[rows:],
            )
        else:
            calls = [
                op(
                    *(
                        t.select(dim, i) if isinstance(dim, int) else t
                        for t, dim in zip(arguments, in_dims, strict=True)
                    )
                )
                for i in range(info.batch_size)
            ]
            if isinstance(calls[0], Tensor):
                result = torch.stack(calls)
            else:
                result = tuple(torch.stack(outputs) for outputs in zip(*calls, strict=True))
        return result, 0 if isinstance(result, Tensor) else (0,) * len(result)

    return rule


def _is_compiling() -> bool:
    return torch.compiler.is_compiling() or torch._guards.CompileContext.try_get() is not None


# Older releases of PyTorch report what Dynamo traces, but not what AOTAutograd calls later with
# fake tensors.
is_compiling: Callable[[], bool] = (
    torch.compiler.is_compiling
    if hasattr(torch.compiler, "_compile_session_context")
    else _is_compiling
)


def is_watched() -> bool:
    """Return whether a compiler, a tracer, a transform or a mode would see PyTorch's own ops.

    PyTorch's dispatcher lets them see ours as well. It costs as much as a small kernel, so a call
    that nothing watches bypasses it.
    """
    return bool(
        is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state()
        or is_forward_mode()
    )


def is_profiled() -> bool:
    """Return whether a profiler is running."""
    return not is_compiling() and profiler._is_profiler_enabled
