"""The op family on a CPU and on any GPU: our row passes around PyTorch's products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm import backends
from fused_norm.backends import cpu_seam, passes, sm90
from fused_norm.call import parameters as known_parameters
from fused_norm.call.memory import LOW_PRECISION, dense, empty_statistics, lies_transposed
from fused_norm.call.parameters import Parameters
from fused_norm.composition import ACTIVATIONS, NORMALIZATIONS, Operands, Results, Seam, is_gate
from fused_norm.native.cpu_features import bfloat16_product

Found = list[Tensor | None]


def forward(kind: Seam, t: Operands, keeps: bool) -> Results:
    """Compute a call.

    Args:
        kind: What to compute.
        t: Valid tensors, as `as_kernels_need` returns them, none of them empty.
        keeps: Whether a backward follows.
    """
    results = _first_half(kind, t, keeps)
    if t.out_weight is None:
        return results
    return results._replace(outputs=[_second_linear(results.outputs[0], t)])


def _second_linear(a: Tensor, t: Operands) -> Tensor:
    assert t.out_weight is not None
    if t.out_residual is None:
        return F.linear(a, t.out_weight, t.out_bias)
    return linear_add(a, t.out_weight, t.out_bias, t.out_residual)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Return a Linear layer's result with a residual added: on Hopper by the product itself.

    Args:
        x: Of shape `[..., K]`, not empty.
        weight: Of shape `[N, K]`.
        bias: Of shape `[N]`, or None.
        residual: Of shape `[..., N]`.
    """
    if x.is_cuda and not lies_transposed(weight):
        y = sm90.linear_add(*dense(x, weight, bias, residual))
        if y is not None:
            return y
    y = F.linear(x, weight, bias)
    y += residual
    return y


def _first_half(kind: Seam, t: Operands, keeps: bool) -> Results:
    """Compute a call but for its second Linear layer, in whichever way is fastest."""
    if t.rstd is None and is_fused_on_cpu(kind, t):
        results = cpu_seam.forward(kind, t, keeps)
        if results is not None:
            return results
    # A product on a GPU finds statistics on its way sooner than a pass applies those given.
    if not t.x.is_cpu and _is_bare(kind, t._replace(mean=None, rstd=None)):
        results = _activated_at_once(kind, t, keeps)
        if results is not None:
            return results
        if len(t.weights) > 1:
            return _around_products(kind, t, keeps)
        (x,) = dense(t.x)
        h, mean, rstd = backends.forward(x, _parameters(kind, t), kind.eps, keeps)
        return _results(kind, [h], None, None, mean, rstd, keeps)
    return _around_products(kind, t, keeps)


def _around_products(kind: Seam, t: Operands, keeps: bool) -> Results:
    """Compute it by row passes around PyTorch's products."""
    x, residual = dense(t.x, t.residual)
    z = torch.empty_like(x, dtype=t.weights[0].dtype)
    total = None if residual is None else torch.empty_like(x)
    mean = rstd = None
    if keeps and t.rstd is None:
        mean, rstd = empty_statistics(x, kind.normalization == "layer_norm")
    passes.normalize(kind, t, x, residual=residual, total=total, z=z, mean=mean, rstd=rstd)
    return _results(kind, _products(kind, z, t), total, z, mean, rstd, keeps)


def _results(
    kind: Seam,
    products: list[Tensor],
    total: Tensor | None,
    z: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    keeps: bool,
) -> Results:
    """Return what is a result or kept, the products activated."""
    return Results(
        [_activated(kind, h) for h in products],
        total if keeps or kind.returns_sum else None,
        z if kind.returns_norm else None,
        mean,
        rstd,
        products if keeps and kind.activation and not kind.recompute else [],
    )


def is_fused_on_cpu(kind: Seam, t: Operands) -> bool:
    """Return whether the CPU's own product is to be asked: for one weight, where it is faster."""
    return (
        t.x.is_cpu
        and len(t.weights) == 1
        and t.weights[0].is_contiguous()
        and t.x.dtype is t.weights[0].dtype
        and not kind.returns_norm
        and not (t.x.dtype is torch.bfloat16 and bfloat16_product() is not None)
    )


