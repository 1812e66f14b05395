"""Blocks in FP8 on a GPU, against bfloat16, torchao and their FP8 products alone.

    poe bench --fp8 [--block NAME] [--mode forward] [--json FILE] [--plot FILE]

Times are of CUDA graphs, interleaved, in a new random order in each round. `products` are
`torch._scaled_mm` with scales of rows, of operands that have been quantized before, and attention:
nothing else of the block. SQNR is that of y against eager bfloat16, in decibels.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import document
from benchmarks.blocks import BLOCKS
from benchmarks.case import Case
from benchmarks.ops import Member
from benchmarks.parts import BARE, TORCH
from benchmarks.timing import Budget, GpuTimer, Rounds
from fused_norm.freeze import freeze_parameters
from fused_norm.models import backend

Block = Callable[..., Tensor]
RECIPES = ("rowwise", "rowwise_with_gw_hp", "tensorwise")
MODES = ("forward", "train")
E4M3 = torch.float8_e4m3fn


class Provider(NamedTuple):
    """Someone who computes a block.

    Attributes:
        name: What the table calls it.
        formula: Computes y from the block's inputs.
        modes: Those that it is measured in.
        freezes: Whether weights are frozen.
    """

    name: str
    formula: Block
    modes: tuple[str, ...] = MODES
    freezes: bool = False


class _Products(torch.autograd.Function):
    """The three products of a Linear layer in FP8, of operands that simulate the real ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, operands: dict[str, Any]) -> Tensor:
        """Return what has y's shape."""
        ctx.operands, ctx.sizes = operands, (x.shape, weight.shape)
        return _multiply(*operands["y"]).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Return what has the shapes of the gradients."""
        x, _ = ctx.sizes
        return _multiply(*ctx.operands["dx"]).view(x), _multiply(*ctx.operands["dw"]), None


def _multiply(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    return torch._scaled_mm(
        a, b.t(), a_scale, b_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _bare() -> Any:
    """Return products in FP8 and nothing around them, of operands kept by their sizes."""
    kept: dict[tuple[int, ...], dict[str, Any]] = {}

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        M, (N, K) = x.numel() // x.shape[-1], weight.shape
        if (M, N, K) not in kept:
            sizes = {"y": (M, N, K), "dx": (M, K, N), "dw": (N, K, M)}
            kept[M, N, K] = {
                name: (*_operand(rows, sums, x.device), *_operand(columns, sums, x.device))
                for name, (rows, columns, sums) in sizes.items()
            }
        found: Tensor = _Products.apply(x, weight, kept[M, N, K])
        return found

    return BARE._replace(linear=linear)


def _operand(rows: int, sums: int, device: torch.device) -> tuple[Tensor, Tensor]:
    values = torch.randn(rows, sums, device=device, dtype=torch.bfloat16)
    return values.to(E4M3), torch.full((rows, 1), 1 / 32, device=device)


def _by_torchao(recipe: str) -> Any:
    """Return the parts whose products are torchao's, which a block calls without modules."""
    torchao = import_module("torchao.float8.float8_linear")
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    products = torchao.Float8Linear(16, 16, bias=False, config=config).linear_mm_config
    multiply = torchao.matmul_with_hp_or_float8_args.apply

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = multiply(x, weight.t(), products, config)
        return y if bias is None else y + bias

    return TORCH._replace(linear=linear)


def providers(member: Member) -> list[Provider]:
    """Return who computes a block, eager first; what cannot be had is told."""
    reference: Any = member.op.reference
    formula: Any = member.formula
    found = [
        Provider("eager", reference),
        Provider("compile", _compiled(reference)),
        Provider("products", partial(formula, _bare())),
        Provider("fused_norm bfloat16", _by_us(reference, {})),
    ]
    for recipe in RECIPES:
        modes = ("train",) if recipe == "rowwise_with_gw_hp" else MODES
        try:
            parts = _by_torchao(recipe)
            found.append(Provider(f"torchao {recipe}", _compiled(partial(formula, parts)), modes))
        except (ImportError, TypeError) as error:
            print(f"no torchao {recipe}: {error}", flush=True)
        ours = _by_us(reference, {"fp8": recipe})
        found.append(Provider(f"fused_norm {recipe}", ours, modes))
    # DeepSeek's, which torchao does not have.
    found.append(Provider("fused_norm blockwise", _by_us(reference, {"fp8": "blockwise"})))
    ours = _by_us(reference, {"fp8": "rowwise"})
    found.append(Provider("fused_norm rowwise, frozen", ours, ("forward",), freezes=True))
    return found


@contextmanager
def _frozen(weights: Sequence[Tensor]) -> Iterator[None]:
    """Freeze weights for good, as `freeze` does those of a model."""
    record = freeze_parameters(weights)
    try:
        yield
    finally:
        record.thaw()


def _compiled(formula: Block) -> Block:
    return torch.compile(formula, dynamic=False, fullgraph=True)


