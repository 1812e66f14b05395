"""A norm and the MLP after it as one module."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from fused_norm.activations import is_gate
from fused_norm.modules import parts
from fused_norm.ops.family import family_call


class LayerNormMLP(parts.NormModule):
    """A norm over the last dimension and the two Linear layers of an MLP, as one op.

    Replaces `nn.Sequential(nn.LayerNorm(hidden_size), nn.Linear(hidden_size, ffn_hidden_size),
    nn.GELU(), nn.Linear(ffn_hidden_size, hidden_size))`, with the same initialization. Options and
    parameters have the names of TransformerEngine's module. Activations are those of `norm_linear`,
    where `"gelu"` is the exact one.

    Args:
        hidden_size: Size of the last dimension of input and output.
        ffn_hidden_size: Size between the two Linear layers, after a gate.
        eps: Added to the variance before the square root, or to the mean square for RMSNorm. None,
            for RMSNorm only, means PyTorch's own.
        bias: Whether the Linear layers have biases.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        normalization: `"LayerNorm"` or `"RMSNorm"`.
        activation: As in `norm_linear`.
        zero_centered_gamma: Whether the norm's weight is kept around zero; 1 is added to it.
        recompute: Whether the backward computes the first product again instead of saving it.
        recipe: A recipe for products in FP8, as in `norm_linear`; None for `autocast_fp8`'s.

    Attributes:
        layer_norm_weight: Gamma, shape `[hidden_size]`.
        layer_norm_bias: Beta, shape `[hidden_size]`, or None.
        fc1_weight: Shape `[ffn_hidden_size, hidden_size]`, before a gate twice as many rows.
        fc1_bias: Shape `[ffn_hidden_size]`, before a gate twice that, or None.
        fc2_weight: Shape `[hidden_size, ffn_hidden_size]`.
        fc2_bias: Shape `[hidden_size]`, or None.

    Raises:
        ValueError: If the normalization, the activation or the recipe is unknown.
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
        recipe: str | None = None,
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self._make_norm(hidden_size, eps, normalization, zero_centered_gamma, True, True, **kind)
        parts.require_known(activation)
        parts.require_recipe(recipe)
        self.activation = activation
        self.recipe = recipe
        self.recompute = recompute
        outputs = ffn_hidden_size * (2 if is_gate(activation) else 1)
        self.fc1_weight = parts.empty(outputs, hidden_size, **kind)
        self.fc1_bias = parts.empty(outputs, **kind) if bias else None
        self.fc2_weight = parts.empty(hidden_size, ffn_hidden_size, **kind)
        self.fc2_bias = parts.empty(hidden_size, **kind) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters as PyTorch's norms and `nn.Linear` do."""
        self._reset_norm()
        parts.reset_linear(self.fc1_weight, self.fc1_bias, self.hidden_size)
        parts.reset_linear(self.fc2_weight, self.fc2_bias, self.ffn_hidden_size)

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
            ln: An `nn.LayerNorm` or `nn.RMSNorm` that normalizes only the last dimension.
            fc1: The Linear layer on `ln`'s output. Before a gate, the first half of its outputs is
                the gate's.
            fc2: The Linear layer on the activation's output.
            activation: As in `norm_linear`.

        Raises:
            TypeError: If one is another kind of module, or a subclass with a `forward` of its own.
            ValueError: If shapes do not match, one Linear layer has a bias and the other has none,
                or one has hooks or parametrizations, which the new module would not run.
        """
        normalization = parts.require_norm("ln", ln)
        parts.require_plain("fc1", fc1, nn.Linear)
        parts.require_plain("fc2", fc2, nn.Linear)
        parts.require_features(ln, "fc1", fc1.in_features)
        parts.require_known(activation)
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
            ValueError: If gamma is kept around zero, which PyTorch's norms cannot express, or if
                this module has hooks or parametrizations, which pruning and weight norm leave and
                the new modules would not run.
        """
        return (
            self._norm_module(self.hidden_size),
            parts.linear_of(self.fc1_weight, self.fc1_bias, self.training),
            parts.linear_of(self.fc2_weight, self.fc2_bias, self.training),
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
            recipe=self.recipe,
            **self._norm_options(),
        )
        return y

    def extra_repr(self) -> str:
        """Return what `print` shows of the module."""
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"{self._norm_repr()}, bias={self.fc1_bias is not None}, "
            f"activation={self.activation!r}"
            + (", recompute=True" if self.recompute else "")
            + (f", recipe={self.recipe!r}" if self.recipe else "")
        )
