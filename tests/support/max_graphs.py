"""The production ops in MAX graphs, a forward and a backward of each kind, for all sizes.

A graph takes MAX minutes to compile, so one module holds all.

python tests/support/max_graphs.py OUT.mef op.mojoc    # compiles one for an H100, attached or not
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from max.driver import (
    Accelerator,
    set_virtual_device_api,
    set_virtual_device_count,
    set_virtual_device_target_arch,
)
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, KernelLibrary, Module, TensorType, ops

from fused_norm import graphs
from fused_norm.graphs import Norm, Saved

EPS, OFFSET = 1e-5, 1.0
GATES = ("reglu", "geglu", "geglu_tanh", "swiglu")
# What each graph takes and returns; a result that is named d and a tensor is its gradient.
_NORM = "norm_weight norm_bias scale shift"
_ALL = f"x {_NORM} weight bias out_weight out_bias"
_GRADIENTS = ["dx", "dnorm_weight", "dnorm_bias", "dscale", "dshift", "dweight", "dbias"]
INPUTS = {
    "forward": f"{_ALL} residual a out_residual",
    "backward": f"{_ALL} a mean rstd product dy dtotal dout",
    "plain": "x norm_weight norm_bias weight bias dy",
}
_OUT_GRADIENTS = ["dout_weight", "dout_bias"]
RESULTS = {
    "forward": ["y", "total", "mean", "rstd", "product", "add", "add_mean", "add_rstd", "mlp"],
    "backward": [
        *("known_y", *_GRADIENTS, "add_da", *(f"add_{name}" for name in _OUT_GRADIENTS)),
        *(f"mlp_{name}" for name in (*_GRADIENTS, *_OUT_GRADIENTS)),
    ],
    "plain": ["y", "mean", "rstd", "dx", "dnorm_weight", "dnorm_bias", "dweight", "dbias"],
}
_VECTORS = ("norm_weight", "norm_bias", "bias", "out_bias", "mean", "rstd")


class Kind(NamedTuple):
    """Of what types tensors are, and what a call computes of them."""

    dtype: str
    norm_dtype: str
    normalization: str
    activation: str


def name_of(part: str, kind: Kind) -> str:
    """Return the name of a graph.

    Args:
        part: Of INPUTS.
        kind: The kind.
    """
    return "_".join([part, *kind[: 2 if part == "plain" else 4]])


def build(
    kinds: Sequence[Kind], device: DeviceRef, package: Path, parts: Sequence[str] = tuple(INPUTS)
) -> Module:
    """Return a module of the graphs of some kinds.

    Args:
        kinds: The kinds.
        device: Where to run.
        package: The ops, precompiled: MAX takes half a minute to read their sources.
        parts: Which graphs.
    """
    library = KernelLibrary()
    library.load_paths([package])
    module = Module()
    for kind in kinds:
        for part, make in (("forward", _forward), ("backward", _backward), ("plain", _plain)):
            if part not in parts or (part == "plain" and kind.normalization != "layer_norm"):
                continue
            types = {name: _type(name, kind, device) for name in INPUTS[part].split()}
            with Graph(
                name_of(part, kind),
                input_types=list(types.values()),
                kernel_library=library,
                module=module,
            ) as graph:
                values = (value.tensor for value in graph.inputs)
                results = make(dict(zip(types, values, strict=True)), kind)
                graph.output(*(value for value in results if value is not None))
    return module


def names_of(part: str, kind: Kind) -> list[str]:
    """Return the names of a graph's results."""
    names = RESULTS[part]
    if kind.normalization == "rms_norm":
        names = [name for name in names if not name.endswith("mean")]
    if kind.activation == "none":
        names = [n for n in names if n != "product" and not n.startswith("mlp")]
    return names


def _norm(t: dict[str, Any], kind: Kind) -> Norm:
    parameters = (t["norm_weight"], t["norm_bias"], EPS, OFFSET, t["scale"], t["shift"])
    activation = None if kind.activation == "none" else kind.activation
    return Norm(kind.normalization, *parameters, activation)


