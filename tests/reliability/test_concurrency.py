"""Threads, processes, streams, devices and signals at the same time.

Two processes on an empty cache, a build that is interrupted, and fork after use are in
test_native.py; a stalled producer on a side stream and CUDA graphs in test_registration.py.
"""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import textwrap
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import torch
from accuracy import make_inputs
from processes import run_python
from torch import Tensor, nn

import fused_norm as fn

CASES = [
    (shape, dtype)
    for shape in ((16, 8, 16), (37, 50, 65), (200, 96, 40), (300, 257, 129))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
]


def work(index: int, device: str = "cpu") -> list[Tensor]:
    """Return the output and gradients of a case, from inputs that its number decides."""
    shape, dtype = CASES[index % len(CASES)]
    if device != "cpu" and dtype is torch.float64:
        dtype = torch.float32
    generator = torch.Generator().manual_seed(index)
    M, K, N = shape
    sizes = (M, K), (K,), (K,), (N, K), (N,), (M, N)
    *inputs, grad_output = (torch.randn(s, generator=generator).to(device, dtype) for s in sizes)
    leaves = [t.requires_grad_() for t in inputs]
    y = fn.fused_layernorm_linear(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad_output)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def test_sixteen_threads(device: str) -> None:
    """Every dtype and several shapes at once, forward and backward: the bits of one thread."""
    count = 20 * len(CASES)
    expected = [work(i, device) for i in range(len(CASES))]
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda i: work(i % len(CASES), device), range(count)))
    assert all(same(results[i], expected[i % len(CASES)]) for i in range(count))


def test_threads_that_change_the_number_of_threads() -> None:
    expected = [work(i) for i in range(len(CASES))]
    before = torch.get_num_threads()
    stop = threading.Event()

    def change() -> None:
        count = 0
        while not stop.wait(0.001):
            count += 1
            torch.set_num_threads(1 + count % 4)

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for i in range(20 * len(CASES)):
            assert same(work(i % len(CASES)), expected[i % len(CASES)])
    finally:
        stop.set()
        changer.join()
        torch.set_num_threads(before)


def test_one_module_in_many_threads() -> None:
    """Gradients of threads that share Parameters add up."""
    layer, x = fn.LayerNormLinear(64, 32, dtype=torch.float64), torch.randn(16, 64).double()
    layer(x).sum().backward()
    once = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: layer(x).sum().backward(), range(32)))
    for parameter, gradient in zip(layer.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 32 * gradient)


def results_as_bytes(index: int) -> list[bytes]:
    return [t.view(torch.uint8).numpy().tobytes() for t in work(index)]


# Other processes take the strategies that users' do.
@pytest.mark.as_dispatched
@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_other_processes(method: str) -> None:
    expected = [results_as_bytes(i) for i in range(4)]
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        assert list(pool.map(results_as_bytes, range(4))) == expected


