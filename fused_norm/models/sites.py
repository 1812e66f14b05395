"""What became of each norm, sum, head and layer of a model: the records that `explain` prints."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

RESIDUAL = "residual"
HEAD = "head"
LINEAR = "linear"
ROTARY = "rotary"
ATTENTION = "attention"
# Kinds that are not norms.
OTHERS = (RESIDUAL, HEAD, LINEAR, ROTARY, ATTENTION)


@dataclass
class Site:
    """A norm of a model, or another part that may become a call: a sum, head, rotation or layer.

    A head is a Linear layer and the cross entropy of its logits. A rotary embedding is one of
    queries or of keys, with the norm of their heads. Separate Linear layers are listed if some are
    to be in FP8, and attention if it is called otherwise: it stays PyTorch's.

    Attributes:
        path: Path of the module that it is, or that has its code; for others, the Linear layer's.
        kind: `"layer_norm"`, `"rms_norm"`, `"residual"`, `"head"`, `"rotary"`, `"attention"` or
            `"linear"`.
        shape: The input's shape; dynamic sizes by name.
        dtype: Its dtype.
        linears: How many Linear layers read it; for other kinds 1, the layer itself, or none.
        fused: Whether it is part of calls of ours.
        calls: Their descriptions, such as `"norm_mlp: residual, swiglu"`.
        implementation: Which code computes them.
        reason: Why it is not fused; `""` if it is.
        bytes_saved: Bytes of tensors that a forward no longer writes.
        ops_before: Ops that the calls replace.
        ops_after: Kernels and products that the calls launch.
        seconds_before: The time of those ops, 0 if not measured.
        seconds_after: The time of the calls.
    """

    path: str
    kind: str
    shape: tuple[str, ...] = ()
    dtype: str = ""
    linears: int = 0
    fused: bool = False
    calls: list[str] = field(default_factory=list)
    implementation: str = ""
    reason: str = ""
    bytes_saved: int = 0
    ops_before: int = 0
    ops_after: int = 0
    seconds_before: float = 0.0
    seconds_after: float = 0.0

    def describe(self, rows: Tensor) -> Site:
        """Set the shape and the dtype from those of the input; return the site."""
        self.shape = tuple(map(str, rows.shape))
        self.dtype = str(rows.dtype).removeprefix("torch.")
        return self
