"""Calls of the ops in MAX graphs, and the same by PyTorch and by the kernels for PyTorch."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import max_graphs
import torch
import torch.nn.functional as F
from max_graphs import EPS, GATES, INPUTS, OFFSET, Kind
from mojo_programs import mojo
from torch import Tensor

from fused_norm import composition
from fused_norm.call.results import Results
from fused_norm.composition import NAMED, Operands, Spec
from fused_norm.native.cpu_features import has_tiles
from fused_norm.reference import widened

Tensors = dict[str, Tensor]
KINDS = [Kind("float32", "float32", "layer_norm", "gelu")]
QUICK_PARTS = ("forward", "plain")
# MAX compiles each of these for two minutes of a core.
MORE_KINDS = [
    Kind("bfloat16", "float32", "rms_norm", "swiglu"),
    Kind("bfloat16", "bfloat16", "layer_norm", "none"),
    Kind("bfloat16", "float32", "layer_norm", "geglu_tanh"),
    Kind("float16", "float16", "layer_norm", "silu"),
    Kind("float32", "float32", "rms_norm", "none"),
    Kind("float64", "float64", "layer_norm", "quick_gelu"),
]
# What is there, how many groups of rows have a modulation of their own, and the number of rows.
CASES: dict[str, tuple[set[str], int, int]] = {
    "all": ({"residual", "norm_weight", "norm_bias", "scale", "shift", "bias", "dtotal"}, 3, 33),
    "none": (set(), 0, 33),
    "residual": ({"residual", "norm_weight", "bias", "dtotal"}, 0, 201),
    "shift": ({"norm_weight", "shift"}, 1, 33),
    "plain": ({"norm_weight", "norm_bias", "bias"}, 0, 33),
}
OPTIONAL = CASES["all"][0]
_AFFINE = {"gamma": "norm_weight", "beta": "norm_bias"}
NAMES = (*(_AFFINE.get(name, name) for name in NAMED), "weight", "bias")


def make_tensors(
    kind: Kind, case: str, device: str, size: tuple[int, int, int] | None = None
) -> Tensors:
    """Return the tensors of a case, of (33 or 201, 50, 34) or of a size."""
    there, groups, rows = CASES[case]
    rows, k, columns = size or (rows, 50, 34)
    n = columns // 2 if kind.activation in GATES else columns
    shapes = {
        **{"x": (rows, k), "residual": (rows, k), "norm_weight": (k,), "norm_bias": (k,)},
        **{"scale": (groups, k), "shift": (groups, k), "weight": (columns, k), "bias": (columns,)},
        **{"out_weight": (31, n), "out_bias": (31,), "out_residual": (rows, 31)},
        **{"dy": (rows, n), "dtotal": (rows, k), "dout": (rows, 31), "a": (rows, n)},
    }
    found = {}
    for name, shape in shapes.items():
        if name in there or name not in OPTIONAL:
            values = torch.randn(shape, dtype=torch.float64)
            if "weight" in name:
                values *= 0.2
            found[name] = values.to(device, _dtype(name, kind))
    return found


def _dtype(name: str, kind: Kind) -> torch.dtype:
    found: torch.dtype = getattr(torch, max_graphs.dtype_of(name, kind).name)
    return found


@functools.cache
def package() -> Path:
    """Return the ops, precompiled once in a process, without a warning."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    mojo("precompile", "op", "-o", str(folder / "op.mojoc"))
    return folder / "op.mojoc"


