"""Both passes in C++: as Python's with every strategy, but without Python where nothing watches."""

from __future__ import annotations

import itertools
import re
import resource
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from accuracy import NAMES, as_copies, eager, make_inputs
from compiling import ITS_OWN_WARNINGS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fused_norm as fn
from fused_norm.ops import node, norm_linear_ops

pytestmark = ITS_OWN_WARNINGS


@pytest.fixture
def python_forwards(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """See the inputs whose forward goes by Python."""
    calls: list[Tensor] = []
    run = norm_linear_ops.forward

    def forward(x: Tensor, *others: object) -> object:
        calls.append(x)
        return run(x, *others)

    monkeypatch.setattr(norm_linear_ops, "forward", forward)
    return calls


def inputs_for(device: str, rows: int = 16) -> list[Tensor]:
    """Return inputs that the fused kernels of a device take."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return make_inputs(rows, 8, 16, dtype=dtype, device=device, requires_grad=True)


def from_python(run: Callable[[], object]) -> object:
    """Return what a function does without the node."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "module", lambda: None)
        return run()


def gradients(
    function: Callable[..., Tensor], inputs: list[Tensor], grad_output: Tensor
) -> list[Tensor]:
    copies = as_copies(inputs)
    function(*copies).backward(grad_output)
    return [t.grad for t in copies if t is not None]


def assert_as_python(
    inputs: list[Tensor], grad_output: Tensor, run: Callable[..., Tensor] | None = None
) -> None:
    """Assert the bits that Python's backward gives."""
    mine = gradients(run or fn.fused_layernorm_linear, inputs, grad_output)
    other = from_python(lambda: gradients(fn.fused_layernorm_linear, inputs, grad_output))
    for name, a, b in zip(NAMES, mine, other, strict=True):
        assert (a is None) == (b is None), name
        assert a is None or torch.equal(a, b), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(16, 8, 16), (300, 200, 90)], ids=str)
def test_same_bits_without_python(
    shape: tuple[int, ...], dtype: torch.dtype, python_calls: list[Tensor]
) -> None:
    inputs = make_inputs(*shape, dtype=dtype, requires_grad=True)
    assert_as_python(inputs, torch.randn(shape[0], shape[2]).to(dtype))
    assert not python_calls


def test_float32_layernorm_parameters(python_calls: list[Tensor]) -> None:
    options = {"dtype": torch.float16, "affine_dtype": torch.float32, "requires_grad": True}
    assert_as_python(make_inputs(33, 24, 40, **options), torch.randn(33, 40).half())
    assert not python_calls


def test_forward_without_python(
    python_calls: list[Tensor], python_forwards: list[Tensor], device: str
) -> None:
    inputs = inputs_for(device)
    for x in (inputs[0], inputs[0].reshape(2, 1, 8, 8), inputs[0][0]):
        python_forwards.clear()
        y = fn.fused_layernorm_linear(x, *inputs[1:])
        assert not python_forwards
        expected = from_python(lambda x=x: fn.fused_layernorm_linear(x, *inputs[1:]))
        assert len(python_forwards) == 1
        assert y.shape == expected.shape
        assert torch.equal(y, expected)


def other_memory(index: int, change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def run(*inputs: Tensor) -> None:
        inputs[index].data = change(inputs[index].data)

    return run


def strided(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor + 1], -1)[..., 0]


