"""What a run keeps: the content of `--json`, whose schema `--schema` prints.

The dataclasses are the schema: their fields are the JSON's, in order, none left out, and each
says what it holds. Reading refuses a file with other fields.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

SCHEMA = 1
T = TypeVar("T")


@dataclass
class Timing:
    """The distribution of one time over the rounds, in microseconds for one call."""

    median: Annotated[float, "Median of the rounds."]
    p20: Annotated[float, "20th percentile."]
    p80: Annotated[float, "80th percentile."]
    minimum: Annotated[float, "Least."]
    rounds: Annotated[int, "Number of rounds."]

    @property
    def spread(self) -> float:
        """The 20th to 80th percentile as a share of the median."""
        return (self.p80 - self.p20) / self.median


@dataclass
class Result:
    """One provider in one measurement."""

    provider: Annotated[str, "Its name, as in `providers`."]
    status: Annotated[
        str,
        "ok; wrong (not timed); failed (raised); oom (memory ran out); unsupported (by itself).",
    ]
    message: Annotated[str, "What was wrong, raised or is unsupported; empty otherwise."] = ""
    errors: Annotated[
        dict[str, float],
        "Relative error (Frobenius) against float64 of each output and of each gradient.",
    ] = field(default_factory=dict)
    timings: Annotated[
        dict[str, Timing],
        "By metric. CPU: wall, one call. GPU: graph, device time of a call in a replayed CUDA "
        "graph; launch, wall time of a call among calls submitted back to back; host, the part "
        "of it before the submission returns.",
    ] = field(default_factory=dict)
    vs_eager: Annotated[dict[str, float], "Ratio of medians to eager's, by metric."] = field(
        default_factory=dict
    )
    vs_floor: Annotated[dict[str, float], "Ratio of medians to the floor's, by metric."] = field(
        default_factory=dict
    )
    peak_bytes: Annotated[
        int | None,
        "Most memory that one call held beyond its inputs, output and gradients included.",
    ] = None


@dataclass
class Measurement:
    """One op, mode, dtype and shape, with every provider that was measured in the same rounds."""

    op: Annotated[str, "Name of the op, as `--list` has it."]
    mode: Annotated[str, "forward (no_grad), forward_grad, backward, train (forward and backward)."]
    dtype: Annotated[str, "Dtype of inputs and parameters."]
    shape: Annotated[list[int], "M, K, N; M, K for layer_norm."]
    flops: Annotated[int, "Floating-point operations, matrix products alone where there are any."]
    bytes: Annotated[int, "Bytes that must move: inputs read once, outputs written once."]
    input_sets: Annotated[int, "How many sets of inputs the calls rotate through."]
    is_past_cache: Annotated[bool, "Whether the sets together exceed twice the last-level cache."]
    results: Annotated[list[Result], "One for each provider."] = field(default_factory=list)

    @property
    def metric(self) -> str:
        """The metric that ratios are read off: device time where eager has it."""
        eager = self.of("eager")
        known = eager.timings if eager else {}
        return next((m for m in ("wall", "graph", "launch") if m in known), "wall")

    def of(self, provider: str) -> Result | None:
        """Return a provider's result, or None."""
        return next((r for r in self.results if r.provider == provider), None)

    def key(self) -> tuple[str, str, str, tuple[int, ...]]:
        """Return what identifies the measurement."""
        return self.op, self.mode, self.dtype, tuple(self.shape)


@dataclass
class Interference:
    """How long a PyTorch op takes depending on what runs between its calls (CPU)."""

    dtype: Annotated[str, "Dtype."]
    shape: Annotated[list[int], "M, K, N of both."]
    alone: Annotated[Timing, "F.linear after F.linear."]
    beside_eager: Annotated[Timing, "F.linear after F.linear(F.layer_norm(x)) on other tensors."]
    beside_ours: Annotated[Timing, "F.linear after fused_layernorm_linear on those tensors."]


@dataclass
class ProviderInfo:
    """A provider as the run found it."""

    op: Annotated[str, "The op."]
    name: Annotated[str, "Its name."]
    role: Annotated[str, "baseline, floor, peer or ours."]
    description: Annotated[str, "What runs."]
    versions: Annotated[str, "Versions of its packages; empty if it is not installed."]
    problem: Annotated[str, "Why it was not measured; empty if it was."]


@dataclass
class Ceiling:
    """What the machine reached in this run, measured with PyTorch's own ops."""

    dtype: Annotated[str, "Dtype."]
    flops_per_second: Annotated[float, "Of a large square matrix product."]
    bytes_per_second: Annotated[float, "Of a large copy, bytes read plus bytes written."]


