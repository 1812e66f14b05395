"""Who is measured: PyTorch, its compiler, other projects' kernels and ours.

A provider is an entry of `PROVIDERS`. It imports what it needs only when it is asked for; where
that fails it is named as not installed, with what the import said.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm import frozen_parameters, reference
from fused_norm.bench.environment import version
from fused_norm.bench.ops import EPS, Case, Formula, Mode

# Ratios are to the baseline and to the floor of the same run.
Role = Literal["baseline", "floor", "peer", "ours"]


class Bound(NamedTuple):
    """A call on one set of inputs.

    Attributes:
        call: Computes the output.
        leaves: The tensors whose gradients it computes, in the order of the op's inputs.
    """

    call: Callable[[], Tensor]
    leaves: list[Tensor]


Bind = Callable[[list[Tensor]], Bound]


@dataclass(frozen=True)
class Provider:
    """Someone who computes an op.

    Attributes:
        name: What `--provider` calls it.
        op: Name of the op.
        role: What it is to the others.
        description: What runs.
        load: Imports what it needs and returns it. An ImportError says that it is not installed.
        prepare: Returns what binds it to inputs, from what was loaded and the case.
        packages: Distributions whose versions name it.
        refuse: Returns why it cannot serve a case, or None if it can.
        formula: What it computes, where that is less than the op.
        capturable: Whether its work goes to PyTorch's current stream, as CUDA graphs need.
        capture: Makes the context in which a CUDA graph of its calls is captured.
        modes: The modes that it differs from another provider in, None for all.
        only_on_request: Whether it is left out unless asked for, or the shape is the puzzle's.
    """

    name: str
    op: str
    role: Role
    description: str
    load: Callable[[], Any]
    prepare: Callable[[Any, Case], Bind]
    packages: tuple[str, ...] = ("torch",)
    refuse: Callable[[Case], str | None] = lambda case: None
    formula: Formula | None = None
    capturable: bool = True
    capture: Callable[[], AbstractContextManager[None]] = nullcontext
    modes: tuple[Mode, ...] | None = None
    only_on_request: bool = False

    def versions(self) -> str:
        """Return the versions of its packages."""
        return ", ".join(f"{name} {version(name)}".strip() for name in self.packages)


def _imported(name: str, *modules: str) -> Callable[[], Any]:
    """Return a function that imports a name from the first of several modules that is there."""

    def load() -> Any:
        for module in modules[:-1]:
            try:
                return getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError):
                continue
        loaded = importlib.import_module(modules[-1])
        if not hasattr(loaded, name):
            raise ImportError(f"{modules[-1]} has no {name}")
        return getattr(loaded, name)

    return load


def _given(function: Formula) -> Callable[[], Formula]:
    return lambda: function


def as_function(function: Formula, case: Case) -> Bind:
    """Bind a function that takes the op's inputs in their order."""
    return lambda inputs: Bound(partial(function, *inputs), inputs)


def _compiled(mode: str | None) -> Callable[[Formula, Case], Bind]:
    """Compile for each case anew: otherwise a limit on recompiling would end in eager, silently."""

    def prepare(function: Formula, case: Case) -> Bind:
        compiled = torch.compile(function, mode=mode, dynamic=False, fullgraph=True)
        return as_function(compiled, case)

    return prepare


def _needs_gpu(case: Case) -> str | None:
    return None if case.device.type == "cuda" else "needs a GPU"


