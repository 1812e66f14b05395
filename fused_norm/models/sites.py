"""What became of each norm, sum, head and layer of a model: the record that `explain` prints."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

RESIDUAL = "residual"
HEAD = "head"
LINEAR = "linear"
ROTARY = "rotary"
# Kinds that are no norms.
OTHERS = (RESIDUAL, HEAD, LINEAR, ROTARY)


@dataclass
class Site:
    """A norm of a model, or what else may become a call: a sum, a head, a rotation, a Linear layer.

    A head is a Linear layer and the cross entropy of its logits. A rotary embedding is one of
    queries or of keys, with the norm of their heads. Linear layers of their own are
    listed where some are to be in FP8.

    Attributes:
        path: Path of the module that it is, or is written in; of others that of the Linear layer.
        kind: `"layer_norm"`, `"rms_norm"`, `"residual"`, `"head"`, `"rotary"` or
            `"linear"`.
        shape: Of what is normalized or multiplied; sizes that are dynamic by their names.
        dtype: Its dtype.
        linears: How many Linear layers read it; of others 1, the layer's own.
        fused: Whether it is part of calls of ours.
        calls: Those in words, as `"norm_mlp: residual, swiglu"`.
        implementation: What computes them.
        reason: Why it is not fused; `""` where it is.
        bytes_saved: Of tensors that a forward does not write any more.
        ops_before: Ops that the calls stand for.
        ops_after: Kernels and products that the calls launch.
        seconds_before: What those ops take, 0 where nobody measured.
        seconds_after: What the calls take.
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
        """Take the shape and the dtype from what is normalized or multiplied; return the site."""
        self.shape = tuple(map(str, rows.shape))
        self.dtype = str(rows.dtype).removeprefix("torch.")
        return self
