"""Heads in whole training steps of transformers' models, against the same steps without a compiler.

Losses are sums divided by the tokens of all micro batches, embeddings are tied to heads, and real
optimizers write weights in place between steps.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel

from fused_norm.models import Site, backend
from fused_norm.models.sites import HEAD

transformers = pytest.importorskip("transformers", reason="uv sync --group models")
V = 503
STEPS, MICRO_BATCHES = 3, 2
# Of Dynamo's own look at the logits.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _no_head_is_small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("fused_norm.ops.head.FEW_LOGITS", 0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Loss(nn.Module):
    """A model's own loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor, tokens: Any) -> Tensor:
        found: Tensor = self.model(input_ids=ids, labels=labels, num_items_in_batch=tokens).loss
        return found


def qwen3(is_checkpointed: bool = False) -> Loss:
    """Return a model of two layers whose embedding is its head."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **{"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
        **{"tie_word_embeddings": True, "use_cache": False},
    )
    model = transformers.Qwen3ForCausalLM(config).train()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return Loss(model)


def batches(is_tensor: bool = True) -> list[list[tuple[Tensor, Tensor, Any]]]:
    """Return micro batches of each step, in which some tokens have no loss, of one whole rows."""
    torch.manual_seed(1)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(0, V, (MICRO_BATCHES, 2, 9))
        labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
        labels[0, 1] = -100
        count = (labels[..., 1:] != -100).sum()
        tokens = count if is_tensor else int(count)
        found.append([(ids[i], labels[i], tokens) for i in range(MICRO_BATCHES)])
    return found


def train(
    model: nn.Module, call: Callable[..., Tensor], data: Any, optimizer: Any, wait: Any = None
) -> list[Tensor]:
    """Train, and return the losses, the last gradients and the parameters after it."""
    steps = optimizer(model.parameters())
    losses = []
    for micro_batches in data:
        steps.zero_grad()
        for i, batch in enumerate(micro_batches):
            is_last = i + 1 == len(micro_batches)
            with nullcontext() if is_last or wait is None else wait():
                loss = call(*batch)
                loss.backward()
            losses.append(loss.detach())
        steps.step()
    parameters = list(model.parameters())
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    assert len(gradients) == len(parameters)
    return [*losses, *gradients, *(p.detach().clone() for p in parameters)]


def check(
    loss: Loss,
    then: str,
    data: Any,
    optimizer: Any,
    wrapped: Callable[[nn.Module], Any] = lambda model: model,
    rewritten: int = 1,
) -> int:
    """Compare training by the backend with PyTorch's ops alone; return how many graphs it got."""
    exact = train(own := copy.deepcopy(loss), own, data, optimizer)
    sites: list[Site] = []
    graphs = 0

    def ours(module: GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return backend(module, inputs, options={"then": then, "small": True}, sites=sites)

    model: Any = wrapped(loss)
    # PyTorch's reducer of static graphs fails in no_sync() when the forward is compiled.
    wait = None if getattr(model, "static_graph", True) else model.no_sync
    found = train(model, torch.compile(model, backend=ours), data, optimizer, wait)
    heads = [(site.fused, site.reason) for site in sites if site.kind == HEAD]
    assert heads == [(True, "")] * rewritten
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
    return graphs


SGD = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9)
# Of fresh moments AdamW's step is the gradient's sign, which roundings may turn.
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)


# What Inductor compiles here for a CPU takes a minute; that it takes the op once is AdamW's test.
BY_INDUCTOR = pytest.param("inductor", marks=pytest.mark.slow)


@pytest.mark.parametrize("then", ["eager", BY_INDUCTOR])
@pytest.mark.parametrize("is_tensor", [False, True])
def test_micro_batches_of_one_number_of_tokens(then: str, is_tensor: bool) -> None:
    check(qwen3(), then, batches(is_tensor), SGD, rewritten=1 if is_tensor else 2)


def test_adamw_writes_tied_weights() -> None:
    check(qwen3(), "inductor", batches(), ADAMW)


@pytest.mark.parametrize("then", ["aot_eager", BY_INDUCTOR])
def test_layers_in_checkpoints(then: str) -> None:
    check(qwen3(is_checkpointed=True), then, batches(), SGD)


@pytest.mark.parametrize("then", ["aot_eager", BY_INDUCTOR])
@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("is_static", [False, True])
def test_distributed_data_parallel(
    is_static: bool, splits: bool, then: str, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets as small as a layer, between which Dynamo splits the graph where it may."""
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 4096)
    wrapped = functools.partial(DistributedDataParallel, static_graph=is_static, bucket_cap_mb=0.01)
    with torch._dynamo.config.patch(optimize_ddp=splits):
        graphs = check(qwen3(), then, batches(), SGD, wrapped)
    assert (graphs > 1) == splits
