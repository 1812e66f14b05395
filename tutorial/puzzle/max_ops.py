"""The puzzle's ops through MAX: the only module that imports ``max``.

``CustomOpLibrary`` compiles one graph for every set of shapes, hands the sizes to the kernels as
compile-time parameters and checks neither against the other: a wrong size reads out of bounds. So
everything is checked here, before MAX sees it.
"""

from __future__ import annotations

import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from max.experimental.torch import CustomOpLibrary
from mojo.paths import MojoCompilationError
from torch import Tensor

Algorithm = Literal["fused", "unfused"]

MAX_THREADS = 1024
"""Threads in a block, at most: the unfused kernels give a thread to each element of a row."""

MAX_SEQ_LEN = 65535
"""Blocks on the y axis of a grid, at most."""

OP_DIRECTORY = Path(__file__).resolve().parents[2] / "op/puzzle"
"""The Mojo package that registers the puzzle's ops: of all of `op`, MAX would read every kernel."""
_lock = threading.Lock()
_loaded: tuple[Path, int, CustomOpLibrary] | None = None


class CompileError(RuntimeError):
    """The Mojo sources do not compile; the message holds the compiler's."""


@dataclass(frozen=True)
class Sizes:
    """The compile-time parameters of the puzzle's kernels."""

    batch_size: int
    seq_len: int
    hidden_dim: int
    output_dim: int

    @classmethod
    def of(cls, x: Tensor, linear_weight: Tensor) -> Sizes:
        """Read the sizes from the tensors that have them all."""
        if x.dim() != 3:
            raise ValueError(f"x must have 3 dimensions, got shape {tuple(x.shape)}")
        if linear_weight.dim() != 2:
            raise ValueError(
                f"linear_weight must have 2 dimensions, got shape {tuple(linear_weight.shape)}"
            )
        batch_size, seq_len, hidden_dim = x.shape
        return cls(batch_size, seq_len, hidden_dim, linear_weight.shape[0])

    def check(self) -> None:
        """Raise ValueError for sizes that the kernels cannot serve."""
        limits = {"seq_len": MAX_SEQ_LEN, "hidden_dim": MAX_THREADS, "output_dim": MAX_THREADS}
        for name, size in asdict(self).items():
            limit = limits.get(name, 2**31 - 1)
            if not 1 <= size <= limit:
                raise ValueError(f"{name} must be from 1 to {limit}, got {size}")