@functools.cache
def models(kinds: tuple[Kind, ...], parts: tuple[str, ...], device: str) -> dict[str, Any]:
    """Return the compiled graphs of some kinds, by name.

    Args:
        kinds: The kinds.
        parts: Which of their graphs.
        device: Where they run.
    """
    from max.driver import CPU, Accelerator, set_virtual_cpu_target
    from max.engine import InferenceSession
    from max.graph import DeviceRef

    is_gpu = device == "cuda"
    some = [kind for kind in kinds if not (is_gpu and "float64" in kind)]
    place = DeviceRef.GPU() if is_gpu else DeviceRef.CPU()
    module = max_graphs.build(some, place, package(), parts)
    session = InferenceSession(devices=[CPU(), Accelerator()] if is_gpu else [CPU()])
    # LLVM takes a masked model for an older one, without the tile registers of the kernels for
    # PyTorch.
    set_virtual_cpu_target("sapphirerapids" if has_tiles() else "")
    try:
        return session.load_all(module, custom_extensions=[package()])
    finally:
        set_virtual_cpu_target("")


def run(part: str, kind: Kind, tensors: Tensors) -> Tensors:
    """Return the results of a graph by name, without those that are empty.

    Args:
        part: Of INPUTS.
        kind: Its kind.
        tensors: What it takes; tensors that are not there are empty, others are not looked at.
    """
    device = tensors["x"].device
    inputs = []
    for name in INPUTS[part].split():
        shape = (0,) * max_graphs.rank_of(name)
        default = torch.empty(shape, device=device, dtype=_dtype(name, kind))
        inputs.append(tensors.get(name, default))
    kinds, parts = tuple(MORE_KINDS), tuple(INPUTS)
    if kind in KINDS:
        # The gradients of the family are slow tests', and compile for a minute.
        kinds, parts = tuple(KINDS), ("backward",) if part == "backward" else QUICK_PARTS
    model = models(kinds, parts, device.type)[max_graphs.name_of(part, kind)]
    if device.type == "cuda":
        # MAX has a stream of its own.
        torch.cuda.synchronize()
    results = [torch.from_dlpack(result) for result in model.execute(*inputs)]
    if device.type == "cuda":
        torch.cuda.synchronize()
    found = zip(max_graphs.names_of(part, kind), results, strict=True)
    return {name: result for name, result in found if result.numel()}


def operands(kind: Kind, t: Tensors, is_mlp: bool, offset: float) -> tuple[Spec, Operands]:
    """Return a call as the library has it, with the rows of a group in a dimension of their own."""
    groups = max((t[name].shape[0] for name in ("scale", "shift") if name in t), default=1)

    def grouped(name: str) -> Tensor | None:
        return t[name].view(groups, -1, t[name].shape[-1]) if name in t else None

    x, residual, scale, shift = map(grouped, ("x", "residual", "scale", "shift"))
    assert x is not None
    second = (t["out_weight"], t["out_bias"], grouped("out_residual")) if is_mlp else (None,) * 3
    activation = "" if kind.activation == "none" else kind.activation
    return Spec(
        kind.normalization, activation, EPS, offset, returns_sum=residual is not None
    ), Operands(
        *(x, residual, t.get("norm_weight"), t.get("norm_bias"), scale, shift, None, None),
        *second,
        weights=[t["weight"]],
        biases=[t.get("bias")],
    )


def by_pytorch(kind: Kind, t: Tensors, *, is_mlp: bool = False, offset: float = OFFSET) -> Tensors:
    """Return all results of norm + Linear, or of the MLP, by PyTorch in the same dtype."""
    what, o = operands(kind, t, is_mlp, offset)
    y, *total = composition.compute(what, o)
    rows = total[0] if total else o.x
    dy = t["dout" if is_mlp else "dy"].view(y.shape)
    dtotal = [t["dtotal"].view(rows.shape)] if total else []
    wanted = [value is not None for value in composition.flat(o)]
    gradients = composition.gradients(what, o, [dy, *dtotal], wanted)
    found = {"mlp" if is_mlp else "y": y, **_statistics(rows, kind), **_gradients(gradients)}
    if total:
        found["total"] = rows
    if what.activation:
        found["product"] = F.linear(
            composition.normalized(what, rows, o), t["weight"], t.get("bias")
        )
    return found


