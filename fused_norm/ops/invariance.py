"""The mode in which a row's bits depend on no other row: how it is entered, and who is in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_mode = ContextVar("fused_norm.batch_invariant", default=False)
# Until somebody enters the mode, nobody has to look whether they have: compilers least of all.
_was_entered = False


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Compute each row alike, whatever rows are beside it and however many.

        with fn.batch_invariant():
            y = fn.norm_linear(x, weight, bias, norm_weight=gamma, norm_bias=beta)

    Inside, a row of y (of the sum and the normalized rows as well) has the same bits at any place
    in a batch of any size; so does its row of the gradients of x and of the residual, when the
    backward is run, be it outside. The order of a row's sums depends on the other sizes, the dtype,
    the options, which gradients are wanted, and on the device: a CPU's bits are not a GPU's.
    Gradients of parameters, of scale and of shift are sums over the rows, and not part of this.

    It holds for `fused_layernorm_linear`, `norm_linear`, `norm_mlp`, `linear_add` and their
    modules: on CPUs in every dtype that has kernels, on Hopper GPUs in bfloat16 and float16 with
    features and outputs that are multiples of 8. PyTorch's own products, which choose a kernel by
    the number of rows, compute nothing but the weights' gradients. docs/numerics.md has the cost.

    The mode is that of a thread, or of an asyncio task. It may be nested, and decorate a function.
    A function that `torch.compile` compiles is compiled anew for a call in the mode; enter the mode
    outside of what is compiled. What `torch.export` traces in the mode stays in it.

    Raises:
        RuntimeError: From calls inside that nothing can compute this way: on another GPU, in
            another dtype, under a transform of `torch.func`, or on a DTensor; and from the backward
            where second derivatives are asked for.
    """
    global _was_entered
    _was_entered = True
    before = _mode.set(True)
    try:
        yield
    finally:
        _mode.reset(before)


def is_batch_invariant() -> bool:
    """Return whether the caller is in the mode."""
    return _was_entered and _mode.get()
