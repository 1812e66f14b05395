"""Holds a backend of torch.compile to what PyTorch's own suite of models asks of one.

As there: a model is run in inference and for two steps of training, and outputs, gradients,
parameters and buffers must be the `same` as PyTorch's own by its rule: alike, or no further from
float64 than a small multiple of what PyTorch's own are. Every tensor is first divided by its
largest value, so that the tolerance means the same for all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from compare import load, results
from torch import Tensor, nn
from torch._dynamo.utils import same
from torch.utils._pytree import tree_map_only
from zoo import Zoo

Found = dict[str, Tensor]
PASSED = "pass"


def run(model: nn.Module, inputs: Any, compiled: Any, trains: bool) -> list[Found]:
    """Return outputs and gradients of each step, and what the model holds after the last."""
    if not trains:
        return results(model.eval(), inputs, compiled, False)[:1]
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for _ in range(2):
        step = results(model, inputs, compiled, True)
        found += [{name: t.clone() for name, t in each.items()} for each in step]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    return [*found, state]


def scaled(found: list[Found], truth: list[Found]) -> list[Found]:
    """Return tensors divided by the truth's largest value.

    Those that are rounding alone, as the gradient of a bias that a softmax takes out again, are
    held to the largest of all.
    """
    rows = []
    for each, exact in zip(found, truth, strict=True):
        largest = {
            name: t.abs().max().item()
            for name, t in exact.items()
            if t.is_floating_point() and t.numel()
        }
        least = 1e-3 * max(largest.values(), default=0.0)
        rows.append(
            {
                name: t / (max(largest[name], least) or 1.0) if name in largest else t
                for name, t in each.items()
            }
        )
    return rows


class Trial:
    """A model in inference or training, by PyTorch in its dtype and in float64."""

    def __init__(self, name: str, zoo: Zoo, trains: bool) -> None:
        self.model, self.inputs = load(name, zoo=zoo)
        self.trains = trains
        self.expected = self._run(lambda model: model)
        self.is_exact = True
        try:
            self.truth = self._in_float64()
        except RuntimeError:
            # Not all models run in float64: then, as in PyTorch's suite, directions are compared.
            self.truth, self.is_exact = self.expected, False

    def _in_float64(self) -> list[Found]:
        model = copy.deepcopy(self.model).double()
        inputs = tree_map_only(
            Tensor, lambda t: t.double() if t.is_floating_point() else t, self.inputs
        )
        return run(model, inputs, model, self.trains)

    def _run(self, compile_: Callable[[nn.Module], Any]) -> list[Found]:
        torch.compiler.reset()
        twin = copy.deepcopy(self.model)
        return run(twin, self.inputs, compile_(twin), self.trains)

    def judge(self, compile_: Callable[[nn.Module], Any]) -> str:
        """Return "pass", or what is wrong with a model compiled.

        Args:
            compile_: Compiles it.
        """
        wrong: list[str] = []

        def say(words: str, *values: Any) -> None:
            wrong.append(words % values)

        try:
            found = self._run(compile_)
            shapes = [{n: t.shape for n, t in each.items()} for each in found]
            if shapes != [{n: t.shape for n, t in each.items()} for each in self.expected]:
                return "other results, or of other shapes"
            three = (scaled(each, self.truth) for each in (self.expected, found, self.truth))
            is_same = same(*three, equal_nan=True, cos_similarity=not self.is_exact, log_error=say)
        except Exception as error:
            # The models are others', and so may be what any backend does to them.
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        return PASSED if is_same else "; ".join(wrong)
