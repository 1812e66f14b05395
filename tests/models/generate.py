"""Writes random programs around norms and Linear layers, as their seed has it.

A program is Python source, so that one that fails can be read, cut down and run. Its variables are
tensors of shape `[2, 4, K]`, those that a view, a norm or a write of any kind makes of them among
them; its parameters are shared between layers, and some are frozen.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

ROWS = (2, 4)
K = 16
PARAMETERS: dict[str, tuple[int, ...]] = {
    **{"x": (*ROWS, K), "r": (*ROWS, K), "m": (*ROWS, K)},
    **{"g": (K,), "h": (K,), "b": (K,), "c": (K,), "w": (K, K), "v": (K, K), "p": (2 * K, K)},
    **{"q": (2 * K, K), "o": (K, 2 * K), "s": (2, K)},
}
# Buffers, which take no gradient and may be written.
BUFFERS = ("m",)


@torch.library.custom_op("fused_norm_tests::accumulate", mutates_args=("total",))
def accumulate(x: Tensor, total: Tensor) -> None:
    total.add_(x)


@torch.library.custom_op("fused_norm_tests::exchange", mutates_args=("a", "b"))
def exchange(a: Tensor, scale: float, b: Tensor) -> None:
    a.mul_(scale)
    b.add_(1)


class Program:
    """A random program.

    Attributes:
        seed: What it is made of.
        lines: The body of its function.
        frozen: Names of parameters that take no gradient.
        rounds: Whether it casts to 8 bits.
        is_narrow: Whether it casts to 16 bits.
        device: Where it runs.
    """

    def __init__(self, seed: int, device: str = "cpu") -> None:
        """Write a program.

        Args:
            seed: What it is made of.
            device: Where it is to run; on a GPU, Triton kernels of the user's write as well.
        """
        self.seed, self.device, self.lines = seed, device, list[str]()
        kernels = [] if device == "cpu" else _KERNELS * 2
        self._random = random.Random(seed)
        self._rows, self._normed, self._count = ["x", "r", "m"], list[str](), 0
        self.frozen = {*BUFFERS, *(n for n in PARAMETERS if self._random.random() < 0.2)}
        self.rounds = self.is_narrow = False
        # A block of the usual kind, with anything in between.
        for _ in range(self._random.randint(1, 2)):
            self._some(_BEFORE + kernels, 2)
            self._norm()
            self._some(_AFTER + kernels, 3)
            self._linear()
            self._some(_AFTER + _LINEARS + kernels, 3)
        if any("checkpoint" in line for line in self.lines):
            # What it computes again would be of another weight.
            self.lines = [line for line in self.lines if "no_grad" not in line]
        results = dict.fromkeys([*self._random.sample(self._rows, 3), *self._rows[-2:]])
        self.lines.append(f"return ({', '.join(results)},)")

    def source(self) -> str:
        """Return the program as Python."""
        body = "\n    ".join(self.lines)
        return f"def program({', '.join(PARAMETERS)}):\n    {body}\n"

    def _some(self, makers: list[str], most: int) -> None:
        for _ in range(self._random.randint(0, most)):
            self._add(self._random.choice(makers))

    def _norm(self) -> None:
        self._add(self._random.choice(_NORMS), self._recent())
        self._normed.append(self._rows[-1])

    def _linear(self) -> None:
        self._add(self._random.choice(_LINEARS), self._normed[-1])

    def _recent(self) -> str:
        return self._random.choice(self._rows[-3:])

    def _add(self, template: str, a: str = "") -> None:
        """Add a line; `{new}` is a variable of it, `{a}` and `{b}` are rows, `{G}` is a vector."""
        pool = self._rows[-4:] + self._normed[-1:] * 3
        pick = self._random.choice
        self._count += 1
        new = f"t{self._count}"
        a = a or pick(pool)
        words = {"new": new, "a": a, "b": pick(self._rows), "G": pick("gh"), "B": pick("bc")}
        words |= {"W": pick("wv"), "P": pick("pq"), "V": pick(_VIEWS).format(a=a)}
        words |= {"I": pick(_IN_PLACE), "E": pick("gh")}
        self.rounds |= "float8" in template
        self.is_narrow |= "bfloat16" in template
        self.lines.append(template.format(**words))
        if "{new}" in template:
            self._rows.append(new)


_NORMS = [
    "{new} = F.layer_norm({a}, (K,), {G}, {B})",
    "{new} = F.layer_norm({a}, (K,), {G}, None, 1e-6)",
    "{new} = F.layer_norm({a}, normalized_shape=(K,))",
    "{new} = F.rms_norm({a}, (K,), {G}, 1e-6)",
    "{new} = F.rms_norm({a}, (K,), 1.0 + {G}, 1e-6)",
    "{new} = {a} * torch.rsqrt({a}.pow(2).mean(-1, keepdim=True) + 1e-6) * {G}",
    "{new} = F.layer_norm({a} + {b}, (K,), {G}, {B})",
    "{new} = F.layer_norm({a}, (K,)) * (1 + s[:, None]) + {b}[:, :1]",
    "{new} = F.layer_norm({a}.clone(), (K,), {G}.clone())",
    "{new} = nn.LayerNorm(K, elementwise_affine=False)({a})",
]
_LINEARS = [
    "{new} = F.linear({a}, {W}, {B})",
    "{new} = F.linear({a}, {W})",
    "{new} = {a} @ {W}.t()",
    "{new} = F.linear({a}, {W}.clone(), {B})",
    "{new} = torch.addmm({B}, {a}.reshape(-1, K), {W}.t()).view(2, 4, K)",
    "{new} = {b} + F.linear({a}, {W}, {B})",
    "{new} = F.linear(F.gelu(F.linear({a}, {P})), o, {B})",
    "{new} = {b} + F.linear(F.silu(F.linear({a}, {P})) * F.linear({a}, q), o)",
    "{new} = F.linear(F.dropout(F.relu(F.linear({a}, {P}), True), 0.0, True, True), o)",
    "{new} = F.silu(F.linear({a}, {W})) * F.linear({a}, {W})",
    "{new}, u = F.linear({a}, {P}).chunk(2, -1)",
    "{new} = F.linear({a}, {P}).chunk(2, -1)[1]",
    "{new} = F.linear({a}.transpose(0, 1), {W}).transpose(0, 1)",
    "{new} = F.linear({a}.view(-1, K), {W}).view_as({a})",
    "{new} = checkpoint(lambda y: F.linear(y, {W}).sigmoid(), {a}, use_reentrant=False)",
    "{new} = checkpoint(lambda y: F.linear(F.layer_norm(y, (K,)), {W}), {a}, use_reentrant=False)",
]
_VIEWS = [
    *("{a}", "{a}.detach()", "{a}.data", "{a}.mT", "{a}.ravel()", "{a}.swapdims(0, 1)"),
    *("{a}.chunk(2, -1)[0]", "{a}.narrow(-1, 1, 3)", "{a}.diagonal(0, 1, 2)", "{a}.unbind(1)[1]"),
    *("{a}.detach().cpu()", "{a}.hsplit(2)[1]", "{a}.view(-1)", "{a}.detach()[0]", "{a}.data[1]"),
    *("{a}.contiguous()", "torch.atleast_3d({a})", "{a}.moveaxis(0, 1).detach()"),
]
_IN_PLACE = [
    *(".mul_(1.5)", ".add_(0.5)", ".copy_(torch.ones(()))", ".clamp_(-0.5, 0.5)", ".zero_()"),
]
_WRITES = [
    "{V}{I}",
    "{V}{I}",
    "{V}{I}",
    "F.leaky_relu({V}, 0.1, True)",
    "nn.ELU(inplace=True)({V})",
    "nn.Hardtanh(-0.5, 0.5, inplace=True)({V})",
    "nn.Dropout(1.0, inplace=True)({V})",
    "F.relu6({V}, inplace=True)",
    "torch.mul(m, 2, out={a}.data)",
    "torch._foreach_mul_([{V}, m], 1.5)",
    "torch._foreach_add_([m, {a}.detach()], [{b}.detach(), m * 2])",
    "accumulate({b}.detach(), {a}.detach())",
    "torch.ops.fused_norm_tests.accumulate(total=m, x={a}.detach())",
    "exchange({b}.detach(), 0.5, {a}.data)",
    "{a}.data[:, 1] = 0.5",
    "m += {b}.detach()",
    "torch.no_grad()(lambda: {W}.mul_(0.9))()",
    "{G}.detach().add_(0.25)",
    "{W}.data.mul_(1.25)",
]
_KERNELS = ["add_by_triton({a}.data, {b}.detach())", "add_by_triton(m, {a}.detach())"]
_OTHERS = [
    "{new} = {a} + {b}",
    "{new} = {a} * 2",
    "{new} = {a} * {b}.detach()",
    "{new} = torch.sin({a})",
    "{new} = {a}.clone()",
    "{new} = {a}.detach()",
    "{new} = {a}.contiguous()",
    "{new} = {a}.view(-1, K).view_as({a})",
    "{new} = {a}.transpose(0, 1).transpose(0, 1)",
    "{new} = {a} + torch.zeros_like({a}.view(-1, K)).view_as({a})",
    "{new} = {a} + {a}.view(-1, K).new_ones({a}.view(-1, K).shape).view_as({a})",
    "{new} = torch.empty_like({a}.transpose(0, 1)).fill_(0.5).transpose(0, 1)",
    "{new} = {a}.to(torch.float8_e4m3fn).to({a}.dtype)",
    "{new} = {a}.bfloat16().to({a}.dtype)",
    "{new} = F.dropout({a}, 0.5, False)",
    "{new} = {a} * 1.0",
    "{new} = 0.5 * {a} * (1 + torch.erf({a} / 2**0.5))",
    "{new} = {a} + {b}.sum(-1, keepdim=True)",
]
_BEFORE = _OTHERS + _WRITES[:6]
_AFTER = _OTHERS + _OTHERS + _WRITES


def compiled_source(source: str) -> Callable[..., tuple[Tensor, ...]]:
    """Return the function of a program."""
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    names = {"torch": torch, "F": F, "nn": nn, "checkpoint": checkpoint, "K": K}
    names |= {"accumulate": accumulate, "exchange": exchange}
    if "add_by_triton" in source:
        from triton_kernel import add_by_triton

        names["add_by_triton"] = add_by_triton
    exec(compile(source, f"<program {hash(source)}>", "exec"), names)
    found: Callable[..., tuple[Tensor, ...]] = names["program"]
    return found