def mlp_by_pytorch(kind: Kind, t: Tensors) -> Tensors:
    """Return the result and the gradients of the MLP by PyTorch in the same dtype."""
    found = by_pytorch(kind, t, is_mlp=True)
    return {
        name if name == "mlp" else f"mlp_{name}": value
        for name, value in found.items()
        if name == "mlp" or name.startswith("d")
    }


def _statistics(rows: Tensor, kind: Kind) -> Tensors:
    rows = widened(rows)
    if kind.normalization == "rms_norm":
        return {"rstd": torch.rsqrt(rows.square().mean(-1) + EPS)}
    variance, mean = torch.var_mean(rows, -1, correction=0)
    return {"mean": mean, "rstd": torch.rsqrt(variance + EPS)}


def _gradients(gradients: list[Tensor | None]) -> Tensors:
    found = zip(NAMES, gradients, strict=True)
    return {f"d{name}": g for name, g in found if g is not None and "residual" not in name}


def linear_add_by_pytorch(kind: Kind, t: Tensors) -> Tensors:
    """Return all results of Linear + residual by PyTorch in the same dtype."""
    leaves = [t[name].detach().requires_grad_() for name in ("a", "out_weight", "out_bias")]
    out = F.linear(*leaves) + t["out_residual"]
    gradients = torch.autograd.grad(out, leaves, t["dout"])
    out = out.detach()
    names = ("da", "dout_weight", "dout_bias")
    found = {"": out, **_statistics(out, kind), **dict(zip(names, gradients, strict=True))}
    return {f"add_{name}".rstrip("_"): value for name, value in found.items()}


@torch.no_grad()
def by_native(kind: Kind, t: Tensors) -> Tensors:
    """Return all results of norm + Linear by the kernels for PyTorch."""
    what, o = operands(kind, t, False, OFFSET)
    results = Results.unflat(
        torch.ops.fused_norm.norm_linear_forward(*o, *what, True), what, o, True
    )
    x = o.x if results.sum is None else results.sum
    saved = o._replace(x=x, residual=None, mean=results.mean, rstd=results.rstd)
    grads = [t["dy"], t["dtotal"]] if o.residual is not None else [t["dy"]]
    wanted = [value is not None for value in composition.flat(o._replace(residual=None))]
    gradients = _by_op(what, saved, results.products, grads, wanted)
    found = {"y": results.outputs[0], "total": results.sum, "mean": results.mean}
    found |= {"rstd": results.rstd, "product": (*results.products, None)[0]}
    return {name: v for name, v in found.items() if v is not None} | _gradients(gradients)


def _by_op(
    kind: Spec, saved: Operands, products: list[Tensor], grads: list[Tensor], wanted: list[bool]
) -> list[Tensor | None]:
    """Return the gradients by the kernels, None where not wanted."""
    places = [place for place, w in enumerate(wanted) if w]
    backward = torch.ops.fused_norm.norm_linear_backward
    found = iter(backward(*saved, *kind, products, grads, places))
    return [next(found) if w else None for w in wanted]


def plain_by_native(t: Tensors) -> Tensors:
    """Return all results of LayerNorm + Linear by the kernels for PyTorch."""
    x, gamma, beta, weight, bias = (
        t[name] for name in ("x", "norm_weight", "norm_bias", "weight", "bias")
    )
    o = Operands(x, gamma=gamma, beta=beta, weights=[weight], biases=[bias])
    kind = Spec(eps=EPS)
    y, mean, rstd = torch.ops.fused_norm.norm_linear_forward(*o, *kind, True)
    saved = o._replace(mean=mean, rstd=rstd)
    wanted = [value is not None for value in composition.flat(o)]
    found = _by_op(kind, saved, [], [t["dy"]], wanted)
    names = ("dx", "dnorm_weight", "dnorm_bias", "dweight", "dbias")
    gradients = [gradient for gradient in found if gradient is not None]
    return {"y": y, "mean": mean, "rstd": rstd, **dict(zip(names, gradients, strict=True))}