def _linear(x: Tensor, ln_weight: Tensor, ln_bias: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


def _bind_linear(function: Formula, case: Case) -> Bind:
    return lambda inputs: Bound(partial(function, *inputs), [inputs[0], inputs[3], inputs[4]])


def _bind_fla(layer_norm_linear: Any, case: Case) -> Bind:
    return lambda inputs: Bound(partial(layer_norm_linear, *inputs, eps=EPS), inputs)


def _bind_liger(function: Any, case: Case) -> Bind:
    def call(x: Tensor, ln_weight: Tensor, ln_bias: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(function.apply(x, ln_weight, ln_bias, EPS), weight, bias)

    return as_function(call, case)


def _bind_transformer_engine(module: Any, case: Case) -> Bind:
    _, features, outputs = case.shape

    def bind(inputs: list[Tensor]) -> Bound:
        layer = module(
            features, outputs, eps=EPS, bias=True, params_dtype=case.dtype, device=case.device
        )
        parameters = [layer.layer_norm_weight, layer.layer_norm_bias, layer.weight, layer.bias]
        for parameter, tensor in zip(parameters, inputs[1:], strict=True):
            parameter.data = tensor.detach()
        return Bound(partial(layer, inputs[0]), [inputs[0], *parameters])

    return bind


def _bind_max(algorithm: str) -> Callable[[Any, Case], Bind]:
    def prepare(function: Any, case: Case) -> Bind:
        def call(x: Tensor, *parameters: Tensor) -> Tensor:
            y: Tensor = function.apply(x[None], *parameters, algorithm)[0]
            return y

        return as_function(call, case)

    return prepare


def _refused_by_max(case: Case) -> str | None:
    rows, features, outputs = case.shape
    if case.dtype is not torch.float32:
        return "is for float32"
    if rows > 65535 or max(features, outputs) > 1024:
        return "takes at most 65535 rows of 1024 features, and 1024 outputs"
    return None


def _bind_f_layer_norm(function: Formula, case: Case) -> Bind:
    def bind(inputs: list[Tensor]) -> Bound:
        x, o = inputs
        eps = o.item() ** 2
        return Bound(partial(function, x, (case.shape.K,), None, None, eps), [x])

    return bind


def _bind_composed(function: Formula, case: Case) -> Bind:
    return lambda inputs: Bound(partial(function, inputs[0]), [inputs[0]])


def _without_gradient_of_o(x: Tensor, o: Tensor) -> Tensor:
    return reference.trainable_eps_layer_norm(x, o.detach())


def _composed_formula(x: Tensor, o: Tensor) -> Tensor:
    return reference.trainable_eps_layer_norm(x, torch.zeros_like(o))


_ALL = (
    Provider(
        "eager",
        "layernorm_linear",
        "baseline",
        "F.linear(F.layer_norm(x))",
        _given(reference.layernorm_linear),
        as_function,
    ),
    Provider(
        "linear",
        "layernorm_linear",
        "floor",
        "bare F.linear, without the LayerNorm",
        _given(_linear),
        _bind_linear,
        formula=_linear,
    ),
    Provider(
        "compile",
        "layernorm_linear",
        "peer",
        "torch.compile",
        _given(reference.layernorm_linear),
        _compiled(None),
    ),
    Provider(
        "compile-max-autotune",
        "layernorm_linear",
        "peer",
        # The graphs are taken by the benchmark, of every provider alike.
        "torch.compile(mode='max-autotune-no-cudagraphs')",
        _given(reference.layernorm_linear),
        _compiled("max-autotune-no-cudagraphs"),
    ),
    Provider(
        "fla",
        "layernorm_linear",
        "peer",
        "flash-linear-attention's layer_norm_linear",
        _imported("layer_norm_linear", "fla.modules.layernorm", "fla.modules.norm.layernorm"),
        _bind_fla,
        packages=("fla-core",),
        refuse=_needs_gpu,
    ),
    Provider(
        "liger",
        "layernorm_linear",
        "peer",
        "Liger's LayerNorm, then F.linear",
        _imported("LigerLayerNormFunction", "liger_kernel.ops.layer_norm"),
        _bind_liger,
        packages=("liger-kernel",),
        refuse=_needs_gpu,
    ),
    Provider(
        "transformer-engine",
        "layernorm_linear",
        "peer",
        "TransformerEngine's LayerNormLinear",
        _imported("LayerNormLinear", "transformer_engine.pytorch"),
        _bind_transformer_engine,
        packages=("transformer-engine",),
        refuse=_needs_gpu,
    ),
    *(
        Provider(
            f"max-{algorithm}",
            "layernorm_linear",
            "peer",
            f"the puzzle's {algorithm} kernels through MAX's CustomOpLibrary",
            _imported("LayerNormLinearFunction", "fused_norm.puzzle.max_ops"),
            _bind_max(algorithm),
            packages=("max",),
            refuse=_refused_by_max,
            capturable=False,
            # It compiles for ten seconds at each shape.
            only_on_request=True,
        )
        for algorithm in ("fused", "unfused")
    ),
    Provider(
        "fused_norm",
        "layernorm_linear",
        "ours",
        "fused_layernorm_linear",
        _imported("fused_layernorm_linear", "fused_norm"),
        as_function,
        packages=("fused-norm",),
    ),
    Provider(
        "fused_norm-frozen",
        "layernorm_linear",
        "ours",
        "the same; CUDA graphs are captured under frozen_parameters, and keep folded weights",
        _imported("fused_layernorm_linear", "fused_norm"),
        as_function,
        packages=("fused-norm",),
        refuse=_needs_gpu,
        capture=frozen_parameters,
        modes=("forward",),
    ),
    Provider(
        "eager",
        "layer_norm",
        "baseline",
        "F.layer_norm without parameters: no gradient of the trained eps",
        _given(F.layer_norm),
        _bind_f_layer_norm,
        formula=_without_gradient_of_o,
    ),
    Provider(
        "formula",
        "layer_norm",
        "peer",
        "v = x - mean(x); v / sqrt(o*o + mean(v*v)) in PyTorch",
        _given(reference.trainable_eps_layer_norm),
        as_function,
    ),
    Provider(
        "compile",
        "layer_norm",
        "peer",
        "torch.compile of that formula",
        _given(reference.trainable_eps_layer_norm),
        _compiled(None),
    ),
    Provider(
        "fused_norm",
        "layer_norm",
        "ours",
        "trainable_eps_layer_norm, one row program",
        _imported("trainable_eps_layer_norm", "fused_norm"),
        as_function,
        packages=("fused-norm",),
    ),
    Provider(
        "fused_norm-composed",
        "layer_norm",
        "ours",
        "composed.layer_norm: mean, norm and div as ops of their own, eps of 0",
        _imported("layer_norm", "fused_norm.composed"),
        _bind_composed,
        packages=("fused-norm",),
        formula=_composed_formula,
    ),
)
PROVIDERS: dict[tuple[str, str], Provider] = {(p.op, p.name): p for p in _ALL}
NAMES: tuple[str, ...] = tuple(dict.fromkeys(p.name for p in _ALL))


def of_op(op: str) -> list[Provider]:
    """Return the providers of an op, the baseline first."""
    return [provider for provider in PROVIDERS.values() if provider.op == op]
