"""Train a small character-level GPT with and without the fused op, and show both side by side.

    python scripts/train.py                         on a CPU, in minutes
    python scripts/train.py --size large            on a GPU, in bfloat16
    torchrun --nproc-per-node 2 scripts/train.py    in two processes: DDP, or --parallel fsdp

Both models start from the same seed and read the same text, that of this repository. A folder gets
checkpoints, curves (train.json) and their plot (train.png); `--resume` goes on from there, to the
same bits as without a stop. Ctrl-C ends after the step at hand and a checkpoint; a second one ends
at once. Exits with 1 if the losses of the two differ by more than their noise.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import MODELS, SIZES, corpus
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from trainer import Curve, Settings, Trainer

from benchmarks.report import size as bytes_in_words

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
INTERRUPTED = 130  # what a shell says of a process that Ctrl-C ended
# Of curves in their order.
COLORS = ("#5f6b76", "#d1495b", "#2e86ab", "#a3adb5")
SMOOTHED = 10  # steps that a point of the plotted curve is the mean of


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print a table and return an exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    settings = _settings(options)
    settings.folder.mkdir(parents=True, exist_ok=True)
    console = Console(quiet=int(os.environ.get("RANK", "0")) > 0)
    with _processes(settings.device) as device:
        text, vocabulary = corpus()
        curves = {}
        for name in MODELS if options.model == "both" else [options.model]:
            trainer = Trainer(name, replace(settings, device=device), text, vocabulary)
            if options.resume:
                try:
                    trainer.load()
                except ValueError as error:
                    parser.error(str(error))
            with progress(trainer, console.quiet) as show:
                finished = trainer.train(show)
            if not finished:
                console.print(f"stopped; --resume goes on from {trainer.path}", highlight=False)
                return INTERRUPTED
            curves[name] = trainer.curve
            del trainer
    return _report(curves, settings, console)


def _parser() -> argparse.ArgumentParser:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="large" if has_gpu else "small")
    parser.add_argument("--model", choices=[*MODELS, "both"], default="both")
    parser.add_argument("--steps", type=int, help="default: by the size")
    parser.add_argument("--batch", type=int, help="sequences a step, of all processes together")
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: bfloat16 on a GPU")
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("train"))
    parser.add_argument("--checkpoint-every", type=int, default=0, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="from the checkpoints in the folder")
    parser.add_argument(
        "--deterministic", action="store_true", help="have PyTorch's own GPU ops repeat their bits"
    )
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    device = torch.device(options.device)
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Every kernel writes all of its results. PyTorch's annotations lack the setting.
        settings: Any = torch.utils.deterministic
        settings.fill_uninitialized_memory = False
    size = SIZES[options.size]
    return Settings(
        size=replace(size, steps=options.steps or size.steps, batch=options.batch or size.batch),
        dtype=DTYPES[options.dtype or ("float32" if device.type == "cpu" else "bfloat16")],
        device=device,
        parallel=options.parallel,
        seed=options.seed,
        folder=options.folder,
        every=options.checkpoint_every,
    )


@contextmanager
def _processes(device: torch.device) -> Iterator[torch.device]:
    """Join the other processes that torchrun started, and give this one's device."""
    if "RANK" not in os.environ:
        yield device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


@contextmanager
def progress(trainer: Trainer, is_quiet: bool) -> Iterator[Callable[[Curve], None]]:
    """Give what shows a step: a live bar on a terminal, ten lines elsewhere.

    Args:
        trainer: What is trained.
        is_quiet: Whether to show nothing.
    """
    console = Console(stderr=True, quiet=is_quiet)
    size = trainer.settings.size
    bar = Progress(
        TextColumn(trainer.name),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
    )
    task = bar.add_task("", total=size.steps, completed=len(trainer.curve.losses))

    def show(curve: Curve) -> None:
        step = len(curve.losses)
        rate = size.tokens / statistics.median(curve.seconds[-20:])
        text = f"loss {curve.losses[-1]:.4f}, {rate:,.0f} tokens/s"
        bar.update(task, completed=step, description=text)
        if not console.is_terminal and (step % max(1, size.steps // 10) == 0):
            console.print(f"{trainer.name} {step}/{size.steps}: {text}", highlight=False)

    with bar if console.is_terminal else nullcontext():
        yield show


def _report(curves: dict[str, Curve], settings: Settings, console: Console) -> int:
    """Print and keep the results, and return whether the losses differ."""
    table = Table("model", "loss", "tokens/s", "memory of a step")
    for name, curve in curves.items():
        rate = settings.size.tokens / statistics.median(curve.seconds)
        memory = "unknown" if curve.memory is None else bytes_in_words(curve.memory)
        table.add_row(name, f"{statistics.mean(curve.last()):.4f}", f"{rate:,.0f}", memory)
    console.print(table)
    if console.quiet:
        return 0
    content = {"settings": str(settings), "curves": {n: asdict(c) for n, c in curves.items()}}
    (settings.folder / "train.json").write_text(json.dumps(content, indent=1))
    if importlib.util.find_spec("matplotlib"):
        plot(curves, settings, settings.folder / "train.png")
    if len(curves) < 2:
        return 0
    eager, fused = (curve.last() for curve in curves.values())
    difference = statistics.mean(fused) - statistics.mean(eager)
    noise = statistics.stdev(eager)
    console.print(
        f"The mean loss of the last {len(eager)} steps differs by {difference:+.1g}; from step to "
        f"step it varies by {noise:.4f}.",
        highlight=False,
    )
    return 0 if abs(difference) <= noise else 1


def plot(curves: dict[str, Curve], settings: Settings, path: Path) -> None:
    """Draw losses over steps, faint, and their means.

    Args:
        curves: By what they are called, as many as COLORS at most; the first one is solid.
        settings: Of all of them.
        path: Of the PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for (name, curve), color in zip(curves.items(), COLORS, strict=False):
        axes.plot(curve.losses, color=color, alpha=0.25, linewidth=0.8)
        count = len(curve.losses) // SMOOTHED
        means = torch.tensor(curve.losses[: count * SMOOTHED]).view(count, SMOOTHED).mean(1)
        steps = torch.arange(count) * SMOOTHED + SMOOTHED / 2
        style = "-" if name == next(iter(curves)) else "--"
        axes.plot(steps.tolist(), means.tolist(), style, color=color, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per character)")
    size = settings.size
    kind = str(settings.dtype).removeprefix("torch.")
    axes.set_title(f"{size.layers} layers of {size.width}, {size.tokens} tokens a step, {kind}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=144, metadata={"Software": None})


if __name__ == "__main__":
    sys.exit(main())
