"""Mixed dtypes: what runs untouched runs fused, with the same dtypes, values and gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from compiling import with_sites
from torch import Tensor

import fused_norm as fn
from fused_norm.models import Site

K = 16
DTYPES = {n: getattr(torch, n) for n in ("float64", "float32", "bfloat16", "float16")}
# What rounding may change, relative to a tensor's norm, by the narrowest dtype of a program.
_BOUNDS = {"float64": 1e-12, "float32": 2e-5, "float16": 6e-3, "bfloat16": 4e-2}
_ROWS, _GROUPS, _MATRICES = "xru", "st", "wvo"
_SEEDS, _BATCH = 160, 40
# Of PyTorch's own RMSNorm, where gamma has another dtype than the rows.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning")


class Program(NamedTuple):
    """A norm and its layers as Python's source, and the dtypes of its tensors."""

    source: str
    dtypes: dict[str, str]

    @property
    def function(self) -> Callable[..., Any]:
        names: dict[str, Any] = {"torch": torch, "F": F, "K": K}
        exec(compile(self.source, "<program>", "exec"), names)
        found: Callable[..., Any] = names["program"]
        return found

    @property
    def bound(self) -> float:
        used = {n for n in DTYPES if n in self.dtypes.values() or f"torch.{n}" in self.source}
        return max(_BOUNDS[name] for name in used)


def written(seed: int) -> Program:
    """Return a random program."""
    pick, chance = random.Random(seed).choice, random.Random(~seed).random
    every = [*DTYPES, "float32", "bfloat16"]
    base = pick(list(DTYPES))
    dtypes = {n: base if chance() > 0.35 else pick(every) for n in (*"xrugbstw",)}
    dtypes |= {n: dtypes["w"] if chance() < 0.92 else pick(every) for n in (*"vaoc",)}

    def cast(name: str, odds: float = 0.4) -> str:
        return f"{name}.to(torch.{pick(every)})" if chance() < odds else name

    lines, results, x = list[str](), ["q"], "x"
    if chance() < 0.4:
        lines.append(f"y = {cast('x', 0.2)} + {cast('r', 0.2)}")
        x = "y"
    g, b = cast("g"), cast("b")
    lines.append(f"h = {cast(x)}")
    root = "torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)"
    variance = "h.var(-1, keepdim=True, unbiased=False)"
    bias = pick(["", f" + {b}"])
    back = pick([f"{x}.dtype", f"torch.{pick(every)}"])
    lines += pick(
        [
            [f"z = F.layer_norm(h, (K,), {pick([g, g, 'None'])}, {pick([b, b, 'None'])})"],
            [f"z = F.layer_norm(h.float(), (K,), {g}.float(), {b}.float()).to({back})"],
            [f"z = F.rms_norm(h, (K,), {pick([g, g, 'None'])}, 1e-5){bias}"],
            [f"z = F.normalize(h, dim=-1) * K**0.5 * {g}"],
            [f"z = h * {root} * {g}{bias}"],
            [f"z = {x} * {root} * (1 + {g})"],
            [f"h = {pick([x, 'h'])}.float()", f"z = {g} * (h * {root}).to({back})"],
            [f"z = (h - h.mean(-1, keepdim=True)) * torch.rsqrt({variance} + 1e-5) * {g}{bias}"],
        ]
    )
    if chance() < 0.2:
        results.append("z.sin()")
    if chance() < 0.25:
        lines.append(f"z = z * (1 + {cast('s', 0.2)}[:, None]) + {cast('t', 0.2)}[:, None]")
    lines.append(f"z = {pick(['z.to(w.dtype)', 'z.to(w.dtype)', 'z.to(w.dtype)', cast('z')])}")
    first = f"F.linear(z, {cast('w', 0.05)}, {pick(['a', 'None', 'a.to(z.dtype)'])})"
    up, last = f"F.linear(z, {cast('v', 0.05)})", f"{cast('o', 0.05)}, {pick(['c', 'None'])}"
    mlp = f"F.linear(F.gelu({first}){pick(['', '.to(o.dtype)'])}, {last})"
    layers = [first, f"z @ {cast('w', 0.05)}.t()", f"F.gelu({first})", f"F.silu({first}) * {up}"]
    layers += [f"({first}, F.linear(z.to(v.dtype), v))"]
    layers += [mlp, f"{mlp} + {cast(pick([x, 'u']), 0.15)}"]
    lines.append(f"q = {pick(layers)}")
    results += pick([[], [f"{x} * 2"]])
    indent, head = "    ", f"def program({', '.join(dtypes)}):"
    if chance() < 0.3:
        head += f"\n    with torch.autocast('cpu', torch.{pick(['bfloat16', 'float16'])}):"
        indent *= 2
    lines.append(f"return ({', '.join(results)},)")
    return Program(f"{head}\n{indent}" + f"\n{indent}".join(lines) + "\n", dtypes)


