"""What `distributed_worker.py` tries in two processes: names, options, and where tensors lie.

Importing this imports little, so that collecting the tests does not wait for torch.distributed.
"""

from __future__ import annotations

from typing import Any

import torch

PLAIN: dict[str, Any] = {
    **{"dtype": torch.float64, "op": "norm_linear", "normalization": "rms_norm"},
    **{"gamma": "there", "beta": False, "weight_offset": 0.0, "modulation": None},
    **{"residual": False, "weights": 1, "bias": True, "activation": None, "statistics": False},
    **{"return_sum": False, "return_norm": False, "recompute": False, "residual_out": False},
    # No size is a multiple of two, so that shards differ.
    "shape": ((3, 5), 7, 9),
}
MLP = PLAIN | {"op": "norm_mlp"}
MEMBERS: dict[str, dict[str, Any]] = {
    "q, k, v": PLAIN | {"weights": 3, "weight_offset": 1.0, "bias": False},
    "residual": PLAIN | {"residual": True, "return_sum": True, "return_norm": True},
    "AdaLN": PLAIN | {"normalization": "layer_norm", "modulation": "batch", "beta": True},
    "AdaLN by place": PLAIN | {"modulation": "sequence"},
    "GELU": PLAIN | {"normalization": "layer_norm", "beta": True, "activation": "gelu"},
    "SwiGLU of a pair": PLAIN | {"weights": 2, "activation": "swiglu", "residual": True},
    "MLP": MLP | {"activation": "gelu_tanh", "residual_out": True},
    "gated MLP": MLP
    | {"activation": "geglu", "weights": 2, "residual": True, "recompute": True}
    | {"return_sum": True},
}
# The placement of x, that of the weights, and whether the kernels should run.
LAYOUTS: dict[str, tuple[str, str, bool]] = {
    "rows of samples": ("S(0)", "R", True),
    "rows of tokens": ("S(1)", "R", True),
    "columns": ("R", "S(0)", True),
    "columns of rows": ("S(1)", "S(0)", True),
    "features": ("S(2)", "R", True),
    "weights by inputs": ("R", "S(1)", False),
}


MEMBER_CASES = [f"{member}; {layout}" for member in MEMBERS for layout in LAYOUTS] + [
    "residual; rows of tokens; compiled",
    "q, k, v; columns of rows; compiled",
    "gated MLP; columns; compiled",
]
TENSOR_PARALLEL = [
    f"tensor parallel; {place}{how}" for how in ("", "; compiled") for place in ("R", "S(1)")
]
# A model that knows nothing of us, by torch.compile's backend.
BACKEND = ["backend; R", "backend; S(1)"]
# Of twenty steps, with evaluations in between. FSDP2 takes modules, whose forward gathers theirs.
TRAINING = [
    *("training; DDP; modules", "training; DDP; functions", "training; DDP; backend"),
    *("training; FSDP2; modules", "training; FSDP2; backend"),
]
# Half of each sequence in each process, by what runs the graph.
CONTEXT = ["context parallel; eager", "context parallel; aot_eager"]
# Each recipe in what trainers do.
FP8 = [
    f"FP8; {recipe}; {wrap}; {mode}"
    for recipe in ("rowwise", "tensorwise", "rowwise_with_gw_hp", "blockwise")
    for wrap in ("DDP", "FSDP2")
    for mode in (
        *("once", "accumulation", "checkpoint", "reentrant checkpoint"),
        *("compiled", "backend"),
    )
]
# torchao's all-gather in FP8, with what FSDP2 does between forward and backward.
GATHERED = [
    f"gathered in FP8; {mode}"
    for mode in ("blocks", "maxima", "whole", "bfloat16", "accumulation", "checkpoint")
]
NAMES = [
    *(*MEMBER_CASES, *TENSOR_PARALLEL, *BACKEND, *CONTEXT, "DDP", "FSDP2", *TRAINING),
    *("linear_add", "mixed", *FP8, *GATHERED),
]
