"""Memory: nothing read or written outside a tensor, nothing kept, nothing freed too early."""

from __future__ import annotations

import gc
import os
import random
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from accuracy import as_copies, make_inputs
from torch import Tensor, nn

import fused_norm as fn

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BAND = 512

# What runs under compute-sanitizer, over `shapes`.
ONE_LINEAR = """
import torch, fused_norm as fn
for dtype in (torch.bfloat16, torch.float32):
    for m, k, n in shapes:
        sizes = (m, k), (k,), (k,), (n, k), (n,)
        leaves = [torch.randn(s, device="cuda").to(dtype).requires_grad_() for s in sizes]
        y = fn.fused_layernorm_linear(*leaves)
        y.backward(torch.randn_like(y))
        with torch.no_grad():
            for _ in range(3):  # the weight is folded in the second
                fn.fused_layernorm_linear(*leaves)
        o = torch.ones(1, device="cuda", requires_grad=True)
        z = fn.trainable_eps_layer_norm(leaves[0], o)
        z.backward(torch.randn_like(z))
        z = fn.composed.layer_norm(leaves[0])
        z.backward(torch.randn_like(z))
torch.cuda.synchronize()
"""
FAMILY = """
import torch, fused_norm as fn
def made(*shape, dtype):
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_()
for dtype in (torch.bfloat16, torch.float16):
    for m, k, n in shapes:
        new = lambda *shape: made(*shape, dtype=dtype)
        x, r, w, v, b, gamma = new(m, k), new(m, k), new(n, k), new(n, k), new(n), new(k)
        rms = {"normalization": "rms_norm", "norm_weight": gamma}
        calls = [
            lambda: fn.norm_linear(x, w, b, activation="gelu", norm_weight=gamma),
            lambda: fn.norm_linear(x, [w, v], activation="swiglu", **rms),
            lambda: fn.norm_linear(x, [w, v, w], [b, b, b], norm_weight=gamma, norm_bias=gamma),
            lambda: fn.norm_linear(x, w, residual=r, return_sum=True, **rms),
            lambda: fn.norm_linear(x, w, b, scale=new(1, k), shift=new(1, k)),
            lambda: fn.linear_add(x, w, b, new(m, n)),
            lambda: fn.norm_mlp(
                x, w, b, new(k, n), new(k), activation="gelu", norm_weight=gamma, residual_out=x
            ),
        ]
        for call in calls:
            results = call()
            results = [results] if isinstance(results, torch.Tensor) else results
            results = [t for t in results if isinstance(t, torch.Tensor)]
            torch.autograd.backward(results, [torch.randn_like(t) for t in results])
            with torch.no_grad():
                for _ in range(3):
                    call()
torch.cuda.synchronize()
"""


def sanitized(command: list[str]) -> str:
    """Return what compute-sanitizer prints."""
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=580,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        check=False,
    )
    output = result.stdout[-3000:] + result.stderr[-1000:]
    assert result.returncode == 0, output
    assert re.search("(RACECHECK|ERROR) SUMMARY", result.stdout), output
    return result.stdout


def races(report: str) -> set[str]:
    """Return the hazards in kernels of ours, but for those that the tool sees in waits of TMA.

    What thread 0 copies over what others have read, it copies after a barrier at which all of them
    arrived. The tool does not follow that, not even where each thread arrives by itself; it names
    the same in kernels of cuBLAS (nvjet).
    """
    pattern = (
        r"Potential (\w+) hazard.*\n=+ +(\w+ Thread .*) at (\S+)\n=+ +(\w+ Thread .*) at (\S+)"
    )
    return {
        f"{kind}: {first} at {place}, {second} at {other}"
        for kind, first, place, second, other in re.findall(pattern, report)
        if not place.startswith("nvjet")
        and not (kind == "WAR" and second == "Write Thread (0,0,0)" and "_matrix_" in place)
    }