def leave(program: Program, function: Callable[..., Any], rows: int) -> dict[str, Tensor | None]:
    """Return results and gradients of a step."""
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return (0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)

    given = {}
    for name, dtype in program.dtypes.items():
        shape: tuple[int, ...] = (2, rows, K) if name in _ROWS else (K,)
        shape = (K, K) if name in _MATRICES else (2, K) if name in _GROUPS else shape
        given[name] = (random(shape, DTYPES[dtype]) + (name == "g")).requires_grad_()
    found = function(**given)
    ys = [y for each in found for y in (each if isinstance(each, tuple) else (each,))]
    torch.autograd.backward(ys, [random(y.shape, y.dtype) for y in ys])
    return {**{f"result {i}": y for i, y in enumerate(ys)}, **{n: t.grad for n, t in given.items()}}


def defect(program: Program, rows: int, **options: Any) -> tuple[str, list[Site]]:
    """Return what differs from PyTorch's run of a program, in words, and its norms."""
    try:
        own = leave(program, program.function, rows)
    except RuntimeError as error:
        return f"refused: {error}", []
    compiled, sites = with_sites(program.function, **options)
    try:
        ours = leave(program, compiled, rows)
    except RuntimeError as error:
        # Reported with its program.
        return f"raises {error}", sites
    for name, a in own.items():
        b = ours[name]
        if a is None or b is None:
            if a is not b:
                return f"{name}: a gradient where there is none, or none where there is one", sites
            continue
        if a.dtype is not b.dtype or a.shape != b.shape:
            return f"{name}: {b.dtype} {b.shape} instead of {a.dtype} {a.shape}", sites
        off = (a.double() - b.double()).norm() / a.double().norm().clamp(min=1e-30)
        if not off <= program.bound:
            return f"{name}: off by {off:.1e}", sites
    return "", sites


@pytest.mark.parametrize("first", range(0, _SEEDS, _BATCH))
def test_random_mixes(first: int) -> None:
    """Regression: stripped casts left tensors of dtypes that no norm and no product takes."""
    taken = fused = 0
    for seed in range(first, first + _BATCH):
        program = written(seed)
        words, sites = defect(program, 3, small=[True, None][seed % 2])
        if words.startswith("refused"):
            continue
        assert not words, f"seed {seed}: {words}\n{program.source}{program.dtypes}"
        taken += 1
        fused += any(site.fused for site in sites)
    assert taken > _BATCH // 3
    assert fused > taken // 4


CASTS = "z = F.layer_norm(x.float(), (K,), g.float(), b.float()).to(torch.bfloat16)"
ROUNDED = "z = F.layer_norm(x, (K,), g.to(torch.bfloat16), b)"
WIDENED = "z = F.layer_norm(x, (K,), g.float(), b.float())"
LLAMA = """h = x.float()
    z = g * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)"""
IN_DOUBLE = "z = F.layer_norm(x.double(), (K,), g.double(), b.double()).float()"
NARROWED = "z = F.rms_norm(x, (K,), g, 1e-6).bfloat16()"
MIXES = {
    "casts of gamma and beta": (CASTS, "bfloat16", {}, ""),
    "rounded gamma": (ROUNDED, "bfloat16", {"g": "float32"}, ""),
    "float16 gamma": (WIDENED, "bfloat16", {"g": "float16"}, ""),
    "float64 gamma": (WIDENED, "bfloat16", {"g": "float64"}, ""),
    "LLaMA in float64": (LLAMA, "float64", {}, "computed in torch.float64"),
    "norm in float64": (IN_DOUBLE, "float32", {}, "computed in torch.float64"),
    "narrower layers": (
        NARROWED,
        "float32",
        dict.fromkeys("wao", "bfloat16"),
        "its rows are torch.float32, and a layer's parameters torch.bfloat16",
    ),
}
TAILS = ["F.linear(z, w, a)", "F.linear(F.gelu(F.linear(z, w, a)), o, a) + x.to(w.dtype)"]


@pytest.mark.parametrize(("rows", "then"), [(3, "eager"), (3, "aot_eager"), (700, "eager")])
@pytest.mark.parametrize("tail", TAILS, ids=["linear", "mlp"])
@pytest.mark.parametrize("mix", MIXES)
def test_mix(mix: str, tail: str, rows: int, then: str) -> None:
    line, base, others, reason = MIXES[mix]
    program = Program(
        f"def program(x, g, b, w, a, o):\n    {line}\n    return ({tail},)\n",
        {**dict.fromkeys("xgbwao", base), **others},
    )
    words, (site,) = defect(program, rows, small=True, then=then)
    assert not words
    assert site.fused != bool(reason)
    assert reason in site.reason


def test_parameters_that_pytorch_refuses_stay() -> None:
    """A fused norm would take them, so that a model would run that does not without us."""
    program = Program(
        "def program(x, g, b, w):\n    return (F.linear(F.layer_norm(x, (K,), g, b), w),)\n",
        {**dict.fromkeys("xgw", "bfloat16"), "b": "float32"},
    )
    compiled, sites = with_sites(program.function, small=True)
    for function in (program.function, compiled):
        with pytest.raises(RuntimeError, match=r"expected scalar type|mixed dtype"):
            leave(program, function, 3)
    assert "PyTorch's norm takes no parameters of" in sites[0].reason


def test_float64_layers_of_float32_rows_under_autocast() -> None:
    """Regression: autocast leaves float64, and kernels were asked for products of two dtypes."""
    x, g = torch.randn(3, K), torch.ones(K)
    w = torch.randn(K, K, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="dtype"):
        fn.norm_linear(x, w, norm_weight=g)
