"""What a step of the worklog runs on a Hopper GPU, along with cuBLAS, eager and float64."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import EPS
from fused_norm.call import record
from fused_norm.chain import kernels as chain_kernels
from fused_norm.composition import Operands, Spec
from fused_norm.native import build
from tutorial.worklog.worklog_steps import Sizes, Step

FOLDER = Path(__file__).resolve().parent
sys.path.append(str(FOLDER.parents[1] / "scripts/measure"))

from hopper_records import fold_of, record_of  # noqa: E402

DTYPE = torch.bfloat16
# Elements around y that nobody may write, and what they hold.
GUARD, GUARDED = 4096, 7.0
# The number of GELU in a call's record.
GELU = 2
# A product's error is that of its one rounding; the sums add little.
ROUNDING = 1.2 * 1.67e-3
# Of other results: twice that of PyTorch's, and half a rounding.
SLACK = 0.25 * torch.finfo(DTYPE).eps

Outputs = tuple[Tensor, ...]
Run = Callable[[], Outputs]


class Inputs(NamedTuple):
    """Random inputs in bfloat16, and guarded memory for y."""

    x: Tensor
    gamma: Tensor
    beta: Tensor
    weight: Tensor
    bias: Tensor
    dy: Tensor
    guarded: Tensor

    @classmethod
    def random(cls, sizes: Sizes) -> Inputs:
        """Draw inputs on the current device.

        Args:
            sizes: Of the product.
        """
        M, K, N = sizes

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", dtype=DTYPE)

        weight = normal(N, K) * K**-0.5
        guarded = torch.full((M * N + 2 * GUARD,), GUARDED, device="cuda", dtype=DTYPE)
        return cls(normal(M, K), normal(K), normal(K), weight, normal(N), normal(M, N), guarded)

    @property
    def y(self) -> Tensor:
        """The memory of y [M, N]."""
        return self.guarded[GUARD:-GUARD].view(len(self.x), len(self.weight))

    @property
    def leaves(self) -> Outputs:
        """What gradients are of."""
        return self[:5]


def runs(step: Step, inputs: Inputs) -> dict[str, Run]:
    """Return the step, cuBLAS and PyTorch eager on the same inputs, for the current stream.

    Args:
        step: The step.
        inputs: The inputs.
    """
    if step.kind == "step":
        alone = step.name == "hidden-pass"
        return {
            "step": functools.partial(training_step, inputs, alone),
            "cublas": _three_products(inputs),
            "eager": functools.partial(eager_training_step, inputs),
        }
    own: Run
    if step.kind == "product":
        own = functools.partial(product, step, inputs)
    elif step.extension:
        own = _epilogue(step, inputs)
    else:
        strategy = record.NEW_FOLD if step.name == "fold" else record.KEPT_FOLD
        own = folded(inputs, strategy, GELU if step.kind == "activation" else 0)
    out = torch.empty_like(inputs.y)
    return {
        "step": own,
        "cublas": lambda: (torch.mm(inputs.x, inputs.weight.t(), out=out),),
        "eager": lambda: (eager(step, *inputs.leaves),),
    }


def truth(step: Step, inputs: Inputs) -> Outputs:
    """Return what is to be computed, in float64.

    Args:
        step: The step.
        inputs: Its inputs.
    """
    exact = inputs._replace(**{name: getattr(inputs, name).double() for name in _TENSORS})
    if step.kind == "product":
        return (exact.x @ exact.weight.t(),)
    if step.kind == "step":
        return eager_training_step(exact)
    return (eager(step, *exact.leaves),)


_TENSORS = ("x", "gamma", "beta", "weight", "bias", "dy")


def check(step: Step, sizes: Sizes) -> dict[str, float]:
    """Return the largest relative error of a step's results, and of eager's, after a look at both.

    Args:
        step: The step.
        sizes: Of its inputs.

    Raises:
        ValueError: If a result is wrong, or something outside y was written.
    """
    inputs = Inputs.random(sizes)
    # Memory that is allocated and not written is NaN, and so is y.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        inputs.y.fill_(float("nan"))
        beside = runs(step, inputs)
        own = [result.clone() for result in beside["step"]()]
        torch.cuda.synchronize()
    finally:
        torch.use_deterministic_algorithms(False)
    edges = torch.cat([inputs.guarded[:GUARD], inputs.guarded[-GUARD:]])
    if not (edges == GUARDED).all():
        raise ValueError(f"{step.name} at {sizes} wrote outside of y")
    exact = truth(step, inputs)
    # cuBLAS is the peer of a product that no norm comes before.
    peers = beside["cublas" if step.kind == "product" else "eager"]()
    found = {"step": 0.0, "peer": 0.0}
    for index, (ours, peer, right) in enumerate(zip(own, peers, exact, strict=True)):
        error, its_error = (float((t.double() - right).norm() / right.norm()) for t in (ours, peer))
        bound = ROUNDING if step.kind == "product" else 2 * its_error + SLACK
        # An error of NaN is not below any bound.
        if not error <= bound:
            raise ValueError(
                f"result {index} of {step.name} at {sizes} has a relative error of {error:.2e}, "
                f"more than {bound:.2e}"
            )
        found = {"step": max(found["step"], error), "peer": max(found["peer"], its_error)}
    return found


def eager(
    step: Step, x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Return what PyTorch users have today."""
    y = F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, EPS), weight, bias)
    return F.gelu(y) if step.kind == "activation" else y