def between_nans(tensor: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Return a copy with NaN before and after it, and the memory that holds all."""
    memory = tensor.new_full((tensor.numel() + 2 * BAND,), float("nan"))
    view = memory[BAND + shift : BAND + shift + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor), memory


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0, 1, 8])
@pytest.mark.parametrize(
    "shape", [(16, 8, 16), (1, 1023, 7), (37, 50, 65), (130, 769, 33), (64, 512, 256)], ids=str
)
def test_reads_and_writes_within_its_tensors(
    shape: tuple[int, int, int], shift: int, dtype: torch.dtype, device: str
) -> None:
    """Inputs lie between NaNs: one that is read turns up in a result, one written is missed."""
    inputs = make_inputs(*shape, dtype=dtype, device=device)
    grad_output = torch.randn(shape[0], shape[2], device=device).to(dtype)

    def run(tensors: list[Tensor], dy: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        y = fn.fused_layernorm_linear(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    expected = run(inputs, grad_output)
    views, memories = zip(*(between_nans(t, shift) for t in [*inputs, grad_output]), strict=True)
    results = run([*views[:5]], views[5])
    for mine, other in zip(results, expected, strict=True):
        assert mine.isfinite().all()
        if device == "cpu":
            assert torch.equal(mine, other)
    for view, memory, tensor in zip(views, memories, [*inputs, grad_output], strict=True):
        assert torch.equal(view, tensor)
        assert memory.isnan().sum() == 2 * BAND


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def some_calls(count: int, device: str) -> None:
    """Call every op forward and backward with changing shapes, now and then wrongly."""
    choose = random.Random(0)
    for index in range(count):
        shape = [choose.randint(1, 40) for _ in range(3)]
        inputs = [t.requires_grad_() for t in make_inputs(*shape, device=device)]
        fn.fused_layernorm_linear(*inputs).sum().backward()
        if index % 4 == 0:
            o = torch.ones(1, device=device, requires_grad=True)
            fn.trainable_eps_layer_norm(inputs[0].detach(), o).sum().backward()
            fn.composed.layer_norm(inputs[0].detach())
        if index % 10 == 0:
            with pytest.raises(RuntimeError):
                fn.fused_layernorm_linear(inputs[0], None, None, torch.ones(2, 41, device=device))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("calls", [3_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_memory_does_not_grow(calls: int, device: str) -> None:
    some_calls(1_000, device)
    gc.collect()
    host = resident()
    on_gpu = torch.cuda.memory_allocated() if device == "cuda" else 0
    some_calls(calls, device)
    gc.collect()
    # Allocators keep some of what they were given back; a leak of 100 bytes a call is 10 MB.
    assert resident() - host < 6 * 2**20
    if device == "cuda":
        assert torch.cuda.memory_allocated() <= on_gpu


def test_modules_are_let_go(device: str) -> None:
    """With their parameters, after a training step, and without waiting for the collector."""

    def use_one() -> list[weakref.ref[object]]:
        layer = fn.LayerNormLinear(64, 96, device=device)
        x = torch.randn(8, 64, device=device, requires_grad=True)
        with torch.no_grad():
            layer(x)
        layer(x).sum().backward()
        return [weakref.ref(t) for t in (layer, x, *layer.parameters())]

    use_one()
    gc.disable()
    try:
        assert not [ref() for ref in use_one() if ref() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("own_kernels")
def test_a_graph_keeps_what_it_says(dtype: torch.dtype) -> None:
    """For the backward: the inputs themselves, and the mean and rstd of each row."""
    inputs = make_inputs(64, 256, 128, dtype=dtype, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fn.fused_layernorm_linear(*inputs)
    places = {t.data_ptr() for t in inputs}
    others = [t for t in kept if t.data_ptr() not in places]
    assert [(t.shape, t.dtype) for t in others] == [((64,), torch.float32)] * 2


def test_an_error_keeps_nothing() -> None:
    inputs = make_inputs(64, 256, 128, requires_grad=True)
    reference = weakref.ref(inputs[0])
    for _ in range(3):
        with pytest.raises(RuntimeError):
            fn.fused_layernorm_linear(*inputs[:3], torch.ones(3, 7))
    del inputs
    gc.collect()
    assert reference() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
class TestGpu:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_input_freed_right_after_a_call_on_a_side_stream(self, dtype: torch.dtype) -> None:
        """Its memory must not be given out again before the kernel has read it."""
        inputs = make_inputs(512, 1024, 1024, dtype=dtype, device="cuda", requires_grad=True)
        grad_output = torch.randn(512, 1024, device="cuda").to(dtype)

        def run(tensors: list[Tensor]) -> list[Tensor]:
            y = fn.fused_layernorm_linear(*tensors)
            return [y.detach(), *torch.autograd.grad(y, tensors, grad_output)]

        expected = run(as_copies(inputs))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copies = as_copies(inputs)
            torch.cuda._sleep(100_000_000)
            results = run(copies)
            sizes = [t.shape for t in copies]
            del copies
            # Takes the freed memory, on the same stream, after the kernels.
            rubbish = [torch.full(s, float("nan"), dtype=dtype, device="cuda") for s in sizes]
        side.synchronize()
        del rubbish
        for mine, other in zip(results, expected, strict=True):
            assert torch.equal(mine, other)

    def test_out_of_memory_is_pytorchs_and_passes(self) -> None:
        inputs = make_inputs(64, 256, 128, device="cuda")
        expected = fn.fused_layernorm_linear(*inputs)
        rows = torch.cuda.get_device_properties(0).total_memory // 256
        huge = inputs[0][:1].expand(rows, 256)
        with pytest.raises(torch.OutOfMemoryError):
            fn.fused_layernorm_linear(huge, *inputs[1:])
        torch.cuda.empty_cache()
        assert torch.equal(fn.fused_layernorm_linear(*inputs), expected)

    def test_twelve_layers_hold_less_than_eagers(self) -> None:
        """PyTorch keeps the rows before and after each LayerNorm for the backward, we the first."""
        x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        options = {"device": "cuda", "dtype": torch.bfloat16}
        pairs = [
            (nn.LayerNorm(4096, **options), nn.Linear(4096, 4096, **options)) for _ in range(12)
        ]
        peaks = []
        for layers in (
            nn.Sequential(*(module for pair in pairs for module in pair)),
            nn.Sequential(*(fn.LayerNormLinear.from_modules(*pair) for pair in pairs)),
        ):
            for _ in range(3):
                # Only what is above it counts: tests before this one may have left some memory.
                gc.collect()
                held = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                layers(x).sum().backward()
                peak = torch.cuda.max_memory_allocated() - held
                layers.zero_grad(set_to_none=True)
                x.grad = None
            peaks.append(peak)
        assert peaks[1] <= 0.75 * peaks[0], peaks

    @pytest.mark.slow
    @pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="no compute-sanitizer")
    @pytest.mark.parametrize("script", [ONE_LINEAR, FAMILY], ids=["one_linear", "family"])
    @pytest.mark.parametrize("tool", ["memcheck", "initcheck", "racecheck", "synccheck"])
    def test_sanitizer(self, tool: str, script: str) -> None:
        """Every kernel at ragged shapes, each allocation on its own so that edges are seen."""
        shapes = [(37, 50, 65), (3, 1023, 7)]
        if tool != "initcheck":  # which does not see what TMA writes
            shapes += [(130, 264, 136), (257, 1024, 512), (37, 2048, 16)]
            # Tiles enough for ping-pong consumers.
            shapes += [(2200, 264, 2056)] if script is FAMILY else []
        command = ["compute-sanitizer", "--tool", tool, "--target-processes", "all"]
        if tool == "memcheck":
            command += ["--leak-check", "no", "--report-api-errors", "no"]
        command += [sys.executable, "-c", f"shapes = {shapes}\n{script}"]
        if tool != "racecheck":
            assert "ERROR SUMMARY: 0 errors" in sanitized(command)
            return
        command[3:3] = ["--racecheck-report", "hazard", "--show-backtrace", "no"]
        command[3:3] = ["--print-limit", "1000000"]
        found = races(sanitized(command))
        assert not found, "\n".join(sorted(found))
