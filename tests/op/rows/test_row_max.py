"""The ops that are row programs in one MAX graph, with dimensions that it does not know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from max.driver import CPU, Accelerator, Buffer
from max.dtype import DType
from max.engine.api import InferenceSession
from max.graph import DeviceRef, Graph, KernelLibrary, TensorType, ops
from test_row_kernels import div, mean, norm, trainable_eps
from torch import Tensor

SOURCES = Path(__file__).resolve().parents[3] / "op"
# name -> inputs and outputs, among the rows x, b and dy and the scalar o
OPS = {
    "trainable_eps_layer_norm": (["x", "o"], ["x"]),
    "trainable_eps_layer_norm_backward": (["dy", "x", "o"], ["x", "o"]),
    "composed_mean": (["x"], ["x"]),
    "composed_norm": (["x"], ["x"]),
    "composed_norm_backward": (["dy", "x"], ["x"]),
    "composed_div": (["x", "b"], ["x"]),
    "composed_div_backward": (["dy", "x", "b"], ["x", "b"]),
}
Run = Callable[..., dict[str, list[Tensor]]]


@pytest.fixture(scope="module", params=[DType.float32, DType.bfloat16], ids=str)
def run(request: pytest.FixtureRequest) -> Run:
    """Return a function that takes x, b, dy and o through every op."""
    on_gpu = torch.cuda.is_available()
    device = DeviceRef.GPU(0) if on_gpu else DeviceRef.CPU()
    library = KernelLibrary()
    library.load_paths([SOURCES])
    rows = TensorType(request.param, ["batch", "rows", "length"], device)
    types = {"x": rows, "b": rows, "dy": rows, "o": TensorType(request.param, [1], device)}
    with Graph("row_programs", input_types=list(types.values()), kernel_library=library) as graph:
        values = dict(zip(types, graph.inputs, strict=True))
        results = [
            result.tensor
            for name, (inputs, outputs) in OPS.items()
            for result in ops.custom(
                name,
                device,
                [values[i].tensor for i in inputs],
                out_types=[types[o] for o in outputs],
            )
        ]
        graph.output(*results)
    session = InferenceSession(devices=[Accelerator(0) if on_gpu else CPU()])
    model = session.load(graph)

    def execute(*tensors: Tensor) -> dict[str, list[Tensor]]:
        flat = [torch.from_dlpack(r) for r in model.execute(*map(Buffer.from_dlpack, tensors))]
        return {name: [flat.pop(0) for _ in outputs] for name, (_, outputs) in OPS.items()}

    execute.dtype = getattr(torch, request.param.name)
    execute.device = "cuda" if on_gpu else "cpu"
    return execute


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 3, 40), (1, 7, 769)], ids=str)
def test_every_op(run: Run, shape: tuple[int, ...]) -> None:
    x, b, dy = torch.rand(3, *shape, device=run.device, dtype=run.dtype) + 0.5
    o = torch.full((1,), 0.3, device=run.device, dtype=run.dtype)
    results = run(x, b, dy, o)
    values = {k: t.double().requires_grad_() for k, t in {"x": x, "b": b, "o": o}.items()}
    exact = {
        "trainable_eps_layer_norm": trainable_eps(values["x"], values["o"]),
        "composed_mean": mean(values["x"]),
        "composed_norm": norm(values["x"]),
        "composed_div": div(values["x"], values["b"]),
    }
    eps = torch.finfo(run.dtype).eps
    for name, y in exact.items():
        torch.testing.assert_close(results[name][0].double(), y, rtol=8 * eps, atol=8 * eps)
        inputs = [values[i] for i in OPS[name][0]]
        gradients = torch.autograd.grad(y, inputs, dy.double())
        if name == "composed_mean":
            continue
        backward = results[f"{name}_backward"]
        for ours, best in zip(backward, gradients, strict=True):
            torch.testing.assert_close(ours.double(), best, rtol=16 * eps, atol=16 * eps)
