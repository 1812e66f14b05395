"""What a run is asked to do, and who hears how it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.case import Case, Mode
from benchmarks.runs import Measurement, Run
from benchmarks.timing import Budget


@dataclass(frozen=True)
class Plan:
    """What to measure and how.

    Attributes:
        cases: In order.
        modes: Of each case.
        device: Where.
        names: Providers to measure along with the baselines, or None for all that are installed.
        budget: How long for each provider.
        seed: Seed of the random inputs.
        is_warm: Whether one set of inputs is used over and over, so that it stays in the cache.
        most_sets: Sets of inputs at most.
        interference: Whether to measure what our calls do to PyTorch's.
        measures_memory: Whether to measure memory.
        time_limit: Seconds after which no further measurement begins.
        commit: The git commit, where there is no checkout to ask.
        earlier: A run to resume: what it has measured is kept and not measured again.
    """

    cases: Sequence[Case]
    modes: Sequence[Mode]
    device: torch.device
    names: Sequence[str] | None = None
    budget: Budget = field(default_factory=Budget)
    seed: int = 0
    is_warm: bool = False
    most_sets: int = 32
    interference: bool = False
    measures_memory: bool = True
    time_limit: float = float("inf")
    commit: str | None = None
    earlier: Run | None = None

    @property
    def steps(self) -> int:
        """How many measurements there are."""
        return len(self.cases) * len(self.modes)


class Listener:
    """Hears what a run does; this one keeps it to itself."""

    def doing(self, text: str) -> None:
        """Hear what is being done now."""

    def did(self, run: Run, measurement: Measurement) -> None:
        """Hear of a measurement that is done."""

    def skipped(self, count: int) -> None:
        """Hear of measurements that will not be made."""
