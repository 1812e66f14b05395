"""The repository for Hugging Face's `kernels`: loaded by it, as exact as PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("kernels")

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts/wheel"))

import hub  # noqa: E402
import wheel  # noqa: E402

USE = """
import sys
import zipfile
from pathlib import Path
import torch
import torch.nn.functional as F
from kernels import LocalLayerRepository, Mode, get_local_kernel, kernelize
from kernels import register_kernel_mapping, use_kernel_forward_from_hub

folder = Path(sys.argv[1])
kernel = get_local_kernel(folder)
assert Path(sys.modules["fused_norm"].__file__).is_relative_to(folder)

def norm(kind, x, gamma, beta):
    if kind == "RMSNormLinear":
        return F.rms_norm(x, (64,), gamma, 1e-5)
    return F.layer_norm(x, (64,), gamma, beta)

def layer(kind):
    @use_kernel_forward_from_hub(kind)
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.eps = 1e-5
            self.layer_norm_weight = torch.nn.Parameter(torch.randn(64))
            self.layer_norm_bias = torch.nn.Parameter(torch.randn(64))
            self.weight = torch.nn.Parameter(torch.randn(96, 64))
            self.bias = torch.nn.Parameter(torch.randn(96))

        def forward(self, x):
            z = norm(kind, x, self.layer_norm_weight, self.layer_norm_bias)
            return F.linear(z, self.weight, self.bias)
    return Layer()

def results(call, x, dy, leaves):
    y = call(x)
    return [y, *(g for g in torch.autograd.grad(y, leaves, dy, allow_unused=True) if g is not None)]

def worst(found, exact):
    return [((a - t).abs().max() / t.abs().max()).item() for a, t in zip(found, exact, strict=True)]

torch.manual_seed(0)
for kind in ("LayerNormLinear", "RMSNormLinear"):
    repository = LocalLayerRepository(folder, layer_name=kind)
    register_kernel_mapping({kind: {"cpu": repository}})
    module = layer(kind)
    x, dy = torch.randn(40, 64, requires_grad=True), torch.randn(40, 96)
    leaves = [x, *module.parameters()]
    theirs = results(module, x, dy, leaves)
    exact_x = x.detach().double().requires_grad_()
    module.double()
    exact = results(module, exact_x, dy.double(), [exact_x, *module.parameters()])
    module.float()
    fused = kernelize(module, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu")
    assert fused.forward.__func__ is getattr(kernel.layers, kind).forward
    ours = results(fused, x, dy, [x, *fused.parameters()])
    arguments = dict(normalization="rms_norm") if kind == "RMSNormLinear" else dict(
        norm_bias=fused.layer_norm_bias)
    function = results(
        lambda x: kernel.norm_linear(x, fused.weight, fused.bias,
            norm_weight=fused.layer_norm_weight, **arguments),
        x, dy, [x, *fused.parameters()])
    for found in (ours, function):
        for mine, peer in zip(worst(found, exact), worst(theirs, exact), strict=True):
            assert mine <= 4 * peer, (kind, mine, peer)
print("holds")
"""


def test_a_wheel_for_cpus_is_no_variant_for_gpus(tmp_path: Path) -> None:
    prebuilt = "fused_norm/prebuilt/norm_linear_cpu-float32-neon.so"
    sources = ["fused_norm/devices/data/nvidia-h100.json", "fused_norm/native/norm_linear_sm_90.py"]
    for machine, kernels, backends in (
        ("aarch64", [prebuilt], ["cpu"]),
        (
            "x86_64",
            [prebuilt, "fused_norm/prebuilt/passes_gpu-float32-nvidia_sm_80.so"],
            ["cpu", "cu126", "cu130"],
        ),
    ):
        path = tmp_path / f"a-1-py3-none-manylinux_2_35_{machine}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name in sources + kernels:
                archive.writestr(name, "")
        expected = [f"torch-stable-abi211-{backend}-{machine}-linux" for backend in backends]
        assert hub.variants(path) == expected


def test_kernels_loads_it(tmp_path: Path) -> None:
    pure = wheel.pure_wheel(tmp_path)
    made = hub.make(pure, tmp_path / "hub")
    assert [path.name for path in made] == ["torch-cpu", "torch-cuda"]
    (tmp_path / "use.py").write_text(USE)
    command = [sys.executable, "-W", "ignore", str(tmp_path / "use.py"), str(tmp_path / "hub")]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines()[-1] == "holds"
