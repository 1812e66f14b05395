"""What training loops train: PyTorch's ops, the library's functions, or its modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fused_norm as fn


class Net(nn.Module):
    """Three blocks of transformers' kinds and a head: PyTorch's ops, or the library's functions."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.is_fused = False
        self.around: Callable[..., Tensor] | None = None
        self.norm1, self.norm2, self.norm4 = (nn.LayerNorm(width) for _ in range(3))
        self.norm3 = nn.RMSNorm(width, eps=1e-6)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.wide = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.head = nn.Linear(width, outputs)
        for name, p in self.named_parameters():
            if name.startswith("norm"):
                nn.init.normal_(p, float(name.endswith("weight")), 0.2)

    def mix(self, x: Tensor) -> Tensor:
        linears = (self.q, self.k, self.v)
        if self.is_fused:
            weights, biases = [m.weight for m in linears], [m.bias for m in linears]
            norm = {"norm_weight": self.norm1.weight, "norm_bias": self.norm1.bias}
            q, k, v = fn.norm_linear(x, weights, biases, **norm)
        else:
            z = self.norm1(x)
            q, k, v = (linear(z) for linear in linears)
        return x + self.out(torch.tanh(q) * torch.sigmoid(k) + v)

    def mlp(self, x: Tensor) -> Tensor:
        if not self.is_fused:
            return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        norm = {"norm_weight": self.norm2.weight, "norm_bias": self.norm2.bias}
        second = (self.fc2.weight, self.fc2.bias)
        first = (self.fc1.weight, self.fc1.bias)
        return fn.norm_mlp(x, *first, *second, activation="gelu", residual_out=x, **norm)

    def gated(self, x: Tensor) -> Tensor:
        if self.is_fused:
            norm = {"normalization": "rms_norm", "norm_weight": self.norm3.weight, "eps": 1e-6}
            return x + self.down(fn.norm_linear(x, self.wide.weight, activation="swiglu", **norm))
        gate, up = self.wide(self.norm3(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def last(self, x: Tensor) -> Tensor:
        if self.is_fused:
            norm = (self.norm4.weight, self.norm4.bias)
            return fn.fused_layernorm_linear(x, *norm, self.head.weight, self.head.bias)
        return self.head(self.norm4(x))

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.mix, self.mlp, self.gated):
            x = self.around(block, x) if self.around and self.training else block(x)
        return self.last(x)


class Modules(Net):
    """The library's modules on the Parameters of a net."""

    def __init__(self, net: Net) -> None:
        nn.Module.__init__(self)
        self.around = net.around
        qkv = {"q": net.q, "k": net.k, "v": net.v}
        self.qkv = fn.LayerNormLinear.from_modules(net.norm1, qkv)
        self.out, self.down = net.out, net.down
        self.whole = fn.LayerNormMLP.from_modules(net.norm2, net.fc1, net.fc2, activation="gelu")
        self.wide = fn.LayerNormLinear.from_modules(net.norm3, net.wide, activation="swiglu")
        self.head = fn.LayerNormLinear.from_modules(net.norm4, net.head)

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(torch.tanh(q) * torch.sigmoid(k) + v)

    def mlp(self, x: Tensor) -> Tensor:
        return self.whole(x, x)

    def gated(self, x: Tensor) -> Tensor:
        return x + self.down(self.wide(x))

    def last(self, x: Tensor) -> Tensor:
        return self.head(x)
