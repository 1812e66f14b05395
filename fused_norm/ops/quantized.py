"""FP8 weights and layers of other libraries: torchao's and transformers', used directly.

torchao's `quantize_` makes parameters of a tensor subclass, `convert_to_float8_training` layers
that multiply with their own function; with `enable_fsdp_float8_all_gather`, FSDP2 gathers their
weights as tensors of another subclass. All are recognized by name here, so that torchao is never
imported. Layers of transformers keep quantized values and scales in two parameters, which a
`ScaledWeight` combines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fused_norm.recipes import E4M3

_PRODUCT = "matmul_with_hp_or_float8_args"


class ScaledWeight(Tensor):
    """A weight's 8-bit values and their scales as one tensor, which supports no ops of its own.

    Args:
        qdata: The values, e4m3 `[N, K]`.
        scale: Their scales in the format of `recipes.quantize`.
        recipe: The recipe whose forward uses it.
        dtype: The dtype of the layer's results.
    """

    qdata: Tensor
    scale: Tensor
    recipe: str

    @staticmethod
    def __new__(cls, qdata: Tensor, scale: Tensor, recipe: str, dtype: torch.dtype) -> ScaledWeight:
        """Return a tensor of the shape of the values."""
        make: Any = Tensor._make_wrapper_subclass
        made: ScaledWeight = make(cls, qdata.shape, dtype=dtype, device=qdata.device)
        return made

    def __init__(self, qdata: Tensor, scale: Tensor, recipe: str, dtype: torch.dtype) -> None:
        self.qdata, self.scale, self.recipe = qdata, scale, recipe

    # Tensor's own signature, which has no annotations: mypy takes these for a difference.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return a short description: the values are not meant to be read."""
        return f"ScaledWeight({list(self.shape)}, {self.recipe!r})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the inner tensors, and the rest."""
        return ["qdata", "scale"], (self.recipe, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], rest: Any, *_: Any) -> ScaledWeight:
        """Return the tensor that `__tensor_flatten__` flattened."""
        return ScaledWeight(inner["qdata"], inner["scale"], *rest)

    # Tensor has a function of C there, whose stub is no class method.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse every op: a sum of values that lack their scales would be wrong.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(f"{op} has no form for a weight in FP8")


def scaled_weight(qdata: Tensor, scale: Tensor, recipe: str, dtype: torch.dtype) -> ScaledWeight:
    """Return a weight of two parameters as one tensor.

    Args:
        qdata: The values, e4m3 `[N, K]`.
        scale: Their scales: N of them for `"rowwise"`, in any shape, and those of blocks for
            `"blockwise"`.
        recipe: The recipe whose forward uses it.
        dtype: The dtype of the layer's results.
    """
    scale = scale.reshape(-1, 1) if recipe == "rowwise" else scale
    return ScaledWeight(qdata, scale, recipe, dtype)


def is_product(target: Any) -> bool:
    """Return whether a graph's node calls the product of torchao's `Float8Linear`."""
    # Dynamo calls a function with the product in its closure.
    for cell in getattr(target, "__closure__", None) or ():
        with suppress(ValueError):  # of a cell that is empty
            held = cell.cell_contents
            if getattr(held, "__name__", "") == _PRODUCT:
                return bool(held.__module__.startswith("torchao."))
    return False


def is_configuration(target: Any) -> bool:
    """Return whether a graph's node calls the constructor of such a product's configuration."""
    return isinstance(target, type) and target.__module__.startswith("torchao.float8.")


def is_quantized(weight: Any) -> bool:
    """Return whether a tensor is a `ScaledWeight`, or torchao's `Float8Tensor` in any form."""
    return _is_of_torchao(weight, "Float8Tensor") or type(weight) is ScaledWeight


def is_gathered(weight: Any) -> bool:
    """Return whether a tensor is torchao's `Float8TrainingTensor`: values and a scale that trains.

    FSDP2 gathers such weights. It frees the memory of their values between the forward and the
    backward, writes them again before the latter, and may then have set another scale: what needs
    them later keeps the weight, and neither the values nor the scale.
    """
    return _is_of_torchao(weight, "Float8TrainingTensor")


def is_in_8_bits(weight: Any) -> bool:
    """Return whether `parts` has values in 8 bits of a weight."""
    return is_quantized(weight) or is_gathered(weight)


def is_to_gather(weight: Any) -> bool:
    """Return whether a tensor is one that becomes a `Float8TrainingTensor` as FSDP2 gathers it."""
    return _is_of_torchao(weight, "WeightWithDynamicFloat8CastTensor")