class Normalized(torch.utils.data.Dataset[Tensor]):
    """Items that the op makes."""

    def __init__(self) -> None:
        self.layer = fn.LayerNormLinear(64, 32).requires_grad_(False)
        self.x = torch.randn(12, 100, 64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        return self.layer(self.x[index])


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_data_loader_workers(method: str) -> None:
    data = Normalized()
    expected = torch.stack([data[i] for i in range(len(data))])
    loader = torch.utils.data.DataLoader(
        data, 4, num_workers=2, multiprocessing_context=method, timeout=600
    )
    assert torch.equal(torch.cat(list(loader)), expected)


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ("-W", "ignore", "-c", textwrap.dedent(script))
    return run_python(*command, timeout=600, **environment)


def test_fork_before_first_use() -> None:
    """The child loads the kernels itself, and computes what the parent then computes."""
    result = run(
        """
        import os, torch, fused_norm as fn
        x, w = torch.randn(300, 256), torch.randn(128, 256)
        reader, writer = os.pipe()
        pid = os.fork()
        y = fn.fused_layernorm_linear(x, None, None, w).numpy().tobytes()
        if pid == 0:
            os.write(writer, bytes([hash(y) % 251])), os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert os.read(reader, 1)[0] == hash(y) % 251
        """,
        PYTHONHASHSEED="1",
    )
    assert result.returncode == 0, result.stderr


def test_interrupts_between_calls() -> None:
    """Ctrl-C comes at any moment; the next call works.

    An interrupt that falls into a destructor or a weak reference's callback is one that Python
    reports and ignores. The handler says that it ran: a timer that has run out does not, since
    the handler may still be waiting for its turn, and would interrupt what checks the call.
    """
    result = run(
        """
        import signal, torch, fused_norm as fn
        inputs = [torch.randn(s, requires_grad=True) for s in ((200, 96), (96,), (96,), (40, 96))]
        expected = fn.fused_layernorm_linear(*inputs)
        handled = interrupted = 0

        def interrupt(number, frame):
            global handled
            handled += 1
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, interrupt)
        while interrupted < 200:
            before = handled
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0007)
                while handled == before:
                    y = fn.fused_layernorm_linear(*inputs)
                    y.sum().backward()
            except KeyboardInterrupt:
                interrupted += 1
            assert torch.equal(fn.fused_layernorm_linear(*inputs), expected)
        """
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
class TestStreams:
    def test_streams_that_wait_for_stalled_producers(self) -> None:
        """Each stream's input is written late; reading it early would give zeros."""
        count = 6
        expected = [work(i, "cuda") for i in range(count)]
        inputs = []
        for i in range(count):
            (M, K, N), dtype = CASES[i]
            dtype = torch.float32 if dtype is torch.float64 else dtype
            generator = torch.Generator().manual_seed(i)
            sizes = (M, K), (K,), (K,), (N, K), (N,)
            inputs.append([torch.randn(s, generator=generator).to("cuda", dtype) for s in sizes])
        late = [torch.zeros_like(tensors[0]) for tensors in inputs]
        streams = [torch.cuda.Stream() for _ in range(count)]
        torch.cuda.synchronize()
        ys = []
        for stream, x, tensors in zip(streams, late, inputs, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)
                x.copy_(tensors[0])
                ys.append(fn.fused_layernorm_linear(x, *tensors[1:]))
        torch.cuda.synchronize()
        for y, results in zip(ys, expected, strict=True):
            torch.testing.assert_close(y, results[0])

    def test_weight_changed_on_another_stream(self) -> None:
        """A weight is kept folded where no gradient follows: a change of it is waited for."""
        layer = fn.LayerNormLinear(1024, 1024, device="cuda", dtype=torch.bfloat16)
        layer.requires_grad_(False)
        x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
        layer(x)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            layer.weight.mul_(2)
        torch.cuda.current_stream().wait_stream(side)
        y = layer(x)
        torch.testing.assert_close(y, nn.Sequential(*layer.to_modules())(x), rtol=3e-2, atol=3e-2)

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_two_devices(self) -> None:
        first = work(5, "cuda:0")
        with torch.cuda.device(0):  # the current device is not that of the tensors
            second = work(5, "cuda:1")
        assert all(t.device.index == 1 for t in second)
        assert same(first, [t.to("cuda:0") for t in second])
        inputs = make_inputs(16, 8, 16, device="cuda:0")
        with pytest.raises(RuntimeError, match="same device"):
            fn.fused_layernorm_linear(inputs[0].to("cuda:1"), *inputs[1:])

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_threads_on_two_devices(self) -> None:
        expected = [work(i, "cuda:0") for i in range(8)]
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda i: work(i % 8, f"cuda:{i % 2}"), range(160)))
        for i, result in enumerate(results):
            assert same([t.to("cuda:0") for t in result], expected[i % 8])


def test_signal_handlers_are_left_alone() -> None:
    before = [signal.getsignal(number) for number in signal.valid_signals()]
    work(0)
    assert [signal.getsignal(number) for number in signal.valid_signals()] == before