@dataclass
class Environment:
    """The machine and the software."""

    device: Annotated[str, "cpu or cuda."]
    cpu: Annotated[str, "Model of the CPU."]
    cores: Annotated[int, "CPUs that this process may use."]
    threads: Annotated[int, "torch.get_num_threads()."]
    load: Annotated[float, "Processes that ran in the minute before, on average: others' work."]
    memory_bytes: Annotated[int, "Memory of the device."]
    cache_bytes: Annotated[int, "Last-level cache of the device."]
    gpu: Annotated[str, "Name of the GPU, or empty."]
    driver: Annotated[str, "GPU driver, or empty."]
    clocks: Annotated[str, "GPU clocks before and after, as nvidia-smi reads them, or empty."]
    tf32: Annotated[str, "What float32 matrix products may use on the GPU."]
    os: Annotated[str, "Operating system."]
    python: Annotated[str, "Python."]
    torch: Annotated[str, "PyTorch."]
    cuda: Annotated[str, "CUDA or ROCm that PyTorch was built for, or empty."]
    max: Annotated[str, "MAX, or empty."]
    mojo: Annotated[str, "The Mojo compiler, or empty."]
    fused_norm: Annotated[str, "fused_norm, and whether its C++ node ran."]
    commit: Annotated[str, "Git commit, with -dirty where files differ from it, or empty."]
    date: Annotated[str, "When the run began, in UTC."]
    command: Annotated[str, "The command line."]


@dataclass
class Run:
    """Everything that one run found."""

    schema: Annotated[int, "Version of this schema."]
    environment: Annotated[Environment, "The machine and the software."]
    seed: Annotated[int, "Seed of the random inputs."]
    seconds: Annotated[float, "Time spent on each provider in each measurement."]
    finished: Annotated[bool, "False if it was interrupted."]
    wall_seconds: Annotated[float, "How long the run took."]
    providers: Annotated[list[ProviderInfo], "Every provider asked for."] = field(
        default_factory=list
    )
    ceilings: Annotated[list[Ceiling], "By dtype."] = field(default_factory=list)
    measurements: Annotated[list[Measurement], "In the order of the run."] = field(
        default_factory=list
    )
    interference: Annotated[list[Interference], "With --interference."] = field(
        default_factory=list
    )

    def role(self, op: str, name: str) -> str:
        """Return the role of a provider."""
        found = (p.role for p in self.providers if (p.op, p.name) == (op, name))
        return next(found, "peer")


def save(run: Run, path: Path) -> None:
    """Write a run as JSON; a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(_rounded(dataclasses.asdict(run)), indent=1) + "\n")
    os.replace(part, path)


def load(path: Path) -> Run:
    """Read what `save` wrote.

    Raises:
        ValueError: If the file is of another schema.
    """
    data = json.loads(path.read_text())
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no benchmark result of schema {SCHEMA}")
    try:
        return _from_json(Run, data)
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path} does not follow schema {SCHEMA}: {error}") from error


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a saved run."""
    definitions: dict[str, Any] = {}
    top = _schema_of(Run, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A run of python -m benchmarks",
        **top,
        "$defs": definitions,
    }


def _rounded(value: Any) -> Any:
    """Shorten floats to six digits: more are noise, and results are committed."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


def _from_json(kind: type[T], data: Any) -> T:
    """Build a value of an annotated type from parsed JSON, with nothing missing or left over."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if set(data) != set(hints):
            raise KeyError(f"{kind.__name__} has fields {sorted(set(data) ^ set(hints))}")
        return kind(**{name: _from_json(hints[name], data[name]) for name in hints})
    if origin is list:
        return typing.cast(T, [_from_json(arguments[0], item) for item in data])
    if origin is dict:
        return typing.cast(T, {key: _from_json(arguments[1], v) for key, v in data.items()})
    if origin in (typing.Union, types.UnionType):
        return typing.cast(T, data if data is None else _from_json(arguments[0], data))
    if kind is float and isinstance(data, int):
        data = float(data)
    if not isinstance(data, kind):
        raise TypeError(f"{data!r} is no {kind.__name__}")
    return data


def _schema_of(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        properties = {}
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            inner, description = typing.get_args(hint)
            properties[name] = {"description": description, **_reference(inner, definitions)}
        return {
            "type": "object",
            "description": (kind.__doc__ or "").strip(),
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    if origin is list:
        return {"type": "array", "items": _reference(arguments[0], definitions)}
    if origin is dict:
        values = _reference(arguments[1], definitions)
        return {"type": "object", "additionalProperties": values}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_reference(argument, definitions) for argument in arguments]}
    names = {
        str: "string",
        int: "integer",
        float: "number",
        bool: "boolean",
        types.NoneType: "null",
    }
    return {"type": names[kind]}


def _reference(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if not dataclasses.is_dataclass(kind):
        return _schema_of(kind, definitions)
    name = getattr(kind, "__name__", "")
    if name not in definitions:
        definitions[name] = {}
        definitions[name] = _schema_of(kind, definitions)
    return {"$ref": f"#/$defs/{name}"}
