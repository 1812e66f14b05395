"""What users put into models: a norm with the Linear layers on it, or a whole MLP, as one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fused_norm.call.memory import statistics_dtype
from fused_norm.call.parameters import forget_before_swap
from fused_norm.composition import ACTIVATIONS, is_gate
from fused_norm.functional import family_call, fused_layernorm_linear, is_traced
from fused_norm.ops import norm_linear

_NORMS: dict[str, tuple[str, type[nn.Module]]] = {
    "LayerNorm": ("layer_norm", nn.LayerNorm),
    "RMSNorm": ("rms_norm", nn.RMSNorm),
}


class _Norm(nn.Module):
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
        if normalization not in _NORMS:
            raise ValueError(f"normalization must be one of {tuple(_NORMS)}, got {normalization!r}")
        if eps is None and normalization == "LayerNorm":
            raise TypeError("LayerNorm needs an eps, got None")
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.layer_norm_weight = _empty(features, **kind) if has_weight else None
        # RMSNorm has no bias.
        has_bias = has_weight and has_bias and normalization == "LayerNorm"
        self.layer_norm_bias = _empty(features, **kind) if has_bias else None

    def _reset_norm(self) -> None:
        if self.layer_norm_weight is not None:
            nn.init.constant_(self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)

    def _norm_options(self) -> dict[str, Any]:
        """Return what the norm is to the functions."""
        return {
            "normalization": _NORMS[self.normalization][0],
            "norm_weight": self.layer_norm_weight,
            "norm_bias": self.layer_norm_bias,
            "eps": self.eps,
            "weight_offset": float(self.zero_centered_gamma),
        }

    def _norm_module(self, features: int) -> nn.Module:
        """Return the norm as a module of PyTorch's that shares its Parameters."""
        if self.zero_centered_gamma:
            raise ValueError("nn.LayerNorm and nn.RMSNorm have no gamma around zero")
        affine = self.layer_norm_weight is not None
        if self.normalization == "RMSNorm":
            norm: nn.Module = nn.RMSNorm(features, self.eps, affine, device="meta")
        else:
            assert self.eps is not None
            has_bias = self.layer_norm_bias is not None
            norm = nn.LayerNorm(features, self.eps, affine, has_bias, device="meta")
            norm.register_parameter("bias", self.layer_norm_bias)
        norm.register_parameter("weight", self.layer_norm_weight)
        return norm.train(self.training)

    def _take_norm(self, norm: nn.Module) -> None:
        """Share the Parameters of a norm of PyTorch's."""
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
        """What transformers asks before it initializes a module by its class's name.

        By that name it takes this one for a LayerNorm, and would fill `weight` with ones. While it
        asks, its own versions of `nn.init` are in place, which spare what a checkpoint brought.
        """
        if nn.init.ones_.__module__.startswith("transformers."):
            self.reset_parameters()
        return True

    @_is_hf_initialized.setter
    def _is_hf_initialized(self, _: bool) -> None:
        """Nothing to keep: the answer is always the same."""


