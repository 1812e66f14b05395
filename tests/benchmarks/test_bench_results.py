"""What is written of a run: JSON and its schema, CSV, comparison with a baseline."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_cases import provider, right, run_of, without_bias

from benchmarks import baseline, report, runs
from benchmarks.runs import Run


def _assert_follows(schema: dict[str, Any], value: Any, top: dict[str, Any]) -> None:
    if "$ref" in schema:
        schema = top["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in schema:
        kinds = {"integer": int, "null": type(None)}
        assert any(isinstance(value, kinds[option["type"]]) for option in schema["anyOf"])
        return
    kind = schema["type"]
    if kind == "object" and "properties" in schema:
        assert list(value) == schema["required"]
        for name, inner in schema["properties"].items():
            assert inner["description"].endswith(".")
            _assert_follows(inner, value[name], top)
    elif kind == "object":
        for inner in value.values():
            _assert_follows(schema["additionalProperties"], inner, top)
    elif kind == "array":
        for inner in value:
            _assert_follows(schema["items"], inner, top)
    else:
        kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool}
        assert isinstance(value, kinds[kind]), (schema, value)


def test_json_follows_its_schema(tmp_path: Path, registry: Callable[..., None]) -> None:
    made = run_of(provider("peer", right), registry=registry)
    path = tmp_path / "folder" / "results.json"
    runs.save(made, path)
    data, schema = json.loads(path.read_text()), runs.schema()
    _assert_follows(schema, data, schema)
    runs.save(runs.load(path), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


@pytest.mark.parametrize("damage", ["extra", "missing", "type", "version", "list"])
def test_other_json_is_refused(damage: str, tmp_path: Path, registry: Callable[..., None]) -> None:
    path = tmp_path / "results.json"
    runs.save(run_of(registry=registry), path)
    data = json.loads(path.read_text())
    if damage == "extra":
        data["measurements"][0]["color"] = "red"
    elif damage == "missing":
        del data["environment"]["threads"]
    elif damage == "type":
        data["seed"] = "zero"
    elif damage == "version":
        data["schema"] += 1
    else:
        data = [data]
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="schema 1"):
        runs.load(path)


def test_csv_has_a_row_for_each_metric(tmp_path: Path, registry: Callable[..., None]) -> None:
    bad = provider("bad", without_bias)
    run = run_of(bad, registry=registry)
    report.write_csv(run, tmp_path / "results.csv")
    header, *rows = (tmp_path / "results.csv").read_text().splitlines()
    assert header == ",".join(report.CSV_FIELDS)
    assert len(rows) == 4
    assert rows[0].startswith("layernorm_linear,forward,float32,24x32x40,eager,ok,wall,")
    assert ",bad,wrong,," in rows[1]


def _scaled(run: Run, factor: float, *, provider: str, spread: float = 0.01) -> Run:
    """The same run with all spreads set, and one provider's times scaled."""
    copy = runs._from_json(Run, json.loads(json.dumps(dataclasses.asdict(run))))
    for measurement in copy.measurements:
        for result in measurement.results:
            for name in result.timings:
                scale = factor if provider in (result.provider, "all") else 1.0
                median = 100.0 * scale
                low, high = median * (1 - spread / 2), median * (1 + spread / 2)
                result.timings[name] = runs.Timing(median, low, high, low, 20)
    return copy


def test_baseline_names_what_moved(
    registry: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    run = run_of(provider("peer", right), provider("other", right), registry=registry)
    before = _scaled(run, 1.0, provider="peer")
    moves = baseline.show(before, _scaled(run, 1.3, provider="peer"), Console(width=150))
    assert [m.name.split()[-2] for m in moves] == ["peer", "peer"]
    assert [round(m.change, 6) for m in moves] == [1.3, 1.3]
    out = capsys.readouterr().out
    assert "2 of 4 times moved" in out
    assert "+30.0%" in out


def test_baseline_leaves_noise_and_the_machine_out(registry: Callable[..., None]) -> None:
    run = run_of(provider("peer", right), registry=registry)
    before = _scaled(run, 1.0, provider="peer")
    slower_machine = _scaled(run, 1.5, provider="all")
    assert not any(m.is_beyond_noise for m in baseline.moves(before, slower_machine))
    noisy = _scaled(run, 1.1, provider="peer", spread=0.2)
    assert not any(m.is_beyond_noise for m in baseline.moves(before, noisy))
    quiet = _scaled(run, 1.1, provider="peer")
    assert all(m.is_beyond_noise for m in baseline.moves(before, quiet))
