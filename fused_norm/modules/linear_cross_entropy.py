"""A module that computes a cross entropy without storing all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_norm.head import linear_cross_entropy
from fused_norm.ops.main_grad import added


class LinearCrossEntropy(torch.nn.Module):
    """`linear_cross_entropy` as a module, with the signature of Liger's.

        loss = LinearCrossEntropy()(lm_head.weight, hidden, labels)

    Args:
        ce_weight: Weight of each class, shape `[V]`, or None.
        ignore_index: Label of rows that have neither loss nor gradient.
        lse_square_scale: Factor of each row's squared log-sum-exp; `z_loss` of the function.
        label_smoothing: As in `F.cross_entropy`.
        reduction: `"mean"`, `"sum"` or `"none"`.
        softcap: Limit of the logits, applied by tanh, or None.
        return_z_loss: Not supported.
        chunk_rows: As in `linear_cross_entropy`.
        fuse_wgrad_accumulation: Whether the gradient of the weight is added to its `main_grad`.

    Raises:
        NotImplementedError: With `return_z_loss`.
    """

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        *,
        chunk_rows: int | str | None = None,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        super().__init__()
        if return_z_loss:
            raise NotImplementedError("return_z_loss: ask linear_cross_entropy for logsumexp")
        self.ce_weight = ce_weight
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.options: dict[str, Any] = {
            **{"ignore_index": ignore_index, "z_loss": lse_square_scale},
            **{"label_smoothing": label_smoothing, "reduction": reduction, "softcap": softcap},
            "chunk_rows": chunk_rows,
        }

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Any:
        """Return the loss.

        Args:
            lin_weight: Weight of the vocabulary, shape `[V, K]`.
            _input: Rows of shape `[..., K]`.
            target: Labels of shape `[...]`, int64.
            bias: Shape `[V]`, or None.

        Returns:
            As `linear_cross_entropy`.
        """
        weight = lin_weight
        if self.fuse_wgrad_accumulation:
            owner = lin_weight if hasattr(lin_weight, "main_grad") else None
            (weight,) = added([lin_weight], [owner])
        return linear_cross_entropy(
            _input, weight, target, bias, class_weight=self.ce_weight, **self.options
        )