def eager_training_step(inputs: Inputs) -> Outputs:
    """Return y and the five gradients by PyTorch's autograd."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs.leaves]
        x, gamma, beta, weight, bias = leaves
        y = F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, EPS), weight, bias)
        return (y.detach(), *torch.autograd.grad(y, leaves, inputs.dy))


def _three_products(inputs: Inputs) -> Run:
    """Return the products of a training step: y, dz and the weight's gradient."""
    x, dy, weight = inputs.x, inputs.dy, inputs.weight
    y, dz, dweight = map(torch.empty_like, (dy, x, weight))

    def run() -> Outputs:
        torch.mm(x, weight.t(), out=y)
        torch.mm(dy, weight, out=dz)
        torch.mm(dy.t(), x, out=dweight)
        return y, dz, dweight

    return run


def training_step(inputs: Inputs, alone: bool) -> Outputs:
    """Return y and the five gradients by Hopper's kernels.

    Args:
        inputs: The inputs.
        alone: Whether no collective is running: only then may the backward's pass over rows run in
            the kernel of its first product.
    """
    x, gamma, beta, weight, bias = inputs.leaves
    t = Operands(x, gamma=gamma, beta=beta, weights=[weight], biases=[bias])
    kind, ops = Spec(eps=EPS), torch.ops.fused_norm
    # Its own name: a renaming is found without a GPU.
    name = chain_kernels.is_alone.__name__
    with mock.patch.object(chain_kernels, name, return_value=alone):
        y, mean, rstd = ops.norm_linear_forward(*t, *kind, True)
        saved = t._replace(mean=mean, rstd=rstd)
        gradients = ops.norm_linear_backward(*saved, *kind, [], [inputs.dy], [0, 2, 3, 11, 12])
    return (y, *gradients)


def folded(inputs: Inputs, strategy: int, activation: int) -> Run:
    """Return the forward on a folded weight, folded now and kept, or in every call.

    Args:
        inputs: The inputs.
        strategy: KEPT_FOLD or NEW_FOLD.
        activation: The activation's number, 0 for none.
    """
    kernels, context = _launcher(build.HOPPER_EXTENSION)
    fold = fold_of(inputs.leaves[1:], activation)
    call = record_of(inputs.leaves, EPS)
    call.context, call.strategy, call.activation = context, strategy, activation
    call.fold_weight, call.fold_sums, call.fold_constants = fold.addresses
    place = ctypes.addressof(call)
    kernels.plan_forward(place)
    if call.strategy != strategy:
        raise ValueError("the plan declines the fold")
    scratch = torch.empty(call.workspace_bytes, dtype=torch.uint8, device="cuda")
    call.y, call.workspace = inputs.y.data_ptr(), scratch.data_ptr()

    def run(_: object = (fold, scratch, call)) -> Outputs:
        kernels.forward(place)
        return (inputs.y,)

    return run


def product(step: Step, inputs: Inputs) -> Outputs:
    """Return x w^T by the kernel of a step."""
    assert step.extension
    kernels, context = _launcher(step.extension)
    tensors = (inputs.y, inputs.x, inputs.weight)
    M, N = inputs.y.shape
    kernels.product(context, *(t.data_ptr() for t in tensors), M, N, inputs.x.shape[1])
    return (inputs.y,)


def _epilogue(step: Step, inputs: Inputs) -> Run:
    """Return the forward on a kept fold, with statistics by a kernel before the product."""
    assert step.extension
    kernels, context = _launcher(step.extension)
    fold = fold_of(inputs.leaves[1:])
    mean, rstd = (torch.empty(len(inputs.x), device="cuda") for _ in range(2))
    tensors = (mean.data_ptr(), rstd.data_ptr())
    M, N = inputs.y.shape

    def run(_: object = (fold, mean, rstd)) -> Outputs:
        places = (inputs.y.data_ptr(), inputs.x.data_ptr(), *fold.addresses, *tensors)
        kernels.forward(context, *places, M, N, inputs.x.shape[1], EPS)
        return (inputs.y,)

    return run


def _launcher(name: str) -> tuple[ModuleType, int]:
    """Return an extension, and the context of its calls on the current stream."""
    folder = None if name == build.HOPPER_EXTENSION else FOLDER
    extension = build.Extension(name, build.DTYPES[DTYPE], "nvidia:sm_90a", folder)
    device = torch.cuda.current_device()
    stream = torch._C._cuda_getCurrentRawStream(device)
    return chain_kernels.launcher(extension, device, stream, True)
