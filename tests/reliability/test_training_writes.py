"""Parameters written between two evaluations, by every means there is, and seen by the second.

Evaluations come in pairs under no_grad, so that whatever a model may keep is kept when its
parameters change: many of these writes leave no trace in a version counter.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from accuracy import assert_within_budget
from compiling import ITS_OWN_WARNINGS
from devices import GPU
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from training import KINDS, Subject, is_noticed, subject

pytestmark = [*ITS_OWN_WARNINGS, pytest.mark.usefixtures("own_kernels")]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Of a module, parameters by name and what they are to be.
Write = Callable[[nn.Module, dict[str, Tensor]], None]
WRITES: dict[str, Write] = {}


def write(function: Write) -> Write:
    WRITES[function.__name__] = function
    return function


def parameters(module: nn.Module, new: dict[str, Tensor]) -> list[tuple[nn.Parameter, Tensor]]:
    return [(p, new[name]) for name, p in module.named_parameters() if name in new]


@write
def copy_(module: nn.Module, new: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for p, value in parameters(module, new):
            p.copy_(value)


@write
def data_copy_(module: nn.Module, new: dict[str, Tensor]) -> None:
    for p, value in parameters(module, new):
        p.data.copy_(value)


@write
def data_add(module: nn.Module, new: dict[str, Tensor]) -> None:
    """What PEFT's merge does."""
    for p, value in parameters(module, new):
        p.data += value - p.data


@write
def data_assigned(module: nn.Module, new: dict[str, Tensor]) -> None:
    for p, value in parameters(module, new):
        p.data = value.clone()


@write
def data_assigned_twice(module: nn.Module, new: dict[str, Tensor]) -> None:
    """The second may have the address of the first one that was read."""
    for p, value in parameters(module, new):
        p.data = torch.empty_like(value)
        p.data = value.clone()


@write
def detached(module: nn.Module, new: dict[str, Tensor]) -> None:
    for p, value in parameters(module, new):
        p.detach().mul_(0).add_(value)


@write
def foreach(module: nn.Module, new: dict[str, Tensor]) -> None:
    pairs = parameters(module, new)
    torch._foreach_copy_([p.data for p, _ in pairs], [value for _, value in pairs])


@write
def dlpack(module: nn.Module, new: dict[str, Tensor]) -> None:
    for p, value in parameters(module, new):
        torch.from_dlpack(p.detach()).copy_(value)


@write
def storage(module: nn.Module, new: dict[str, Tensor]) -> None:
    for p, value in parameters(module, new):
        p.untyped_storage().copy_(value.clone().untyped_storage())


@write
def inference_mode(module: nn.Module, new: dict[str, Tensor]) -> None:
    with torch.inference_mode():
        for p, value in parameters(module, new):
            p.data.copy_(value)


@write
def vector(module: nn.Module, new: dict[str, Tensor]) -> None:
    flat = parameters_to_vector([new.get(n, p.data) for n, p in module.named_parameters()])
    vector_to_parameters(flat, module.parameters())


@write
def load_state_dict(module: nn.Module, new: dict[str, Tensor]) -> None:
    module.load_state_dict(new, strict=False)


@write
def load_state_dict_assign(module: nn.Module, new: dict[str, Tensor]) -> None:
    module.load_state_dict({n: t.clone() for n, t in new.items()}, strict=False, assign=True)


@write
def swap_tensors(module: nn.Module, new: dict[str, Tensor]) -> None:
    # PyTorch's compiler leaves weak references to what it traced in cycles.
    gc.collect()
    for p, value in parameters(module, new):
        torch.utils.swap_tensors(p, nn.Parameter(value.clone()))


@write
def other_parameters(module: nn.Module, new: dict[str, Tensor]) -> None:
    for name, value in new.items():
        path, _, own = name.rpartition(".")
        setattr(module.get_submodule(path), own, nn.Parameter(value.clone()))


def changed(seen: Subject, of_norms: bool) -> dict[str, Tensor]:
    """Return other values for the parameters of norms, or for those of Linear layers."""
    own = {mine: twins for twins, mine in seen.names.items()}
    return {
        name: (p.detach() + 0.5 * torch.randn_like(p) * p.detach().abs().mean())
        for name, p in seen.module.named_parameters()
        if own[name].startswith("norm") == of_norms
    }


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("kind", KINDS)
def test_write(kind: str, name: str, dtype: torch.dtype, device: str) -> None:
    """Regression: results of the weights before, as they had been kept folded."""
    torch.compiler.reset()
    seen = subject(kind, device, dtype)
    for of_norms in (True, False, True, False):
        seen.evaluate()
        before = seen.parameters()
        WRITES[name](seen.module, changed(seen, of_norms))
        seen.evaluate()
        assert is_noticed(seen, before, seen.parameters())


@pytest.mark.parametrize("name", ["data_copy_", "data_add", "dlpack", "vector", "data_assigned"])
@pytest.mark.parametrize("kind", ["modules", "functions"])
@pytest.mark.parametrize("device", [GPU])
def test_write_between_replays(kind: str, name: str, device: str) -> None:
    """A graph of CUDA reads the memory that it was recorded with, as PyTorch's own does.

    Regression: NaN, or the result of the weights before, where a graph read a fold.
    """
    seen, own = (subject(each, device, torch.bfloat16) for each in (kind, "plain"))
    x, _ = seen.data.batch(-1)
    results, graphs, held = [], [], []
    recorded = seen.parameters()
    for each in (seen, own):
        with torch.no_grad():
            for _ in range(3):
                each.call(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results.append(each.call(x))
        graphs.append(graph)
    for of_norms in (True, False):
        new = changed(own, of_norms)
        for each in (seen, own):
            # Memory that graphs read stays as long as they do.
            held += [p.data for p in each.module.parameters()]
            WRITES[name](each.module, {each.names[n]: value for n, value in new.items()})
        seen.evaluate()
        for graph in graphs:
            graph.replay()
        parameters_read = recorded if name == "data_assigned" else seen.parameters()
        _, truth = seen.by_pytorch(parameters_read)
        assert_within_budget("replay", results[0], truth, results[1])
