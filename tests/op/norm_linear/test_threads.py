"""The CPU kernels run on PyTorch's threads: on no others, and out of the way of its ops."""

from __future__ import annotations

import os
import textwrap

import pytest
from processes import run_python

from fused_norm.native import build

pytestmark = [
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core has no threads to share"),
    pytest.mark.skipif(not build.gomp_parallel(), reason="this PyTorch has no libgomp"),
]

COMMON = """
import os, statistics, time
import torch
import torch.nn.functional as F
import fused_norm as fn

shapes = (512, 768), (768,), (768,), (768, 768), (768,)
inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]


def ours():
    fn.fused_layernorm_linear(*inputs).sum().backward()


def eager():
    x, gamma, beta, weight, bias = inputs
    F.linear(F.layer_norm(x, (768,), gamma, beta), weight, bias).sum().backward()


def seconds():
    # What each thread has run so far.
    tasks = os.listdir("/proc/self/task")
    return {t: int(open(f"/proc/self/task/{t}/schedstat").read().split()[0]) / 1e9 for t in tasks}


def during(function):
    function()
    before = seconds()
    for _ in range(30):
        function()
    return {t: total - before.get(t, 0) for t, total in seconds().items()}
"""


def run(script: str) -> list[float]:
    """Return the numbers that a new process prints, whose threads are its own."""
    result = run_python("-W", "ignore", "-c", COMMON + textwrap.dedent(script), timeout=300)
    assert result.returncode == 0, result.stderr
    return [float(word) for word in result.stdout.split()]


def test_one_thread_does_all_the_work() -> None:
    """Idle threads there may be: Mojo's runtime makes some when it is loaded."""
    (others,) = run(
        """
        torch.set_num_threads(1)
        spent = during(ours)
        print(1 - spent[str(os.getpid())] / sum(spent.values()))
        """
    )
    assert others < 0.02


def test_two_threads_are_those_of_pytorch() -> None:
    """Regression: a second pool on the same cores slows both."""
    others, second = run(
        """
        torch.set_num_threads(2)
        pytorchs = {t for t, spent in during(eager).items() if spent > 0.001}
        spent = during(ours)
        total = sum(spent.values())
        print(sum(s for t, s in spent.items() if t not in pytorchs) / total)
        print(1 - spent[str(os.getpid())] / total)
        """
    )
    assert others < 0.02
    # Both work, so work is what the measure sees.
    assert second > 0.2


def test_ops_between_calls_are_not_slowed() -> None:
    """A wide bound, for busy machines; `poe bench --interference` measures it."""
    after_eager, after_ours = run(
        """
        torch.set_num_threads(2)
        x, weight = torch.randn(256, 768), torch.randn(768, 768)
        times = {eager: [], ours: []}
        for _ in range(60):
            for before, measured in times.items():
                before()
                start = time.perf_counter()
                F.linear(x, weight)
                measured.append(time.perf_counter() - start)
        print(*(statistics.median(measured) for measured in times.values()))
        """
    )
    assert after_ours < 2 * after_eager
