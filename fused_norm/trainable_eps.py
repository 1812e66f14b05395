"""The Spiral language's LayerNorm, whose eps is a trained scalar squared: function and module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fused_norm.ops import node
from fused_norm.ops.rows import trainable_eps
from fused_norm.ops.validation import has_trainable_eps_kernel, trainable_eps_by_pytorch


def trainable_eps_layer_norm(x: Tensor, o: Tensor) -> Tensor:
    """Apply layer normalization over the last dimension, with a trained scalar squared as eps.

    `v = x - mean(x)`, `y = v / sqrt(o * o + mean(v * v))`: equivalent to
    `F.layer_norm(x, (K,), eps=o * o)`, with a gradient for `o`. Statistics and sums are computed in
    float32 (float64 for float64). The backward saves only the inputs; its sums run in a fixed
    order, so every run gives the same bits.

    Where `o` is 0, a constant row is 0 / 0 and gives NaN; without constant rows, the gradient of
    `o` is 0 there.

    Args:
        x: Input of shape `[..., K]`.
        o: Tensor of one element, in the dtype of `x`, or float32 with bfloat16 and float16.

    Returns:
        Tensor of the shape and dtype of `x`.

    Raises:
        RuntimeError: If `o` does not have one element, and as in PyTorch's ops.
        TypeError: As in PyTorch, if an argument is not a tensor.
    """
    if (found := node.trainable_eps(x, o)) is not None:
        return found
    if not has_trainable_eps_kernel(x, o):
        return trainable_eps_by_pytorch(x, o)
    return trainable_eps(x, o)


class TrainableEpsLayerNorm(nn.Module):
    """Layer normalization over the last dimension, with a trained scalar squared as eps.

    The scalar starts at 0, as in the Spiral language's LayerNorm. Its gradient is 0 there, because
    eps is its square. To train it, give it another value: `nn.init.constant_(layer.o, 0.01)`.

    Args:
        device: Device of the scalar.
        dtype: Dtype of the scalar: that of the input, or float32 with a narrower input.

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
