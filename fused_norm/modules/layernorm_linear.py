"""A norm and the Linear layer after it as one module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fused_norm.call.memory import statistics_dtype
from fused_norm.functional import fused_layernorm_linear
from fused_norm.modules import parts
from fused_norm.ops.family import family_call, is_traced


class LayerNormLinear(parts.NormModule):
    """A norm over the last dimension, then a Linear layer, as one op.

    Replaces `nn.Sequential(nn.LayerNorm(in_features), nn.Linear(in_features, out_features))`, with
    the same initialization. Options and parameters have the names of TransformerEngine's module.

    Args:
        in_features: K, the size of the last dimension of the input.
        out_features: N, the size of the last dimension of the Linear layer's output, which a gate
            halves.
        eps: Added to the variance before the square root, or to the mean square for RMSNorm. None,
            for RMSNorm only, means PyTorch's own, as in `nn.RMSNorm`.
        elementwise_affine: Whether the norm has a weight and, for LayerNorm, a bias.
        bias: Whether the Linear layer has a bias.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        layer_norm_bias: Whether the LayerNorm has a bias, not only a weight.
        normalization: `"LayerNorm"` or `"RMSNorm"`.
        zero_centered_gamma: Whether the norm's weight is kept around zero; 1 is added to it.
        activation: Applied to the output, as in `norm_linear`; None for none.
        parameters_split: Names of equal parts of the weight and the bias, or a dictionary from
            names to numbers of outputs. Each part is a separate parameter: `query_weight` and
            `query_bias` for `"query"`. The output is still one tensor.
        return_layernorm_output: Whether to return the normalized rows as well.
        fuse_wgrad_accumulation: Whether the backward adds the gradient of `weight` to
            `weight.main_grad`, which the caller creates (float32, in the weight's shape), and
            leaves `weight.grad` alone, as in TransformerEngine. If the weight has an attribute
            `grad_added_to_main_grad`, it is set, and `weight.grad` gets a meaningless tensor.
        recipe: A recipe for products in FP8, as in `norm_linear`; None for `autocast_fp8`'s.

    Attributes:
        layer_norm_weight: Gamma, shape `[in_features]`, or None.
        layer_norm_bias: Beta, shape `[in_features]`, or None.
        weight: Weight of the Linear layer, shape `[out_features, in_features]`, if not split.
        bias: Bias of the Linear layer, shape `[out_features]`, or None, if not split.

    Raises:
        ValueError: If the normalization, the activation or the recipe is unknown, or the parts do
            not add up to `out_features`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float | None = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        layer_norm_bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        activation: str | None = None,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        return_layernorm_output: bool = False,
        fuse_wgrad_accumulation: bool = False,
        recipe: str | None = None,
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_features = in_features
        self.out_features = out_features
        self._make_norm(
            in_features,
            eps,
            normalization,
            zero_centered_gamma,
            elementwise_affine,
            layer_norm_bias,
            **kind,
        )
        parts.require_known(activation, out_features)
        parts.require_recipe(recipe)
        self.activation = activation
        self.recipe = recipe
        self.return_layernorm_output = return_layernorm_output
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.parameters_split = _parts(parameters_split, out_features)
        for prefix, size in self.parameters_split.items():
            self.register_parameter(f"{prefix}weight", parts.empty(size, in_features, **kind))
            self.register_parameter(f"{prefix}bias", parts.empty(size, **kind) if bias else None)
        self._is_plain = (
            normalization == "LayerNorm"
            and not (zero_centered_gamma or activation or return_layernorm_output or recipe)
            and len(self.parameters_split) == 1
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters as PyTorch's norms and `nn.Linear` do."""
        self._reset_norm()
        for weight, bias in zip(*self._linear_parameters(), strict=True):
            parts.reset_linear(weight, bias, self.in_features)

    @classmethod
    def from_modules(
        cls,
        ln: nn.LayerNorm | nn.RMSNorm,
        linear: nn.Linear | Mapping[str, nn.Linear],
        *,
        activation: str | None = None,
    ) -> LayerNormLinear:
        """Return a module that shares the Parameters of a norm and of the Linear layer after it.

        Args:
            ln: An `nn.LayerNorm` or `nn.RMSNorm` that normalizes only the last dimension.
            linear: The Linear layer on `ln`'s output, or several by the names of their parts.
            activation: Applied to the output, as in `norm_linear`.

        Raises:
            TypeError: If either is another kind of module, or a subclass with a `forward` of its
                own, such as an adapter or a quantized layer.
            ValueError: If `ln` does not normalize the shape `(linear.in_features,)`, or if either
                has hooks or parametrizations, which the new module would not run.
        """
        linears = dict(linear) if isinstance(linear, Mapping) else {"": linear}
        normalization = parts.require_norm("ln", ln)
        for each in linears.values():
            parts.require_plain("linear", each, nn.Linear)
            parts.require_features(ln, "linear", each.in_features)
        biases = {each.bias is not None for each in linears.values()}
        if len(biases) > 1:
            raise ValueError("either all of the Linear layers have a bias, or none has")
        layer = cls(
            next(iter(linears.values())).in_features,
            sum(each.out_features for each in linears.values()),
            ln.eps,
            device="meta",
            bias=biases == {True},
            normalization=normalization,
            activation=activation,
            parameters_split=None
            if list(linears) == [""]
            else {name: each.out_features for name, each in linears.items()},
        )
        layer._take_norm(ln)
        for prefix, each in zip(layer.parameters_split, linears.values(), strict=True):
            layer.register_parameter(f"{prefix}weight", cast(nn.Parameter, each.weight))
            layer.register_parameter(f"{prefix}bias", each.bias)
            layer.train(each.training)
        return layer

    def to_modules(self) -> tuple[nn.Module, Any]:
        """Return a norm and a Linear layer, or a dictionary of them, on this module's Parameters.

        Raises:
            ValueError: If gamma is kept around zero, which PyTorch's norms cannot express, or if
                this module has hooks or parametrizations, which pruning and weight norm leave and
                the new modules would not run.
        """
        norm = self._norm_module(self.in_features)
        linears = {
            prefix.removesuffix("_"): parts.linear_of(weight, bias, self.training)
            for prefix, weight, bias in zip(
                self.parameters_split, *self._linear_parameters(), strict=True
            )
        }
        return norm, linears[""] if list(linears) == [""] else linears

    def _linear_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter | None]]:
        prefixes = list(self.parameters_split)
        return (
            [getattr(self, f"{prefix}weight") for prefix in prefixes],
            [getattr(self, f"{prefix}bias") for prefix in prefixes],
        )

    def forward(self, x: Tensor) -> Any:
        """Return `[..., out_features]` for an input of shape `[..., in_features]`.

        After a gate, half as many features. With `return_layernorm_output`, a tuple of that and
        the normalized rows.
        """
        if self._is_plain and (not self.fuse_wgrad_accumulation or is_traced(x, None, None)):
            tensors = (self.layer_norm_weight, self.layer_norm_bias, self.weight, self.bias)
            return fused_layernorm_linear(x, *tensors, cast(float, self.eps))
        weights, biases = self._linear_parameters()
        owners = [self._owner(weight) for weight in weights]
        results = family_call(
            x,
            list(weights),
            list(biases),
            (None, None, None),
            True,
            False,
            activation=self.activation,
            return_norm=self.return_layernorm_output,
            owners=owners if any(owner is not None for owner in owners) else None,
            recipe=self.recipe,
            **self._norm_options(),
        )
        return tuple(results) if self.return_layernorm_output else results[0]

    def _owner(self, weight: nn.Parameter) -> nn.Parameter | None:
        """Return a weight if its gradient goes to its `main_grad`."""
        if not (self.fuse_wgrad_accumulation and weight.requires_grad and torch.is_grad_enabled()):
            return None
        _require_main_grad(weight)
        return weight

    def extra_repr(self) -> str:
        """Return what `print` shows of the module."""
        has_bias = self._linear_parameters()[1][0] is not None
        split = {prefix.removesuffix("_"): n for prefix, n in self.parameters_split.items()}
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"{self._norm_repr()}, "
            f"elementwise_affine={self.layer_norm_weight is not None}, "
            f"layer_norm_bias={self.layer_norm_bias is not None}, bias={has_bias}"
            + (f", activation={self.activation!r}" if self.activation else "")
            + (f", parameters_split={split}" if len(split) > 1 else "")
            + (f", recipe={self.recipe!r}" if self.recipe else "")
        )


