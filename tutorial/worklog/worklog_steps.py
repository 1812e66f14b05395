"""The steps of docs/worklog.md: what each computes, where its code is, what it is timed at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["product", "forward", "activation", "step"]


class Sizes(NamedTuple):
    """A product x w^T: x is [M, K], w is [N, K]."""

    M: int
    K: int
    N: int

    def __str__(self) -> str:
        return ",".join(map(str, self))


# The headline's shape, and the others of the log of trials.
HEADLINE = Sizes(8192, 4096, 4096)
LARGE = (
    HEADLINE,
    Sizes(8192, 4096, 12288),
    Sizes(8192, 2048, 2048),
    Sizes(16384, 1024, 1024),
    Sizes(16384, 768, 2304),
)
FEW = (Sizes(64, 4096, 4096), Sizes(16, 4096, 4096), Sizes(1, 4096, 4096))
# Every edge of a tile is inside the matrix, and the last k block is not full.
RAGGED = Sizes(200, 136, 264)


@dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        number: Its place.
        name: What `--step` takes as well as the number.
        title: Its heading.
        kind: What it computes.
        source: The file to read, in the repository.
        sizes: What it is timed at; the first is the table's.
        checked: What else it is checked at.
        topic: How the list of steps that was asked for calls it.
    """

    number: int
    name: str
    title: str
    kind: Kind
    source: str
    sizes: tuple[Sizes, ...]
    topic: str
    checked: tuple[Sizes, ...] = (RAGGED,)

    @property
    def extension(self) -> str | None:
        """The file of this folder that is built for it, None where the library's own serves."""
        return Path(self.source).stem if self.source.startswith("tutorial/") else None

    @property
    def flops(self) -> int:
        """Products, two for each FLOP of the first sizes."""
        return work(self.kind, self.sizes[0])


def work(kind: Kind, sizes: Sizes) -> int:
    """Return the floating-point operations of the products, which a LayerNorm adds little to.

    Args:
        kind: What is computed.
        sizes: Of what.
    """
    return (6 if kind == "step" else 2) * sizes.M * sizes.N * sizes.K


STEPS = (
    Step(
        1,
        "naive",
        "One thread, one element",
        "product",
        "tutorial/worklog/step1_naive.mojo",
        (HEADLINE,),
        "naive",
    ),
    Step(
        2,
        "tiled",
        "Tiles in shared memory and registers",
        "product",
        "tutorial/worklog/step2_tiled.mojo",
        (HEADLINE,),
        "tiled",
    ),
    Step(
        3,
        "tensor-cores",
        "TMA and wgmma",
        "product",
        "tutorial/worklog/step3_tensor_cores.mojo",
        (HEADLINE,),
        "TMA + wgmma",
    ),
    Step(
        4,
        "ring",
        "A ring between warps that copy and warps that multiply",
        "product",
        "tutorial/worklog/step4_ring.mojo",
        (HEADLINE,),
        "warp-specialized ring",
    ),
    Step(
        5,
        "clusters",
        "Blocks that stay, in clusters",
        "product",
        "tutorial/worklog/step5_clusters.mojo",
        LARGE,
        "persistent with clusters",
    ),
    Step(
        6,
        "no-spills",
        "Sums that never move",
        "product",
        "tutorial/worklog/step6_no_spills.mojo",
        LARGE,
        "no spills (SASS beside)",
    ),
    Step(
        7,
        "epilogue",
        "The norm in the epilogue",
        "forward",
        "tutorial/worklog/step7_epilogue.mojo",
        LARGE,
        "epilogue",
    ),
    Step(
        8,
        "statistics",
        "Statistics while multiplying",
        "forward",
        "tutorial/worklog/step8_statistics.mojo",
        LARGE,
        "statistics while multiplying",
        (Sizes(200, 192, 264),),
    ),
    Step(
        9,
        "ping-pong",
        "Ping-pong",
        "forward",
        "op/gemm/sm90/consumer.mojo",
        LARGE,
        "ping-pong",
    ),
    Step(
        10,
        "fold",
        "A fold that is centered, made in every call",
        "forward",
        "op/norm_linear/sm90/fold.mojo",
        LARGE,
        "centered fold with its numerics",
    ),
    Step(
        11,
        "few-rows",
        "Few rows",
        "forward",
        "op/gemm/sm90/few_rows/kernel.mojo",
        FEW,
        "few rows",
        (Sizes(33, 136, 264),),
    ),
    Step(
        12,
        "backward",
        "The backward",
        "step",
        "op/norm_linear/sm90/backward.mojo",
        LARGE,
        "backward",
    ),
    Step(
        13,
        "hidden-pass",
        "The pass that hides in a product",
        "step",
        "op/norm_linear/sm90/row_pass.mojo",
        (HEADLINE, Sizes(16384, 4096, 4096), Sizes(8192, 3072, 3072)),
        "hidden pass",
    ),
    Step(
        14,
        "activation",
        "The activation",
        "activation",
        "op/gemm/activation.mojo",
        LARGE,
        "activation",
    ),
)

# Steps that are timed in the same rounds, all at the headline's sizes. The first two are not among
# them: while they run, a GPU raises its clock.
GROUPS = {
    "forward": [s for s in STEPS[2:] if s.kind != "step" and s.sizes[0] == HEADLINE],
    "step": [s for s in STEPS if s.kind == "step"],
}


def find(text: str) -> Step:
    """Return the step of a number or a name.

    Args:
        text: Either.

    Raises:
        ValueError: If there is none.
    """
    for step in STEPS:
        if text in (str(step.number), step.name):
            return step
    names = ", ".join(f"{step.number} {step.name}" for step in STEPS)
    raise ValueError(f"no step {text}: {names}")
