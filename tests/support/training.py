"""A model trained along with the same model by PyTorch's ops, in its dtype and in float64.

What is trained is one architecture whose norms and Linear layers run in four ways: PyTorch's
modules, the library's modules, its functions, and the backend of torch.compile. After every step,

- the evaluation, twice over so that whatever may be kept is in use, is held against PyTorch's with
  the very same parameters: what is out of date by a step shows at once, and the step is seen to
  have moved the result by more than the bound;
- losses, evaluations and parameters are held against a training in float64 from the same start:
  they may be off by twice what PyTorch's own training has been off by so far, in 16 bits by eight
  times that.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accuracy import assert_within_budget
from torch import Tensor, nn
from torch.func import functional_call
from training_net import Modules, Net

from fused_norm.models import backend

STEPS = 20
# How much more than PyTorch's an evaluation may err.
BUDGET = 2.0
# How far a single evaluation may be from what many may err.
MOST = 2.0
# How many more times PyTorch's error is drawn.
DRAWS = 8
KINDS = ("modules", "functions", "backend")
EAGER: dict[str, Any] = {"backend": backend, "options": {"then": "eager"}}
# Of rows that Hopper multiplies by a folded weight, as tests/ops/test_folds.py has them.
WIDTHS = {"cpu": (16, 8), "cuda": (256, 128)}


@dataclass
class Subject:
    """A model in one of the four ways.

    Attributes:
        kind: The way, or "plain".
        module: Has the parameters.
        call: Computes.
        twin: The same by PyTorch's ops, with other parameters.
        names: The parameters' names in the module, by those in the twin.
        data: Makes the batch of a step.
    """

    kind: str
    module: nn.Module
    call: Callable[[Tensor], Tensor]
    twin: nn.Module
    data: Data
    names: dict[str, str] = field(default_factory=dict)

    def parameters(self) -> dict[str, Tensor]:
        """Return copies of the parameters by the twin's names."""
        own = dict(self.module.named_parameters())
        return {name: own[mine].detach().clone() for name, mine in self.names.items()}

    def loss(self, step: int, part: slice = slice(None)) -> Tensor:
        """Return the loss of a step's batch, or of a part of it."""
        x, y = self.data.batch(step)
        wide = torch.promote_types(y.dtype, torch.float32)
        # Reentrant checkpointing depends on whether inputs need gradients.
        found = self.call(x[part].requires_grad_())
        return F.mse_loss(found.to(wide), y[part].to(wide))

    def evaluate(self) -> Tensor:
        """Evaluate the model twice, hold both results against the twin's, and return one."""
        was_training = self.module.training
        self.module.eval()
        x, _ = self.data.batch(-1)
        with torch.no_grad():
            # Graphs of CUDA give all their results in the same memory.
            results = [self.call(x).clone() for _ in range(2)]
        self.module.train(was_training)
        if self.kind != "plain":
            parameters = self.parameters()
            bar, truth = self.by_pytorch(parameters)
            for y in results:
                try:
                    assert_within_budget("evaluation", y, truth, bar, BUDGET)
                except AssertionError:
                    # What is out of date is further off than that, also where later calls are not.
                    is_near = _typical(y, truth) <= MOST * self.allowed_error(parameters)
                    if not (is_near and self._errs_as_pytorch(parameters)):
                        raise
        return results[1]

    def by_pytorch(self, parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return what PyTorch computes with these parameters, and what is exact."""
        x, _ = self.data.batch(-1)
        with torch.no_grad():
            bar = functional_call(self.twin, parameters, (x,))
            return bar, self._exact(parameters, x)

    def typical_error(self, parameters: dict[str, Tensor]) -> float:
        """Return the error of PyTorch's evaluations at many inputs that are a rounding away.

        Where a result depends so steeply on its input that all roundings grow, the error of a
        single evaluation is a random number.
        """
        near = neighbors(self.data.batch(-1)[0])
        with torch.no_grad():
            bar = functional_call(self.twin, parameters, (near,))
            return _typical(bar, self._exact(parameters, near))

    def _errs_as_pytorch(self, parameters: dict[str, Tensor]) -> bool:
        """Return whether evaluations at such inputs err as PyTorch's do."""
        was_training = self.module.training
        self.module.eval()
        x, _ = self.data.batch(-1)
        near = neighbors(x)
        with torch.no_grad():
            results = torch.cat([self.call(each).clone() for each in near.split(len(x))])
        self.module.train(was_training)
        return _typical(results, self._exact(parameters, near)) <= self.allowed_error(parameters)

    def allowed_error(self, parameters: dict[str, Tensor]) -> float:
        """Return what evaluations at such inputs may err."""
        floor = torch.finfo(self.data.dtype).eps / 2
        return BUDGET * (self.typical_error(parameters) + floor)

    def _exact(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        exact = {name: p.double() for name, p in parameters.items()}
        y: Tensor = functional_call(self.twin, exact, (x.double(),))
        return y


def _typical(y: Tensor, truth: Tensor) -> float:
    return ((y.double() - truth).norm() / truth.norm()).item()


class Data(NamedTuple):
    """Where and in which dtype batches are."""

    device: str
    dtype: torch.dtype

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step, the same in every dtype but for its rounding."""
        width, outputs = WIDTHS[self.device]
        generator = torch.Generator().manual_seed(100 + step)
        x = torch.randn(4, 4, width, generator=generator, dtype=torch.float64).bfloat16().double()
        y = torch.tanh(x.flip(-1).cumsum(-1)[..., :outputs] / 2)
        return tuple(t.to(self.device, self.dtype) for t in (x, y))


def neighbors(x: Tensor) -> Tensor:
    """Return DRAWS tensors, one after another, whose elements are x's or the next numbers."""
    generator = torch.Generator().manual_seed(7)
    steps = torch.randint(-1, 2, (DRAWS, *x.shape), generator=generator).to(x)
    return (x + steps * x.abs() * torch.finfo(x.dtype).eps).to(x.dtype).flatten(0, 1)


Change = Callable[[nn.Module], nn.Module]


def subject(
    kind: str,
    device: str,
    dtype: torch.dtype,
    *,
    exact: bool = False,
    change: Change = lambda net: net,
    around: Callable[..., Tensor] | None = None,
    **options: Any,
) -> Subject:
    """Return a model.

    Args:
        kind: "plain", or one of KINDS.
        device: Where.
        dtype: In which it starts.
        exact: Whether it goes on in float64.
        change: Makes another of the net, such as PEFT's.
        around: Calls a block of the net, such as checkpoint.
        options: Of torch.compile, which modules and functions go through if there are any.
    """
    torch.manual_seed(1)
    net = Net(*WIDTHS[device]).to(device, dtype)
    net.around = around
    if exact:
        net.double()
        dtype = torch.float64
    net.is_fused = kind == "functions"
    module = change(net)
    twin = copy.deepcopy(module)
    for each in twin.modules():
        if isinstance(each, Net):
            each.is_fused, each.around = False, None
    known = {id(p): name for name, p in module.named_parameters()}
    if kind == "modules":
        module = Modules(net)
    names = {known[id(p)]: name for name, p in module.named_parameters()}
    assert len(names) == len(known)
    call: Callable[..., Any] = module
    if kind == "backend":
        call = torch.compile(module, **{**EAGER, **options})
    elif options:
        call = torch.compile(module, **options)
    return Subject(kind, module, call, twin, Data(device, dtype), names)


# Where PyTorch's own training is as far as this from the exact one, in its evaluation or its
# parameters, roundings have begun to grow from step to step, tenfold in ten steps on an H100: who
# is nearer from then on is chance, also in what follows from it. What is out of date shows at any
# step, in evaluations that are compared at the same parameters.
CHAOS = 0.03

# Makes what trains a model by one step and returns the loss.
Recipe = Callable[[Subject], Callable[[int], Tensor]]


class Moment(NamedTuple):
    """A training after a step."""

    loss: Tensor
    evaluation: Tensor
    parameters: dict[str, Tensor]

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Give what is compared after a step, each as a vector in float64."""
        yield "evaluation", self.evaluation.double().flatten()
        values = [self.parameters[name].double().flatten() for name in sorted(self.parameters)]
        yield "parameters", torch.cat(values)


def follow(trained: Subject, recipe: Recipe, steps: int = STEPS) -> list[Moment]:
    """Train a model, and return what was to be seen after each step."""
    step = recipe(trained)
    moments = []
    for i in range(steps):
        trained.module.train()
        loss = step(i).detach()
        moments.append(Moment(loss, trained.evaluate(), trained.parameters()))
    return moments


@functools.cache
def references(
    recipe: Recipe, device: str, dtype: torch.dtype, change: Change, steps: int
) -> tuple[list[Moment], list[Moment]]:
    """Return what PyTorch's training in a dtype gives, and that in float64."""
    bar, truth = (
        follow(subject("plain", device, dtype, exact=exact, change=change), recipe, steps)
        for exact in (False, True)
    )
    return bar, truth


def same(net: nn.Module) -> nn.Module:
    """Change nothing."""
    return net


def check_training(
    recipe: Recipe,
    kind: str,
    device: str,
    dtype: torch.dtype,
    change: Change = same,
    steps: int = STEPS,
    **options: Any,
) -> None:
    """Train a model in one way, and hold it against PyTorch's trainings."""
    torch.compiler.reset()
    bars, truths = references(recipe, device, dtype, change, steps)
    ours = subject(kind, device, dtype, change=change, **options)
    moments = follow(ours, recipe, steps)
    assert_seen(ours, moments)
    floor = torch.finfo(dtype).eps / 2
    times = 2 if dtype is torch.float32 else 4
    allowed: dict[str, float] = {}
    for i, (found, bar, truth) in enumerate(zip(moments, bars, truths, strict=True)):
        for (name, b), (_, t) in zip(bar.parts(), truth.parts(), strict=True):
            # Of all steps so far: PyTorch's own may happen to cross the truth.
            allowed[name] = max(allowed.get(name, 0.0), distance(b, t))
        if max(allowed.values()) > CHAOS:
            break
        for (name, a), (_, t) in zip(found.parts(), truth.parts(), strict=True):
            error, bound = distance(a, t), times * (allowed[name] + floor)
            assert error <= bound, f"{name} after step {i}: off by {error:.3g}, not {bound:.3g}"
    a, b, t = (torch.stack([m.loss.double() for m in each]) for each in (moments, bars, truths))
    if max(allowed.values()) <= CHAOS:
        assert distance(a, t) <= times * (distance(b, t) + floor), "losses"


def distance(a: Tensor, truth: Tensor) -> float:
    """Return how far a vector is off, relative to the norm of the truth."""
    assert a.isfinite().all()
    return ((a - truth).norm() / truth.norm()).item()


def assert_seen(ours: Subject, moments: list[Moment]) -> None:
    """Assert that evaluations with the parameters of the step before would have been noticed."""
    noticed = 0
    for before, after in itertools.pairwise(moments):
        noticed += is_noticed(ours, before.parameters, after.parameters)
    assert noticed >= 0.75 * (len(moments) - 1), f"{noticed} of {len(moments) - 1} steps"


def is_noticed(ours: Subject, old: dict[str, Tensor], new: dict[str, Tensor]) -> bool:
    """Return whether a result with old parameters is further off than the bounds."""
    stale, _ = ours.by_pytorch(old)
    bar, truth = ours.by_pytorch(new)
    try:
        assert_within_budget("stale", stale, truth, bar, BUDGET)
    except AssertionError:
        return _typical(stale, truth) > MOST * ours.allowed_error(new)
    return False
