"""What users put into models: LayerNorm and a Linear layer as one, LayerNorm with a trained eps."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fused_norm.call.memory import statistics_dtype
from fused_norm.call.parameters import forget_before_swap
from fused_norm.functional import trainable_eps_layer_norm
from fused_norm.ops import norm_linear


class LayerNormLinear(nn.Module):
    """Layer normalization over the last dimension, then a Linear layer, as one op.

    Takes the place of `nn.Sequential(nn.LayerNorm(in_features), nn.Linear(in_features,
    out_features))` and is initialized as those are. Parameter names follow TransformerEngine's
    module of this name.

    Args:
        in_features: K, the size of the last dimension of the input.
        out_features: N, the size of the last dimension of the output.
        eps: Added to the variance before the square root.
        elementwise_affine: Whether the LayerNorm has a weight and a bias.
        bias: Whether the Linear layer has a bias.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        layer_norm_bias: Whether the LayerNorm has a bias beside its weight.
        fuse_wgrad_accumulation: Whether the backward adds the gradient of `weight` to
            `weight.main_grad`, which the caller has made (float32, in the weight's shape), and
            leaves `weight.grad` alone: TransformerEngine's option of this name. Where the weight
            has an attribute `grad_added_to_main_grad`, it is set, and `weight.grad` gets a tensor
            of no meaning.

    Attributes:
        layer_norm_weight: Gamma, shape `[in_features]`, or None.
        layer_norm_bias: Beta, shape `[in_features]`, or None.
        weight: Weight of the Linear layer, shape `[out_features, in_features]`.
        bias: Bias of the Linear layer, shape `[out_features]`, or None.
    """

    layer_norm_weight: nn.Parameter | None
    layer_norm_bias: nn.Parameter | None
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        layer_norm_bias: bool = True,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.eps = eps
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.layer_norm_weight = parameter(in_features) if elementwise_affine else None
        has_beta = elementwise_affine and layer_norm_bias
        self.layer_norm_bias = parameter(in_features) if has_beta else None
        self.weight = parameter(out_features, in_features)
        self.bias = parameter(out_features) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters as `nn.LayerNorm` and `nn.Linear` do."""
        if self.layer_norm_weight is not None:
            nn.init.ones_(self.layer_norm_weight)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
            nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def from_modules(cls, ln: nn.LayerNorm, linear: nn.Linear) -> LayerNormLinear:
        """Return a module that shares the Parameters of a LayerNorm and of the Linear after it.

        Args:
            ln: Normalizes the last dimension alone.
            linear: Takes what `ln` returns.

        Raises:
            TypeError: If either is another kind of module, a subclass with a `forward` of its own
                included: RMSNorm, adapters, quantized layers.
            ValueError: If `ln` normalizes another shape than `(linear.in_features,)`, or if either
                has hooks or parametrizations, which the new module would not run.
        """
        _require_plain("ln", ln, nn.LayerNorm)
        _require_plain("linear", linear, nn.Linear)
        if tuple(ln.normalized_shape) != (linear.in_features,):
            raise ValueError(
                f"ln must normalize the shape ({linear.in_features},) that linear takes, "
                f"got normalized_shape={tuple(ln.normalized_shape)}"
            )
        layer = cls(linear.in_features, linear.out_features, ln.eps, device="meta")
        layer.layer_norm_weight, layer.layer_norm_bias = ln.weight, ln.bias
        layer.weight, layer.bias = cast(nn.Parameter, linear.weight), linear.bias
        layer.train(linear.training)
        return layer

    def to_modules(self) -> tuple[nn.LayerNorm, nn.Linear]:
        """Return a LayerNorm and a Linear that share this module's Parameters."""
        ln = nn.LayerNorm(
            self.in_features,
            self.eps,
            elementwise_affine=self.layer_norm_weight is not None,
            bias=self.layer_norm_bias is not None,
            device="meta",
        )
        linear = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, device="meta"
        )
        for module, name, parameter in (
            (ln, "weight", self.layer_norm_weight),
            (ln, "bias", self.layer_norm_bias),
            (linear, "weight", self.weight),
            (linear, "bias", self.bias),
        ):
            module.register_parameter(name, parameter)
        return ln.train(self.training), linear.train(self.training)

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

    def _apply(self, *args: Any, **kwargs: Any) -> LayerNormLinear:
        forget_before_swap(self.weight)
        # PyTorch's own has no annotations.
        return cast(LayerNormLinear, super()._apply(*args, **kwargs))  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        forget_before_swap(self.weight)
        super()._load_from_state_dict(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., out_features]` for an input of shape `[..., in_features]`."""
        tensors = (self.layer_norm_weight, self.layer_norm_bias, self.weight, self.bias)
        owner = None
        if self.fuse_wgrad_accumulation and self.weight.requires_grad and torch.is_grad_enabled():
            owner = self.weight
            _require_main_grad(owner)
        return norm_linear.call(x, tensors, self.eps, owner)

    def extra_repr(self) -> str:
        """Return what `print` shows of the module."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, eps={self.eps}, "
            f"elementwise_affine={self.layer_norm_weight is not None}, "
            f"layer_norm_bias={self.layer_norm_bias is not None}, bias={self.bias is not None}"
        )


class TrainableEpsLayerNorm(nn.Module):
    """Layer normalization over the last dimension, with a trained scalar squared as eps.

    The scalar begins at 0, as in the Spiral language's LayerNorm. There its own gradient is 0,
    since eps is its square: to train it, give it another value, `nn.init.constant_(layer.o, 0.01)`.

    Args:
        device: Device of the scalar.
        dtype: Dtype of the scalar: that of the input, or float32 beside a narrower input.

    Attributes:
        o: The scalar, shape `[1]`.
    """

    o: nn.Parameter

    def __init__(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.o = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scalar to 0."""
        nn.init.zeros_(self.o)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, each row normalized."""
        return trainable_eps_layer_norm(x, self.o)


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
