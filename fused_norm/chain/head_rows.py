"""The exponentials, losses and factors of a chunk's rows, computed with PyTorch's ops."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm.call.memory import LOW_PRECISION, statistics_dtype
from fused_norm.chain import shards
from fused_norm.cross_entropy import Head, Loss


class Chunk(NamedTuple):
    """Some rows of a call.

    Attributes:
        rows: The slice of the rows.
        losses: One for each row, written: 0 for ignored rows.
        logsumexp: One for each row, written.
        scales: Gradients of the losses, None if no gradient is wanted.
        logsumexp_scales: Gradients of the logsumexps, None for zeros.
    """

    rows: slice
    losses: Tensor
    logsumexp: Tensor
    scales: Tensor | None
    logsumexp_scales: Tensor | None


class Others(NamedTuple):
    """What label smoothing subtracts from the gradient of all classes: a matrix of rank one.

    Attributes:
        scales: One for each row, shape `[rows]`.
        class_weight: One for each class, shape `[V]`.
        mean_weight: The class weights times the weight, shape `[K]`.
    """

    scales: Tensor
    class_weight: Tensor
    mean_weight: Tensor


class Rows(NamedTuple):
    """What a chunk computes for the gradients.

    Attributes:
        exponentials: Shape `[rows, V]`; times the factors, the gradient of the logits except for
            `others`.
        factors: One for each row, None for 1.
        scaled: The rows of x times their factors, None if these are 1.
        others: What is subtracted from that gradient, None for nothing.
    """

    exponentials: Tensor
    factors: Tensor | None = None
    scaled: Tensor | None = None
    others: Others | None = None


class Composed(NamedTuple):
    """Computes chunks with PyTorch's ops.

    Attributes:
        t: The tensors of the call, with rows in one dimension.
        loss: What to compute.
    """

    t: Head
    loss: Loss

    def begin(self, part: slice) -> None:
        """Do nothing: there is nothing to queue ahead."""

    def rows(self, chunk: Chunk) -> Rows | None:
        """Compute a chunk from its logits, minus the largest of each row.

        Returns None if no gradients are wanted.

        Args:
            chunk: Its rows.
        """
        t, loss = self
        x, target, wide = t.x[chunk.rows], t.target[chunk.rows], statistics_dtype(t.x.dtype)
        z = _logits(x, t, wide)
        slope = None
        if loss.softcap:
            bent = z.div_(loss.softcap).tanh_()
            slope = None if chunk.scales is None else 1 - bent.square()
            z = bent.mul_(loss.softcap)
        terms = Terms.of(t, loss, chunk.rows, wide)
        counts, smooth = terms.counts, terms.smooth
        label = _Label.of(torch.where(counts, target, 0), t.weight.shape[0], loss)
        logit = label.entry(z)
        of_all = None
        if smooth:
            class_weight = _own_classes(terms.class_weight, t, loss)
            of_all = z.sum(1) if class_weight is None else z @ class_weight
        if chunk.scales is None and z.is_cpu and not loss.group and logit.isfinite().all():
            # One pass on a CPU, if exponentials are not wanted.
            e = torch.log_softmax(z, 1)
            sums, lse = z, logit - label.entry(e)
        else:
            most = shards.largest(z, loss.group)
            e = z.sub_(most.unsqueeze(1)).exp_()
            sums, logit, of_all = shards.totals((e.sum(1), logit, of_all), loss.group)
            lse = most + sums.log()
        chunk.losses.copy_(terms.losses(lse, logit, of_all))
        chunk.logsumexp.copy_(lse)
        if chunk.scales is None:
            return None
        scales = chunk.scales
        of_sum = terms.of_sum(lse, chunk)
        is_plain = not (smooth or loss.z_loss or loss.softcap) and chunk.logsumexp_scales is None
        # Float16 lacks the range for a label's entry before its factor.
        if is_plain and x.dtype is not torch.float16:
            label.add(e, -(sums * counts))
            factors = of_sum / sums
            scaled = (x.to(wide) * factors.unsqueeze(1)).to(x.dtype)
            return Rows(e.to(x.dtype), factors, scaled)
        e.mul_((of_sum / sums).unsqueeze(1))
        label.add(e, -(scales * terms.hard))
        if smooth:
            each = (scales * smooth).unsqueeze(1)
            e.sub_(each if class_weight is None else each * class_weight)
        if slope is not None:
            e.mul_(slope)
        return Rows(e.to(x.dtype))


class Terms(NamedTuple):
    """The terms of a loss that depend on labels and classes, not on logits.

    Attributes:
        counts: Which rows are not ignored, shape `[rows]`.
        class_weight: One for each class of the whole vocabulary, shape `[V]`, or None.
        hard: Weight of the label's term in a row's loss, shape `[rows]`, 0 for ignored rows.
        smooth: Weight of the term of each class whose class weight is 1.
        total: The sum of the class weights.
        z_loss: Factor of the squared logsumexp.
    """

    counts: Tensor
    class_weight: Tensor | None
    hard: Tensor
    smooth: float
    total: Any
    z_loss: float

    @staticmethod
    def of(t: Head, loss: Loss, rows: slice, wide: torch.dtype) -> Terms:
        """Compute the terms of some rows, in a wide dtype."""
        target = t.target[rows]
        counts = target != loss.ignore_index
        if t.class_weight is None:
            class_weight, own = None, counts.to(wide)
        else:
            class_weight = t.class_weight.to(wide)
            own = class_weight[torch.where(counts, target, 0)] * counts
        classes = loss.classes or t.weight.shape[0]
        smooth = loss.label_smoothing / classes
        total: Any = classes
        if smooth and class_weight is not None:
            total = class_weight.sum()
        return Terms(
            counts, class_weight, own * (1 - loss.label_smoothing), smooth, total, loss.z_loss
        )

    def losses(self, lse: Tensor, logit: Tensor, of_all: Tensor | None) -> Tensor:
        """Return the losses; `of_all` is the sum of all logits times their class weights."""
        # An ignored row's label is a placeholder, whose logit may be infinite.
        losses = torch.where(self.counts, self.hard * (lse - logit), 0)
        if of_all is not None:
            losses = losses + torch.where(self.counts, self.smooth * (lse * self.total - of_all), 0)
        if self.z_loss:
            losses = losses + torch.where(self.counts, self.z_loss * lse.square(), 0)
        return losses

    def of_sum(self, lse: Tensor, chunk: Chunk) -> Tensor:
        """Return the gradients of the logsumexps, including what the losses contribute."""
        # A Python number times a bool tensor would be float32.
        smooth = self.smooth * self.total + 2 * self.z_loss * lse
        of_sum: Tensor = chunk.scales * (self.hard + smooth * self.counts)
        return of_sum if chunk.logsumexp_scales is None else of_sum + chunk.logsumexp_scales


class _Label(NamedTuple):
    """Where the labels of rows are among the classes of this process.

    Attributes:
        column: The label of each row, shape `[rows, 1]`; arbitrary if another process has it.
        is_here: Whether this process has it, shape `[rows]`; None if it has all classes.
    """

    column: Tensor
    is_here: Tensor | None

    @staticmethod
    def of(labels: Tensor, classes: int, loss: Loss) -> _Label:
        """Locate labels among this many classes, which start at `loss.first`."""
        if not loss.group:
            return _Label(labels.unsqueeze(1), None)
        column = labels - loss.first
        is_here = (column >= 0) & (column < classes)
        return _Label(torch.where(is_here, column, 0).unsqueeze(1), is_here)

    def entry(self, z: Tensor) -> Tensor:
        """Return each row's entry for its label, 0 if another process has it."""
        if self.is_here is None:
            return z.gather(1, self.column)[:, 0]
        if not z.shape[1]:
            return z.new_zeros(z.shape[0])
        return torch.where(self.is_here, z.gather(1, self.column)[:, 0], 0)

    def add(self, z: Tensor, values: Tensor) -> None:
        """Add a value to each row's entry for its label, if this process has it."""
        if self.is_here is not None:
            values = torch.where(self.is_here, values, 0)
        if z.shape[1]:
            z.scatter_add_(1, self.column, values.unsqueeze(1))


def _own_classes(class_weight: Tensor | None, t: Head, loss: Loss) -> Tensor | None:
    if class_weight is None or not loss.group:
        return class_weight
    return class_weight[loss.first : loss.first + t.weight.shape[0]]


def _logits(x: Tensor, t: Head, wide: torch.dtype) -> Tensor:
    if x.is_cuda and x.dtype in LOW_PRECISION:
        z = torch.mm(x, t.weight.t(), out_dtype=torch.float32)
        return z if t.bias is None else z.add_(t.bias)
    return F.linear(x, t.weight, t.bias).to(wide)
