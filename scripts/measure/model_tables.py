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
    lines = [
        f"{machine}, {run['dtype']}, torch {environment['torch']}, {environment['date']}. Time is "
        "that of eager in the same rounds.",
        "",
        "| model | mode | commit | batch | norms fused | provider | a second | time | peak memory "
        "| error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for m in run["measurements"]:
        eager = seconds(m["results"]["eager"])
        for provider, result in m["results"].items():
            head = f"| {m['model']} | {m['mode']} | {m['commit'][:7]} | {m['batch']} | "
            head += f"{m['fused']} | `{provider}` | "
            took = seconds(result)
            if took is None or eager is None:
                lines.append(f"{head}{result['status']} | | | |")
                continue
            held = result["peak bytes"]
            memory = "" if held is None else bytes_in_words(held)
            error = max(result["output error"], result["gradient error"])
            rate = f"{m['count'] / took:,.0f} {m['unit']}"
            lines.append(f"{head}{rate} | {took / eager:.2f} | {memory} | {error:.1e} |")
    return "\n".join(lines) + "\n"


def plot(run: dict[str, Any], path: Path) -> None:
    """Draw each provider's speed, of eager's, with the spread of the rounds.

    Args:
        run: What was written.
        path: Where to.
    """
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib import pyplot

    shown = [m for m in run["measurements"] if seconds(m["results"]["eager"]) is not None]
    figure, axes = pyplot.subplots(figsize=(8, 0.9 + 0.62 * len(shown)), layout="constrained")
    providers = [p for p in COLORS if any(p in m["results"] for m in shown)]
    height = 0.8 / max(len(providers), 1)
    for i, provider in enumerate(providers):
        for row, m in enumerate(shown):
            eager, took = seconds(m["results"]["eager"]), seconds(m["results"].get(provider, {}))
            if eager is None or took is None:
                continue
            place = row + (i - (len(providers) - 1) / 2) * height
            label = provider if row == 0 else None
            axes.barh(place, eager / took, height, color=COLORS[provider], label=label)
            axes.text(eager / took, place, f" {m['count'] / took:,.0f} {m['unit']}/s", va="center")
    axes.set_yticks(range(len(shown)), [f"{m['model']}, {m['mode']}" for m in shown])
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.axvline(1.0, color="#333333", linewidth=0.8)
    axes.set_xlabel("speed, of eager's")
    environment = run["environment"]
    axes.set_title(f"Whole models, {environment['gpu'] or environment['cpu']}, {run['dtype']}")
    if shown:
        figure.legend(loc="outside lower center", ncols=len(providers), frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