def _activated_at_once(kind: Seam, t: Operands, keeps: bool) -> Results | None:
    """Compute a call by a product whose epilogue activates; None where passes around it do."""
    if not kind.activation or (len(t.weights) > 1 and not _is_pair(kind, t)):
        return None
    (x,) = dense(t.x)
    number, _ = ACTIVATIONS[kind.activation]
    norm = (*_norm(kind)[:2], number)
    up = (t.weights[1], t.biases[1]) if len(t.weights) > 1 else ()
    tensors = (t.gamma, t.beta, t.weights[0], t.biases[0])
    parameters = known_parameters.of(*tensors, norm, *up)
    if not sm90.accepts(x, parameters):
        return None
    found = sm90.activated(x, parameters, kind.eps, keeps, keeps and not kind.recompute)
    if found is None:
        return None
    a, mean, rstd, h = found
    return Results([a], None, None, mean, rstd, [] if h is None else [h])


def _is_pair(kind: Seam, t: Operands) -> bool:
    """Return whether one weight gates another of its size."""
    if len(t.weights) != 2 or not (kind.is_joined and is_gate(kind.activation)):
        return False
    (gate, up), biases = t.weights, t.biases
    return gate.shape == up.shape and (biases[0] is None) == (biases[1] is None)


def _is_one_product(kind: Seam, t: Operands) -> bool:
    """Return whether a call begins as a norm and a Linear layer, and nothing before or between."""
    return len(t.weights) == 1 and _is_bare(kind, t)


def _is_bare(kind: Seam, t: Operands) -> bool:
    """Return whether a call begins as a norm and Linear layers, and nothing before or between.

    The backends of such a call would copy a weight that lies otherwise, such as a Conv1D's.
    """
    around = (t.residual, t.scale, t.shift, t.rstd)
    return (
        not kind.returns_norm
        and all(each is None for each in around)
        and all(weight.is_contiguous() for weight in t.weights)
    )


def _parameters(kind: Seam, t: Operands) -> Parameters:
    """Return what is known of the parameters of a norm and one Linear layer."""
    return known_parameters.of(t.gamma, t.beta, t.weights[0], t.biases[0], _norm(kind))


