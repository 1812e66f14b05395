"""The calls that are measured: random ones from a seed, or those of a model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from fused_norm.activations import ACTIVATIONS, is_gate
from fused_norm.composition import Operands
from fused_norm.devices.costs import KINDS
from fused_norm.models.fuse import fuse
from fused_norm.models.settings import settings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# For random sizes: products of a forward, above which all sizes behave alike.
MOST_PRODUCTS = 2**31
# Elements of x and y: more memory than caches have, but little of a small machine's.
MOST_ELEMENTS = 2**24
# The same on a GPU: some milliseconds, and 512 MiB of 16-bit numbers.
MOST_GPU_PRODUCTS = 2**40
MOST_GPU_ELEMENTS = 2**28
COMMON = (64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 8192, 14336)
SEED = 1


class Size(NamedTuple):
    """A call to measure.

    Attributes:
        dtype: Name of the tensors' dtype.
        kind: What follows the product: one of KINDS.
        M: Rows.
        K: Features.
        N: Outputs of the product, twice a gate's.
    """

    dtype: str
    kind: str
    M: int
    K: int
    N: int


def draw(count: int, seed: int, dtypes: Sequence[str] = tuple(DTYPES)) -> list[Size]:
    """Return random sizes of calls on a CPU, alternating between dtypes.

    M is 1 to 32768, K and N are 8 to 16384, uniform on a log scale; half of the widths are common
    ones.
    """
    dice = random.Random(seed)
    found: list[Size] = []
    while len(found) < count:
        dtype = dtypes[len(found) % len(dtypes)]
        M, K, N = _rows(dice), _width(dice), _width(dice)
        kind = dice.choice(KINDS + KINDS[:1])
        N *= 2 if kind == "gate" else 1
        # PyTorch's 16-bit products take tens of times longer on many CPUs.
        most = MOST_PRODUCTS if dtype == "float32" else MOST_PRODUCTS // 8
        if max(M * K * N / most, M * max(K, N) / MOST_ELEMENTS) <= 1:
            found.append(Size(dtype, kind, M, K, N))
    return found


def draw_for_gpu(count: int, seed: int, dtypes: Sequence[str] = tuple(DTYPES)) -> list[Size]:
    """Return random sizes of calls on a GPU like `draw`, whose tensors are aligned.

    K and N are multiples of 8: products of other sizes are PyTorch's.
    """
    dice = random.Random(seed)
    found: list[Size] = []
    while len(found) < count:
        M, K, N = _rows(dice), -(-_width(dice) // 8) * 8, -(-_width(dice) // 8) * 8
        if max(M * K * N / MOST_GPU_PRODUCTS, M * max(K, N) / MOST_GPU_ELEMENTS) <= 1:
            found.append(Size(dtypes[len(found) % len(dtypes)], "", M, K, N))
    return found


def _rows(dice: random.Random) -> int:
    return 1 if dice.random() < 0.15 else round(math.exp(dice.uniform(0, math.log(32768))))


def _width(dice: random.Random) -> int:
    if dice.random() < 0.5:
        return dice.choice(COMMON)
    return round(math.exp(dice.uniform(math.log(8), math.log(16384))))


class _Recorder(TorchDispatchMode):
    """Records the calls that a model makes on a kind of device."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.sizes = device, list[Size]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.fused_norm.norm_linear_forward.default:
            t = Operands(*args[: len(Operands._fields)])
            activation = args[len(Operands._fields) + 1]
            dtype = str(t.weights[0].dtype).removeprefix("torch.")
            if (
                t.x.device.type == self.device
                and dtype in DTYPES
                and activation in ("", *ACTIVATIONS)
            ):
                kind = "" if not activation else "gate" if is_gate(activation) else "activation"
                K, N = t.x.shape[-1], sum(w.shape[0] for w in t.weights)
                if t.x.numel() and N:
                    self.sizes.append(Size(dtype, kind, t.x.numel() // K, K, N))
        return func(*args, **(kwargs or {}))


def calls_of(model: torch.nn.Module, example: Sequence[Any], device: str) -> list[Size]:
    """Return the calls that a model makes on a kind of device, once compiled by the backend."""
    recorder = _Recorder(device)

    def recording(module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        fuse(module, settings({"small": True}, None).fusing)

        def run(*arguments: Any) -> Any:
            with recorder:
                return module.forward(*arguments)

        return run

    with torch.no_grad():
        torch.compile(model, backend=recording)(*example)
    return recorder.sizes
