"""Compares a run with an earlier one: what changed by more than the noise of both."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.report import duration
from benchmarks.runs import Measurement, Result, Run

# No change below this counts, however quiet the two runs were.
LEAST_NOISE = 0.02


@dataclass(frozen=True)
class Move:
    """One time in two runs.

    Attributes:
        name: What was measured.
        before: Median in the earlier run, in microseconds.
        after: Median in the later run.
        noise: Relative change that the spreads of both explain.
        eager: How eager changed meanwhile, as a ratio: what the machine did.
    """

    name: str
    before: float
    after: float
    noise: float
    eager: float

    @property
    def change(self) -> float:
        """Ratio of the later time to the earlier one, with the machine's own change taken out."""
        return self.after / self.before / self.eager

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the noise does not explain the change."""
        return abs(self.change - 1) > self.noise


def moves(before: Run, after: Run) -> list[Move]:
    """Return every time that both runs have, of all providers but the baseline.

    Args:
        before: The earlier run.
        after: The later run.
    """
    earlier = {measurement.key(): measurement for measurement in before.measurements}
    found = []
    for new in after.measurements:
        old = earlier.get(new.key())
        if old is None:
            continue
        for result in new.results:
            counterpart = old.of(result.provider)
            if counterpart is None or after.role(new.op, result.provider) == "baseline":
                continue
            for metric in result.timings:
                if metric in counterpart.timings:
                    found.append(_move(old, new, counterpart, result, metric))
    return found


def show(before: Run, after: Run, console: Console) -> list[Move]:
    """Print what changed by more than the noise, and return it.

    Args:
        before: The earlier run.
        after: The later run.
        console: Where to.
    """
    all_moves = moves(before, after)
    moved = sorted((m for m in all_moves if m.is_beyond_noise), key=lambda m: -m.change)
    console.print(
        f"\nAgainst the run of {before.environment.date} at {before.environment.commit or '?'}: "
        f"{len(moved)} of {len(all_moves)} times moved by more than the noise.",
        highlight=False,
    )
    for old, new, what in (
        (before.environment.cpu, after.environment.cpu, "CPU"),
        (before.environment.gpu, after.environment.gpu, "GPU"),
        (before.environment.threads, after.environment.threads, "number of threads"),
        (before.environment.torch, after.environment.torch, "PyTorch"),
    ):
        if old != new:
            console.print(f"The {what} differs: {old} before, {new} now.", highlight=False)
    if not moved:
        return moved
    table = Table(header_style="dim")
    table.add_column("measurement")
    for name in ("before", "now", "eager", "change", "noise"):
        table.add_column(name, justify="right")
    for move in moved:
        color = "red" if move.change > 1 else "green"
        table.add_row(
            move.name,
            duration(move.before),
            duration(move.after),
            f"{move.eager - 1:+.1%}",
            f"[{color}]{move.change - 1:+.1%}[/]",
            f"{move.noise:.1%}",
        )
    console.print(table)
    console.print("A change is what is left of it after eager's own.", highlight=False)
    return moved


def _move(old: Measurement, new: Measurement, was: Result, now: Result, metric: str) -> Move:
    involved = [was.timings[metric], now.timings[metric]]
    eager = 1.0
    baselines = [m.of("eager") for m in (old, new)]
    known = [b.timings[metric] for b in baselines if b is not None and metric in b.timings]
    if len(known) == 2:
        eager = known[1].median / known[0].median
        involved += known
    noise = sum(timing.spread / 2 for timing in involved)
    name = f"{' '.join(new.key()[:3])} {'x'.join(map(str, new.shape))} {now.provider} {metric}"
    return Move(
        name,
        was.timings[metric].median,
        now.timings[metric].median,
        max(noise, LEAST_NOISE),
        eager,
    )
