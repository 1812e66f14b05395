"""The op family as a composition of PyTorch's ops: what every implementation computes.

    s = x + residual;  z = norm(s) (gamma + offset) + beta;  z = z (1 + scale) + shift
    h = z W^T + b;  a = activation(h), for a gate activation(h[:, :N]) h[:, N:]
    norm_mlp: y = a W2^T + b2 + residual_out

Every tensor is rounded to its dtype once, when it is a result: sums, norms, modulation and
activations are computed in float32 (float64 for float64). Everything is differentiable, so it also
serves derivatives that have no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm.activations import after_products
from fused_norm.norms import LAYER_NORM, NORMS
from fused_norm.reference import widened


class Spec(NamedTuple):
    """What a call computes, without its tensors.

    Attributes:
        normalization: One of NORMS.
        activation: One of ACTIVATIONS, or `""` for none.
        eps: Added to the variance, or to the mean square.
        weight_offset: Added to gamma.
        is_joined: Whether the products of all weights are columns of one tensor.
        returns_sum: Whether x + residual is a result.
        returns_norm: Whether the normalized rows are a result.
        recompute: Whether the backward recomputes h instead of keeping it.
        batch_invariant: Whether the bits of a row may not depend on other rows.
    """

    normalization: str = LAYER_NORM
    activation: str = ""
    eps: float = 1e-5
    weight_offset: float = 0.0
    is_joined: bool = False
    returns_sum: bool = False
    returns_norm: bool = False
    recompute: bool = False
    batch_invariant: bool = False


class Operands(NamedTuple):
    """The tensors of a call, None for absent ones.

    Attributes:
        x: Input of shape `[..., K]`.
        residual: Added to x before the norm, in its shape.
        gamma: Weight of the norm, shape `[K]`.
        beta: Bias of the norm, shape `[K]`.
        scale: Modulation that broadcasts against x.
        shift: The shift of the modulation.
        mean: Mean of each row of `x + residual`, shape `[...]`, if statistics are given.
        rstd: Reciprocal deviation of each row, or 1 / root mean square.
        out_weight: Weight of a second Linear layer, shape `[K2, N]`.
        out_bias: Its bias.
        out_residual: Added to the second layer's result.
        weights: Weights of the Linear layers on the norm, each of shape `[N, K]`.
        biases: One for each weight, or None.
    """

    x: Tensor
    residual: Tensor | None = None
    gamma: Tensor | None = None
    beta: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None
    out_weight: Tensor | None = None
    out_bias: Tensor | None = None
    out_residual: Tensor | None = None
    weights: Sequence[Tensor] = ()
    biases: Sequence[Tensor | None] = ()


# The operands that schemas and C++ list one by one: all except the weights and the biases.
NAMED = Operands._fields[:-2]
# The form of each operand of the norm: that of x, a number for each feature, features for each
# group of rows, or a number for each row. Checks, options, shards, the record and its gradients
# follow from this; chain/operands.h has the same for C++.
FORMS = {
    **{"residual": "rows", "gamma": "features", "beta": "features"},
    **{"scale": "groups", "shift": "groups", "mean": "statistics", "rstd": "statistics"},
}
NAMES: dict[str, tuple[str, ...]] = {
    form: tuple(name for name in FORMS if FORMS[name] == form) for form in FORMS.values()
}
# x and the operands that may have a gradient, which come before the statistics.
WITH_GRADIENT = Operands._fields[: 1 + len(FORMS) - len(NAMES["statistics"])]
# The options of a norm with their defaults: the operands first, as users name them.
OPTIONS: dict[str, Any] = {
    **dict.fromkeys(
        {"gamma": "norm_weight", "beta": "norm_bias"}.get(name, name) for name in WITH_GRADIENT[1:]
    ),
    **{"normalization": LAYER_NORM, "eps": 1e-5, "weight_offset": 0.0, "activation": None},
    **{"statistics": None, "return_sum": False, "return_norm": False},
}


class Added(NamedTuple):
    """The tensors of a Linear layer with a residual after it.

    Attributes:
        x: Input of shape `[..., K]`.
        weight: Of shape `[N, K]`.
        bias: Of shape `[N]`, or None.
        residual: Added to the result, of shape `[..., N]`, or None.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None


