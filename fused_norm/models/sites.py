"""What became of each norm of a model: the records that `explain` prints."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Site:
    """A norm of a model.

    Attributes:
        path: Path of the module that it is, or is written in.
        kind: `"layer_norm"` or `"rms_norm"`.
        shape: Shape of what is normalized; sizes that are dynamic by their names.
        dtype: Its dtype.
        fused: Whether it is part of a call of ours.
        calls: Those calls in words, as `norm_mlp: residual, swiglu`.
        linears: How many Linear layers read it.
        reason: Why it is not fused; `""` where it is.
        bytes_saved: Of tensors that are neither written nor read any more in a forward.
        ops_before: Ops that the calls stand for.
    """

    path: str
    kind: str
    shape: tuple[str, ...] = ()
    dtype: str = ""
    fused: bool = False
    calls: list[str] = field(default_factory=list)
    linears: int = 0
    reason: str = ""
    bytes_saved: int = 0
    ops_before: int = 0
