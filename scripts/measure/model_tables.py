"""What `whole_models.py` measured, as a line, a table in Markdown and a plot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.report import size as bytes_in_words

COLORS = {
    **{"eager": "#5f6b76", "compile": "#edae49", "fused_norm": "#d1495b"},
    **{"fused_norm-frozen": "#8d2f3d", "fused_norm-small": "#e58b97"},
}


def seconds(result: dict[str, Any]) -> float | None:
    """Return the median seconds of a call, None where it was not timed."""
    timings = result.get("timings", {})
    timing = timings.get("launch") or timings.get("wall")
    return None if timing is None else float(timing["median"]) * 1e-6


def line(found: dict[str, Any]) -> str:
    """Return a measurement in a line.

    Args:
        found: What `measure` returned.
    """
    parts = [f"{found['model']} {found['mode']} ({found['fused']} fused):"]
    for provider, result in found["results"].items():
        took = seconds(result)
        if took is None:
            parts.append(f"{provider} {result['status']} {result.get('message', '')}")
        else:
            parts.append(f"{provider} {found['count'] / took:,.0f} {found['unit']}/s")
    return "  ".join(parts)


def table(run: dict[str, Any]) -> str:
    """Return the measurements as a table in Markdown.

    Args:
        run: What was written.
    """
    environment = run["environment"]
    machine = environment["gpu"] or environment["cpu"]
    every = {provider for m in run["measurements"] for provider in m["results"]}
    others = [provider for provider in COLORS if provider in every - {"eager"}]
    names = " | ".join(f"`{provider}`" for provider in others)
    lines = [
        f"{machine}, {run['dtype']}, torch {environment['torch']}, {environment['date']}. Time and "
        "(in parentheses) peak memory are relative to eager's in the same rounds. Errors are those "
        "of eager, `compile` and `fused_norm`, against float32.",
        "",
        f"| model, mode | batch | norms fused | eager | {names} | errors | commit |",
        "|---|---:|---|---:|" + "---:|" * len(others) + "---|---|",
    ]
    for m in run["measurements"]:
        results, eager = m["results"], m["results"]["eager"]
        errors = ", ".join(
            f"{max(results[p]['output error'], results[p]['gradient error']):.1e}"
            for p in ("eager", "compile", "fused_norm")
            if "output error" in results.get(p, {})
        )
        took = seconds(eager)
        rate = eager["status"] if took is None else f"{m['count'] / took:,.0f} {m['unit']}/s"
        held = eager.get("peak bytes")
        cells = [f"{m['model']}, {m['mode']}", m["batch"], m["fused"].removesuffix(" norms")]
        cells.append(rate if held is None else f"{rate}, {bytes_in_words(held)}")
        cells += [_relative(results.get(provider), eager) for provider in others]
        cells += [errors, m["commit"][:7]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def _relative(result: dict[str, Any] | None, eager: dict[str, Any]) -> str:
    """Return time and peak memory of eager's, or what came instead of a time."""
    if result is None:
        return ""
    took, base = seconds(result), seconds(eager)
    if took is None or base is None:
        return str(result["status"])
    held, most = result.get("peak bytes"), eager.get("peak bytes")
    return f"{took / base:.2f}" + (f" ({held / most:.2f})" if held and most else "")


def plot(run: dict[str, Any], path: Path) -> None:
    """Draw each provider's speed, of eager's, with the spread of the rounds.

    Args:
        run: What was written.
        path: Where to.
    """
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib import pyplot

    shown = [m for m in run["measurements"] if seconds(m["results"]["eager"]) is not None]
    # Of each model the providers that were timed, one below the other, and a gap before the next.
    bars: list[tuple[float, dict[str, Any], str, float]] = []
    ticks, place = [], 0.0
    for m in shown:
        times = {p: seconds(m["results"].get(p, {})) for p in COLORS}
        timed = [(p, took) for p, took in times.items() if took is not None]
        bars += [(place + i, m, p, took) for i, (p, took) in enumerate(timed)]
        ticks.append(place + (len(timed) - 1) / 2)
        place += len(timed) + 0.8
    size = (8, 1.2 + 0.2 * place)
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    labels = set[str]()
    for at, m, provider, took in bars:
        eager = seconds(m["results"]["eager"])
        assert eager is not None
        label = None if provider in labels else provider
        labels.add(provider)
        axes.barh(at, eager / took, 1, color=COLORS[provider], label=label)
        words = f" {m['count'] / took:,.0f} {m['unit']}/s"
        axes.text(eager / took, at, words, va="center", fontsize=8)
    axes.set_yticks(ticks, [f"{m['model']}, {m['mode']}" for m in shown])
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.axvline(1.0, color="#333333", linewidth=0.8)
    axes.set_xlabel("speed, of eager's")
    environment = run["environment"]
    axes.set_title(f"Whole models, {environment['gpu'] or environment['cpu']}, {run['dtype']}")
    if shown:
        figure.legend(loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