def _norm(kind: Seam) -> tuple[int, float, int]:
    return NORMALIZATIONS.index(kind.normalization), kind.weight_offset, 0


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
        grad_outputs: Those of the outputs, the sum and the normalized rows, None for zeros.
        wanted: Which are.
        main_grads: What is added to in place of a gradient, for each weight, or None.
    """
    count = len(t.weights)
    head, weights, biases = wanted[: -2 * count], wanted[-2 * count : -count], wanted[-count:]
    want = Operands._make((*head, weights, biases))
    if kind.activation and not products:
        products = _products(kind, _normalized(kind, t), t)
    rows = t.x.numel() // t.x.shape[-1]
    dys = [None if g is None else dense(g)[0].view(rows, g.shape[-1]) for g in grad_outputs]
    dnorm = dys.pop() if kind.returns_norm else None
    dsum = dys.pop() if kind.returns_sum else None

    dout_weight = dout_bias = None
    if t.out_weight is not None:
        dys, dout_weight, dout_bias = _second_backward(kind, t, products[0], dys[0], want)
    if _is_one_product(kind, t._replace(rstd=None)) and not t.x.is_cpu and dsum is None:
        found = _one_product_backward(kind, t, products, dys[0], want, main_grads)
        return [*found[:4], *(None,) * 4, dout_weight, dout_bias, None, *found[4:]]
    fuses = (
        not any(main is not None for main in main_grads)
        and dnorm is None
        and dys[0] is not None
        and is_fused_on_cpu(kind, t)
    )
    dhs: Found
    dbiases: Found
    if fuses and not kind.activation:
        # The kernels sum the bias's gradient up themselves.
        dhs, dbiases = dys, [None]
    else:
        dhs, dbiases = _activation_backward(kind, t, products, dys, want)
    if fuses:
        fused = _fused_backward(kind, t, dhs[0], dsum, want, dbiases[0])
        if fused is not None:
            return [*fused[:4], *(None,) * 4, dout_weight, dout_bias, None, *fused[4:]]
        if not kind.activation:
            dhs, dbiases = _activation_backward(kind, t, products, dys, want)
    dz = _dz(t, dhs, dnorm) if any(want[:6]) else None
    z = None
    if any(weights):
        # The pass over x writes the normalized rows again, over dz: it is the last to need that.
        may_replace = dz is not None and dz is not dnorm and dz.dtype is t.weights[0].dtype
        z = dz if may_replace else t.x.new_empty(rows, t.x.shape[-1], dtype=t.weights[0].dtype)
    norm = _norm_backward(kind, t, dz, z, dsum, want)
    dweights = [
        _dweight(dh, z, weight, main_grad) if wants else None
        for dh, weight, wants, main_grad in zip(
            dhs, t.weights, weights, main_grads or [None] * count, strict=True
        )
    ]
    return [*norm, None, None, dout_weight, dout_bias, None, *dweights, *dbiases]


def _fused_backward(
    kind: Seam,
    t: Operands,
    dh: Tensor | None,
    dsum: Tensor | None,
    want: Operands,
    dbias: Tensor | None,
) -> Found | None:
    """Return the gradients of x, none, gamma, beta, the weight and the bias in one native call.

    None where the kernels decline.
    """
    parts = (want.x, want.gamma, want.beta, want.weights[0], want.biases[0] and dbias is None)
    likes = (t.x, t.gamma, t.beta, t.weights[0], t.biases[0])
    gradients: Found = [
        _dense_like(like) if wants and like is not None else None
        for like, wants in zip(likes, parts, strict=True)
    ]
    if any(g is not None for g in gradients):
        assert dh is not None
        if not cpu_seam.backward(kind, t, dh, dsum, gradients):
            return None
    dx, dgamma, dbeta, dweight, found = gradients
    return [dx, None, dgamma, dbeta, dweight, found if dbias is None else dbias]


def _one_product_backward(
    kind: Seam,
    t: Operands,
    products: Sequence[Tensor],
    dy: Tensor | None,
    want: Operands,
    main_grads: Sequence[Tensor | None],
) -> Found:
    """Return the gradients of x, gamma and beta, with one between them, the weight and the bias."""
    parts = (want.gamma, want.beta, want.weights[0], want.biases[0])
    wanted = [bool(want.x or want.residual), *map(bool, parts)]
    dbias = None
    if kind.activation:
        (dy,), (dbias,) = _activation_backward(kind, t, products, [dy], want)
        wanted[4] = False
    if dy is None:
        tensors = (t.x, t.gamma, t.beta, t.weights[0], t.biases[0])
        found: Found = [
            torch.zeros_like(v) if w and v is not None else None
            for v, w in zip(tensors, wanted, strict=True)
        ]
    elif any(wanted):
        assert t.rstd is not None
        (x,) = dense(t.x)
        dy = dy.view(*x.shape[:-1], dy.shape[-1])
        main_grad = main_grads[0] if main_grads else None
        parameters = known_parameters.of_saved(t.gamma, t.beta, t.weights[0], _norm(kind))
        found = backends.backward(dy, x, parameters, t.mean, t.rstd, kind.eps, wanted, main_grad)
    else:
        found = [None] * 5
    return [found[0], None, *found[1:4], found[4] if dbias is None else dbias]


def _second_backward(
    kind: Seam, t: Operands, h: Tensor, dy: Tensor | None, want: Operands
) -> tuple[list[Tensor | None], Tensor | None, Tensor | None]:
    """Return the gradients of the activations, and of the second weight and bias."""
    assert t.out_weight is not None
    if dy is None:
        dweight = torch.zeros_like(t.out_weight) if want.out_weight else None
        return [None], dweight, None if t.out_bias is None else torch.zeros_like(t.out_bias)
    dweight = dbias = None
    if want.out_bias:
        dbias = dy.new_empty(dy.shape[-1])
        passes.activate_backward("", None, dy, dbias=dbias)
    if want.out_weight:
        dweight = torch.mm(dy.t(), _activated(kind, h).flatten(0, -2))
    is_passed_on = any(want[:6]) or any(want.weights) or any(want.biases)
    return [torch.mm(dy, t.out_weight) if is_passed_on else None], dweight, dbias


def _activation_backward(
    kind: Seam,
    t: Operands,
    products: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    want: Operands,
) -> tuple[Found, Found]:
    """Return the gradients of each weight's product and, summed over the rows, of each bias."""
    needs_dh = any(want[:6]) or any(want.weights)
    dhs: Found = []
    dbiases: Found = []
    for i, da in enumerate(grads):
        dh, dbias = da, None
        wants_bias = any(want.biases) if kind.is_joined else want.biases[i]
        if da is not None:
            h = products[i] if kind.activation else None
            if wants_bias:
                dbias = da.new_empty(da.shape[-1] if h is None else h.shape[-1])
            if h is not None and (needs_dh or wants_bias):
                dh = torch.empty_like(h).view(-1, h.shape[-1]) if needs_dh else None
                passes.activate_backward(kind.activation, h, da, dh=dh, dbias=dbias)
            elif wants_bias:
                passes.activate_backward("", None, da, dbias=dbias)
        dhs.append(dh)
        dbiases.append(dbias)
    if kind.is_joined:
        sizes = [weight.shape[0] for weight in t.weights]
        dhs = [None] * len(sizes) if dhs[0] is None else list(dhs[0].split(sizes, -1))
        if dbiases[0] is not None:
            # Each gradient has memory of its own, so that whoever keeps one keeps no more.
            dbiases = [d.clone() for d in dbiases[0].split(sizes)]
        else:
            dbiases = [None] * len(sizes)
    for i, (bias, wants_it) in enumerate(zip(t.biases, want.biases, strict=True)):
        if not wants_it:
            dbiases[i] = None
        elif dbiases[i] is None and bias is not None:
            dbiases[i] = torch.zeros_like(bias)
    return dhs, dbiases