def _parts(split: Sequence[str] | Mapping[str, int] | None, out_features: int) -> dict[str, int]:
    """Return the outputs of each part of the weight, by what its parameters' names begin with."""
    if split is None:
        return {"": out_features}
    if not isinstance(split, Mapping):
        if not split or out_features % len(split):
            raise ValueError(f"{out_features} outputs cannot be split into {len(split)} parts")
        split = dict.fromkeys(split, out_features // len(split))
    if sum(split.values()) != out_features:
        raise ValueError(
            f"parameters_split adds up to {sum(split.values())} outputs, not {out_features}"
        )
    return {f"{name.rstrip('_')}_": size for name, size in split.items()}


def _require_main_grad(weight: Tensor) -> None:
    """Raise unless a weight has a `main_grad` of its shape, in the dtype of sums."""
    main_grad = getattr(weight, "main_grad", None)
    dtype = statistics_dtype(weight.dtype)
    if (
        not isinstance(main_grad, Tensor)
        or main_grad.shape != weight.shape
        or main_grad.dtype is not dtype
        or main_grad.device != weight.device
    ):
        got = main_grad
        if isinstance(main_grad, Tensor):
            got = f"{list(main_grad.shape)} of {main_grad.dtype} on {main_grad.device}"
        raise RuntimeError(
            f"fuse_wgrad_accumulation needs weight.main_grad of shape {list(weight.shape)} "
            f"and {dtype} on {weight.device}, got {got}"
        )
