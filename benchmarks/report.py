"""How a run is shown: its head, tables for people, CSV for spreadsheets."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.blocks import EVERY
from benchmarks.runs import Interference, Measurement, Result, Run, Timing

CSV_FIELDS = (
    *("op", "mode", "dtype", "shape", "provider", "status", "metric"),
    *("median_us", "p20_us", "p80_us", "rounds", "vs_eager", "vs_floor"),
    *("tflops", "gb_per_s", "peak_bytes", "max_error", "message"),
)
INTERFERENCE = ("after itself", "after eager", "after ours", "ours vs itself", "ours vs eager")


def head(run: Run) -> list[tuple[str, str]]:
    """Return what was measured on, as pairs of a name and its value.

    Args:
        run: The run.
    """
    e = run.environment
    mebibytes, gibibytes = 2**20, 2**30
    load = f"load {e.load:.1f} before"
    machine = [("cpu", f"{e.cpu}, {e.cores} cores, {e.threads} threads, {load}")]
    if e.device == "cuda":
        memory = f"{e.memory_bytes / gibibytes:.0f} GiB, L2 {e.cache_bytes / mebibytes:.0f} MiB"
        machine += [
            ("gpu", f"{e.gpu}, {memory}, driver {e.driver}"),
            ("clocks", f"{e.clocks} (SM, memory, SM at most, power limit)"),
            ("float32 products", e.tf32),
        ]
    else:
        memory = f"{e.memory_bytes / gibibytes:.0f} GiB"
        machine.append(
            ("memory", f"{memory}, last-level cache {e.cache_bytes / mebibytes:.0f} MiB")
        )
    cuda = f" (CUDA {e.cuda})" if e.cuda else ""
    software = f"torch {e.torch}{cuda}, max {e.max or '-'}, mojo {e.mojo or '-'}, Python {e.python}"
    reached = "; ".join(
        f"{c.dtype} product {_rate(c.flops_per_second, 'FLOP/s')}, "
        f"copy {_rate(c.bytes_per_second, 'B/s')}"
        for c in run.ceilings
    )
    unfinished = "" if run.finished else ", UNFINISHED"
    return [
        *machine,
        ("software", software),
        ("fused_norm", f"{e.fused_norm} at {e.commit or 'no commit'}"),
        ("reached by torch", reached or "not measured"),
        ("run", f"{e.date}, {run.wall_seconds:.0f} s, seed {run.seed}{unfinished}"),
    ]


def show(run: Run, console: Console) -> None:
    """Print a run.

    Args:
        run: The run.
        console: Where to.
    """
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in head(run):
        table.add_row(name, escape(value))
    for info in run.providers:
        if info.problem:
            table.add_row(f"no {info.name}", escape(f"{info.op}: {info.problem}"))
    console.print(table)
    if run.environment.load > run.environment.cores / 2:
        warning = "Other work was running on this machine: the times are not to be trusted."
        console.print(warning, style="red")
    tables: dict[tuple[str, str, str], list[Measurement]] = {}
    for measurement in run.measurements:
        tables.setdefault(measurement.key()[:3], []).append(measurement)
    for group in tables.values():
        console.print()
        console.print(_table(run, group))
    if run.interference:
        console.print()
        console.print(_interference_table(run))


def line(run: Run, measurement: Measurement) -> str:
    """Return a measurement in one line: what eager takes, and the others as ratios to it.

    Args:
        run: The run.
        measurement: The measurement.
    """
    metric = measurement.metric
    sizes = "x".join(map(str, measurement.shape))
    parts = []
    for result in measurement.results:
        if metric not in result.timings:
            parts.append(f"{result.provider} {result.status}")
        elif run.role(measurement.op, result.provider) == "baseline":
            parts.append(f"{result.provider} {duration(result.timings[metric].median)}")
        else:
            parts.append(f"{result.provider} {result.vs_eager.get(metric, float('nan')):.2f}")
    name = f"{measurement.op} {measurement.mode} {measurement.dtype} {sizes}"
    return f"{name}: {', '.join(parts)}"


def duration(microseconds: float) -> str:
    """Return a time with three digits and its unit."""
    for limit, unit, scale in ((1e3, "us", 1.0), (1e6, "ms", 1e3)):
        if microseconds < limit:
            return f"{microseconds / scale:.3g} {unit}"
    return f"{microseconds / 1e6:.3g} s"


def size(count: int) -> str:
    """Return a number of bytes with three digits and its unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"


def roofline(run: Run, measurement: Measurement) -> float | None:
    """Return the least time that the best rates seen in the run allow, in microseconds.

    The rates are the highest of PyTorch's probes and of everything measured since: a probe that
    is slower than what it bounds bounds nothing.

    Args:
        run: The run.
        measurement: One of its measurements.
    """
    probe = next((c for c in run.ceilings if c.dtype == measurement.dtype), None)
    if probe is None:
        return None
    flops, bytes_ = probe.flops_per_second, probe.bytes_per_second
    for other in run.measurements:
        if other.dtype != measurement.dtype:
            continue
        for result in other.results:
            timing = _primary(other, result)
            # The floor computes less than the op's FLOPs and bytes say.
            if timing is None or run.role(other.op, result.provider) == "floor":
                continue
            flops = max(flops, 1e6 * other.flops / timing.median)
            if other.is_past_cache:
                bytes_ = max(bytes_, 1e6 * other.bytes / timing.median)
    return 1e6 * max(measurement.flops / flops, measurement.bytes / bytes_)


