"""What runs in a process of its own: CUDA graphs of nothing else, children of a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CAPTURE = """
import torch, fused_norm as fn
layer = {layer}
x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        layer(x).sum().backward()
torch.cuda.current_stream().wait_stream(side)
with torch.cuda.graph(graph, stream=side):
    layer(x).sum().backward()
graph.replay()
torch.cuda.synchronize()
"""
# As bytes, and by our kernels at every size: PyTorch's own parallel ops would hang in the child.
FORK = """
import os, sys, torch, fused_norm as fn
from fused_norm.call.record import FUSED
from fused_norm.chain import kernels
from fused_norm.ops import norm_linear
kernels.cpu_strategy, norm_linear.is_host_bound = lambda: FUSED, lambda t: False
torch.set_num_threads(2)
{setup}

def run():
    return [t.detach().numpy().tobytes() for t in {tensors}]

expected = run()
pid = os.fork()
if pid == 0:
    os._exit(0 if run() == expected else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def assert_is_captured(layer: str) -> None:
    """Capture a layer's step, warmed up as PyTorch asks, where no other product was computed."""
    command = [sys.executable, "-c", CAPTURE.format(layer=layer)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def assert_same_after_a_fork(setup: str, tensors: str) -> None:
    """Compute tensors, and again in a child, which has no threads but its own."""
    script = FORK.format(setup=textwrap.dedent(setup).strip(), tensors=tensors)
    command = [sys.executable, "-W", "ignore", "-c", script]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


def with_root(root: Path = ROOT) -> dict[str, str]:
    """Return the environment of processes that import the repository, or a copy of it, first."""
    found = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(found)}


def run_script(
    script: str, *arguments: str, root: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of the repository, or of a copy of it, and return what it printed."""
    return subprocess.run(
        [sys.executable, script, *arguments],
        cwd=root,
        env=with_root(root) | environment,
        capture_output=True,
        text=True,
        check=False,
    )
