"""Norm + Linear whose output is split into parts, as for queries, keys and values of one layer.

Autograd would concatenate the gradients of the parts, a pass over as much memory as the output has.
The backward reads them as they are: each is that of a Linear layer with a part of the weight's
rows, and all are on the same rows. In FP8 they are quantized as one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function

from fused_norm.composition import OPTIONS
from fused_norm.ops.autocast_fp8 import chosen
from fused_norm.ops.family import checked_call, is_traced, tensors_of


def norm_linear_in_parts(
    x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int], **options: Any
) -> tuple[Tensor, ...]:
    """Apply a norm and a Linear layer, and split its output.

    Args:
        x: Input of shape `[..., K]`.
        weight: Weight of shape `[N, K]` in the dtype of `x`.
        bias: Bias of shape `[N]`, or None.
        sizes: The features of each part, two or more; N in all.
        options: Those of `norm_linear`, without an activation.

    Returns:
        Views of the output, of shapes `[..., size]`; then the sum and the normalized rows, where
        asked for.

    Raises:
        RuntimeError: As in PyTorch's ops, if shapes, dtypes or devices disagree, or the sizes are
            not those of the output.
        TypeError: If there is an activation.
    """
    if options.get("activation"):
        raise TypeError("norm_linear_in_parts() got an unexpected keyword argument 'activation'")
    if is_traced(x, weight, options.get("residual")):
        return handle_torch_function(
            norm_linear_in_parts, tensors_of(x, weight), x, weight, bias, sizes, **options
        )
    values = tuple([options.get(name, default) for name, default in OPTIONS.items()])
    layers = ([weight], [bias], (None, None, None), False, False)
    recipe = chosen(options.get("recipe"))
    return tuple(checked_call(x, layers, values, recipe=recipe, sizes=sizes))