def has_sum(t: Operands) -> bool:
    """Return whether a residual is added to x before the norm."""
    return first(t, "rows") is not None


def first(t: Operands, *forms: str) -> Tensor | None:
    """Return the first operand with one of some forms that is not None.

    Args:
        t: The tensors.
        forms: The forms to look for, of FORMS.
    """
    for form in forms:
        for name in NAMES[form]:
            found: Tensor | None = getattr(t, name)
            if found is not None:
                return found
    return None


def _layers(
    z: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str,
    is_joined: bool,
    residual: Tensor | None = None,
) -> list[Tensor]:
    products = [F.linear(z, w, b) for w, b in zip(weights, biases, strict=True)]
    if residual is not None:
        products = [products[0] + residual]
    return after_products(products, activation, is_joined)


def compute(
    spec: Spec,
    t: Operands,
    layers: Callable[..., list[Tensor]] = _layers,
    normed_layers: Callable[..., list[Tensor]] | None = None,
) -> list[Tensor]:
    """Return the results of a call: its outputs, then the sum and the normalized rows if wanted.

    Args:
        spec: What to compute.
        t: The tensors. Statistics are recomputed, so that gradients reach x through them.
        layers: Computes Linear layers of the same rows and their activation from the rows, the
            weights and the biases, the activation, whether products are joined, and what is added
            to a single product, or None.
        normed_layers: Computes the norm as well, from the rows that it is of instead of its result;
            or None. No norm is returned then.
    """
    x = summed(t)
    z = normalized(spec, x, t) if normed_layers is None else x
    first_layers = layers if normed_layers is None else normed_layers
    outputs = first_layers(z, t.weights, t.biases, spec.activation, spec.is_joined)
    if t.out_weight is not None:
        outputs = layers(outputs[0], [t.out_weight], [t.out_bias], "", False, t.out_residual)
    if spec.returns_sum:
        outputs.append(x)
    if spec.returns_norm:
        outputs.append(z)
    return outputs


def summed(t: Operands) -> Tensor:
    """Return the input of the norm: x plus the residual."""
    return t.x if t.residual is None else t.x + t.residual


def normalized(spec: Spec, x: Tensor, t: Operands) -> Tensor:
    """Return the normalized and modulated rows of x, in its dtype.

    Args:
        spec: The norm.
        x: The sum that is normalized.
        t: Gamma, beta, scale and shift.
    """
    rows, gamma, beta, scale, shift = x, t.gamma, t.beta, t.scale, t.shift
    features = _features(x, gamma, t.weights[0] if t.weights else None)
    norm = NORMS[spec.normalization]
    is_bare = norm.has_bias and not spec.weight_offset and scale is shift is None
    parameters = (gamma, beta) if norm.has_bias else (gamma,)
    is_wrong = not all(v is None or isinstance(v, Tensor) for v in parameters)
    if is_bare or is_wrong or not isinstance(x, Tensor) or not x.dim():
        # PyTorch's own op, whatever the dtypes: it raises the error if there is one.
        return norm.function(x, features, gamma, beta, spec.eps)
    # PyTorch's norms also compute in float32, and round once.
    if not is_rounded_once(spec, x, t):
        rows = widened(x)
        gamma, beta, scale, shift = (
            widened(v) if isinstance(v, Tensor) else v for v in (gamma, beta, scale, shift)
        )
    if gamma is not None and spec.weight_offset:
        gamma = gamma + spec.weight_offset
    z = norm.function(rows, features, gamma, beta, spec.eps)
    if scale is not None:
        z = z * (1 + scale)
    if shift is not None:
        z = z + shift
    return z.to(x.dtype) if x.is_floating_point() else z


def is_rounded_once(spec: Spec, x: Tensor, t: Operands) -> bool:
    """Return whether a norm is one op of PyTorch, with parameters in the dtype of x.

    Args:
        spec: The norm.
        x: What is normalized.
        t: Gamma, beta, scale and shift.
    """
    gamma, beta = t.gamma, t.beta
    return (
        t.scale is None
        and t.shift is None
        and (gamma is None or (gamma.dtype is x.dtype and not spec.weight_offset))
        and (beta is None or (NORMS[spec.normalization].has_bias and beta.dtype is x.dtype))
    )


