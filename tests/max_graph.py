"""The production op and its gradients in one MAX graph, for every dtype and all sizes.

python tests/max_graph.py OUT.mef    # compiles it for an H100 or H200, attached or not
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from max.driver import (
    Accelerator,
    set_virtual_device_api,
    set_virtual_device_count,
    set_virtual_device_target_arch,
)
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops

OP = Path(__file__).parents[1] / "op"


def build(dtypes: list[tuple[str, str]], device: DeviceRef) -> Graph:
    """Return a graph from x, four parameters and dy to the eight results, for each pair of dtypes.

    Args:
        dtypes: The dtype of the tensors and that of LayerNorm's parameters.
        device: Where to run.
    """
    inputs = []
    for name, ln_name in dtypes:
        dtype, ln_dtype = DType[name], DType[ln_name]
        # Each size has a name of its own: whether they agree is for the op to find out.
        sizes = [["M", "K"], ["K_1"], ["K_2"], ["N", "K_3"], ["N_1"], ["M_1", "N_2"]]
        kinds = [dtype, ln_dtype, ln_dtype, dtype, dtype, dtype]
        inputs += [TensorType(*pair, device) for pair in zip(kinds, sizes, strict=True)]
    with Graph("layernorm_linear", input_types=inputs, custom_extensions=[OP]) as graph:
        eps = ops.constant(1e-5, DType.float64, DeviceRef.CPU())
        tensors = iter(value.tensor for value in graph.inputs)
        results = []
        for name, _ in dtypes:
            dtype = DType[name]
            x, ln_weight, ln_bias, weight, bias, dy = (next(tensors) for _ in range(6))
            y = TensorType(dtype, ["M", "N"], device)
            wide = DType.float64 if dtype == DType.float64 else DType.float32
            statistics = TensorType(wide, ["M"], device)
            forward = ops.custom(
                "fused_norm_layernorm_linear",
                device,
                [x, ln_weight, ln_bias, weight, bias, eps],
                [y, statistics, statistics],
            )
            backward = ops.custom(
                "fused_norm_layernorm_linear_backward",
                device,
                [dy, x, ln_weight, ln_bias, weight, *forward[1:], eps],
                [t.type for t in (x, ln_weight, ln_bias, weight, bias)],
            )
            results += [*forward, *backward]
        graph.output(*results)
    return graph


def compile_for_gpu(graph: Callable[[], Graph], path: str) -> None:
    """Compile a graph for a GPU that need not be there, and leave this process.

    Args:
        graph: Makes the graph.
        path: Where to write it.
    """
    set_virtual_device_api("cuda")
    set_virtual_device_target_arch("sm_90")
    set_virtual_device_count(1)
    InferenceSession(devices=[Accelerator()]).compile(graph()).export_mef(path)
    # MAX now and then aborts on the way out, while threads of its compiler still run.
    os._exit(0)


if __name__ == "__main__":
    compile_for_gpu(lambda: build([("bfloat16", "float32")], DeviceRef.GPU()), sys.argv[1])
