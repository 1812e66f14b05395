"""torchtitan's LLaMA, each block compiled by torchtitan itself (`--compile.backend fused_norm`)."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adopters import EAGER
from torch import Tensor, nn

import fused_norm as fn

titan: Any = pytest.importorskip("torchtitan.models.llama3", reason="uv pip install torchtitan")
compiling: Any = pytest.importorskip("torchtitan.distributed.compile")
pytestmark = pytest.mark.filterwarnings("ignore")


class Attention(nn.Module):
    """PyTorch's instead of torchtitan's, whose kernels need a GPU."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: Any, **_: Any) -> Tensor:
        rows = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(*rows, is_causal=True, scale=scale)
        return y.transpose(1, 2)


def llama() -> Any:
    torch.manual_seed(0)
    config = titan.llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:2]
    model = config.build()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05 if parameter.dim() > 1 else 1.0)
    for block in model.layers.values():
        block.attention.inner_attention = Attention()
    return model.double()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Undo what torchtitan sets for good."""
    names = ("capture_scalar_outputs", "skip_fwd_side_effects_in_bwd_under_checkpoint")
    config: Any = torch._dynamo.config
    with config.patch({name: getattr(config, name) for name in names}):
        yield


def test_blocks_are_compiled_by_torchtitan(sites: list[Any]) -> None:
    own = llama()
    ours = copy.deepcopy(own)
    one = types.SimpleNamespace(tp_enabled=False)
    backend = functools.partial(fn.models.backend, options=EAGER)
    config = types.SimpleNamespace(backend=backend, enable_async_tensor_parallel=False)
    compiling.apply_compile(ours, compile_config=config, parallel_dims=one)
    ids = torch.randint(2048, (2, 16))
    expected, found = own(ids), ours(ids)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for y in (expected, found):
        y.square().mean().backward()
    for a, e in zip(ours.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(a.grad, e.grad, rtol=1e-5, atol=1e-9)
    # Two norms of one graph, which serves both blocks.
    assert [(site.linears, site.fused) for site in sites] == [(1, True), (2, True)]


def test_a_whole_model() -> None:
    report = fn.explain(llama(), torch.randint(2048, (2, 16)), options={"small": True})
    assert len(report.norms) == len(report.fused) == 5, report
