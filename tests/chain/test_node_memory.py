"""What the node keeps and lets go of, and that threads and children of a fork may share it."""

from __future__ import annotations

import resource
import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from accuracy import make_inputs
from node_calls import gradients, inputs_for
from torch import Tensor

import fused_norm as fn


@pytest.mark.parametrize("index", [0, 3])
def test_other_memory_since_the_forward(index: int, python_calls: list[Tensor]) -> None:
    """An assignment to `data` counts no version: the kernels must not read what is not there."""
    inputs = inputs_for("cpu")
    y = fn.fused_layernorm_linear(*inputs)
    inputs[index].data = torch.randn(3, 4)
    with pytest.raises(RuntimeError):
        y.backward(torch.randn_like(y))
    assert len(python_calls) == 1


def test_threads(python_calls: list[Tensor], device: str) -> None:
    inputs = inputs_for(device, rows=200)
    grad_output = torch.randn(200, 16, device=device, dtype=inputs[0].dtype)
    expected = gradients(fn.fused_layernorm_linear, inputs, grad_output)
    shared = fn.fused_layernorm_linear(*inputs)
    barrier = threading.Barrier(8)

    def run(index: int) -> None:
        barrier.wait()
        for _ in range(40):
            own = gradients(fn.fused_layernorm_linear, inputs, grad_output)
            ours = torch.autograd.grad(shared, inputs, grad_output, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(8)))
    assert not python_calls


def test_backward_lets_go_of_what_was_saved(python_calls: list[Tensor], device: str) -> None:
    inputs = inputs_for(device)
    hidden = inputs[0] * 2
    saved = weakref.ref(hidden)
    y = fn.fused_layernorm_linear(hidden, *inputs[1:])
    del hidden
    y.sum().backward(retain_graph=True)
    assert saved() is not None
    y.sum().backward()
    assert saved() is None
    assert y.grad_fn is not None


def test_memory_does_not_grow(python_calls: list[Tensor]) -> None:
    inputs = make_inputs(64, 64, 64, requires_grad=True)
    grad_output = torch.randn(64, 64)

    def steps(count: int) -> int:
        for index in range(count):
            hidden = inputs[0] * 1
            y = fn.fused_layernorm_linear(hidden, *inputs[1:])
            # Some graphs end unused.
            if index % 4:
                torch.autograd.grad(y, inputs, grad_output)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    # A leaked tensor is 16 KB, and 10,000 of them 160 MB.
    assert -steps(500) + steps(10_000) < 8_000
    assert not python_calls


def test_fork(library: Path) -> None:
    """A child that waits for the parent's OpenMP workers waits forever."""
    script = """
    import os, sys, torch, fused_norm as fn
    from pathlib import Path
    from fused_norm.chain import library
    from fused_norm.ops import node
    library.load()
    module = library.import_node(Path(sys.argv[1]))
    node.tell(module)
    node.module = lambda: module
    torch.set_num_threads(2)
    x, w = torch.randn(200, 256, requires_grad=True), torch.randn(128, 256, requires_grad=True)
    grad_output = torch.randn(200, 128)
    before = fn.fused_layernorm_linear(x, None, None, w)

    def run(y):
        gradients = torch.autograd.grad(y, (x, w), grad_output, retain_graph=True)
        # As bytes: PyTorch's own parallel ops would hang in the child.
        return [t.detach().numpy().tobytes() for t in gradients]

    expected = run(before)
    pid = os.fork()
    if pid == 0:
        after = fn.fused_layernorm_linear(x, None, None, w)
        os._exit(0 if run(before) == run(after) == expected else 3)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), str(library)]
    assert subprocess.run(command, timeout=600, check=False).returncode == 0