CHANGES = {
    "strided input": other_memory(0, strided),
    "strided weight": other_memory(3, strided),
    "strided gamma": other_memory(1, strided),
    "strided bias": other_memory(4, strided),
    "input of another length": other_memory(0, lambda x: torch.cat([x, x], 1)),
    "longer weight": other_memory(3, lambda w: torch.cat([w, w], 1)),
    "shorter gamma": other_memory(1, lambda gamma: gamma[:4].clone()),
    "shorter bias": other_memory(4, lambda bias: bias[:4].clone()),
    "weight of another dtype": other_memory(3, lambda w: w.double()),
    "input of another dtype": other_memory(0, lambda x: x.double()),
    "gamma of another dtype": other_memory(1, lambda gamma: gamma.double()),
    "input shorter than a row": other_memory(0, lambda x: x[:1, :4].clone()),
    "no rows": other_memory(0, lambda x: x[:0]),
    "a vector for a weight": other_memory(3, lambda w: w.view(-1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_since_the_parameters_were_met(
    change: str, python_calls: list[Tensor], device: str
) -> None:
    def outcome(function: Callable[..., Tensor], inputs: list[Tensor]) -> object:
        try:
            return function(*inputs)
        except RuntimeError:
            return None

    inputs = inputs_for(device)
    CHANGES[change](*inputs)
    y = outcome(fn.fused_layernorm_linear, inputs)
    expected = from_python(lambda: outcome(fn.fused_layernorm_linear, inputs))
    assert (y is None) == (expected is None)
    assert y is None or torch.equal(y, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", ["sparse", "nested", "subclass"])
def test_inputs_that_are_pytorchs(layout: str, python_calls: list[Tensor], device: str) -> None:
    class Own(Tensor):
        pass

    make: dict[str, Callable[[Tensor], Tensor]] = {
        "sparse": lambda x: x.to_sparse(),
        "nested": lambda x: torch.nested.nested_tensor([x, x]),
        "subclass": lambda x: x.as_subclass(Own),
    }
    inputs = inputs_for(device)
    x = make[layout](inputs[0].detach())

    def outcome() -> tuple[type, str]:
        try:
            y = fn.fused_layernorm_linear(x, *inputs[1:])
        except (RuntimeError, NotImplementedError) as error:
            return type(error), str(error)
        return type(y), str(y.tolist() if not y.is_nested else y.unbind())

    assert outcome() == from_python(outcome)


@pytest.mark.parametrize("layout", ["negated", "zeros"])
def test_inputs_without_their_values_in_memory(
    layout: str, python_calls: list[Tensor], device: str
) -> None:
    inputs = inputs_for(device)
    x = LAYOUTS[layout](inputs[0].detach())
    y = fn.fused_layernorm_linear(x, *inputs[1:])
    assert torch.equal(y, fn.fused_layernorm_linear(x.clone(), *inputs[1:]))


@pytest.mark.parametrize("index", [0, 3])
def test_inference_tensors_are_pytorchs_error(
    index: int, python_calls: list[Tensor], device: str
) -> None:
    inputs = inputs_for(device)
    with torch.inference_mode():
        inputs[index] = inputs[index].clone()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            fn.fused_layernorm_linear(*inputs)


@pytest.mark.parametrize("subset", list(itertools.product([False, True], repeat=5))[1:], ids=str)
def test_any_subset_of_gradients(
    subset: tuple[bool, ...], python_calls: list[Tensor], device: str
) -> None:
    inputs = inputs_for(device)
    for tensor, required in zip(inputs, subset, strict=True):
        tensor.requires_grad_(required)
    grad_output = torch.randn(16, 16, device=device, dtype=inputs[0].dtype)
    assert_as_python(inputs, grad_output)
    missing = [
        None if i in (1, 2, 4) and not r else t
        for i, (t, r) in enumerate(zip(inputs, subset, strict=True))
    ]
    copies = as_copies(missing)
    fn.fused_layernorm_linear(*copies).backward(grad_output)
    for tensor, required in zip(copies, subset, strict=True):
        assert tensor is None or (tensor.grad is not None) == required
    assert not python_calls


def test_gradients_asked_for_alone(python_calls: list[Tensor], device: str) -> None:
    """`autograd.grad` asks for some of the tensors, all of which require a gradient."""
    inputs = inputs_for(device)
    y = fn.fused_layernorm_linear(*inputs)
    grad_output = torch.randn_like(y)
    every = torch.autograd.grad(y, inputs, grad_output, retain_graph=True)
    for index, expected in enumerate(every):
        (alone,) = torch.autograd.grad(y, inputs[index], grad_output, retain_graph=True)
        torch.testing.assert_close(alone, expected)
    assert not python_calls


def messages(function: Callable[..., Tensor], spoil: Callable[..., None], device: str) -> str:
    inputs = [t.clone() for t in inputs_for(device)]
    y = function(*inputs)
    with pytest.raises(RuntimeError) as error:
        spoil(y, *inputs)
    # PyTorch names its own node and the version that it met.
    return re.sub(r"output \d+ of \w+|version \d+", "", str(error.value))


def test_second_backward_is_pytorchs_error(python_calls: list[Tensor], device: str) -> None:
    def spoil(y: Tensor, *_: Tensor) -> None:
        y.sum().backward()
        y.sum().backward()

    message = messages(fn.fused_layernorm_linear, spoil, device)
    assert message == messages(eager, spoil, device)
    assert "backward through the graph a second time" in message


@pytest.mark.parametrize("index", [0, 1, 3])
def test_change_in_place_is_pytorchs_error(
    index: int, python_calls: list[Tensor], device: str
) -> None:
    def spoil(y: Tensor, *inputs: Tensor) -> None:
        with torch.no_grad():
            inputs[index].mul_(2)
        y.sum().backward()

    message = messages(fn.fused_layernorm_linear, spoil, device)
    assert "modified by an inplace operation" in message
    if index != 3:  # of the weight, PyTorch saves a transposed view
        assert message == messages(eager, spoil, device)


def test_result_may_change_in_place(python_calls: list[Tensor], device: str) -> None:
    inputs = inputs_for(device)
    y = fn.fused_layernorm_linear(*inputs)
    y.mul_(2).add_(1)
    y.backward(torch.ones_like(y))
    doubled = inputs[4].grad
    assert torch.equal(doubled, torch.full_like(doubled, 32))


def test_result_of_pytorchs_ops_may_change_in_place() -> None:
    """F.linear of one row gives a view."""
    x, gamma, beta, weight, bias = make_inputs((), 24, 10, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = fn.fused_layernorm_linear(x, gamma, beta, weight, bias)
    y.mul_(2)
    y.backward(torch.ones_like(y))
    assert torch.equal(bias.grad, torch.full_like(bias, 2))


def test_retained_graph(python_calls: list[Tensor], device: str) -> None:
    inputs = inputs_for(device)
    grad_output = torch.randn(16, 16, device=device, dtype=inputs[0].dtype)
    expected = gradients(fn.fused_layernorm_linear, inputs, grad_output)
    y = fn.fused_layernorm_linear(*inputs)
    y.backward(grad_output, retain_graph=True)
    y.backward(grad_output)
    for tensor, once in zip(inputs, expected, strict=True):
        torch.testing.assert_close(tensor.grad, 2 * once)
    assert not python_calls


def test_second_derivatives(python_calls: list[Tensor]) -> None:
    inputs = make_inputs(4, 5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        fn.fused_layernorm_linear, inputs, check_undefined_grad=True, check_batched_grad=True
    )
    assert torch.autograd.gradgradcheck(fn.fused_layernorm_linear, inputs)
    assert all(
        torch._C._functorch.is_legacy_batchedtensor(dy) or dy.requires_grad for dy in python_calls
    )
    assert python_calls


LAYOUTS = {
    "expanded": lambda dy: dy[:1].expand_as(dy),
    "transposed": lambda dy: dy.t().contiguous().t(),
    "sliced": lambda dy: torch.cat([dy, dy], 1)[:, :16],
    "negated": lambda dy: torch._neg_view(dy),
    "zeros": lambda dy: torch._efficientzerotensor(dy.shape, dtype=dy.dtype, device=dy.device),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_grad_outputs(layout: str, python_calls: list[Tensor], device: str) -> None:
    inputs = inputs_for(device)
    dy = LAYOUTS[layout](torch.randn(16, 16, device=device, dtype=inputs[0].dtype))
    assert_as_python(inputs, dy)
    assert len(python_calls) == (layout in ("negated", "zeros"))


def test_undefined_grad_output(python_calls: list[Tensor], device: str) -> None:
    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: object, grad_output: Tensor) -> None:
            return None

    inputs = inputs_for(device)
    Cut.apply(fn.fused_layernorm_linear(*inputs)).sum().backward()
    assert [t.grad for t in inputs] == [None] * 5
    assert not python_calls


def test_hooks(python_calls: list[Tensor], device: str) -> None:
    seen = []
    inputs = inputs_for(device)
    y = fn.fused_layernorm_linear(*inputs)
    assert y.grad_fn.name() == "NormLinearBackward"
    assert [edge[0].name() for edge in y.grad_fn.next_functions] == [
        "torch::autograd::AccumulateGrad"
    ] * 5
    y.register_hook(lambda dy: seen.append("tensor") or 2 * dy)
    y.grad_fn.register_prehook(lambda dy: seen.append("before"))
    y.grad_fn.register_hook(lambda dx, dy: seen.append("after"))
    inputs[0].register_hook(lambda dx: seen.append("input"))
    grad_output = torch.randn_like(y)
    y.backward(grad_output)
    assert seen == ["tensor", "before", "after", "input"]
    for tensor, expected in zip(
        inputs, gradients(fn.fused_layernorm_linear, inputs, 2 * grad_output), strict=True
    ):
        assert torch.equal(tensor.grad, expected)
    assert not python_calls


def test_saved_tensors_hooks(python_calls: list[Tensor], device: str) -> None:
    packed, unpacked = [], []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.detach().cpu().clone()

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor.shape)
        return tensor.to(device)

    def run(*inputs: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return fn.fused_layernorm_linear(*inputs)

    inputs = inputs_for(device)
    assert_as_python(inputs, torch.randn(16, 16, device=device, dtype=inputs[0].dtype), run)
    assert len(packed) == 6
    assert packed == unpacked


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, python_calls: list[Tensor], device: str) -> None:
    inputs = inputs_for(device)
    grad_output = torch.randn(16, 16, device=device, dtype=inputs[0].dtype)
    assert_as_python(
        inputs,
        grad_output,
        lambda *a: checkpoint(fn.fused_layernorm_linear, *a, use_reentrant=reentrant),
    )
    assert not python_calls


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_anomaly_mode(python_calls: list[Tensor]) -> None:
    inputs = inputs_for("cpu")
    with torch.autograd.detect_anomaly(check_nan=True):
        y = fn.fused_layernorm_linear(*inputs)
        with (
            pytest.warns(UserWarning, match="(?s)NormLinearBackward.*in test_anomaly_mode"),
            pytest.raises(RuntimeError, match="'NormLinearBackward' returned nan values"),
        ):
            y.backward(torch.full_like(y, torch.nan))


def test_modes_see_the_backward(python_calls: list[Tensor], device: str) -> None:
    class Log(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: object, types: object, args: object = (), kwargs: object = None
        ) -> object:
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    names: list[str] = []
    y = fn.fused_layernorm_linear(*inputs_for(device))
    with Log():
        y.backward(torch.randn_like(y))
    assert "fused_norm.norm_linear_backward.default" in names
    assert len(python_calls) == 1


def test_tangent_of_grad_output(python_calls: list[Tensor]) -> None:
    inputs = make_inputs(4, 5, 3, requires_grad=True)
    y = fn.fused_layernorm_linear(*inputs)
    dy, tangent = torch.randn_like(y), torch.randn_like(y)
    expected = torch.autograd.grad(y, inputs, tangent, retain_graph=True)
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        result = torch.autograd.grad(y, inputs, forward_ad.make_dual(dy, tangent))
        tangents = [forward_ad.unpack_dual(g).tangent for g in result]
    for mine, other in zip(tangents, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert len(python_calls) == 1


def test_compiled_autograd(python_calls: list[Tensor]) -> None:
    inputs = inputs_for("cpu")
    inputs[1].requires_grad_(False)
    grad_output = torch.randn(16, 16)
    expected = gradients(fn.fused_layernorm_linear, inputs, grad_output)
    y = fn.fused_layernorm_linear(*inputs)
    compiler = torch.compile(backend="eager")
    with torch._dynamo.compiled_autograd._enable(compiler):
        y.backward(grad_output)
    for tensor, other in zip(inputs, expected, strict=True):
        assert (tensor.grad is None) == (other is None)
        assert other is None or torch.equal(tensor.grad, other)
    assert len(python_calls) == 1


@pytest.mark.parametrize("index", [0, 3])
def test_other_memory_since_the_forward(index: int, python_calls: list[Tensor]) -> None:
    """An assignment to `data` counts no version: the kernels must not read what is not there."""
    inputs = inputs_for("cpu")
    y = fn.fused_layernorm_linear(*inputs)
    inputs[index].data = torch.randn(3, 4)
    with pytest.raises(RuntimeError):
        y.backward(torch.randn_like(y))
    assert len(python_calls) == 1


def test_error_of_python_is_raised(
    python_calls: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("of a test")

    y = fn.fused_layernorm_linear(*inputs_for("cpu"))
    monkeypatch.setattr(node, "gradients", fail)
    with pytest.raises(ZeroDivisionError, match="of a test"):
        y.backward(torch._neg_view(torch.ones_like(y)))


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
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