def _by_us(formula: Block, options: dict[str, Any]) -> Block:
    return torch.compile(formula, backend=backend, options=options, dynamic=False, fullgraph=True)


def measure(member: Member, mode: str, budget: Budget, device: torch.device) -> dict[str, Any]:
    """Return microseconds and SQNR of each provider, and why others have none."""
    case = Case(member.op, BLOCKS[member], torch.bfloat16, device)
    inputs, (dy,) = case.inputs(0), case.grad_outputs(0)
    stream = torch.cuda.Stream()
    timers, found = {}, dict[str, Any]()
    reference: Any = member.op.reference
    expected = reference(*inputs).detach()
    torch.cuda.synchronize()
    with torch.set_grad_enabled(mode == "train"):
        for provider in providers(member):
            if mode not in provider.modes:
                continue
            capture: Any = partial(_frozen, inputs[1:]) if provider.freezes else nullcontext

            def step(formula: Block = provider.formula) -> Any:
                y = formula(*inputs)
                return (
                    torch.autograd.grad(y, inputs, dy, allow_unused=True) if y.requires_grad else y
                )

            try:
                with torch.cuda.stream(stream), capture():
                    y = provider.formula(*inputs).detach()
                    step()
                torch.cuda.synchronize()
            except Exception as error:
                # Another project's block may raise whatever it likes; the others go on.
                found[provider.name] = {"error": f"{type(error).__name__}: {error}"[:300]}
                continue
            found[provider.name] = {"sqnr": round(_decibels(expected, y), 1)}
            timers[provider.name] = GpuTimer([step], stream, capture)
        rounds = Rounds(dict(timers), budget, 0)
        rounds.run()
    for name, timer in timers.items():
        if timings := rounds.timings(name).get("graph"):
            found[name] |= {"us": round(timings.median, 1), "rounds": timings.rounds}
        else:
            found[name] |= {"error": str(rounds.failures.get(name) or timer.problem)[:300]}
    return {"block": member.op.name, "mode": mode, "shape": list(case.sizes), "results": found}


def _decibels(expected: Tensor, y: Tensor) -> float:
    error = (expected.float() - y.float()).norm()
    return float(20 * torch.log10(expected.float().norm() / error))


def table(cases: Sequence[dict[str, Any]]) -> Table:
    """Return times over eager bfloat16, with the SQNR of y."""
    names = list(dict.fromkeys(name for case in cases for name in case["results"]))
    found = Table(title="Blocks: time over eager bfloat16 in CUDA graphs (SQNR of y, dB)")
    found.add_column("")
    columns = [f"{case['block']} {case['mode']}" for case in cases]
    for column in columns:
        found.add_column(column, justify="right")
    for name in names:
        cells = []
        for case in cases:
            result, eager = case["results"].get(name, {}), case["results"]["eager"]["us"]
            text = f"{result['us'] / eager:.3f} ({result['sqnr']:.0f})" if "us" in result else "-"
            cells.append(text)
        found.add_row(name, *cells)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and return an exit status."""
    blocks = {member.op.name: member for member in BLOCKS}
    parser = argparse.ArgumentParser(prog="poe bench --fp8", description=__doc__)
    parser.add_argument("--fp8", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--block", action="append", choices=list(blocks))
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each (default: 0.3)")
    parser.add_argument("--json", type=Path, help="results; its cases that are not measured stay")
    parser.add_argument("--plot", type=Path, help="file of a plot, which needs matplotlib")
    parser.add_argument("--from-json", type=Path, help="show results instead of measuring")
    parser.add_argument("--commit", help="what is measured, where there is no repository")
    options = parser.parse_args(arguments)
    if options.from_json:
        found = json.loads(options.from_json.read_text())
        for case in found["cases"]:
            Console().print(table([case]))
    elif not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        print("SKIPPED: needs a GPU that has FP8")
        return 0
    else:
        found = _measured(options, blocks)
    if options.plot:
        # It needs matplotlib.
        from benchmarks import fp8_plot

        fp8_plot.plot(found, options.plot, options.from_json or options.json)
    return 0


def _measured(options: argparse.Namespace, blocks: dict[str, Member]) -> dict[str, Any]:
    # Dynamo counts all compilations of one function, and would stop at eight.
    torch._dynamo.config.recompile_limit = 64
    device = torch.device("cuda", torch.cuda.current_device())
    budget = Budget(options.seconds, options.seconds / 2, fewest=9)
    found = document.new(device, options.commit, "torch", "torchao", "triton")
    if options.json and options.json.exists():
        found["cases"] = json.loads(options.json.read_text())["cases"]
    of = {name: found["environment"][name] for name in ("commit", "date")}
    for name in options.block or blocks:
        for mode in options.mode or MODES:
            case = measure(blocks[name], mode, budget, device) | of
            others = [c for c in found["cases"] if (c["block"], c["mode"]) != (name, mode)]
            found["cases"] = [*others, case]
            document.show(case, table([case]))
            document.write(found, options.json)
    return found


if __name__ == "__main__":
    sys.exit(main())
