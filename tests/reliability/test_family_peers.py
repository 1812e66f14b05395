"""The shapes and options that other libraries hold their fused MLPs and RMSNorms to.

Results and gradients are held to float64, with at most twice PyTorch's own errors: stricter than
any of theirs. Where a library tests a piece alone, the rest of a call of ours stands around it.
"""

from __future__ import annotations

from typing import Any

import family
import pytest
import torch

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
RMS: dict[str, Any] = {
    **{"op": "norm_linear", "normalization": "rms_norm", "gamma": "there", "beta": False},
    **{"weight_offset": 0.0, "modulation": None, "residual": False, "weights": 1, "bias": False},
    **{"activation": None, "statistics": False, "return_sum": False, "return_norm": False},
    **{"recompute": False, "residual_out": False},
}
MLP = RMS | {"op": "norm_mlp"}


def check(device: str, **case: Any) -> None:
    family.check(case, family.make_tensors(case, device))


# Liger, test/transformers/test_swiglu.py: LlamaMLP (two weights) and Phi3MLP (one).
@pytest.mark.parametrize("weights", [2, 1], ids=["LlamaMLP", "Phi3MLP"])
@pytest.mark.parametrize("shape", [((2, 256), 256, 512), ((6, 42), 123, 431)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_liger_swiglu(dtype: Any, shape: Any, weights: int, device: str) -> None:
    case = {"dtype": dtype, "shape": shape, "weights": weights, "activation": "swiglu"}
    check(device, **MLP | case)


# Liger, test/transformers/test_geglu.py: the tanh form, wide and odd.
@pytest.mark.parametrize("shape", [((2, 2048), 2048, 4096), ((9, 41), 341, 4231)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_liger_geglu(dtype: Any, shape: Any, device: str) -> None:
    if device == "cpu":
        # Of a size for a CPU; columns are what differs.
        shape = ((2, 9), shape[1] // 4, shape[2] // 4)
    case = {"dtype": dtype, "shape": shape, "weights": 2, "activation": "geglu_tanh"}
    check(device, **MLP | case)


# Liger, test/transformers/test_fused_add_rms_norm.py: LLaMA's and Gemma's norm after a sum.
@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["llama", "gemma"])
@pytest.mark.parametrize(
    "shape", [((2, 128), 512, 8), ((5, 123), 123, 8), ((9, 7), 41, 8)], ids=str
)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_liger_fused_add_rms_norm(dtype: Any, shape: Any, offset: float, device: str) -> None:
    case = {"dtype": dtype, "shape": shape, "weight_offset": offset}
    check(device, **RMS | case | {"residual": True, "return_sum": True, "return_norm": True})


# quack, tests/test_rmsnorm.py: few and many rows, long ones, with and without a residual.
@pytest.mark.parametrize("features", [192, 760, 1128, 4096, 16384, 65536])
@pytest.mark.parametrize("rows", [1, 37, 199])
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("dtype", [F32, pytest.param(F16, marks=pytest.mark.slow), BF16], ids=str)
def test_quack_rms_norm(dtype: Any, residual: bool, rows: int, features: int, device: str) -> None:
    if device == "cpu" and rows * features > 2**18:
        pytest.skip("long on a CPU")
    case = {"dtype": dtype, "shape": ((rows,), features, 8)}
    check(device, **RMS | case | {"residual": residual, "return_sum": residual})


# quack, tests/test_mlp.py: activations and gates in bfloat16, kept and recomputed.
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ["gelu_tanh", "relu", "swiglu", "reglu", "geglu"])
def test_quack_mlp(activation: str, recompute: bool, device: str) -> None:
    case = {"dtype": BF16, "shape": ((256,), 512, 512), "activation": activation}
    check(device, **MLP | case | {"recompute": recompute})


# TransformerEngine, tests/pytorch/test_numerics.py: LayerNormMLP and LayerNormLinear, either norm.
@pytest.mark.parametrize("normalization", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "quick_gelu", "silu", *family.GATES])
@pytest.mark.parametrize(
    "dtype", [F32, *(pytest.param(low, marks=pytest.mark.slow) for low in (F16, BF16))], ids=str
)
def test_transformer_engine_mlp(
    dtype: Any, activation: str, normalization: str, device: str
) -> None:
    case = {"dtype": dtype, "shape": ((32, 2), 128, 512), "activation": activation}
    case |= {"normalization": normalization, "beta": normalization == "layer_norm", "bias": True}
    check(device, **MLP | case)


# TransformerEngine, tests/cpp/operator/test_normalization.cu: RMSNorm, gamma around zero or one.
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(71, 229), (29, 541), (768, 6144), (2048, 12288)], ids=str)
def test_transformer_engine_cpp(shape: tuple[int, int], offset: float, device: str) -> None:
    rows, features = shape
    if device == "cpu" and rows > 71:
        rows //= 16
    case = {"dtype": F32, "shape": ((rows,), features, 8), "weight_offset": offset}
    check(device, **RMS | case)
