"""Holds a model with fused norms against itself untouched: outputs and every gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import ZOO, Zoo

from fused_norm.models import Site, backend


class Comparison(NamedTuple):
    """What became of a model's norms, and how far off its results are, relative to the largest."""

    sites: list[Site]
    graphs: int
    output_error: float
    gradient_error: float

    @property
    def with_linear(self) -> list[Site]:
        return [site for site in self.sites if site.linears]


def load(name: str, deep: bool = False, zoo: Zoo = ZOO) -> tuple[nn.Module, Any]:
    """Return a model of the zoo with parameters that hide nothing, ready to train, and inputs."""
    torch.manual_seed(0)
    model, inputs = zoo[name][1](deep)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            # Ones and zeros would hide a swapped or a missing one.
            if p.dim() <= 1 or any(w in parameter_name for w in ("gamma", "lambda", "layer_scale")):
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
    for module in model.modules():
        # Whole layers left out at random would differ from run to run.
        for chance in ("layerdrop", "drop_path_prob", "drop_prob", "dropout_prob"):
            if isinstance(getattr(module, chance, None), float):
                setattr(module, chance, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, inputs


def call(model: Callable[..., Any], inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def leaves(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Give the tensors of a model's output."""
    if isinstance(output, Tensor):
        yield path, output
    elif isinstance(output, dict):
        for key, each in output.items():
            yield from leaves(each, f"{path}.{key}")
    elif isinstance(output, (list, tuple)):
        for i, each in enumerate(output):
            yield from leaves(each, f"{path}[{i}]")
    elif hasattr(output, "sample"):
        yield from leaves(output.sample, ".sample")


class DenseBatchNorm(TorchDispatchMode):
    """Hands BatchNorm's backward dense tensors.

    On a CPU, PyTorch's computes other gradients for one sample if x and dy differ in their strides,
    as behind a transposed Linear layer (EfficientFormer: off by 9 times the largest value).
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.native_batch_norm_backward.default:
            args = (args[0].contiguous(), args[1].contiguous(), *args[2:])
        return func(*args, **(kwargs or {}))


def results(model: nn.Module, inputs: Any, compiled: Any, trains: bool) -> list[dict[str, Tensor]]:
    """Return outputs and gradients of one step."""
    torch.manual_seed(2)
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(trains):
        outputs = dict(leaves(call(compiled, inputs)))
    if trains:
        generator = torch.Generator().manual_seed(3)
        loss = sum(
            (t.double() * torch.randn(t.shape, generator=generator)).sum()
            for t in outputs.values()
            if t.is_floating_point() and t.requires_grad
        )
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return [{k: t.detach() for k, t in outputs.items()}, gradients]


def _compiled(
    model: nn.Module, dynamic: bool | None = None, **options: Any
) -> tuple[Any, list[Site], list[Any]]:
    """Return a model compiled again, what becomes of its norms, and its graphs."""
    sites: list[Site] = []
    graphs = []

    def counted(module: Any, example_inputs: Any) -> Any:
        graphs.append(module)
        return backend(module, example_inputs, options={"then": "eager", **options}, sites=sites)

    torch._dynamo.reset()
    return torch.compile(model, backend=counted, dynamic=dynamic), sites, graphs


def compare(
    name: str, trains: bool = True, dynamic: bool | None = None, zoo: Zoo = ZOO, **options: Any
) -> Comparison:
    """Run a model of a zoo untouched and compiled, and compare."""
    model, inputs = load(name, zoo=zoo)
    model.train(trains)
    twin = copy.deepcopy(model)
    with DenseBatchNorm():
        expected = results(model, inputs, model, trains)
    compiled, sites, graphs = _compiled(twin, dynamic, **options)
    found = results(twin, inputs, compiled, trains)
    output_error, gradient_error = (error(a, b) for a, b in zip(expected, found, strict=True))
    return Comparison(sites, len(graphs), output_error, gradient_error)


def look(name: str, deep: bool) -> tuple[list[Site], int]:
    """Return what becomes of a model's norms in training, and how many graphs there are of it."""
    model, inputs = load(name, deep)
    compiled, sites, graphs = _compiled(model.train())
    call(compiled, inputs)
    return sites, len(graphs)


def error(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """Return the largest difference, relative to the largest value of each tensor.

    Gradients that are rounding alone, as of a bias that a softmax takes out again, are held to the
    largest of all.
    """
    assert expected.keys() == found.keys()
    floats = {k: t.double() for k, t in expected.items() if t.is_floating_point()}
    largest = max((t.abs().max().item() for t in floats.values() if t.numel()), default=0.0)
    errors = [
        (t - found[k].double()).abs().max().item()
        / max(t.abs().max().item(), 1e-3 * largest, 1e-30)
        for k, t in floats.items()
        if t.numel()
    ]
    return max(errors, default=0.0)
