"""What comes between a norm and attention: queries, keys and values of heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fused_norm.call.memory import own_eps
from fused_norm.functional import norm_linear
from fused_norm.ops import rotary as rotary_ops
from fused_norm.rotation import Heads, Rotation


def norm_qkv(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    qk_eps: float | None = 1e-6,
    qk_weight_offset: float = 0.0,
    rotary: tuple[Tensor, Tensor] | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    **norm: Any,
) -> Any:
    """Apply a norm, the Linear layers of queries, keys and values, and what precedes attention.

        z = norm(x + residual);  q, k, v = z Wq^T, z Wk^T, z Wv^T, split into heads
        q, k = rotated(rms_norm(q) q_norm), rotated(rms_norm(k) k_norm)

    Heads are normalized and rotated in one pass, in float32, and rounded once; PyTorch's ops round
    bfloat16 five times. The backward saves what `norm_linear` saves, and the products of queries
    and keys. Sums run in a fixed order, so every run gives the same bits.

    Kernels do this on CPUs if `head_dim` and the number of rotated elements are multiples of 16,
    and on GPUs if they are multiples of 8 up to 256. Otherwise, PyTorch's ops do.

    Args:
        x: Input of shape `[..., S, K]`.
        weights: Of queries, keys and values, shapes `[heads head_dim, K]`. Keys and values may have
            fewer heads.
        biases: One for each weight, or None.
        head_dim: Elements D of a head.
        q_norm: Weight of the RMSNorm of each head of the queries, shape `[D]`; None for no norm.
        k_norm: The same of the keys.
        qk_eps: Added to the mean square of a head; None for PyTorch's own.
        qk_weight_offset: Added to `q_norm` and `k_norm`: 1.0 if those are kept around zero.
        rotary: Cosines and sines, of shape `[S, R]`, or `[..., S, R]` for positions of each row;
            None for no rotation.
        rotary_dim: How many elements of a head are rotated, from the first; None for R. If it is
            2 R, there is one angle for each pair.
        interleaved: Whether neighbors are rotated into each other (GPT-J, Flux), instead of
            elements at a distance of half of `rotary_dim` (LLaMA).
        norm: The options of `norm_linear` for the norm before: `normalization`, `norm_weight`,
            `norm_bias`, `eps`, `weight_offset`, `scale`, `shift`, `residual`, `statistics`,
            `return_sum`, `return_norm` and `recipe`.

    Returns:
        Queries, keys and values of shape `[..., heads, S, D]`, as `scaled_dot_product_attention`
        takes them, in memory `[..., S, heads, D]`; then the sum and the normalized rows, where
        asked for.

    Raises:
        ValueError: If there are not three weights, outputs are not a multiple of `head_dim`, or the
            cosines are not those of the rows and of at most D elements.
        RuntimeError: As in PyTorch's ops, if shapes, dtypes or devices disagree.
        TypeError: As in PyTorch, if an argument is not a tensor or not known.
    """
    if "activation" in norm:
        raise TypeError("norm_qkv() got an unexpected keyword argument 'activation'")
    _check_tensors(x=x, q_norm=q_norm, k_norm=k_norm)
    _check_weights(weights, head_dim)
    angles, is_half = _angles(rotary, rotary_dim, x, head_dim)
    for gamma in (q_norm, k_norm):
        if gamma is not None and gamma.shape != (head_dim,):
            raise RuntimeError(
                f"expected a weight of a head's norm of shape [{head_dim}], got {list(gamma.shape)}"
            )
    (q, k, v), *extras = _parted(norm_linear(x, tuple(weights), biases, **norm), norm)
    heads = [t.unflatten(-1, (-1, head_dim)) for t in (q, k, v)]
    eps = own_eps(x.dtype) if qk_eps is None else float(qk_eps)
    options = (eps, float(qk_weight_offset), interleaved, is_half)
    calls = [
        (Heads(x, gamma, *angles), Rotation(gamma is not None, *options))
        for x, gamma in zip(heads, (q_norm, k_norm), strict=False)
    ]
    if (q_norm is not None and k_norm is not None) or (q_norm is k_norm and rotary is not None):
        heads[:2] = rotary_ops.call_both(calls[0][0], calls[1][0], calls[0][1])
    else:
        for place, (t, rotation) in enumerate(calls):
            if t.gamma is not None or rotary is not None:
                heads[place] = rotary_ops.call(t, rotation)
    return (*(t.transpose(-3, -2) for t in heads), *extras)


def _check_tensors(x: Any, **others: Any) -> None:
    for name, value in {"x": x, **{n: v for n, v in others.items() if v is not None}}.items():
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise TypeError(f"norm_qkv(): argument '{name}' must be Tensor, not {kind}")


def _check_weights(weights: Sequence[Tensor], head_dim: int) -> None:
    if len(weights) != 3:
        raise ValueError(f"expected the weights of queries, keys and values, got {len(weights)}")
    if head_dim < 1:
        raise ValueError(f"head_dim must be positive, got {head_dim}")
    for weight in weights:
        if isinstance(weight, Tensor) and weight.dim() and weight.shape[0] % head_dim:
            raise ValueError(f"{weight.shape[0]} outputs are not a multiple of head_dim={head_dim}")


def _parted(results: Any, norm: dict[str, Any]) -> tuple[Any, ...]:
    """Return the three outputs, followed by the other results."""
    if norm.get("return_sum") or norm.get("return_norm"):
        return tuple(results)
    return (results,)


def _angles(
    rotary: tuple[Tensor, Tensor] | None, rotary_dim: int | None, x: Tensor, head_dim: int
) -> tuple[tuple[Tensor | None, Tensor | None], bool]:
    """Return cosines and sines in two dimensions, and whether there is one for each pair.

    Raises:
        ValueError: If they do not belong to the rows, or to the elements of a head.
    """
    if rotary is None:
        return (None, None), False
    cos, sin = rotary
    _check_tensors(x, cos=cos, sin=sin)
    rows, columns = x.shape[:-1], cos.shape[-1]
    if cos.shape != sin.shape or cos.shape[:-1] not in (rows, rows[-1:], (1, *rows[-1:])):
        raise ValueError(
            f"expected cosines and sines of shape {[*rows[-1:], 'R']} or {[*rows, 'R']}, got "
            f"{list(cos.shape)} and {list(sin.shape)}"
        )
    size = columns if rotary_dim is None else rotary_dim
    if size not in (columns, 2 * columns) or size % 2 or size > head_dim:
        raise ValueError(
            f"{columns} cosines rotate {columns} or {2 * columns} of at most head_dim={head_dim} "
            f"elements, an even number, but got rotary_dim={size}"
        )
    return (cos.reshape(-1, columns), sin.reshape(-1, columns)), size != columns
