"""Shared fixtures: the devices of this machine, a seed and poisoned memory for every test."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from devices import GPU
from guards import time_no_guards
from strategies import hopper_goes, pass_failed, tell_again, told
from torch import Tensor

from fused_norm.call import frozen
from fused_norm.call.record import AROUND_PRODUCTS, FUSED, KEPT_FOLD, NEW_FOLD
from fused_norm.chain import kernels
from fused_norm.chain import library as chain
from fused_norm.ops import node

# cuBLAS asks for this where PyTorch is told to be deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Files that take a worker longest, in the order in which they begin; the others, of seconds each,
# fill what is left. Of the first, two wait for different compilers.
LONGEST = {
    name: place
    for place, name in enumerate(
        [
            *("test_documents.py", "test_sm90.py", "test_cross_compile.py"),
            *("test_puzzle_driver.py", "test_worklog.py", "test_distributed.py"),
            *("test_batch_invariant.py", "test_family_peers.py", "test_family_registration.py"),
            *("test_registration.py", "test_backend.py", "test_node.py", "test_adoption.py"),
            *("test_training_optimizers.py", "test_training_writes.py", "test_training_loops.py"),
            # Of those that would begin last, the two that build kernels or compile models.
            *("test_layernorm_linear.py", "test_freeze.py"),
        ]
    )
}
# They run MAX graphs. The first one starts a thread that wakes 5000 times a second for as long as
# the process lives, which takes a tenth of a core: so they begin last, the longer one first, and
# the tests of scripts fill what is left.
OF_MAX = ["test_max_ops.py", "test_puzzle.py"]
# One row of float16 has code of its own.
OF_FLOAT16 = ("test_layernorm_linear.py", "test_few_rows.py")

# Where no fold is kept, and where one may be.
FORWARD_STRATEGIES = {
    "folded": (NEW_FOLD, KEPT_FOLD),
    "composed": (FUSED, FUSED),
    "torch": (AROUND_PRODUCTS, AROUND_PRODUCTS),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too")
    parser.addoption(
        "--forward-strategy",
        choices=list(FORWARD_STRATEGIES),
        help="how Hopper's forward runs, at every size: with a new fold or a kept one, our "
        "LayerNorm and our product, our LayerNorm and PyTorch's product (default: the fastest)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Leave the cores to the other workers, where there are some, and start no more processes."""
    if getattr(config.option, "numprocesses", None):
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        # Each would import PyTorch for Inductor. A GPU's kernels take long to compile.
        if not torch.cuda.is_available():
            os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes longest, and leave slow tests out.

    Slow tests run if all are asked for, or `-m slow` or a node id names them.
    """
    # A path rebuilds its name whenever it is asked.
    names = {item.path: item.path.name for item in items}
    places = {path: _place(path) for path in names}
    items.sort(key=lambda item: places[item.path])
    if not torch.cuda.is_available():
        for item in items:
            if names[item.path] not in OF_FLOAT16 and _is_float16(item):
                item.add_marker(pytest.mark.slow)
    if config.option.all or "slow" in config.option.markexpr or any("::" in a for a in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]


def _place(path: Path) -> int:
    """Return when a file begins: its tests follow those of lower places."""
    if path.name in OF_MAX:
        return len(LONGEST) + 1 + OF_MAX.index(path.name)
    if path.parent.name == "scripts":
        return len(LONGEST) + 1 + len(OF_MAX)
    return LONGEST.get(path.name, len(LONGEST))


def pytest_collection_finish() -> None:
    """Exclude everything imported so far from garbage collections: each takes half a second.

    Collect less often, too: a compile makes thousands of objects that stay.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def pytest_runtest_setup() -> None:
    time_no_guards()


def pytest_unconfigure() -> None:
    """Have extensions find at the end that nothing of theirs is left."""
    gc.unfreeze()


def _is_float16(item: pytest.Item) -> bool:
    """Return whether a test needs kernels of float16.

    A CPU's are float32's in another width, and building them takes two minutes: files that need no
    more than those of a norm and a Linear layer keep their cases.
    """
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    found = [v["dtype"] if isinstance(v, dict) and "dtype" in v else v for v in values]
    return any(v is torch.float16 for v in found)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Fill memory that is allocated and not written with NaN, so that no kernel leaves any."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(name="back_to_back")
def _back_to_back(_poison: None) -> Iterator[None]:
    """Leave memory unfilled, so that kernels follow each other.

    PyTorch fills the result of each call by a kernel of its own, which begins once the one before
    has ended: a kernel that begins too early would find everything there.
    """
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(autouse=True)
def _nothing_stays_frozen() -> Iterator[None]:
    """Have a test fail that leaves something frozen: calls of the next one would ask for it."""
    yield
    if frozen.is_any():
        # What a test compiled is in cycles, and so is what it froze.
        gc.collect()
    left = {record for each in frozen._frozen.values() for r in each if (record := r())}
    for record in left:
        record.thaw()
    assert not left
    assert not frozen.is_any()


@pytest.fixture(autouse=True)
def _pass_does_not_fail(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a pass over a graph that fails be an error; users get a warning and their graph."""
    if "pass_fails" not in request.keywords:
        monkeypatch.setattr("fused_norm.models.fuse._say_failed", pass_failed)


@pytest.fixture(autouse=True)
def _forward_strategy(request: pytest.FixtureRequest) -> Iterator[None]:
    name = request.config.option.forward_strategy
    with hopper_goes(*FORWARD_STRATEGIES[name]) if name else nullcontext():
        yield


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def own_kernels() -> Iterator[None]:
    """Have the CPU's kernels run in bfloat16 where PyTorch's ops are faster, too."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(kernels, "bfloat16_product", lambda: None)
    tell_again()
    yield
    monkeypatch.undo()
    tell_again()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str], list[tuple[Any, ...]]]:
    """Returns what keeps the positional arguments of every call of a module's function."""

    def watched(module: ModuleType, name: str) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []
        function = getattr(module, name)

        def call(*arguments: Any, **named: Any) -> Any:
            calls.append(arguments)
            return function(*arguments, **named)

        monkeypatch.setattr(module, name, call)
        return calls

    return watched


@pytest.fixture(autouse=True)
def _kernels_at_every_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also run kernels at sizes at which PyTorch's ops are faster."""
    is_dispatched = "as_dispatched" in request.keywords
    if not is_dispatched:
        monkeypatch.setattr(kernels, "cpu_strategy", lambda: FUSED)
        monkeypatch.setattr("fused_norm.ops.norm_linear.is_host_bound", lambda t: False)
    if told[0] is not is_dispatched:
        tell_again()
        told[0] = is_dispatched


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled node: that of the cache, or one for these tests."""
    if chain.is_built(chain.NODE):
        return chain.NODE.path
    if chain.compiler() is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Of all workers: one builds, and others wait for it.
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSED_NORM_CACHE_DIR", str(folder / "node"))
        return chain.build(chain.NODE)


@pytest.fixture
def python_calls(library: Path, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Have the node in force, and see the grad_outputs that it leaves to Python."""
    module = chain.import_node(library)
    calls = []

    def backward(spec: object, tensors: object, grad_outputs: Any, needed: object) -> Any:
        calls.append(grad_outputs[0])
        return python(spec, tensors, grad_outputs, needed)

    python = node.backward
    monkeypatch.setattr(node, "backward", backward)
    node.tell(module)
    monkeypatch.setattr(node, "module", lambda: module)
    return calls
