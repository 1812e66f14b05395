"""Trains a model in one process or several: steps, checkpoints, an end when asked for one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from gpt import GPT, MODELS, Size, batch, norm_linear
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.memory import peak

WARM_UP = 20  # steps in which the learning rate rises


@dataclass
class Curve:
    """What a training returns in addition to its model.

    Attributes:
        losses: Mean loss of each step, in nats per character.
        seconds: Time of each step.
        memory: Most bytes of a step without parameters and optimizer, None if unknown.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: int | None = None

    def last(self) -> list[float]:
        """Return the losses of the last tenth."""
        return self.losses[-max(2, len(self.losses) // 10) :]


@dataclass(frozen=True)
class Settings:
    """What a training is made with.

    Attributes:
        size: Sizes of the model and the batch; how many steps may change when going on.
        dtype: float32, or what autocast is to use.
        device: Where to train.
        parallel: `ddp` or `fsdp`, for several processes.
        seed: Of the parameters and the batches.
        folder: Where checkpoints are.
        every: Steps between checkpoints, 0 for one at the end.
    """

    size: Size
    dtype: torch.dtype
    device: torch.device
    parallel: str
    seed: int
    folder: Path
    every: int

    def fixed(self, text: Tensor) -> dict[str, object]:
        """Return the settings that a run must share with the checkpoint that it resumes."""
        sizes = asdict(self.size)
        del sizes["steps"]
        return sizes | {"dtype": str(self.dtype), "seed": self.seed, "characters": len(text)}


class Trainer:
    """A model in training.

    Args:
        name: Which of `MODELS`, or a name of its own for a model of PyTorch's modules.
        settings: How to train it.
        text: Numbers of characters.
        vocabulary: How many characters there are.
        prepare: Changes the model in place before it is trained: converts layers, or compiles it.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        text: Tensor,
        vocabulary: int,
        prepare: Callable[[nn.Module], object] = lambda model: None,
    ) -> None:
        self.name, self.settings, self.text = name, settings, text
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.path = settings.folder / f"{name}.pt"
        self.curve = Curve()
        torch.manual_seed(settings.seed)
        entry = MODELS.get(name, norm_linear)
        model = GPT(settings.size, vocabulary, settings.dtype, entry).to(settings.device)
        prepare(model)
        self.model: nn.Module = model
        if self.world > 1 and settings.parallel == "fsdp":
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        elif self.world > 1:
            self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), settings.size.rate)

    def step(self) -> None:
        """Take one step and keep its loss, the mean of all processes, and its time."""
        start = time.perf_counter()
        settings, index = self.settings, len(self.curve.losses)
        text = batch(self.text, settings.size, settings.seed, index, self.rank, self.world)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.size.rate * min(1, (index + 1) / WARM_UP)
        self.optimizer.zero_grad()
        narrow = settings.dtype is not torch.float32
        with torch.autocast(settings.device.type, settings.dtype, enabled=narrow):
            loss = self.model(text.to(settings.device))
        loss.backward()
        self.optimizer.step()
        self.curve.losses.append(self._mean(loss.detach()))
        self.curve.seconds.append(time.perf_counter() - start)

    def train(self, show: Callable[[Curve], None]) -> bool:
        """Train to the last step, or until a signal asks to stop.

        Args:
            show: Called after every step.

        Returns:
            Whether the last step was reached.
        """
        curve, every = self.curve, self.settings.every
        with _stop_signals() as asked:
            while len(curve.losses) < self.settings.size.steps:
                # The second step is the first one that finds the optimizer's state there.
                if len(curve.losses) == 1:
                    curve.memory = peak(self.step, self.settings.device)
                else:
                    self.step()
                show(curve)
                # Processes that are asked at different steps must leave the loop together.
                if self._mean(torch.tensor(float(bool(asked)), device=self.settings.device)):
                    self.save()
                    return False
                if every and len(curve.losses) % every == 0:
                    self.save()
        self.save()
        return True

    def save(self) -> None:
        """Write a checkpoint, which replaces the last one."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        if self.rank == 0:
            content = {"model": model, "optimizer": optimizer, "curve": asdict(self.curve)}
            unfinished = self.path.with_suffix(".tmp")
            torch.save(content | {"settings": self.settings.fixed(self.text)}, unfinished)
            os.replace(unfinished, self.path)

    def load(self) -> None:
        """Go on from the checkpoint, if there is one.

        Raises:
            ValueError: If it was made with other settings.
        """
        if not self.path.exists():
            return
        content = torch.load(self.path, map_location="cpu")
        wanted = self.settings.fixed(self.text)
        if content["settings"] != wanted:
            raise ValueError(f"{self.path} was made with {content['settings']}, not {wanted}")
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )
        self.curve = Curve(**content["curve"])

    def _mean(self, value: Tensor) -> float:
        if self.world > 1:
            dist.all_reduce(value)
        return value.item() / self.world


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect the first signal to stop in a list; the second one stops at once."""
    asked: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
