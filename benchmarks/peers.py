"""Other projects' kernels for the op family: pieces of a member, or all of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import parts
from benchmarks.case import EPS, Case, Outputs
from benchmarks.ops import Member
from benchmarks.provider import Bind, Bound, Provider, as_function, imported, needs_gpu, through
from benchmarks.shapes import Shape


def _of_parts(
    name: str, load: Callable[[], parts.Parts], package: str, what: str
) -> Callable[[Member], Provider]:
    """Return a maker of providers that compose a member of their own parts."""
    return lambda member: Provider(
        name,
        member.op.name,
        "peer",
        f"{what} in PyTorch's composition",
        load,
        lambda loaded, case: as_function(partial(member.formula, loaded), case),
        packages=(package,),
        refuse=needs_gpu,
    )


def _fla(member: Member) -> Provider:
    name, call = FLA[member.op.name]
    modules = ("fla.modules.layernorm", "fla.modules.norm.layernorm")
    return Provider(
        "fla",
        member.op.name,
        "peer",
        f"flash-linear-attention's {name}",
        imported(name, *modules),
        through(call),
        packages=("fla-core",),
        refuse=needs_gpu,
    )


FLA: dict[str, tuple[str, Callable[..., Outputs]]] = {
    "layernorm_linear": ("layer_norm_linear", lambda call, *inputs: call(*inputs, eps=EPS)),
    "rms_norm_linear": (
        "rms_norm_linear",
        lambda call, x, norm_weight, weight: call(x, norm_weight, None, weight, None, eps=EPS),
    ),
    "residual_rms_norm_linear": (
        "rms_norm_linear",
        lambda call, x, residual, norm_weight, weight: call(
            x, norm_weight, None, weight, None, residual=residual, eps=EPS, prenorm=True
        ),
    ),
}


def _transformer_engine(member: Member) -> Provider:
    module, options, names, finish = TRANSFORMER_ENGINE[member.op.name]

    def prepare(cls: Any, case: Case) -> Bind:
        rms = {} if member.op.name == "layernorm_linear" else {"normalization": "RMSNorm"}

        def bind(inputs: list[Tensor]) -> Bound:
            kind = {"params_dtype": case.dtype, "device": case.device}
            layer = cls(**options(case.shape), eps=EPS, **rms, **kind)
            parameters = [getattr(layer, name) for name in names]
            for parameter, tensor in zip(parameters, inputs[1:], strict=True):
                # Copied: parts of a weight lie side by side in memory, and have to stay there.
                parameter.data.copy_(tensor.detach())
            return Bound(partial(finish, layer, inputs[0]), [inputs[0], *parameters])

        return bind

    return Provider(
        "transformer-engine",
        member.op.name,
        "peer",
        f"TransformerEngine's {module}",
        imported(module, "transformer_engine.pytorch"),
        prepare,
        packages=("transformer-engine",),
        refuse=needs_gpu,
    )


def _call(layer: Any, x: Tensor) -> Any:
    return layer(x)


def _parts_of(layer: Any, x: Tensor) -> Any:
    widths = [part.shape[0] for part in (layer.query_weight, layer.key_weight, layer.value_weight)]
    return torch.split(layer(x), widths, -1)


def _linear_sizes(shape: Shape, bias: bool) -> dict[str, Any]:
    return {"in_features": shape.K, "out_features": shape.N, "bias": bias}


def _heads(shape: Shape, groups: int) -> dict[str, Any]:
    shared = max(shape.N // groups, 1)
    split = {"query": shape.N, "key": shared, "value": shared}
    outputs = {"out_features": sum(split.values()), "parameters_split": split}
    return _linear_sizes(shape, False) | outputs


_QKV = ("layer_norm_weight", "query_weight", "key_weight", "value_weight")
# The module, its sizes, where it keeps the op's inputs after x, and a call.
TRANSFORMER_ENGINE: dict[
    str,
    tuple[
        str, Callable[[Shape], dict[str, Any]], tuple[str, ...], Callable[[Any, Tensor], Outputs]
    ],
] = {
    "layernorm_linear": (
        "LayerNormLinear",
        lambda s: _linear_sizes(s, True),
        ("layer_norm_weight", "layer_norm_bias", "weight", "bias"),
        _call,
    ),
    "rms_norm_linear": (
        "LayerNormLinear",
        lambda s: _linear_sizes(s, False),
        ("layer_norm_weight", "weight"),
        _call,
    ),
    "norm_qkv": ("LayerNormLinear", lambda s: _heads(s, 4), _QKV, _parts_of),
    "norm_qkv_equal": ("LayerNormLinear", lambda s: _heads(s, 1), _QKV, _parts_of),
    "norm_mlp": (
        "LayerNormMLP",
        lambda s: {
            "hidden_size": s.K,
            "ffn_hidden_size": s.N,
            "bias": False,
            "activation": "swiglu",
        },
        ("layer_norm_weight", "fc1_weight", "fc2_weight"),
        lambda layer, x: x + layer(x),
    ),
}


def _max(algorithm: str) -> Callable[[Member], Provider]:
    def call(function: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        y: Tensor = function.apply(x[None], *parameters, algorithm)[0]
        return y

    return lambda member: Provider(
        f"max-{algorithm}",
        member.op.name,
        "peer",
        f"the puzzle's {algorithm} kernels through MAX's CustomOpLibrary",
        imported("LayerNormLinearFunction", "tutorial.puzzle.max_ops"),
        through(call),
        packages=("max",),
        refuse=_refused_by_max,
        capturable=False,
        # It compiles for ten seconds at each shape.
        only_on_request=True,
    )


def _refused_by_max(case: Case) -> str | None:
    count, features, outputs = case.shape
    if case.dtype is not torch.float32:
        return "is for float32"
    if count > 65535 or max(features, outputs) > 1024:
        return "takes at most 65535 rows of 1024 features, and 1024 outputs"
    return None


PEERS: dict[str, Callable[[Member], Provider]] = {
    "fla": _fla,
    "liger": _of_parts("liger", parts.liger, "liger-kernel", "Liger's norm and gate"),
    "quack": _of_parts("quack", parts.quack, "quack-kernels", "QuACK's RMSNorm"),
    "transformer-engine": _transformer_engine,
    "max-fused": _max("fused"),
    "max-unfused": _max("unfused"),
}
