"""Records of calls in bfloat16 for Hopper's kernels, and folded weights: for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fused_norm.call.record import Call


class Fold(NamedTuple):
    """A folded weight, its row sums and its constants, and their addresses in a record."""

    weight: Tensor
    sums: Tensor

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Those of the weight, the sums and the constants."""
        return self.weight.data_ptr(), self.sums.data_ptr(), self.sums[1].data_ptr()


def record_of(inputs: Sequence[Tensor], eps: float) -> Call:
    """Return the record of LayerNorm + Linear, but for its results and the context.

    Args:
        inputs: x `[M, K]`, gamma and beta `[K]`, the weight `[N, K]` and the bias `[N]`.
        eps: Added to the variance.
    """
    x, gamma, beta, weight, bias = inputs
    (M, K), N = x.shape, len(weight)
    call = Call(M=M, K=K, N=N, eps=eps, x=x.data_ptr())
    call.gamma, call.beta = gamma.data_ptr(), beta.data_ptr()
    call.weight, call.bias = weight.data_ptr(), bias.data_ptr()
    return call


def fold_of(parameters: Sequence[Tensor], activation: int = 0) -> Fold:
    """Return the fold of parameters.

    Args:
        parameters: Gamma and beta `[K]`, the weight `[N, K]` and the bias `[N]`.
        activation: The number of that in the epilogue.
    """
    gamma, beta, weight, bias = parameters
    layer = gamma, beta, [weight], [bias]
    op = torch.ops.fused_norm.norm_linear_fold
    return Fold(*op(*layer, "layer_norm", 0.0, activation))