class LayerNormLinear(_Norm):
    """A norm over the last dimension, then a Linear layer, as one op.

    Takes the place of `nn.Sequential(nn.LayerNorm(in_features), nn.Linear(in_features,
    out_features))` and is initialized as those are. Names of options and parameters follow
    TransformerEngine's module of this name.

    Args:
        in_features: K, the size of the last dimension of the input.
        out_features: N, the size of the last dimension of the Linear layer's output. A gate halves
            it.
        eps: Added to the variance before the square root, for RMSNorm to the mean square; None,
            for RMSNorm alone, is the dtype's own, as in `nn.RMSNorm`.
        elementwise_affine: Whether the norm has a weight and, a LayerNorm, a bias.
        bias: Whether the Linear layer has a bias.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        layer_norm_bias: Whether the LayerNorm has a bias beside its weight.
        normalization: `"LayerNorm"` or `"RMSNorm"`.
        zero_centered_gamma: Whether the norm's weight is kept around zero: 1 is added to it.
        activation: What follows, as in `norm_linear`; None for nothing.
        parameters_split: Names of equal parts of the weight and the bias, or a dictionary of
            their numbers of outputs: each part is a parameter of its own, `query_weight` and
            `query_bias` for `"query"`. The output is one tensor all the same.
        return_layernorm_output: Whether to return the normalized rows as well.
        fuse_wgrad_accumulation: Whether the backward adds the gradient of `weight` to
            `weight.main_grad`, which the caller has made (float32, in the weight's shape), and
            leaves `weight.grad` alone: TransformerEngine's option of this name. Where the weight
            has an attribute `grad_added_to_main_grad`, it is set, and `weight.grad` gets a tensor
            of no meaning.

    Attributes:
        layer_norm_weight: Gamma, shape `[in_features]`, or None.
        layer_norm_bias: Beta, shape `[in_features]`, or None.
        weight: Weight of the Linear layer, shape `[out_features, in_features]`, if not split.
        bias: Bias of the Linear layer, shape `[out_features]`, or None, if not split.

    Raises:
        ValueError: If the normalization or the activation is not known, or the parts do not add up
            to `out_features`.
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
        _require_known(activation, out_features)
        self.activation = activation
        self.return_layernorm_output = return_layernorm_output
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.parameters_split = _parts(parameters_split, out_features)
        for prefix, size in self.parameters_split.items():
            self.register_parameter(f"{prefix}weight", _empty(size, in_features, **kind))
            self.register_parameter(f"{prefix}bias", _empty(size, **kind) if bias else None)
        self._is_plain = (
            normalization == "LayerNorm"
            and not (zero_centered_gamma or activation or return_layernorm_output)
            and len(self.parameters_split) == 1
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters as PyTorch's norms and `nn.Linear` do."""
        self._reset_norm()
        for weight, bias in zip(*self._linear_parameters(), strict=True):
            _reset_linear(weight, bias, self.in_features)

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
            ln: An `nn.LayerNorm` or `nn.RMSNorm` that normalizes the last dimension alone.
            linear: Takes what `ln` returns; or several that do, by the names of their parts.
            activation: What follows, as in `norm_linear`.

        Raises:
            TypeError: If either is another kind of module, a subclass with a `forward` of its own
                included: adapters, quantized layers.
            ValueError: If `ln` normalizes another shape than `(linear.in_features,)`, or if either
                has hooks or parametrizations, which the new module would not run.
        """
        linears = dict(linear) if isinstance(linear, Mapping) else {"": linear}
        normalization = _require_norm("ln", ln)
        for each in linears.values():
            _require_plain("linear", each, nn.Linear)
            _require_features("ln", ln, "linear", each.in_features)
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
        """Return a norm and a Linear that share this module's Parameters, a dictionary if split.

        Raises:
            ValueError: If gamma is kept around zero, which no norm of PyTorch's does.
        """
        linears = {
            prefix.removesuffix("_"): _linear(weight, bias, self.training)
            for prefix, weight, bias in zip(
                self.parameters_split, *self._linear_parameters(), strict=True
            )
        }
        norm = self._norm_module(self.in_features)
        return norm, linears[""] if list(linears) == [""] else linears

    def _linear_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter | None]]:
        parts = self.parameters_split
        return (
            [getattr(self, f"{prefix}weight") for prefix in parts],
            [getattr(self, f"{prefix}bias") for prefix in parts],
        )

    def _apply(self, *args: Any, **kwargs: Any) -> LayerNormLinear:
        self._forget_before_swap()
        # PyTorch's own has no annotations.
        return cast(LayerNormLinear, super()._apply(*args, **kwargs))  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._forget_before_swap()
        super()._load_from_state_dict(*args, **kwargs)

    def _forget_before_swap(self) -> None:
        for weight in self._linear_parameters()[0]:
            forget_before_swap(weight)

    def forward(self, x: Tensor) -> Any:
        """Return `[..., out_features]` for an input of shape `[..., in_features]`.

        Half as many features after a gate; and a tuple of that and the normalized rows with
        `return_layernorm_output`.
        """
        if self._is_plain:
            tensors = (self.layer_norm_weight, self.layer_norm_bias, self.weight, self.bias)
            if is_traced(x, None, None):
                return fused_layernorm_linear(x, *tensors, cast(float, self.eps))
            return norm_linear.call(x, tensors, self.eps, self._owner(self.weight))
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
        parts = {prefix.removesuffix("_"): n for prefix, n in self.parameters_split.items()}
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"{self._norm_repr()}, "
            f"elementwise_affine={self.layer_norm_weight is not None}, "
            f"layer_norm_bias={self.layer_norm_bias is not None}, bias={has_bias}"
            + (f", activation={self.activation!r}" if self.activation else "")
            + (f", parameters_split={parts}" if len(parts) > 1 else "")
        )


class LayerNormMLP(_Norm):
    """A norm over the last dimension and the two Linear layers of an MLP, as one op.

    Takes the place of `nn.Sequential(nn.LayerNorm(hidden_size), nn.Linear(hidden_size,
    ffn_hidden_size), nn.GELU(), nn.Linear(ffn_hidden_size, hidden_size))` and is initialized as
    those are. Names of options and parameters follow TransformerEngine's module of this name; its
    activations are those of `norm_linear` (`"gelu"` is exact here).

    Args:
        hidden_size: Size of the last dimension of input and output.
        ffn_hidden_size: Size between the two Linear layers, after a gate.
        eps: Added to the variance before the square root, for RMSNorm to the mean square; None,
            for RMSNorm alone, is the dtype's own.
        bias: Whether the Linear layers have biases.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        normalization: `"LayerNorm"` or `"RMSNorm"`.
        activation: As in `norm_linear`.
        zero_centered_gamma: Whether the norm's weight is kept around zero: 1 is added to it.
        recompute: Whether the backward computes the first product again instead of keeping it.

    Attributes:
        layer_norm_weight: Gamma, shape `[hidden_size]`.
        layer_norm_bias: Beta, shape `[hidden_size]`, or None.
        fc1_weight: Shape `[ffn_hidden_size, hidden_size]`, before a gate twice as many rows.
        fc1_bias: Shape `[ffn_hidden_size]`, before a gate twice that, or None.
        fc2_weight: Shape `[hidden_size, ffn_hidden_size]`.
        fc2_bias: Shape `[hidden_size]`, or None.

    Raises:
        ValueError: If the normalization or the activation is not known.
    """

    fc1_weight: nn.Parameter
    fc1_bias: nn.Parameter | None
    fc2_weight: nn.Parameter
    fc2_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float | None = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        zero_centered_gamma: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self._make_norm(hidden_size, eps, normalization, zero_centered_gamma, True, True, **kind)
        _require_known(activation)
        self.activation = activation
        self.recompute = recompute
        outputs = ffn_hidden_size * (2 if is_gate(activation) else 1)
        self.fc1_weight = _empty(outputs, hidden_size, **kind)
        self.fc1_bias = _empty(outputs, **kind) if bias else None
        self.fc2_weight = _empty(hidden_size, ffn_hidden_size, **kind)
        self.fc2_bias = _empty(hidden_size, **kind) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters as PyTorch's norms and `nn.Linear` do."""
        self._reset_norm()
        _reset_linear(self.fc1_weight, self.fc1_bias, self.hidden_size)
        _reset_linear(self.fc2_weight, self.fc2_bias, self.ffn_hidden_size)

    @classmethod
    def from_modules(
        cls,
        ln: nn.LayerNorm | nn.RMSNorm,
        fc1: nn.Linear,
        fc2: nn.Linear,
        *,
        activation: str = "gelu",
    ) -> LayerNormMLP:
        """Return a module that shares the Parameters of a norm and of the two Linear layers.

        Args:
            ln: An `nn.LayerNorm` or `nn.RMSNorm` that normalizes the last dimension alone.
            fc1: Takes what `ln` returns; before a gate, its first half of outputs is the gate's.
            fc2: Takes what the activation returns.
            activation: As in `norm_linear`.

        Raises:
            TypeError: If one is another kind of module, a subclass with a `forward` of its own
                included.
            ValueError: If shapes do not fit each other, one Linear has a bias and the other none,
                or one has hooks or parametrizations, which the new module would not run.
        """
        normalization = _require_norm("ln", ln)
        _require_plain("fc1", fc1, nn.Linear)
        _require_plain("fc2", fc2, nn.Linear)
        _require_features("ln", ln, "fc1", fc1.in_features)
        _require_known(activation)
        halves = 2 if is_gate(activation) else 1
        wanted = (fc1.out_features // halves, fc1.in_features)
        if (fc2.in_features, fc2.out_features) != wanted or fc1.out_features % halves:
            raise ValueError(
                f"fc2 must take and return {wanted} features, "
                f"got {(fc2.in_features, fc2.out_features)}"
            )
        if (fc1.bias is None) != (fc2.bias is None):
            raise ValueError("either both Linear layers have a bias, or none has")
        layer = cls(
            fc1.in_features,
            fc2.in_features,
            ln.eps,
            fc1.bias is not None,
            "meta",
            normalization=normalization,
            activation=activation,
        )
        layer._take_norm(ln)
        layer.fc1_weight, layer.fc1_bias = cast(nn.Parameter, fc1.weight), fc1.bias
        layer.fc2_weight, layer.fc2_bias = cast(nn.Parameter, fc2.weight), fc2.bias
        layer.train(fc1.training)
        return layer

    def to_modules(self) -> tuple[nn.Module, nn.Linear, nn.Linear]:
        """Return a norm and two Linear layers that share this module's Parameters.

        Raises:
            ValueError: If gamma is kept around zero, which no norm of PyTorch's does.
        """
        return (
            self._norm_module(self.hidden_size),
            _linear(self.fc1_weight, self.fc1_bias, self.training),
            _linear(self.fc2_weight, self.fc2_bias, self.training),
        )

    def forward(self, x: Tensor, residual_out: Tensor | None = None) -> Tensor:
        """Return `[..., hidden_size]` for an input of that shape.

        Args:
            x: Input.
            residual_out: Added at the end, such as `x` itself.
        """
        (y,) = family_call(
            x,
            [self.fc1_weight],
            [self.fc1_bias],
            (self.fc2_weight, self.fc2_bias, residual_out),
            True,
            self.recompute,
            activation=self.activation,
            **self._norm_options(),
        )
        return y

    def extra_repr(self) -> str:
        """Return what `print` shows of the module."""
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"{self._norm_repr()}, bias={self.fc1_bias is not None}, "
            f"activation={self.activation!r}" + (", recompute=True" if self.recompute else "")
        )