def _forward(t: dict[str, Any], kind: Kind) -> list[Any]:
    norm = _norm(t, kind)
    second = (t["out_weight"], t["out_bias"])
    y, saved = graphs.norm_linear(t["x"], norm, t["weight"], t["bias"], residual=t["residual"])
    add, statistics = graphs.linear_add(t["a"], *second, t["out_residual"], norm)
    results = [y, *saved, add, *statistics]
    if norm.activation is None:
        return results
    mlp, _ = graphs.norm_mlp(
        *(t["x"], norm, t["weight"], t["bias"], *second),
        residual=t["residual"],
        residual_out=t["out_residual"],
    )
    return [*results, mlp]


def _backward(t: dict[str, Any], kind: Kind) -> list[Any]:
    norm = _norm(t, kind)
    is_rms = kind.normalization == "rms_norm"
    mean = None if is_rms else t["mean"]
    saved = Saved(None, mean, t["rstd"], t["product"] if norm.activation else None)
    first, second = (t["weight"], t["bias"]), (t["out_weight"], t["out_bias"])
    known, _ = graphs.norm_linear(t["x"], norm, *first, statistics=(saved.mean, saved.rstd))
    gradients = graphs.norm_linear_backward(
        *(t["dy"], t["x"], norm, *first, saved), grad_sum=t["dtotal"]
    )
    results = [known, *gradients[:7], *graphs.linear_add_backward(t["dout"], t["a"], *second)]
    if norm.activation is None:
        return results
    of_mlp = graphs.norm_mlp_backward(
        *(t["dout"], t["x"], norm, *first, *second, saved), grad_sum=t["dtotal"]
    )
    return [*results, *of_mlp]


def _plain(t: dict[str, Any], kind: Kind) -> list[Any]:
    x, gamma, beta, weight, bias, dy = t.values()
    eps = ops.constant(EPS, DType.float64, DeviceRef.CPU())
    wide = DType.float64 if x.dtype == DType.float64 else DType.float32
    statistics = TensorType(wide, [x.shape[0]], x.device)
    y = TensorType(x.dtype, [x.shape[0], weight.shape[0]], x.device)
    forward = ops.custom(
        "fused_norm_layernorm_linear",
        x.device,
        [x, gamma, beta, weight, bias, eps],
        [y, statistics, statistics],
    )
    backward = ops.custom(
        "fused_norm_layernorm_linear_backward",
        x.device,
        [dy, x, gamma, beta, weight, *forward[1:], eps],
        [value.type for value in (x, gamma, beta, weight, bias)],
    )
    return [*forward, *backward]


def rank_of(name: str) -> int:
    """Return the rank of a tensor."""
    return 1 if name in _VECTORS else 2


def dtype_of(name: str, kind: Kind) -> DType:
    """Return the dtype of a tensor."""
    if name in ("mean", "rstd"):
        return DType.float64 if kind.dtype == "float64" else DType.float32
    return DType[kind.norm_dtype if name.startswith("norm_") else kind.dtype]


def _type(name: str, kind: Kind, device: DeviceRef) -> TensorType:
    # Each size has a name of its own: whether they agree is for the op to find out.
    sizes = [f"{name}_{axis}" for axis in range(rank_of(name))]
    return TensorType(dtype_of(name, kind), sizes, device)


def compile_for_gpu(kinds: Sequence[Kind], path: str, package: Path) -> None:
    """Compile for a GPU that need not be there, and leave this process.

    Args:
        kinds: What to compile.
        path: Where to write it.
        package: The ops.
    """
    set_virtual_device_api("cuda")
    set_virtual_device_target_arch("sm_90")
    set_virtual_device_count(1)
    session = InferenceSession(devices=[Accelerator()])
    module = build(kinds, DeviceRef.GPU(), package)
    session.compile(module, custom_extensions=[package]).export_mef(path)
    # MAX now and then aborts on the way out, while threads of its compiler still run.
    os._exit(0)


if __name__ == "__main__":
    compile_for_gpu(
        [Kind("bfloat16", "float32", "layer_norm", "swiglu")], sys.argv[1], Path(sys.argv[2])
    )
