"""Measures this machine's calls each way, and keeps what later calls are chosen by.

The ways of a size take turns on inputs that exceed the last cache together, as a model's weights
do, and their medians count. Nothing is measured unless somebody asks.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

import fused_norm as fn
from fused_norm.activations import ACTIVATIONS, is_gate
from fused_norm.call.record import AROUND_PRODUCTS, FUSED
from fused_norm.chain import kernels, library
from fused_norm.composition import Operands
from fused_norm.devices import choice, costs
from fused_norm.devices.costs import DIRECTIONS, KINDS, Device, Measured
from fused_norm.devices.machine import cpu_kind
from fused_norm.models.fuse import fuse
from fused_norm.models.settings import settings
from fused_norm.native import build, cache
from fused_norm.ops.operands import at_every_size

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ACTIVATION = {"": None, "activation": "gelu", "gate": "swiglu"}
# Of sizes drawn: products of a forward, above which all sizes are alike.
MOST_PRODUCTS = 2**31
# Elements of x and y: more memory than caches have, and not much of a small machine's.
MOST_ELEMENTS = 2**24
COMMON = (64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 8192, 14336)
SEED = 1
FEWEST_ROUNDS = 4
# An odd number, so that each way meets every set of inputs.
MOST_SETS = 41
EPS = 1e-5


class Size(NamedTuple):
    """A call to measure.

    Attributes:
        dtype: Name of the tensors' dtype.
        kind: What follows the product: one of KINDS.
        M: Rows.
        K: Features.
        N: Outputs of the product: twice those of a gate.
    """

    dtype: str
    kind: str
    M: int
    K: int
    N: int


def draw(count: int, seed: int, dtypes: Sequence[str] = tuple(DTYPES)) -> list[Size]:
    """Return random sizes, the dtypes in turn.

    M is 1 to 32768, K and N are 8 to 16384, even on a scale of logarithms; half of the widths are
    common ones.
    """
    dice = random.Random(seed)

    def width() -> int:
        if dice.random() < 0.5:
            return dice.choice(COMMON)
        return round(math.exp(dice.uniform(math.log(8), math.log(16384))))

    found: list[Size] = []
    while len(found) < count:
        dtype = dtypes[len(found) % len(dtypes)]
        M = 1 if dice.random() < 0.15 else round(math.exp(dice.uniform(0, math.log(32768))))
        K, N = width(), width()
        kind = dice.choice(KINDS + KINDS[:1])
        N *= 2 if kind == "gate" else 1
        # PyTorch's products of 16 bits take tens of times longer on many CPUs.
        most = MOST_PRODUCTS if dtype == "float32" else MOST_PRODUCTS // 8
        if max(M * K * N / most, M * max(K, N) / MOST_ELEMENTS) <= 1:
            found.append(Size(dtype, kind, M, K, N))
    return found


@contextmanager
def ways() -> Iterator[Callable[[int], None]]:
    """Give what has calls on a CPU go a way from now on; 0 is the one that is chosen."""
    chain = library.load()
    if chain is None:
        raise RuntimeError(
            "fused_norm has no kernels to measure here: see `python -m fused_norm doctor`"
        )
    before, told = kernels.cpu_way, dict[int, int]()

    def go(way: int) -> None:
        kernels.cpu_way = lambda: way
        told[way] = kernels.tell(chain, told.get(way, 0))

    try:
        yield go
    finally:
        kernels.cpu_way = before
        kernels.tell(chain)


def measure(size: Size, direction: str, seconds: float, others: Iterable[str] = ()) -> Measured:
    """Measure a call each way.

    Args:
        size: The call.
        direction: "forward", or "training": with a backward, before an activation only keeping
            what a backward needs.
        seconds: To take, at least as many as 4 calls each way do.
        others: "chosen", to measure what users get as well.
    """
    dtype, K, outputs = DTYPES[size.dtype], size.K, size.N // (2 if size.kind == "gate" else 1)
    shapes = (size.M, K), (K,), (K,), (size.N, K), (size.N,)
    # A model's weights: with larger ones, exponentials run out of normal numbers.
    scales = 1.0, 1.0, 1.0, K**-0.5, 1.0
    elements = sum(math.prod(shape) for shape in shapes) + size.M * size.N
    count = min(MOST_SETS, 2 * _cache_bytes() // (dtype.itemsize * elements)) | 1
    sets = [
        [(torch.randn(shape) * s).to(dtype) for shape, s in zip(shapes, scales, strict=True)]
        for _ in range(count)
    ]
    grad_output = torch.randn(size.M, outputs).to(dtype)
    activation = ACTIVATION[size.kind]
    act = composed_activation(size.kind)

    def eager(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return act(F.linear(F.layer_norm(x, (K,), gamma, beta, EPS), weight, bias))

    def ours(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return fn.norm_linear(
            x, weight, bias, norm_weight=gamma, norm_bias=beta, eps=EPS, activation=activation
        )

    if direction == "training":
        for tensors in sets:
            for tensor in tensors:
                tensor.requires_grad_()

    def step(call: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
        y = call(*tensors)
        if direction == "training" and not size.kind:
            torch.autograd.grad(y, tensors, grad_output)

    calls = {"eager": (eager, 0), "fused": (ours, FUSED), "around": (ours, AROUND_PRODUCTS)}
    if "chosen" in others:
        calls["chosen"] = (ours, 0)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    turns = itertools.cycle(sets)
    with ways() as go, torch.inference_mode(direction == "forward"):
        for call, way in calls.values():
            go(way)
            with at_every_size() if way else nullcontext():
                step(call, next(turns))
        end = time.perf_counter() + seconds
        names = list(calls)
        while time.perf_counter() < end or len(taken["eager"]) < FEWEST_ROUNDS:
            random.shuffle(names)
            for name in names:
                call, way = calls[name]
                tensors = next(turns)
                go(way)
                with at_every_size() if way else nullcontext():
                    start = time.perf_counter()
                    step(call, tensors)
                    taken[name].append(time.perf_counter() - start)
    us = {name: round(1e6 * statistics.median(each), 2) for name, each in taken.items()}
    return Measured(
        size.dtype, size.kind, direction, torch.get_num_threads(), size.M, K, size.N, us
    )


def composed_activation(kind: str) -> Callable[[Tensor], Tensor]:
    """Return what follows a product, by PyTorch's ops."""
    if kind == "gate":
        return lambda h: F.silu(h[..., : h.shape[-1] // 2]) * h[..., h.shape[-1] // 2 :]
    return F.gelu if kind else lambda h: h


def tune(
    model: torch.nn.Module | None = None,
    *example: Any,
    seconds: float = 120.0,
    sizes: Sequence[tuple[int, int, int]] = (),
) -> Path:
    """Measure this machine and keep the result, which later calls and processes are chosen by.

    Only calls on a CPU are measured: a GPU's go by what was measured on its kind.

    Args:
        model: Its calls are measured as well; none for those of models in general.
        example: The model's arguments.
        seconds: To take. Sizes drawn take what is left of it by those given.
        sizes: (M, K, N) to be measured as well, in every dtype.

    Returns:
        The file, in the cache of what is built.

    Raises:
        RuntimeError: If there are no kernels to measure, or the cache cannot be written.
    """
    wanted = [Size(dtype, "", *each) for each in sizes for dtype in DTYPES]
    if model is not None:
        wanted += _calls_of(model, example)
    device = _measured(list(dict.fromkeys(wanted)), seconds)
    path = choice.tuned_path()
    cache.check()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    device.save(path)
    choice.forget()
    if (chain := library.load()) is not None:
        kernels.tell(chain)
    return path


def _measured(wanted: list[Size], seconds: float) -> Device:
    """Return a device by sizes wanted and others, within some seconds."""
    began, found = time.perf_counter(), list[Measured]()
    for dtype in DTYPES:
        build.check_at_hand(torch.device("cpu"), DTYPES[dtype])
    # As many as there is time for.
    drawn = iter(draw(10_000, SEED))
    each = 0.15
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=seconds)
        for size in itertools.chain(wanted, drawn):
            passed = time.perf_counter() - began
            if passed > seconds and len(found) >= 2 * len(wanted):
                break
            for direction in DIRECTIONS:
                found.append(measure(size, direction, 2 * each if size in wanted else each))
            progress.update(task, completed=min(time.perf_counter() - began, seconds))
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    about = {"measured": now, "torch": torch.__version__, "threads": torch.get_num_threads()}
    about["calls"] = len(found)
    return costs.fit(cpu_kind() or "cpu", about, found)


class _Recorder(TorchDispatchMode):
    """Notes the calls on a CPU that a model makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[Size] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.fused_norm.norm_linear_forward.default:
            t = Operands(*args[: len(Operands._fields)])
            activation = args[len(Operands._fields) + 1]
            dtype = str(t.weights[0].dtype).removeprefix("torch.")
            if t.x.is_cpu and dtype in DTYPES and activation in ("", *ACTIVATIONS):
                kind = "" if not activation else "gate" if is_gate(activation) else "activation"
                K, N = t.x.shape[-1], sum(w.shape[0] for w in t.weights)
                if t.x.numel() and N:
                    self.sizes.append(Size(dtype, kind, t.x.numel() // K, K, N))
        return func(*args, **(kwargs or {}))


def _calls_of(model: torch.nn.Module, example: Sequence[Any]) -> list[Size]:
    """Return the calls that a model makes, once it is compiled by the backend."""
    recorder = _Recorder()

    def recording(module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        fuse(module, settings({"small": True}, None).fusing)

        def run(*arguments: Any) -> Any:
            with recorder:
                return module.forward(*arguments)

        return run

    with torch.no_grad():
        torch.compile(model, backend=recording)(*example)
    return recorder.sizes


def _cache_bytes() -> int:
    """Return the size of the last cache, or 32 MiB where Linux does not tell."""
    found = [
        path.read_text().strip()
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    units = {"K": 2**10, "M": 2**20}
    return max((int(t[:-1]) * units[t[-1]] for t in found if t[-1:] in units), default=2**25)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure this machine, say where the result is, and return an exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fused_norm tune",
        description="Measures this machine's CPU, so that calls are chosen by it. "
        f"{choice.SWITCH}=0 goes by the shipped measurements again.",
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="to take (default: 120)")
    parser.add_argument(
        "--sizes", metavar="M,K,N", action="append", default=[], help="measured as well; repeatable"
    )
    parser.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="whose calls are measured as well: a function that returns a model and its arguments",
    )
    options = parser.parse_args(arguments)
    try:
        sizes = [_size(text) for text in options.sizes]
        model, example = _model(options.model) if options.model else (None, ())
        path = tune(model, *example, seconds=options.seconds, sizes=sizes)
    except (ValueError, ImportError, AttributeError) as error:
        parser.error(str(error))
    except RuntimeError as error:
        print(error)
        return 1
    device = costs.load(path)
    console = Console()
    console.print(
        f"{device.about['calls']} calls measured on {device.name}; {len(device.exceptions)} are "
        f"exceptions to the model. Calls are chosen by {path} from now on.",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _size(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(p.isdecimal() and int(p) for p in parts):
        raise ValueError(f"a size is M,K,N, three positive integers: got {text!r}")
    M, K, N = map(int, parts)
    return M, K, N


def _model(text: str) -> tuple[torch.nn.Module, Sequence[Any]]:
    module, _, factory = text.partition(":")
    if not factory:
        raise ValueError(f"a model is MODULE:FACTORY, got {text!r}")
    model, *example = getattr(importlib.import_module(module), factory)()
    return model, example
