"""Calls of the op family, each with its equivalent in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from accuracy import as_copies, as_float64, assert_within_budget
from torch import Tensor

import fused_norm as fn

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "quick_gelu": lambda h: h * torch.sigmoid(1.702 * h),
    "silu": F.silu,
}
GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
LOW = (torch.bfloat16, torch.float16)
ACTIVATIONS = [None, *FUNCTIONS, *GATES]

GRID: dict[str, Sequence[Any]] = {
    "dtype": [torch.float32, torch.bfloat16, torch.float16, torch.float64],
    "op": ["norm_linear", "norm_mlp"],
    "normalization": ["layer_norm", "rms_norm"],
    "gamma": ["there", "float32", "missing"],
    "beta": [True, False],
    "weight_offset": [0.0, 1.0],
    "modulation": [None, "batch", "both alike", "token", "sequence", "scale", "shift"],
    "residual": [False, True],
    "weights": [1, 2, 3],
    "bias": [True, False],
    "activation": ACTIVATIONS,
    "statistics": [False, True],
    "return_sum": [False, True],
    "return_norm": [False, True],
    "recompute": [False, True],
    "residual_out": [False, True],
    "shape": [
        ((2, 5), 24, 16),
        ((3, 1, 4), 17, 6),
        ((37,), 50, 66),
        ((2, 3), 1023, 8),
        ((1,), 5, 2),
    ],
}


def is_possible(case: Mapping[str, Any]) -> bool:
    """Return whether options go together."""
    gated = case["activation"] in GATES
    mlp = case["op"] == "norm_mlp"
    return not (
        (gated and case["weights"] == 3)
        or (mlp and (case["activation"] is None or (case["weights"] > 1 and not gated)))
        or (not mlp and (case["recompute"] or case["residual_out"]))
        or (case["gamma"] == "float32" and case["dtype"] is torch.float64)
        or (case["statistics"] and not case["residual"])
    )


# With fewer numbers than FEW, errors are taken over DRAWS draws of x together.
FEW = 16
DRAWS = 8

PLAIN = dict(zip(GRID, (values[0] for values in GRID.values()), strict=True))


def make_tensors(case: Mapping[str, Any], device: str = "cpu", mean: float = 0.0) -> dict[str, Any]:
    """Return the tensors of a case by the arguments' names, each of which wants a gradient."""
    leading, K, N = case["shape"]
    dtype = case["dtype"]
    gated = case["activation"] in GATES
    affine = torch.float32 if case["gamma"] == "float32" else dtype

    def tensor(*shape: int, around: float = 0.0, size: float = 1.0, like: Any = dtype) -> Tensor:
        values = around + size * torch.randn(*shape, dtype=torch.float64)
        return values.to(device, like).requires_grad_()

    found: dict[str, Any] = {"x": tensor(*leading, K, around=mean)}
    if case["residual"]:
        found["residual"] = tensor(*leading, K)
    if case["gamma"] != "missing":
        around = 1.0 - case["weight_offset"]
        found["norm_weight"] = tensor(K, around=around, size=0.2, like=affine)
    if case["beta"]:
        found["norm_bias"] = tensor(K, size=0.2, like=affine)
    ones = [1] * len(leading)
    shapes = {
        None: {},
        "batch": {"scale": (leading[0], *ones[1:], K), "shift": (leading[0], *ones[1:], K)},
        "both alike": {"scale": (K,), "shift": (*ones, K)},
        "token": {"scale": (*leading, K), "shift": (leading[0], *ones[1:], K)},
        "sequence": {"scale": (*ones[:-1], leading[-1], K), "shift": (1,)},
        "scale": {"scale": (leading[0], *ones[1:], K)},
        "shift": {"shift": (leading[0], *ones[1:], K)},
    }
    for name, shape in shapes[case["modulation"]].items():
        found[name] = tensor(*shape, size=0.3)
    count = case["weights"]
    sizes = [N] * count
    if not gated:
        sizes = [N + 2 * i for i in range(count)]
    elif count == 1:
        sizes = [2 * N]
    found["weight"] = [tensor(n, K, size=K**-0.5) for n in sizes]
    found["bias"] = [tensor(n, size=0.2) if case["bias"] else None for n in sizes]
    if case["op"] == "norm_mlp":
        found["fc2_weight"] = tensor(K, N, size=N**-0.5)
        found["fc2_bias"] = tensor(K, size=0.2) if case["bias"] else None
        if case["residual_out"]:
            found["residual_out"] = tensor(*leading, K)
    return found