def library(directory: Path | None = None) -> CustomOpLibrary:
    """Return the op library of this process, loading it the first time (some seconds).

    Args:
        directory: A Mojo package that registers the puzzle's ops; by default the one loaded
            already, else ``OP_DIRECTORY``.

    Raises:
        CompileError: If the package does not compile.
        RuntimeError: If this process already holds the library of another directory, since two ops
            of one name silently replace each other; or if it was forked from one that holds a
            library, since MAX then hangs.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            path = (directory or OP_DIRECTORY).resolve()
            try:
                _loaded = (path, os.getpid(), CustomOpLibrary(path))
            except MojoCompilationError as error:
                raise CompileError(error.stderr) from error
        path, pid, loaded = _loaded
        if pid != os.getpid():
            raise RuntimeError("MAX cannot be used after fork(); start the process with 'spawn'")
        if directory is not None and directory.resolve() != path:
            raise RuntimeError(f"this process already uses the ops of {path}, not of {directory}")
        return loaded


def layernorm_linear(
    x: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor,
    *,
    algorithm: Algorithm = "fused",
    sizes: Sizes | None = None,
) -> Tensor:
    """Compute LayerNorm and Linear with the puzzle's forward kernels.

    Args:
        x: Input of shape ``[batch_size, seq_len, hidden_dim]``.
        ln_weight: Scale, ``[hidden_dim]``.
        ln_bias: Shift, ``[hidden_dim]``.
        linear_weight: Matrix, ``[output_dim, hidden_dim]``.
        linear_bias: Bias, ``[output_dim]``.
        algorithm: One kernel, or LayerNorm, transpose, matmul and bias after each other.
        sizes: Compile-time parameters; those of the tensors by default.

    Returns:
        A tensor of shape ``[batch_size, seq_len, output_dim]``.

    Raises:
        ValueError: If the kernels cannot serve the sizes, or tensors and sizes disagree.
    """
    if algorithm not in ("fused", "unfused"):
        raise ValueError(f"algorithm must be 'fused' or 'unfused', got {algorithm!r}")
    sizes = sizes or Sizes.of(x, linear_weight)
    inputs = _checked(
        sizes,
        x=x,
        ln_weight=ln_weight,
        ln_bias=ln_bias,
        linear_weight=linear_weight,
        linear_bias=linear_bias,
    )
    output = x.new_empty(sizes.batch_size, sizes.seq_len, sizes.output_dim)
    op = library().layernorm_linear[{"algorithm": algorithm, **asdict(sizes)}]
    _run(op, [output], inputs)
    return output


def layernorm_linear_backward(
    grad_output: Tensor,
    x: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    linear_weight: Tensor,
    *,
    sizes: Sizes | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the five gradients with the puzzle's backward kernel.

    Args:
        grad_output: Incoming gradient, ``[batch_size, seq_len, output_dim]``.
        x: Input of the forward pass.
        ln_weight: Scale, ``[hidden_dim]``.
        ln_bias: Shift, ``[hidden_dim]``.
        linear_weight: Matrix, ``[output_dim, hidden_dim]``.
        sizes: Compile-time parameters; those of the tensors by default.

    Returns:
        The gradients of ``x``, ``ln_weight``, ``ln_bias``, ``linear_weight`` and ``linear_bias``.

    Raises:
        ValueError: If the kernels cannot serve the sizes, or tensors and sizes disagree.
    """
    sizes = sizes or Sizes.of(x, linear_weight)
    inputs = _checked(
        sizes,
        grad_output=grad_output,
        x=x,
        ln_weight=ln_weight,
        ln_bias=ln_bias,
        linear_weight=linear_weight,
    )
    _, *differentiated = inputs
    gradients = [torch.empty_like(tensor) for tensor in differentiated]
    gradients.append(x.new_empty(sizes.output_dim))
    _run(library().layernorm_linear_backward[asdict(sizes)], gradients, inputs)
    grad_x, grad_ln_weight, grad_ln_bias, grad_linear_weight, grad_linear_bias = gradients
    return grad_x, grad_ln_weight, grad_ln_bias, grad_linear_weight, grad_linear_bias


class LayerNormLinearFunction(torch.autograd.Function):
    """Joins the two ops for autograd: ``apply(x, four parameters, algorithm)``."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        """Compute the output and keep what the backward pass reads."""
        *tensors, algorithm = args
        ctx.save_for_backward(*tensors[:4])
        return layernorm_linear(*tensors, algorithm=algorithm)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the five gradients for the incoming one."""
        (grad_output,) = grad_outputs
        return (*layernorm_linear_backward(grad_output, *ctx.saved_tensors), None)


def _checked(sizes: Sizes, **tensors: Tensor) -> list[Tensor]:
    """Return the tensors as MAX takes them, or raise ValueError."""
    sizes.check()
    shapes = {
        "x": (sizes.batch_size, sizes.seq_len, sizes.hidden_dim),
        "ln_weight": (sizes.hidden_dim,),
        "ln_bias": (sizes.hidden_dim,),
        "linear_weight": (sizes.output_dim, sizes.hidden_dim),
        "linear_bias": (sizes.output_dim,),
        "grad_output": (sizes.batch_size, sizes.seq_len, sizes.output_dim),
    }
    device = tensors["x"].device
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"x must be on a CPU or a GPU, got device {device}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(f"{name} must have shape {shapes[name]}, got {tuple(tensor.shape)}")
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} must be float32, got {tensor.dtype}")
        if tensor.device != device:
            raise ValueError(f"{name} must be on {device} like x, got {tensor.device}")
    # DLPack refuses tensors that need a gradient or have gaps, and forgets a pending negation.
    return [tensor.detach().resolve_neg().contiguous() for tensor in tensors.values()]


def _run(op: Any, outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """Run an op in the order of PyTorch's current stream."""
    device = inputs[0].device
    # MAX orders its work after PyTorch's default stream and no other.
    elsewhere = device.type == "cuda" and torch.cuda.current_stream(
        device
    ) != torch.cuda.default_stream(device)
    if elsewhere:
        torch.cuda.current_stream(device).synchronize()
    try:
        op(*outputs, *inputs)
    except RuntimeError as error:
        if "Failed to compile" not in str(error):
            raise
        raise CompileError("the compiler's messages are above") from error
    if elsewhere:
        torch.cuda.synchronize(device)