def _dz(t: Operands, dhs: Found, dnorm: Tensor | None) -> Tensor:
    """Return the gradient of the normalized rows, in the dtype of x."""
    dz = dnorm
    for dh, weight in zip(dhs, t.weights, strict=True):
        if dh is None:
            continue
        if dh.dtype is not t.x.dtype:
            # Autocast: the product is narrower than the rows.
            product = torch.mm(dh, weight, out_dtype=t.x.dtype) if dh.is_cuda else dh @ weight
            dz = product.to(t.x.dtype) if dz is None else dz + product
        elif dz is None:
            dz = torch.mm(dh, weight)
        elif dz is dnorm:
            dz = torch.addmm(dz, dh, weight)
        else:
            dz.addmm_(dh, weight)
    return t.x.new_zeros(t.x.numel() // t.x.shape[-1], t.x.shape[-1]) if dz is None else dz


def _norm_backward(
    kind: Seam,
    t: Operands,
    dz: Tensor | None,
    z: Tensor | None,
    dsum: Tensor | None,
    want: Operands,
) -> Found:
    """Return the gradients of x, nothing, and those of the norm's parameters; write z."""
    found: Found = [None] * 6
    if dz is not None or z is not None:
        if dz is not None:
            if want.x or want.residual:
                found[0] = _dense_like(t.x)
            for i, name in enumerate(("gamma", "beta", "scale", "shift"), 2):
                if getattr(want, name):
                    found[i] = _dense_like(getattr(t, name))
        dx, _, dgamma, dbeta, dscale, dshift = found
        passes.normalize_backward(
            kind,
            t,
            dz,
            dsum=dsum,
            z=z,
            dx=dx,
            dgamma=dgamma,
            dbeta=dbeta,
            dscale=dscale,
            dshift=dshift,
        )
    return found


def _dweight(
    dh: Tensor | None, z: Tensor | None, weight: Tensor, main_grad: Tensor | None
) -> Tensor | None:
    """Return the gradient of a weight, None if it was added to what there was."""
    if dh is None:
        return torch.zeros_like(weight) if main_grad is None else None
    assert z is not None
    if main_grad is None:
        return torch.mm(z.t(), dh).t() if lies_transposed(weight) else torch.mm(dh.t(), z)
    if dh.is_cuda and dh.dtype in LOW_PRECISION:
        # Tensor cores multiply what they are given and add up in float32.
        torch.addmm(main_grad, dh.t(), z, out_dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.addmm_(dh.t().to(main_grad.dtype), z.to(main_grad.dtype))
    return None


def _products(kind: Seam, z: Tensor, t: Operands) -> list[Tensor]:
    """Return the product of the normalized rows and each weight, or all in one tensor."""
    if not kind.is_joined or len(t.weights) == 1:
        return [F.linear(z, w, b) for w, b in zip(t.weights, t.biases, strict=True)]
    sizes = [weight.shape[0] for weight in t.weights]
    joined = z.new_empty(*z.shape[:-1], sum(sizes))
    rows = z.flatten(0, -2)
    parts = joined.view(-1, sum(sizes)).split(sizes, -1)
    for part, weight, bias in zip(parts, t.weights, t.biases, strict=True):
        if bias is None:
            torch.mm(rows, weight.t(), out=part)
        else:
            torch.addmm(bias, rows, weight.t(), out=part)
    return [joined]


def _normalized(kind: Seam, t: Operands) -> Tensor:
    (x,) = dense(t.x)
    z = torch.empty_like(x, dtype=t.weights[0].dtype)
    passes.normalize(kind, t, x, z=z)
    return z


def _activated(kind: Seam, h: Tensor) -> Tensor:
    if not kind.activation:
        return h
    a = (
        h.new_empty(*h.shape[:-1], h.shape[-1] // 2)
        if is_gate(kind.activation)
        else h.new_empty(h.shape)
    )
    passes.activate(kind.activation, h, a)
    return a


def _dense_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)