def _empty(*shape: int, **kind: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, **kind))


def _reset_linear(weight: Tensor, bias: Tensor | None, features: int) -> None:
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(features) if features > 0 else 0
        nn.init.uniform_(bias, -bound, bound)


def _linear(weight: nn.Parameter, bias: nn.Parameter | None, training: bool) -> nn.Linear:
    outputs, features = weight.shape
    linear = nn.Linear(features, outputs, bias is not None, device="meta")
    linear.register_parameter("weight", weight)
    linear.register_parameter("bias", bias)
    return linear.train(training)


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


def _require_known(activation: str | None, out_features: int = 0) -> None:
    if activation is None:
        return
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation must be None or one of {tuple(ACTIVATIONS)}, got {activation!r}"
        )
    if is_gate(activation) and out_features % 2:
        raise ValueError(f"{activation} needs an even out_features, got {out_features}")


def _require_norm(name: str, module: Any) -> str:
    """Return the name of a norm's kind, or raise if it is none of PyTorch's."""
    normalization = "RMSNorm" if isinstance(module, nn.RMSNorm) else "LayerNorm"
    _require_plain(name, module, _NORMS[normalization][1])
    return normalization


def _require_features(name: str, norm: Any, linear: str, features: int) -> None:
    if tuple(norm.normalized_shape) != (features,):
        raise ValueError(
            f"{name} must normalize the shape ({features},) that {linear} takes, "
            f"got normalized_shape={tuple(norm.normalized_shape)}"
        )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _require_plain(name: str, module: Any, kind: type[nn.Module]) -> None:
    """Raise unless a module computes what its class does, and nothing else.

    Args:
        name: The argument's name.
        module: The argument.
        kind: The class, whose subclasses may not bring a `forward` of their own.
    """
    plain = f"nn.{kind.__name__}"
    if not isinstance(module, kind):
        raise TypeError(f"{name} must be an {plain}, got {type(module).__name__}")
    if is_parametrized(module):
        raise ValueError(f"{name} has parametrizations, which from_modules would drop")
    if type(module).forward is not kind.forward or "forward" in vars(module):
        raise TypeError(
            f"{name} must be an {plain} with its own forward, got {type(module).__name__}, "
            "which computes something else"
        )
    if any(getattr(module, hooks) for hooks in _HOOKS):
        raise ValueError(f"{name} has hooks, which from_modules would drop")


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
