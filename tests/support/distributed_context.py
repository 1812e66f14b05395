"""Context parallel in two processes: each has half of every sequence, and all keys and values.

The keys and values are gathered before attention, as LLaMA 3 was trained. Ring attention computes
the same without holding them at once, and only on GPUs; norms and Linear layers see the same rows.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from compiling import with_sites
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

FEATURES, TOKENS = 16, 10


class Block(nn.Module):
    """Attention and a gated MLP; tokens from `first` on are those of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(FEATURES), nn.RMSNorm(FEATURES)
        self.q, self.k, self.v, self.out = (
            nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(FEATURES, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, FEATURES, bias=False)

    def forward(self, x: Tensor, first: int, gather: Callable[[Tensor], Tensor]) -> Tensor:
        z = self.norm1(x)
        q, k, v = self.q(z), gather(self.k(z)), gather(self.v(z))
        places = torch.arange(k.shape[1])
        mask = places[first : first + q.shape[1], None] >= places
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, mask))
        z = self.norm2(x)
        y: Tensor = x + self.down(F.silu(self.gate(z)) * self.up(z))
        return y


def check(how: str, mesh: DeviceMesh) -> None:
    """Compare rows and gradients with those of one process that has whole sequences."""
    torch.manual_seed(11)
    alone = nn.ModuleList([Block(), Block()]).double()
    parallel = copy.deepcopy(alone)
    group = mesh.get_group()

    def gather(t: Tensor) -> Tensor:
        return collectives.all_gather_tensor_autograd(t, 1, group)

    def run(layers: nn.ModuleList, x: Tensor, first: int, gather: Callable) -> Tensor:
        for layer in layers:
            x = layer(x, first, gather)
        return x

    rank, half = dist.get_rank(), TOKENS // 2
    x = torch.randn(3, TOKENS, FEATURES, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    own = x[:, rank * half :][:, :half].clone().requires_grad_()
    compiled, sites = with_sites(
        functools.partial(run, parallel, first=rank * half, gather=gather),
        fullgraph=True,
        then=how,
        small=True,
    )
    expected = run(alone, whole, 0, lambda t: t)
    found = compiled(own)
    fused = ["norm_linear: 3 Linear", "norm_mlp: residual, swiglu"]
    fused += ["norm_linear: residual, 3 Linear", "norm_mlp: residual, swiglu"]
    calls = [call for site in sites for call in site.calls]
    assert calls == fused, calls
    dy = torch.sin(torch.arange(float(x.numel()), dtype=x.dtype)).view_as(x)
    expected.backward(dy)
    part = slice(rank * half, (rank + 1) * half)
    found.backward(dy[:, part].contiguous())
    assert whole.grad is not None
    torch.testing.assert_close(found, expected[:, part])
    torch.testing.assert_close(own.grad, whole.grad[:, part])
    for mine, theirs in zip(parallel.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None
        # Each process has the gradient of its rows.
        dist.all_reduce(mine.grad)
        torch.testing.assert_close(mine.grad, theirs.grad)


def cases() -> dict[str, Callable[[DeviceMesh], None]]:
    """Return what to run by the names of distributed_cases.CONTEXT."""
    from distributed_cases import CONTEXT

    return {name: functools.partial(check, name.split("; ")[1]) for name in CONTEXT}
