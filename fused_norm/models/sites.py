"""What became of each norm of a model: the record that `explain` prints."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Site:
    """A norm of a model.

    Attributes:
        path: Path of the module that it is, or is written in.
        kind: `"layer_norm"` or `"rms_norm"`.
        shape: Of what is normalized; sizes that are dynamic by their names.
        dtype: Its dtype.
        linears: How many Linear layers read it.
        fused: Whether it is part of calls of ours.
        calls: Those in words, as `"norm_mlp: residual, swiglu"`.
        way: Which way they run.
        reason: Why it is not fused; `""` where it is.
        bytes_saved: Of tensors that a forward does not write any more.
        ops_before: Ops that the calls stand for.
        ops_after: Kernels and products that the calls launch.
    """

    path: str
    kind: str
    shape: tuple[str, ...] = ()
    dtype: str = ""
    linears: int = 0
    fused: bool = False
    calls: list[str] = field(default_factory=list)
    way: str = ""
    reason: str = ""
    bytes_saved: int = 0
    ops_before: int = 0
    ops_after: int = 0