def write_csv(run: Run, path: Path) -> None:
    """Write one row for each metric of each result.

    Args:
        run: The run.
        path: The file to write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, CSV_FIELDS)
        writer.writeheader()
        for measurement in run.measurements:
            for result in measurement.results:
                writer.writerows(_csv_rows(measurement, result))


def _csv_rows(measurement: Measurement, result: Result) -> Iterable[dict[str, object]]:
    common: dict[str, object] = {
        "op": measurement.op,
        "mode": measurement.mode,
        "dtype": measurement.dtype,
        "shape": "x".join(map(str, measurement.shape)),
        "provider": result.provider,
        "status": result.status,
        "peak_bytes": result.peak_bytes,
        "max_error": max(result.errors.values(), default=None),
        "message": result.message,
    }
    if not result.timings:
        yield common
    for metric, timing in result.timings.items():
        yield common | {
            "metric": metric,
            "median_us": timing.median,
            "p20_us": timing.p20,
            "p80_us": timing.p80,
            "rounds": timing.rounds,
            "vs_eager": result.vs_eager.get(metric),
            "vs_floor": result.vs_floor.get(metric),
            "tflops": measurement.flops / timing.median / 1e6,
            "gb_per_s": measurement.bytes / timing.median / 1e3,
        }


def _table(run: Run, measurements: list[Measurement]) -> Table:
    first = measurements[0]
    on_gpu = run.environment.device == "cuda"
    title = f"{EVERY[first.op].title}, {first.mode}, {first.dtype}"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
    table.add_column("x".join("MKN"[: len(first.shape)]))
    table.add_column("provider")
    for name in (
        *(("graph", "launch", "host") if on_gpu else ("time",)),
        *("spread", "vs eager", "vs floor", "FLOP/s", "B/s", "roofline", "peak"),
    ):
        table.add_column(name, justify="right")
    table.add_column("remark", overflow="fold", max_width=40)
    for measurement in measurements:
        names = ["x".join(map(str, measurement.shape))]
        if not measurement.is_past_cache:
            names.append("[dim]in cache[/dim]")
        for index, result in enumerate(measurement.results):
            name = names[index] if index < len(names) else ""
            table.add_row(name, *_cells(run, measurement, result, on_gpu))
        table.add_section()
    return table


def _cells(run: Run, measurement: Measurement, result: Result, on_gpu: bool) -> list[str]:
    is_ours = run.role(measurement.op, result.provider) == "ours"
    provider = f"[bold]{result.provider}[/bold]" if is_ours else result.provider
    metrics = ("graph", "launch", "host") if on_gpu else ("wall",)
    remark = escape(result.message)
    if result.status != "ok":
        remark = (
            f"[red]{result.status}[/red] {remark}" if result.status != "unsupported" else remark
        )
    timing = _primary(measurement, result)
    times = [duration(result.timings[m].median) if m in result.timings else "-" for m in metrics]
    least = roofline(run, measurement)
    if timing is None:
        return [provider, *times, *["-"] * 7, remark]
    return [
        provider,
        *times,
        f"{timing.spread:.0%}",
        _ratio(result.vs_eager.get(measurement.metric), is_ours),
        _ratio(result.vs_floor.get(measurement.metric), False),
        _rate(1e6 * measurement.flops / timing.median, ""),
        _rate(1e6 * measurement.bytes / timing.median, ""),
        "-" if least is None else f"{least / timing.median:.0%}",
        "-" if result.peak_bytes is None else size(result.peak_bytes),
        remark,
    ]


def _primary(measurement: Measurement, result: Result) -> Timing | None:
    return result.timings.get(measurement.metric) or next(iter(result.timings.values()), None)


def _ratio(value: float | None, is_colored: bool) -> str:
    if value is None:
        return "-"
    text = f"{value:.2f}"
    if not is_colored:
        return text
    return f"[bold {'green' if value <= 1 else 'red'}]{text}[/]"


def _interference_table(run: Run) -> Table:
    title = "F.linear after another op"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
    table.add_column("MxKxN")
    table.add_column("dtype")
    for name in INTERFERENCE:
        table.add_column(name, justify="right")
    for found in run.interference:
        table.add_row(*interference_cells(found))
    return table


def interference_cells(found: Interference) -> list[str]:
    """Return a measurement of an op after others: shape, dtype, and what `INTERFERENCE` names.

    Args:
        found: The measurement.
    """
    alone, eager, ours = (t.median for t in (found.alone, found.beside_eager, found.beside_ours))
    return [
        "x".join(map(str, found.shape)),
        found.dtype,
        *(duration(t) for t in (alone, eager, ours)),
        f"{ours / alone - 1:+.1%}",
        f"{ours / eager - 1:+.1%}",
    ]


def _rate(value: float, unit: str) -> str:
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
