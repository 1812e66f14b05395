"""The op family in one MAX graph: some norms and activations, for all sizes.

python tests/max_family.py OUT.mef    # compiles it for an H100 or H200, attached or not
"""

from __future__ import annotations

import sys

from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops
from max_graph import OP, compile_for_gpu

# Dtype of the tensors, dtype of the norm's parameters, the norm, the activation.
KINDS = [
    ("float32", "float32", "layer_norm", "gelu"),
    ("float32", "float32", "rms_norm", "swiglu"),
    ("bfloat16", "float32", "rms_norm", "none"),
    ("float64", "float64", "layer_norm", "quick_gelu"),
]
RANKS = {
    **{"x": 2, "residual": 2, "norm_weight": 1, "norm_bias": 1, "scale": 2, "shift": 2},
    **{"weight": 2, "bias": 1},
}
GATES = ("reglu", "geglu", "geglu_tanh", "swiglu")


def build(kinds: list[tuple[str, str, str, str]], device: DeviceRef) -> Graph:
    """Return a graph from the tensors of RANKS to y, the sum, mean, rstd and product, of each kind.

    Args:
        kinds: Some of KINDS.
        device: Where to run.
    """
    inputs = []
    for i, (name, norm_name, *_) in enumerate(kinds):
        for tensor, rank in RANKS.items():
            dtype = DType[norm_name if tensor.startswith("norm") else name]
            sizes = [f"{tensor}_{i}_{axis}" for axis in range(rank)]
            inputs.append(TensorType(dtype, sizes, device))
    with Graph("norm_linear", input_types=inputs, custom_extensions=[OP]) as graph:
        cpu = DeviceRef.CPU()
        eps = ops.constant(1e-5, DType.float64, cpu)
        offset = ops.constant(1.0, DType.float64, cpu)
        tensors = iter(value.tensor for value in graph.inputs)
        results = []
        for name, _, normalization, activation in kinds:
            dtype = DType[name]
            wide = DType.float64 if dtype == DType.float64 else DType.float32
            x, residual, gamma, beta, scale, shift, weight, bias = (next(tensors) for _ in RANKS)
            rows, (columns, _) = x.shape[0], weight.shape
            outputs = columns // 2 if activation in GATES else columns
            statistics = TensorType(wide, [rows], device)
            results += ops.custom(
                "fused_norm_norm_linear",
                device,
                [x, residual, gamma, beta, scale, shift, weight, bias, eps, offset],
                [
                    TensorType(dtype, [rows, outputs], device),
                    TensorType(dtype, residual.shape, device),
                    TensorType(wide, [0], device) if normalization == "rms_norm" else statistics,
                    statistics,
                    TensorType(dtype, [rows, columns], device),
                ],
                parameters={"normalization": normalization, "activation": activation},
            )
        graph.output(*results)
    return graph


if __name__ == "__main__":
    kinds = [kind for kind in KINDS if kind[0] != "float64"]
    compile_for_gpu(lambda: build(kinds, DeviceRef.GPU()), sys.argv[1])
