"""What runs in a process of its own: CUDA graphs of nothing else, children of a fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
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


def run_python(
    *arguments: str, cwd: Path | None = None, timeout: float | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, and return what it printed and how it ended.

    Args:
        arguments: What follows `python`.
        cwd: The folder in which it runs, None for this process's.
        timeout: Seconds after which it counts as hanging.
        environment: Variables that this process lacks or has otherwise.
    """
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def assert_is_captured(layer: str) -> None:
    """Capture a layer's step, warmed up as PyTorch asks, where no other product was computed."""
    result = run_python("-c", CAPTURE.format(layer=layer))
    assert result.returncode == 0, result.stderr


def assert_same_after_a_fork(setup: str, tensors: str) -> None:
    """Compute tensors, and again in a child, which has no threads but its own."""
    script = FORK.format(setup=textwrap.dedent(setup).strip(), tensors=tensors)
    command = [sys.executable, "-W", "ignore", "-c", script]
    assert subprocess.run(command, timeout=600, check=False).returncode == 0


def with_root(root: Path = ROOT) -> dict[str, str]:
    """Return the environment of processes that import the repository, or a copy of it, first."""
    found = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(found)}


def run_script(
    script: str, *arguments: str, root: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of the repository, or of a copy of it, and return what it printed."""
    return run_python(script, *arguments, cwd=root, **with_root(root) | environment)


def in_forks(functions: Iterable[Callable[[], object]]) -> list[int]:
    """Call functions at the same time, each in a child of this process, and return how each ended.

    Importing PyTorch and its compiler takes a process 5 s. Children have what this one imported,
    which must not have computed yet: they have none of its threads.
    """
    sys.stdout.flush()
    children = []
    for function in functions:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                function()
                status = 0
            except BaseException:
                # Whatever it is, the parent's code is not to go on in its child.
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def run_forks(script: str, *arguments: str) -> None:
    """Run a script of tests/support whose work is done `in_forks`; all of them have to succeed."""
    environment = {
        # Asking the driver whether there is a GPU would leave none to children.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Processes that compile would begin when the compiler is imported.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/support" / script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=with_root() | environment,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0, said
    finally:
        # Where one is lost, others wait for it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
