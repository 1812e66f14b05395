"""Train a GPT in bfloat16 from two seeds, in torchao's FP8 and in ours, and plot the losses.

    python scripts/fp8_curve.py --out FOLDER               on a GPU with FP8: 152 M parameters
    python scripts/fp8_curve.py --out FOLDER --size tiny   on a CPU, in a minute, for a try

A character-level GPT reads the sources of the installed PyTorch. Each training leaves NAME.json in
the folder, and one that is there is not done again; the last one writes fp8-curve.json and
fp8-curve.png of all. With `--only NAME`, a call does one, and several calls may share a GPU. With
`--seconds`, a training stops in time after a checkpoint, and the next call goes on. Exits with 130
where it stopped, and with 1 if the last losses of our FP8 are further above both of bfloat16's than
these differ from each other.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from gpt import Size
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from train import INTERRUPTED, plot, progress
from trainer import Curve, Settings, Trainer

from benchmarks.environment import describe
from fused_norm.models.precision import unsuited

SIZES = {
    "gpt": Size(layers=12, heads=16, width=1024, context=512, batch=32, steps=2000, rate=3e-4),
    # As wide, or no layer would be in FP8.
    "tiny": Size(layers=1, heads=16, width=1024, context=16, batch=4, steps=20, rate=3e-4),
}
# ASCII; what is beyond it reads as a question mark.
VOCABULARY = 128
CHARACTERS = 40_000_000
RECIPE = "rowwise"


def as_it_is(model: nn.Module) -> None:
    """Compile a model, on a GPU."""
    if _is_on_gpu(model):
        model.compile()


def in_torchao(model: nn.Module) -> None:
    """Have torchao convert the layers that ours has in FP8, and compile the model."""
    float8 = import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(RECIPE)
    if not _is_on_gpu(model):
        config = replace(config, emulate=True)

    def is_suited(layer: nn.Module, _: str) -> bool:
        return isinstance(layer, nn.Linear) and not unsuited(layer.weight)

    float8.convert_to_float8_training(model, config=config, module_filter_fn=is_suited)
    as_it_is(model)


def in_ours(model: nn.Module) -> None:
    """Compile a model with the backend, in FP8."""
    then = "inductor" if _is_on_gpu(model) else "eager"
    model.compile(backend="fused_norm", options={"fp8": RECIPE, "then": then})


def _is_on_gpu(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda


RUNS: dict[str, tuple[int, Callable[[nn.Module], None]]] = {
    "bfloat16": (0, as_it_is),
    "fused_norm": (0, in_ours),
    "torchao": (0, in_torchao),
    "bfloat16-again": (1, as_it_is),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is left to train, and return an exit status."""
    options = _parser().parse_args(arguments)
    ends = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    options.checkpoints.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device)
    size = SIZES[options.size]
    settings = Settings(
        size=replace(size, steps=options.steps or size.steps),
        dtype=torch.bfloat16,
        device=device,
        parallel="ddp",
        seed=0,
        folder=options.checkpoints,
        every=0,
    )
    console = Console()
    left = _left(options.out, options.only or list(RUNS))
    text = corpus() if left else torch.empty(0)
    for name in left:
        trainer = _trainer(name, settings, text)
        with progress(trainer, console.quiet) as show:
            finished = trainer.train(partial(_show, show, ends))
        if not finished:
            console.print(f"stopped in {name}; the same command goes on", highlight=False)
            return INTERRUPTED
        content: dict[str, Any] = {
            "environment": asdict(describe(device, options.commit)),
            "size": asdict(settings.size),
        }
        content |= {"recipe": RECIPE, "curve": asdict(trainer.curve)}
        (options.out / f"{name}.json").write_text(json.dumps(content))
        trainer.path.unlink()
        del trainer
        torch.compiler.reset()
    if others := _left(options.out, list(RUNS)):
        console.print(f"not trained yet: {', '.join(others)}", highlight=False)
        return 0
    return _report(options.out, settings, console)


def _left(folder: Path, names: Sequence[str]) -> list[str]:
    return [name for name in names if not (folder / f"{name}.json").exists()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--out", type=Path, required=True, help="the folder of results")
    parser.add_argument("--size", choices=list(SIZES), default="gpt")
    parser.add_argument("--only", choices=list(RUNS), action="append", help="some of them")
    parser.add_argument("--steps", type=int, help="default: by the size")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop in time")
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--commit", help="where there is no checkout to ask")
    parser.add_argument("--checkpoints", type=Path, default=Path("train/fp8"), metavar="FOLDER")
    return parser


def corpus() -> Tensor:
    """Return the sources of the installed PyTorch as numbers of characters."""
    parts, count = [], 0
    for path in sorted(Path(torch.__file__).parent.rglob("*.py")):
        parts.append(path.read_bytes().decode("ascii", "replace").replace("\ufffd", "?"))
        count += len(parts[-1])
        if count > CHARACTERS:
            break
    text = "".join(parts)[:CHARACTERS]
    return torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8).long()


def _trainer(name: str, settings: Settings, text: Tensor) -> Trainer:
    """Return a trainer where an earlier call left it."""
    seed, prepare = RUNS[name]
    torch.compiler.reset()
    trainer = Trainer(name, replace(settings, seed=seed), text, VOCABULARY, prepare)
    trainer.load()
    return trainer


def _show(show: Callable[[Curve], None], ends: float, curve: Curve) -> None:
    show(curve)
    if time.monotonic() > ends:
        # As Ctrl-C would: the trainer saves a checkpoint.
        signal.raise_signal(signal.SIGINT)


def _report(folder: Path, settings: Settings, console: Console) -> int:
    """Print, write and plot what the trainings left, and return whether ours is worse."""
    found: dict[str, Any] = {
        name: json.loads((folder / f"{name}.json").read_text()) for name in RUNS
    }
    curves = {name: Curve(**each["curve"]) for name, each in found.items()}
    last = {name: statistics.mean(curve.last()) for name, curve in curves.items()}
    apart = abs(last["bfloat16"] - last["bfloat16-again"])
    above = last["fused_norm"] - max(last["bfloat16"], last["bfloat16-again"])
    size = Size(**found["bfloat16"]["size"])
    rates = {n: round(size.tokens / statistics.median(c.seconds)) for n, c in curves.items()}
    table = Table("training", "last losses", "tokens/s")
    for name in curves:
        table.add_row(name, f"{last[name]:.4f}", f"{rates[name]:,}")
    console.print(table)
    console.print(f"two seeds of bfloat16 are {apart:.4f} apart, ours is {above:+.4f} above both")
    losses = {name: [round(v, 4) for v in curve.losses] for name, curve in curves.items()}
    content = {"environment": found["fused_norm"]["environment"], "size": asdict(size)}
    content |= {"recipe": RECIPE, "last": last, "tokens a second": rates, "losses": losses}
    (folder / "fp8-curve.json").write_text(json.dumps(content, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib"):
        plot(curves, replace(settings, size=size), folder / "fp8-curve.png")
    return int(above > apart)


if __name__ == "__main__":
    sys.exit(main())