def leaves(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a case one by one."""
    found = {}
    for name, value in tensors.items():
        for i, each in enumerate(value if isinstance(value, list) else [value]):
            if each is not None:
                found[f"{name}[{i}]" if isinstance(value, list) else name] = each
    return found


def replaced(tensors: Mapping[str, Any], by: Callable[[list[Any]], list[Any]]) -> dict[str, Any]:
    """Return a case with each tensor replaced, by a function of lists."""
    return {
        name: by(value) if isinstance(value, list) else by([value])[0]
        for name, value in tensors.items()
    }


def ours(case: Mapping[str, Any], tensors: Mapping[str, Any]) -> list[Tensor]:
    """Return what the library computes, in one list."""
    t = dict(tensors)
    x, weights, biases = t.pop("x"), t.pop("weight"), t.pop("bias")
    weight, bias = (weights[0], biases[0]) if case["weights"] == 1 else (weights, biases)
    if case["statistics"]:
        x, _, statistics = _given_statistics(case, x, t.pop("residual"))
        t["statistics"] = statistics
    names = ("normalization", "weight_offset", "activation", "return_sum", "return_norm")
    options = {name: case[name] for name in names}
    if case["op"] == "norm_mlp":
        second = t.pop("fc2_weight"), t.pop("fc2_bias")
        results = fn.norm_mlp(x, weight, bias, *second, recompute=case["recompute"], **t, **options)
    else:
        results = fn.norm_linear(x, weight, bias, **t, **options)
    flat: list[Tensor] = []
    for result in results if isinstance(results, tuple) else [results]:
        flat += result if isinstance(result, tuple) else [result]
    return flat


def _given_statistics(case: Mapping[str, Any], x: Tensor, residual: Tensor) -> Any:
    """Return the sum as `linear_add` leaves it for a Linear layer that changes nothing."""
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    total, statistics = fn.linear_add(
        x, identity, None, residual, normalization=case["normalization"]
    )
    return total, None, statistics


def eager(case: Mapping[str, Any], t: Mapping[str, Any]) -> list[Tensor]:
    """Return what PyTorch's ops compute, as a model would write it."""
    x = t["x"] + t["residual"] if case["residual"] else t["x"]
    gamma, beta = t.get("norm_weight"), t.get("norm_bias")
    mixed = gamma is not None and gamma.dtype is not x.dtype
    mixed = mixed or (beta is not None and beta.dtype is not x.dtype)
    rows = x.float() if mixed else x
    if gamma is not None:
        gamma = gamma + case["weight_offset"]
    if case["normalization"] == "layer_norm":
        z = F.layer_norm(rows, x.shape[-1:], gamma, beta, 1e-5)
    else:
        z = F.rms_norm(rows, x.shape[-1:], gamma, 1e-5)
        z = z if beta is None else z + beta
    z = z.to(x.dtype)
    if "scale" in t:
        z = z * (1 + t["scale"])
    if "shift" in t:
        z = z + t["shift"]
    outputs = [F.linear(z, w, b) for w, b in zip(t["weight"], t["bias"], strict=True)]
    activation = case["activation"]
    if activation in GATES:
        gate, up = outputs if len(outputs) == 2 else outputs[0].chunk(2, -1)
        outputs = [FUNCTIONS[GATES[activation]](gate) * up]
    elif activation is not None:
        outputs = [FUNCTIONS[activation](h) for h in outputs]
    if case["op"] == "norm_mlp":
        outputs = [F.linear(outputs[0], t["fc2_weight"], t["fc2_bias"])]
        if case["residual_out"]:
            outputs[0] = outputs[0] + t["residual_out"]
    if case["return_sum"]:
        outputs.append(x)
    if case["return_norm"]:
        outputs.append(z)
    return outputs


def check(
    case: Mapping[str, Any],
    tensors: Mapping[str, Any],
    factor: float = 2.0,
    copied: Callable[[list[Any]], list[Any]] = as_copies,
    placed: Callable[[Tensor], Tensor] = lambda gradient: gradient,
    draws: int = DRAWS,
) -> None:
    """Compare the results and every gradient with float64.

    Args:
        case: The options.
        tensors: The tensors, as `make_tensors` returns them.
        factor: How many of PyTorch's errors are allowed.
        copied: Makes the copies that the library gets.
        placed: Makes the gradients of the results that it gets.
        draws: How many draws of x to take where there are few numbers.
    """
    if case["activation"] in ("relu", "reglu") and case["dtype"] in LOW:
        # Where h rounds to another sign, a whole term of the sums comes or goes.
        backward_factor = factor * 3
    else:
        backward_factor = factor
    found: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    drawn = tensors
    for _ in range(draws):
        for name, tensors_ in _compared(case, drawn, copied, placed):
            found.setdefault(name, []).append(tensors_)
        if all(actual.numel() >= FEW for (actual, *_), *_ in found.values()):
            break
        # The error of a few numbers is luck, not an average.
        x = tensors["x"].detach()
        drawn = {**tensors, "x": (torch.randn_like(x) + x.mean()).requires_grad_()}
    for name, compared in found.items():
        allowed = backward_factor if name.startswith("grad_") else factor
        actual, truth, bar = (
            torch.cat([t.flatten() for t in each]) for each in zip(*compared, strict=True)
        )
        assert_within_budget(name, actual, truth, bar, allowed)


def _compared(
    case: Mapping[str, Any],
    tensors: Mapping[str, Any],
    copied: Callable[[list[Any]], list[Any]],
    placed: Callable[[Tensor], Tensor],
) -> Iterator[tuple[str, tuple[Tensor, Tensor, Tensor]]]:
    """Give what the library computes, what is exact, and what PyTorch computes, by name."""
    mine, low = replaced(tensors, copied), replaced(tensors, as_copies)
    exact = replaced(tensors, as_float64)
    results, bars, truths = ours(case, mine), eager(case, low), eager(case, exact)
    assert len(results) == len(truths)
    grads = [torch.randn_like(truth) for truth in truths]
    for i, (result, truth, bar) in enumerate(zip(results, truths, bars, strict=True)):
        assert result.shape == truth.shape, i
        yield f"result {i}", (result.detach(), truth.detach(), bar.detach().to(result.dtype))
    _backward(results, grads, placed)
    _backward(bars, grads)
    _backward(truths, grads)
    highs, lows = leaves(exact), leaves(low)
    for name, leaf in leaves(mine).items():
        assert leaf.grad is not None, name
        assert leaf.grad.dtype is leaf.dtype, name
        assert leaf.grad.shape == leaf.shape, name
        yield f"grad_{name}", (leaf.grad, highs[name].grad, lows[name].grad)


def _backward(
    results: Sequence[Tensor],
    grads: Sequence[Tensor],
    placed: Callable[[Tensor], Tensor] = lambda gradient: gradient,
) -> None:
    both = zip(results, grads, strict=True)
    pairs = [(r, placed(g.to(r.dtype))) for r, g in both if r.requires_grad]
    torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
