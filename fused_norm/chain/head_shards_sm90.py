"""A chunk of a vocabulary that is sharded over processes, with Hopper's kernels.

Each process has its own offsets, and recomputes its rows whose sums are out of the safe range.
With o the offset of a row, E its exponentials here and lse the logarithm of the sum over all
processes, the gradient of the logits here is

    a exp(o - lse) E - b onehot(label)

with a and b as in op/head/rows.mojo. So processes exchange only their own logsumexp of each row and
the logit of its label.
"""

from __future__ import annotations

import torch

from fused_norm.call.memory import address
from fused_norm.chain import shards
from fused_norm.chain.head_rows import Chunk, Others, Rows, Terms
from fused_norm.chain.head_sm90 import Chunks, run, weighted_rows
from fused_norm.cross_entropy import Head, Loss

# The least share of a row's sum that a process is assumed to have, so that the label's term, which
# is divided by the factor, stays finite; far below the roundings of bfloat16.
_LEAST_SHARE = 1e-6
# The least ratio of a, the gradient of the sum, to the label's, as in op/head/rows.mojo.
_LEAST_OF_SUM = 2.0**-20
# The kernels' number for "no label".
_NO_LABEL = -1


class ShardedChunks(Chunks):
    """The memory and the record of one chunk, which all chunks of a call reuse."""

    def __init__(self, t: Head, loss: Loss, size: int, keeps: bool) -> None:
        """Allocate the memory of a chunk.

        Args:
            t: The tensors, with rows in one dimension, and this process's weight and bias.
            loss: What to compute.
            size: Most rows of a chunk.
            keeps: Whether exponentials are wanted for gradients.
        """
        # The kernels compute the plain loss of this process's classes.
        super().__init__(t._replace(class_weight=None), _plain(loss), size, keeps)
        V = len(t.weight)
        self.whole, self.options = t, loss
        column = t.target - loss.first
        is_here = (column >= 0) & (column < V) & (t.target != loss.ignore_index)
        self.target = torch.where(is_here, column, _NO_LABEL)
        self.plain_losses, self.logsumexp = self.x.new_empty((2, size), dtype=torch.float32)

    def _terms_of_classes(self) -> None:
        t, loss, self.has_terms = self.whole, self.options, True
        if not loss.label_smoothing:
            return
        V = len(t.weight)
        if t.class_weight is None:
            each = self.x.new_ones(V, dtype=torch.float32)
        else:
            each = t.class_weight[loss.first : loss.first + V].float()
        self.class_weight_of_others, self.mean_weight = each, weighted_rows(t.weight, each)
        self.mean_bias = None if t.bias is None else (t.bias.float() @ each).reshape(1)

    def rows(self, chunk: Chunk) -> Rows | None:
        """Compute losses and factors from the exponentials of the last rows passed to `begin`.

        Returns None if no gradients are wanted.

        Args:
            chunk: Its rows.
        """
        if not self.has_terms:
            self._terms_of_classes()
        part, loss, group = chunk.rows, self.options, self.options.group
        x, offsets = self.x[part], self.of_rows[0, part]
        count = len(x)
        plain, own = self.plain_losses[:count], self.logsumexp[:count]
        call = self.call
        call.target = address(self.target[part])
        call.losses, call.logsumexp = address(plain), address(own)
        run("rows", call, x.device)
        is_here = self.target[part] != _NO_LABEL
        own_logit = torch.where(is_here, own - plain, 0)
        most = shards.largest(own.unsqueeze(1), group)
        of_all = None
        if self.mean_weight is not None:
            of_all = x.float() @ self.mean_weight
            of_all = of_all if self.mean_bias is None else of_all + self.mean_bias
        found = shards.totals(((own - most).exp(), own_logit, of_all), group)
        lse = most + found[0].log()
        terms = Terms.of(self.whole, loss, part, torch.float32)
        chunk.losses.copy_(terms.losses(lse, found[1], found[2]))
        chunk.logsumexp.copy_(lse)
        if self.exponentials is None or self.scaled is None or chunk.scales is None:
            return None
        of_label = chunk.scales * terms.hard
        least = of_label.abs() * _LEAST_OF_SUM
        a = terms.of_sum(lse, chunk)
        a = torch.where(a.abs() < least, least, a)
        factors = a * (own - lse).exp().clamp_(min=_LEAST_SHARE) * (offsets - own).exp()
        e = self.exponentials[:count, : call.V]
        entry = (own_logit - offsets).exp() - of_label / factors
        if loss.softcap:
            entry *= 1 - (own_logit / loss.softcap).square()
        column = self.target[part].clamp(min=0).unsqueeze(1)
        kept = e.gather(1, column)[:, 0]
        entry = torch.where(is_here & (a != 0), entry.to(e.dtype), kept)
        e.scatter_(1, column, entry.unsqueeze(1))
        torch.mul(x, factors.unsqueeze(1), out=self.scaled[:count])
        others = None
        if self.mean_weight is not None:
            scales = chunk.scales * terms.smooth
            others = Others(scales, self.class_weight_of_others, self.mean_weight)
        return Rows(e, factors, self.scaled[:count], others)


def _plain(loss: Loss) -> Loss:
    return Loss(softcap=loss.softcap, ignore_index=_NO_LABEL)