def _features(x: Tensor, *others: Tensor | None) -> torch.Size:
    """Return the size of a row, or the size that parameters require if it fits none."""
    sizes = [size for size in map(_last_size, others) if size]
    features = _last_size(x)
    return features if features in sizes or not sizes else sizes[-1]


def _last_size(tensor: Any) -> torch.Size:
    """Return the size of the last dimension, an empty one if there is none."""
    # A nested tensor of this layout raises when asked for a shape.
    return torch.Size() if not isinstance(tensor, Tensor) or tensor.is_nested else tensor.shape[-1:]


def gradients(
    spec: Spec, t: Operands, grad_outputs: Sequence[Tensor | None], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of a call's tensors, differentiable themselves, None if not wanted.

    Args:
        spec: What was computed.
        t: The tensors; statistics get no gradient.
        grad_outputs: The gradients of the results of `compute`, None for zeros.
        wanted: Which gradients are wanted, in the order of `flat`.
    """
    tensors = _with_biases(flat(t), wanted)
    chosen = [i for i, w in enumerate(wanted) if w]

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        changed = list(tensors)
        for i, value in zip(chosen, values, strict=True):
            changed[i] = value
        with cast_as_recorded(t):
            results = compute(spec, unflat(changed))
        return tuple(r for r, g in zip(results, grad_outputs, strict=True) if g is not None)

    values = [tensors[i] for i in chosen]
    # Not unpacked: PyTorch's annotations have a third result, which is optional.
    pull = torch.func.vjp(function, *values)[1]
    found = iter(pull(tuple(g for g in grad_outputs if g is not None)))
    return [next(found) if w else None for w in wanted]


def cast_as_recorded(t: Operands) -> AbstractContextManager[Any]:
    """Return the autocast that gave weights another dtype than x, to compute a call in it again.

    It may have ended: a backward usually runs after it.

    Args:
        t: The tensors of a call that kernels take.
    """
    dtype = t.weights[0].dtype
    if dtype is t.x.dtype:
        return nullcontext()
    return torch.autocast(t.x.device.type, dtype, cache_enabled=False)


def _with_biases(tensors: list[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return the tensors with zeros for biases that were not kept, as no gradient needs them."""
    count = (len(tensors) - len(NAMED)) // 2
    out_weight = NAMED.index("out_weight")
    pairs = [(out_weight, out_weight + 1)]
    pairs += [(place, place + count) for place in range(len(NAMED), len(NAMED) + count)]
    for of_weight, place in pairs:
        weight = tensors[of_weight]
        if wanted[place] and tensors[place] is None and weight is not None:
            tensors[place] = weight.new_zeros(weight.shape[0])
    return tensors


def reached(spec: Spec, count: int, grad_outputs: Sequence[Tensor | None]) -> list[bool]:
    """Return which tensors have a gradient, in the order of `flat`; PyTorch leaves others None.

    Args:
        spec: What was computed.
        count: How many weights there are.
        grad_outputs: The gradients of the results of `compute`, None if nothing depends on one.
    """
    there = [g is not None for g in grad_outputs]
    last = len(there) - spec.returns_norm
    norm = spec.returns_norm and there[last]
    total = spec.returns_sum and there[last - 1]
    outputs = there[: last - spec.returns_sum]
    through = any(outputs)
    places = dict.fromkeys(WITH_GRADIENT, norm or through)
    places |= dict.fromkeys(("x", *NAMES["rows"]), total or norm or through)
    places |= dict.fromkeys(NAMES["statistics"], False)
    layers = outputs if len(outputs) == count else [through] * count
    return [places.get(name, through) for name in NAMED] + 2 * layers


def flat(t: Operands) -> list[Tensor | None]:
    """Return the tensors of a call in one list, with weights and then biases at the end."""
    return [*t[:-2], *t.weights, *t.biases]


def unflat(tensors: Sequence[Tensor | None]) -> Operands:
    """Return the tensors of a list made by `flat`."""
    first = len(NAMED)
    count = (len(tensors) - first) // 2
    weights, biases = list(tensors[first : first + count]), list(tensors[first + count :])
    return Operands._make((*tensors[:first], weights, biases))