def _is_of_torchao(tensor: Any, name: str) -> bool:
    kind = type(tensor)
    return kind.__name__ == name and kind.__module__.startswith("torchao.")


def recipe_of(weight: Any) -> str:
    """Return the recipe whose forward uses a weight in 8 bits.

    Args:
        weight: A `ScaledWeight`, a `Float8Tensor` from `quantize_` with
            `Float8DynamicActivationFloat8WeightConfig` of `PerRow()` or `PerTensor()`, or a
            `Float8TrainingTensor` with one scale.

    Raises:
        NotImplementedError: If it has another form, which the message names.
    """
    if isinstance(weight, ScaledWeight):
        return weight.recipe
    if is_gathered(weight):
        return _recipe_of_gathered(weight._data, weight._scale)
    rows = weight.act_quant_kwargs
    if rows is None:
        raise NotImplementedError("weight is in FP8 and rows are not to be")
    q, scale = weight.qdata, weight.scale
    if q.dim() != 2 or not q.is_contiguous():
        raise NotImplementedError("weight is no matrix of dense rows")
    if not q.dtype is rows.float8_dtype is E4M3:
        raise NotImplementedError(f"weight is {q.dtype}, and rows {rows.float8_dtype}")
    if rows.hp_value_lb is not None or rows.hp_value_ub is not None:
        raise NotImplementedError("maxima of rows have bounds")
    N, K = q.shape
    granularity = type(rows.granularity).__name__
    block = tuple(weight.block_size)
    if granularity == "PerRow" and block == (1, K) and scale.shape == (N, 1):
        return "rowwise"
    if granularity == "PerTensor" and block == (N, K) and scale.numel() == 1:
        return "tensorwise"
    raise NotImplementedError(f"weight has scales of blocks {list(block)}, and rows {granularity}")


def _recipe_of_gathered(q: Tensor, scale: Tensor) -> str:
    if q.dim() != 2 or not q.is_contiguous():
        raise NotImplementedError("weight is no matrix of dense rows")
    if q.dtype is not E4M3 or scale.numel() != 1:
        raise NotImplementedError(f"weight is gathered as {q.dtype} with {scale.numel()} scales")
    return "tensorwise"


def values(weight: Any) -> Tensor:
    """Return what a weight's op reads: its 8-bit values, if it is gathered, or the weight."""
    found: Tensor = weight._data if is_gathered(weight) else weight
    return found


def parts(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return a weight's 8-bit values and their scales; for others, the weight and None.

    Args:
        weight: Of shape `[N, K]`.
    """
    of: Any = weight
    if is_gathered(weight):
        # torchao's scale is the one that the weight was multiplied by.
        return of._data, of._scale.reciprocal().reshape(1, 1)
    if not is_quantized(weight):
        return weight, None
    scale: Tensor = of.scale
    if isinstance(weight, ScaledWeight):
        return of.qdata, scale
    return of.qdata, scale if scale.dim() == 2 else scale.reshape(1, 1)


def for_gradients(
    weights: Sequence[Tensor], scales: Sequence[Tensor | None], are_read: bool
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return weights as ops of gradients take them: the values of gathered ones, transposed.

    Args:
        weights: As a forward saved them; of shape `[N, K]` if they are gathered.
        scales: For each weight its scales, None if the forward kept none.
        are_read: Whether the gradient of the rows is wanted, which nothing else takes weights for.
    """
    found, own = [*weights], [*scales]
    for i, weight in enumerate(weights):
        if not is_gathered(weight):
            continue
        if are_read:
            q, own[i] = parts(weight)
            found[i] = q.t().contiguous()
        else:
            found[i] = values(weight)
    return found, own


def require_recipe(weight: Tensor, recipe: str, operands: Iterable[Tensor | None]) -> None:
    """Raise an error if a weight in 8 bits is used with another recipe, or lacks a gradient.

    Args:
        weight: Any weight.
        recipe: The call's.
        operands: The tensors that it multiplies or that are added.

    Raises:
        ValueError: If the weight was quantized for another recipe.
        NotImplementedError: If a gradient is needed of a weight that has none, or the weight's form
            is not supported.
    """
    if not is_in_8_bits(weight):
        return
    if (own := recipe_of(weight)) != recipe:
        raise ValueError(f"weight is quantized for recipe={own!r}, but got {recipe!r}")
    if is_gathered(weight):
        return
    if torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in operands):
        raise NotImplementedError("a weight that is quantized has no gradients")
