"""What modules share: the norm's half, shared Parameters, and checks of adopted modules."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fused_norm import recipes
from fused_norm.activations import is_gate, require_activation
from fused_norm.norms import NORMS

# By the names of PyTorch's modules, which are TransformerEngine's.
_NAMES = {norm.module.__name__: name for name, norm in NORMS.items()}


class NormModule(nn.Module):
    """The norm's half of a module: its parameters, and how they are initialized."""

    layer_norm_weight: nn.Parameter | None
    layer_norm_bias: nn.Parameter | None

    def _make_norm(
        self,
        features: int,
        eps: float | None,
        normalization: str,
        zero_centered_gamma: bool,
        has_weight: bool,
        has_bias: bool,
        **kind: Any,
    ) -> None:
        if normalization not in _NAMES:
            raise ValueError(f"normalization must be one of {tuple(_NAMES)}, got {normalization!r}")
        norm = NORMS[_NAMES[normalization]]
        if eps is None and norm.eps is not None:
            raise TypeError(f"{normalization} needs an eps, got None")
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.layer_norm_weight = empty(features, **kind) if has_weight else None
        has_bias = has_weight and has_bias and norm.has_bias
        self.layer_norm_bias = empty(features, **kind) if has_bias else None

    def _reset_norm(self) -> None:
        if self.layer_norm_weight is not None:
            nn.init.constant_(self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)

    def _norm_options(self) -> dict[str, Any]:
        """Return the norm's options for the functions."""
        return {
            "normalization": _NAMES[self.normalization],
            "norm_weight": self.layer_norm_weight,
            "norm_bias": self.layer_norm_bias,
            "eps": self.eps,
            "weight_offset": float(self.zero_centered_gamma),
        }

    def _norm_module(self, features: int) -> nn.Module:
        """Return the norm as a PyTorch module that shares its Parameters."""
        require_shared(self, "to_modules")
        if self.zero_centered_gamma:
            raise ValueError("nn.LayerNorm and nn.RMSNorm have no gamma around zero")
        affine = self.layer_norm_weight is not None
        known = NORMS[_NAMES[self.normalization]]
        options = {"bias": self.layer_norm_bias is not None} if known.has_bias else {}
        make: Any = known.module
        norm: nn.Module = make(features, self.eps, affine, device="meta", **options)
        if known.has_bias:
            norm.register_parameter("bias", self.layer_norm_bias)
        norm.register_parameter("weight", self.layer_norm_weight)
        return norm.train(self.training)

    def _take_norm(self, norm: nn.Module) -> None:
        """Share the Parameters of a PyTorch norm."""
        self.layer_norm_weight = cast(Any, norm).weight
        self.layer_norm_bias = getattr(norm, "bias", None)

    def _norm_repr(self) -> str:
        rms = self.normalization != "LayerNorm"
        centered = self.zero_centered_gamma
        return (
            f"eps={self.eps}"
            + (f", normalization={self.normalization!r}" if rms else "")
            + (f", zero_centered_gamma={centered}" if centered else "")
        )

    def reset_parameters(self) -> None:
        """Initialize the parameters as PyTorch's modules do."""
        raise NotImplementedError

    @property
    def _is_hf_initialized(self) -> bool:
        """The flag that transformers reads before it initializes a module by its class's name.

        By name, transformers takes this for a LayerNorm, and would fill `weight` with ones.
        Its versions of `nn.init`, active at that time, skip what a checkpoint has set.
        """
        if nn.init.ones_.__module__.startswith("transformers."):
            self.reset_parameters()
        return True

    @_is_hf_initialized.setter
    def _is_hf_initialized(self, _: bool) -> None:
        """Ignore the value: the answer is always the same."""


def empty(*shape: int, **kind: Any) -> nn.Parameter:
    """Return a Parameter to be initialized."""
    return nn.Parameter(torch.empty(shape, **kind))


def reset_linear(weight: Tensor, bias: Tensor | None, features: int) -> None:
    """Initialize a weight and a bias as `nn.Linear` does."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(features) if features > 0 else 0
        nn.init.uniform_(bias, -bound, bound)


def linear_of(weight: nn.Parameter, bias: nn.Parameter | None, training: bool) -> nn.Linear:
    """Return an `nn.Linear` that shares a weight and a bias."""
    outputs, features = weight.shape
    linear = nn.Linear(features, outputs, bias is not None, device="meta")
    linear.register_parameter("weight", weight)
    linear.register_parameter("bias", bias)
    return linear.train(training)


def require_known(activation: str | None, out_features: int = 0) -> None:
    """Raise unless an activation is known, and a gate's outputs are even."""
    require_activation(activation)
    if activation is not None and is_gate(activation) and out_features % 2:
        raise ValueError(f"{activation} needs an even out_features, got {out_features}")


def require_recipe(recipe: str | None) -> None:
    """Raise unless an FP8 recipe is known."""
    if recipe is not None:
        recipes.find(recipe)


def require_norm(name: str, module: Any) -> str:
    """Return the name of a norm's kind, or raise if it is not one of PyTorch's."""
    require_plain(name, module, *(norm.module for norm in NORMS.values()))
    return next(each for each, n in _NAMES.items() if isinstance(module, NORMS[n].module))


def require_features(norm: Any, linear: str, features: int) -> None:
    """Raise unless a norm normalizes rows of this many features."""
    if tuple(norm.normalized_shape) != (features,):
        raise ValueError(
            f"ln must normalize the shape ({features},) that {linear} takes, "
            f"got normalized_shape={tuple(norm.normalized_shape)}"
        )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def require_plain(name: str, module: Any, *kinds: type[nn.Module]) -> None:
    """Raise unless a module computes what its class does, and nothing else.

    Args:
        name: The argument's name.
        module: The argument.
        kinds: The classes, whose subclasses may not have their own `forward`.
    """
    plain = " or ".join(f"an nn.{kind.__name__}" for kind in kinds)
    if not isinstance(module, kinds):
        raise TypeError(f"{name} must be {plain}, got {type(module).__name__}")
    require_shared(module, "from_modules", name)
    if type(module).forward not in [kind.forward for kind in kinds] or "forward" in vars(module):
        raise TypeError(
            f"{name} must be {plain} with its own forward, got {type(module).__name__}, "
            "which computes something else"
        )


def require_shared(module: nn.Module, function: str, name: str = "the module") -> None:
    """Raise if a module does more with its Parameters than another that shares them would.

    Args:
        module: The module whose Parameters would be shared.
        function: The function that shares them.
        name: What to call the module.
    """
    if is_parametrized(module):
        raise ValueError(f"{name} has parametrizations, which {function} would drop")
    if any(getattr(module, hooks) for hooks in _HOOKS):
        raise ValueError(f"{name} has hooks, which {function} would drop")
