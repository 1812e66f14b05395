"""The backward of the op family by kernels: native/seam_backward.h in Python."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_norm.backends import cpu_seam, linear, passes, several, sm90
from fused_norm.backends.products import input_gradient
from fused_norm.backends.seams import activated, has_product, norm_of, recomputed
from fused_norm.call import parameters as known_parameters
from fused_norm.call.memory import LOW_PRECISION, aligned, dense, laid_as_sum, lies_transposed
from fused_norm.composition import WITH_GRADIENT, Operands, Seam, first

Found = list[Tensor | None]

# Where the gradients of the tensors by name stand, in the order of `composition.flat`.
_GAMMA, _BETA, _OUT_WEIGHT, _OUT_BIAS, _NAMED = map(
    Operands._fields.index, ("gamma", "beta", "out_weight", "out_bias", "weights")
)


def backward(
    kind: Seam,
    t: Operands,
    products: Sequence[Tensor],
    grad_outputs: Sequence[Tensor | None],
    wanted: Sequence[bool],
    main_grads: Sequence[Tensor | None] = (),
) -> Found:
    """Return the gradients that are wanted, in the order of `composition.flat`.

    Those of the residuals are left out: they are those of x and of the output.

    Args:
        kind: What was computed.
        t: The tensors, x being the sum where there was a residual, statistics included.
        products: What the forward kept of this name.
        grad_outputs: Those of the outputs, the sum and the normalized rows, or None.
        wanted: Which are, of those that more than the sum's reaches: `composition.reached`.
        main_grads: What is added to in place of a gradient, for each weight, or None.
    """
    found = _Backward(kind, t, products, grad_outputs, wanted, main_grads).run()
    if kind.returns_sum and found[0] is not None:
        dsum = grad_outputs[-1 - kind.returns_norm]
        if dsum is not None:
            # To which autograd would add that of the norm.
            found[0] = laid_as_sum(found[0], dsum, found[0])
    return found


class _Backward:
    """Finds gradients, each once.

    Attributes:
        found: Those found, by place.
        das: Gradients of the activations, in rows.
        dhs: Gradients of each weight's product.
    """

    def __init__(
        self,
        kind: Seam,
        t: Operands,
        products: Sequence[Tensor],
        grad_outputs: Sequence[Tensor | None],
        wanted: Sequence[bool],
        main_grads: Sequence[Tensor | None],
    ) -> None:
        if kind.batch_invariant:
            # Passes read what lies otherwise in another order.
            t = t._replace(x=aligned(*dense(t.x))[0])
            grad_outputs = aligned(*dense(*grad_outputs))
        self.kind, self.t, self.products, self.wanted = kind, t, products, wanted
        self.count = len(t.weights)
        self.norm = norm_of(kind)[0]
        self.biases = _NAMED + self.count
        self.main_grads = main_grads or [None] * self.count
        self.rows = t.x.numel() // t.x.shape[-1]
        self.found: Found = [None] * len(wanted)
        self.das: Found = [
            None if g is None else dense(g)[0].view(self.rows, g.shape[-1]) for g in grad_outputs
        ]
        self.dnorm = self.das.pop() if kind.returns_norm else None
        self.dsum = self.das.pop() if kind.returns_sum else None
        self.dhs: Found = []
        self.wants_norm = any(wanted[: len(WITH_GRADIENT)])
        self.wants_weight = any(wanted[_NAMED : self.biases])
        self.wants_bias = any(wanted[self.biases :])

    def run(self) -> Found:
        kind, t = self.kind, self.t
        if kind.activation and not self.products:
            self.products = recomputed(kind, t)
        dout = self._second_linear() if t.out_weight is not None else None
        a = self._before_activation(needs_a=dout is not None and self.wanted[_OUT_WEIGHT])
        if dout is not None:
            self._second_parameters(dout, a)
        if not self._by_product():
            self._around_products()
        return self.found

    def _second_linear(self) -> Tensor | None:
        """Put the gradient of the activation in the place of the output's, and return that."""
        t, dout = self.t, self.das[0]
        assert t.out_weight is not None
        if dout is None:
            return None
        is_passed_on = self.wants_norm or self.wants_weight or self.wants_bias
        self.das[0] = None
        if is_passed_on:
            invariant = self.kind.batch_invariant
            self.das[0] = input_gradient(dout, t.out_weight, invariant, self.norm)
        return dout

    def _second_parameters(self, dout: Tensor, a: Tensor | None) -> None:
        """Find the gradients of the second Linear layer's parameters; a is what it multiplied."""
        weight, wants_bias = self.t.out_weight, self.wanted[_OUT_BIAS]
        if a is not None and weight is not None:
            planned = None
            if not self.kind.batch_invariant and weight.is_contiguous():
                planned = linear.WeightGradient.planned(dout, a, self.norm)
            if planned is None:
                self.found[_OUT_WEIGHT] = torch.mm(dout.t(), a)
            else:
                dbias = dout.new_empty(dout.shape[-1]) if wants_bias else None
                self.found[_OUT_WEIGHT] = planned.run(weight, dbias)
                self.found[_OUT_BIAS] = dbias
        if wants_bias and self.found[_OUT_BIAS] is None:
            self.found[_OUT_BIAS] = _sum_of_rows(dout)

    def _before_activation(self, needs_a: bool) -> Tensor | None:
        """Find the gradient of each product, and of each bias where no kernel after it does.

        Returns the activations, in rows, where they are needed once more.
        """
        kind, a = self.kind, None
        needs_dh = self.wants_norm or self.wants_weight
        dbiases: Found = []
        for i, da in enumerate(self.das):
            wants_bias = self.wants_bias if kind.is_joined else self.wanted[self.biases + i]
            dh, dbias = None if kind.activation else da, None
            if da is not None and kind.activation and (needs_dh or wants_bias):
                h = self.products[i].flatten(0, -2)
                dh = torch.empty_like(h) if needs_dh else None
                dbias = h.new_empty(h.shape[-1]) if wants_bias else None
                a = torch.empty_like(da) if needs_a else None
                passes.activate_backward(kind.activation, h, da, dh=dh, a=a, dbias=dbias)
            elif dh is not None and wants_bias and len(self.das) < self.count:
                dbias = _sum_of_rows(dh)
            self.dhs.append(dh)
            dbiases.append(dbias)
        if needs_a and a is None:
            a = activated(kind, self.products[0]).flatten(0, -2)
        if kind.is_joined and self.count > 1:
            sizes = [weight.shape[0] for weight in self.t.weights]
            self.dhs, dbiases = _split(self.dhs[0], sizes, -1), _split(dbiases[0], sizes, 0)
            # Each has memory of its own, so that whoever keeps one keeps no more.
            dbiases = [None if d is None else d.clone() for d in dbiases]
        for place, dbias in enumerate(dbiases, self.biases):
            self.found[place] = dbias if self.wanted[place] else None
        return a

    def _by_product(self) -> bool:
        """Run the kernels that have both products; return False where they decline."""
        kind, t, dh, main_grad = self.kind, self.t, self.dhs[0], self.main_grads[0]
        is_modulated = first(t, "groups") is not None
        if self.count > 1 or is_modulated or self.dnorm is not None or dh is None:
            return False
        if not has_product(kind, t):
            return False
        places = (0, _GAMMA, _BETA, _NAMED, self.biases)
        wanted = [self.wanted[place] and self.found[place] is None for place in places]
        if not any(wanted):
            return True
        found: Found | None = None
        if t.x.is_cpu:
            if main_grad is None:
                found = cpu_seam.backward(kind, t, dh, self.dsum, wanted)
        else:
            found = self._on_hopper(dh, wanted, main_grad)
        if found is None:
            return False
        for place, gradient in zip(places, found, strict=True):
            if gradient is not None:
                self.found[place] = gradient
        return True

    def _on_hopper(self, dh: Tensor, wanted: list[bool], main_grad: Tensor | None) -> Found | None:
        kind, t = self.kind, self.t
        x, mean, rstd = dense(t.x, t.mean, t.rstd)
        norm = (*norm_of(kind), 0)
        parameters = known_parameters.of(t.gamma, t.beta, t.weights[0], None, norm)
        if not sm90.accepts(x, parameters):
            return None
        dy = dh.view(*x.shape[:-1], dh.shape[-1])
        known = mean, rstd, kind.eps
        return sm90.backward(dy, x, parameters, *known, wanted, main_grad, self.dsum)

    def _around_products(self) -> None:
        """Find the other gradients by row passes around PyTorch's products."""
        t = self.t
        z = self._passed_rows()
        is_passed = z is not None
        dz = self._gradient_of_norm() if self.wants_norm and not is_passed else None
        if self.wants_weight and not is_passed:
            # The pass over x writes the normalized rows again, over dz: it needs that last of all.
            dtype = t.weights[0].dtype
            may_replace = dz is not None and dz is not self.dnorm and dz.dtype is dtype
            z = dz if may_replace else t.x.new_empty(self.rows, t.x.shape[-1], dtype=dtype)
        weight_gradients = [self._weight_gradient(i, z) for i in range(self.count)]
        # Where no activation has computed them: with a weight's, along the way, or one by one.
        on_the_way = None
        by_weights: set[int] = set()
        for place, dh in enumerate(self.dhs, self.biases):
            if not self.wanted[place] or self.found[place] is not None or dh is None:
                continue
            if weight_gradients[place - self.biases] is not None:
                self.found[place] = dh.new_empty(dh.shape[-1])
                by_weights.add(place)
            elif self.count == 1 and (dz is not None or z is not None):
                on_the_way = self.found[place] = dh.new_empty(dh.shape[-1])
            else:
                self.found[place] = _sum_of_rows(dh)
        if not is_passed and (dz is not None or z is not None):
            self._norm_backward(dz, z, on_the_way)
        weights = zip(self.dhs, t.weights, self.main_grads, strict=True)
        for place, (dh, weight, main_grad) in enumerate(weights, _NAMED):
            planned = weight_gradients[place - _NAMED]
            if planned is not None:
                bias = place + self.count
                dbias = self.found[bias] if bias in by_weights else None
                self.found[place] = planned.run(weight, dbias)
            elif self.wanted[place]:
                self.found[place] = _dweight(dh, z, weight, main_grad)

    def _weight_gradient(self, i: int, z: Tensor | None) -> linear.WeightGradient | None:
        """Return the product that finds the gradient of a weight, if ours does."""
        dh, main_grad = self.dhs[i], self.main_grads[i]
        is_ours = not self.kind.batch_invariant and main_grad is None
        if not is_ours or not self.wanted[_NAMED + i] or dh is None or z is None:
            return None
        if not self.t.weights[i].is_contiguous():
            return None
        return linear.WeightGradient.planned(dh, z, self.norm)

    def _passed_rows(self) -> Tensor | None:
        """Return the normalized rows where one kernel finds the norm's gradients with them."""
        t, kind = self.t, self.kind
        goes_on = self.wanted[0] and self.wants_weight
        is_bare = first(t, "groups") is None and self.dnorm is None
        if self.count == 1 or kind.batch_invariant or not (goes_on and is_bare):
            return None
        (x,) = dense(t.x)
        planned = several.PassedRows.planned(self.dhs, t.weights, x, self.norm, self.dsum)
        if planned is None:
            return None
        norm, kept = passes.norm_call(kind, t, x, x.dtype)
        z = planned.run(norm, self._results())
        del kept
        return z

    def _gradient_of_norm(self) -> Tensor:
        """Return the gradient of the normalized rows, in the dtype of x."""
        x, dz = self.t.x, self.dnorm
        if dz is None and x.dtype is self.t.weights[0].dtype and not self.kind.batch_invariant:
            product = several.input_gradients(self.dhs, self.t.weights, self.norm)
            if product is not None:
                return product
        for dh, weight in zip(self.dhs, self.t.weights, strict=True):
            if dh is None:
                continue
            if self.kind.batch_invariant:
                product = input_gradient(dh, weight, True).to(x.dtype)
                dz = product if dz is None else dz + product
            elif dh.dtype is not x.dtype:
                # Autocast: the product is narrower than the rows.
                product = torch.mm(dh, weight, out_dtype=x.dtype) if dh.is_cuda else dh @ weight
                dz = product.to(x.dtype) if dz is None else dz + product
            elif dz is None:
                dz = input_gradient(dh, weight, False, self.norm)
            elif dz is self.dnorm:
                dz = torch.addmm(dz, dh, weight)
            else:
                dz.addmm_(dh, weight)
        assert dz is not None
        return dz

    def _results(self) -> dict[str, Tensor]:
        """Return memory for the gradients of the sum (x) and of what comes with it, by name."""
        results: dict[str, Tensor] = {}
        for place, name in enumerate(WITH_GRADIENT):
            like = getattr(self.t, name)
            if self.wanted[place] and like is not None:
                found = torch.empty_like(like, memory_format=torch.contiguous_format)
                results[name] = self.found[place] = found
        return results

    def _norm_backward(self, dz: Tensor | None, z: Tensor | None, dbias: Tensor | None) -> None:
        """Find the gradients of x and of the norm's parameters, and write z and dbias."""
        t = self.t
        results = {} if dz is None else self._results()
        dy = None if dbias is None else self.dhs[0]
        passes.normalize_backward(
            self.kind, t, dz, dsum=self.dsum, z=z, dy=dy, dbias=dbias, gradients=results
        )


def _split(rows: Tensor | None, sizes: list[int], dim: int) -> Found:
    return [None] * len(sizes) if rows is None else list(rows.split(sizes, dim))


def _sum_of_rows(rows: Tensor) -> Tensor:
    total = rows.new_empty(rows.shape[-1])
    passes.activate_backward("", None, rows, dbias=total)
    return total


def _dweight(
    dh: Tensor | None, z: Tensor | None, weight: Tensor, main_grad: Tensor | None
) -> Tensor | None:
    """Return the gradient of a weight, None if it was added to what there was."""
    assert dh is not None
    assert z is not None
    if main_grad is None:
        return torch.mm(z.t(), dh).t() if lies_transposed(weight) else torch.mm(dh.t(), z)
    if dh.is_cuda and dh.dtype in LOW_PRECISION:
        # Tensor cores multiply what they are given and add up in float32.
        torch.addmm(main_grad, dh.t(), z, out_dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.addmm_(dh.t().to(main_grad.dtype), z.to(main_grad.dtype))
    return None
