"""Folds on Hopper: made again by every call, and kept for frozen parameters alone."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accuracy import as_float64, assert_within_budget, eager, make_inputs
from devices import ON_HOPPER
from torch import Tensor, nn

import fused_norm as fn
from fused_norm.call import frozen
from fused_norm.call.prepared import allocate
from fused_norm.ops import folding
from fused_norm.ops.family import family_call

pytestmark = [
    pytest.mark.gpu,
    ON_HOPPER,
]
BFLOAT16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}


@pytest.fixture(autouse=True, params=["C++", "Python"])
def _strategy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have calls served by the compiled node, and without it."""
    if request.param == "C++":
        request.getfixturevalue("python_calls")
    else:
        monkeypatch.setattr("fused_norm.ops.node.module", lambda: None)


@pytest.fixture
def folds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses of the weights whose folds were made to be kept."""
    made: list[int] = []
    make = folding._fold

    def counted(gamma: Any, beta: Any, weights: Any, *others: Any) -> Any:
        made.append(weights[0].data_ptr())
        return make(gamma, beta, weights, *others)

    monkeypatch.setattr(folding, "_fold", counted)
    return made


def a_layer() -> fn.LayerNormLinear:
    layer = fn.LayerNormLinear(256, 128, **BFLOAT16)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 16)
    return layer.eval()


def inputs(rows: int = 16, mean: float = 0.0) -> list[Tensor]:
    return make_inputs(rows, 256, 128, mean=mean, **BFLOAT16)


def check(tensors: list[Tensor]) -> Tensor:
    y = fn.fused_layernorm_linear(*tensors)
    assert_within_budget("y", y, eager(*as_float64(tensors)), eager(*tensors))
    return y


def check_layer(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y: Tensor = layer(x)
        bar = eager(x, *layer.parameters())
        assert_within_budget("y", y, eager(*as_float64([x, *layer.parameters()])), bar)
    return y


def _fused(name: str) -> Callable[[list[nn.Parameter]], Callable[[], None]]:
    def begin(parameters: list[nn.Parameter]) -> Callable[[], None]:
        optimizer = getattr(torch.optim, name)(parameters, lr=0.5, fused=True)

        def step() -> None:
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()

        return step

    begin.__name__ = f"fused {name}"
    return begin


def _data(parameters: list[nn.Parameter]) -> Callable[[], None]:
    def step() -> None:
        for p in parameters:
            p.data += torch.randn_like(p)

    return step


def _data_copy(parameters: list[nn.Parameter]) -> Callable[[], None]:
    def step() -> None:
        for p in parameters:
            p.data.copy_(torch.randn_like(p))

    return step


def _vector(parameters: list[nn.Parameter]) -> Callable[[], None]:
    def step() -> None:
        vector = torch.randn(sum(p.numel() for p in parameters), **BFLOAT16)
        nn.utils.vector_to_parameters(vector, parameters)

    return step


def _dlpack(parameters: list[nn.Parameter]) -> Callable[[], None]:
    def step() -> None:
        for p in parameters:
            torch.from_dlpack(p.detach()).normal_()

    return step


def _raw(parameters: list[nn.Parameter]) -> Callable[[], None]:
    """Write by the driver, as a communication library does."""
    driver = ctypes.CDLL("libcuda.so.1")

    def step() -> None:
        for p in parameters:
            values = torch.randn_like(p)
            torch.cuda.synchronize()
            places = map(ctypes.c_uint64, (p.data_ptr(), values.data_ptr()))
            assert driver.cuMemcpyDtoD_v2(*places, ctypes.c_size_t(p.nbytes)) == 0

    return step


WRITES = [
    *map(_fused, ("AdamW", "Adam", "SGD", "Adagrad")),
    *(_data, _data_copy, _vector, _dlpack, _raw),
]


@pytest.mark.parametrize("writes", WRITES, ids=lambda f: f.__name__.strip("_"))
def test_writes_that_no_version_tells_of(
    writes: Callable[[list[nn.Parameter]], Callable[[], None]], folds: list[int]
) -> None:
    """Regression: a kept fold went by version counters, which these leave as they are."""
    layer, (x, *_) = a_layer(), inputs()
    step = writes(list(layer.parameters()))
    for _ in range(3):
        for _ in range(3):
            check_layer(layer, x)
        try:
            step()
        except RuntimeError as error:
            if "`fused=True` requires" not in str(error):
                raise
            pytest.skip("this PyTorch has no fused Adagrad on GPUs")
    check_layer(layer, x)
    assert not folds


def test_one_fold_of_frozen_parameters(folds: list[int]) -> None:
    layer, (x, *_) = fn.freeze(a_layer()), inputs()
    results = [check_layer(layer, x) for _ in range(4)]
    assert len(folds) == 1
    assert torch.equal(results[0], results[3])
    layer.train()
    layer(x).square().mean().backward()
    torch.optim.SGD(layer.parameters(), lr=0.5).step()
    check_layer(layer, x)
    fn.freeze(layer.eval())
    check_layer(layer, x)
    assert len(folds) == 2


def test_memory_of_folds_goes_with_the_model() -> None:
    layer, (x, *_) = fn.freeze(a_layer()), inputs()
    check_layer(layer, x)
    gc.collect()
    before = torch.cuda.memory_allocated()
    fn.unfreeze(layer)
    assert torch.cuda.memory_allocated() <= before - 2 * layer.weight.numel()


def test_offloaded_weight(folds: list[int]) -> None:
    layer, x = a_layer(), inputs()[0]
    expected, weight = check_layer(layer, x), layer.weight.detach().clone()
    truth = eager(*as_float64([x, *layer.parameters()]))
    bar = eager(x, *layer.parameters())
    fn.freeze(layer, offload=True)
    with torch.no_grad():
        for rows in (16, 1, 16, 5000):
            y = layer(x[:1].expand(rows, -1).contiguous() if rows != 16 else x)
            if rows == 16:
                assert_within_budget("y", y, truth, bar)
            else:
                torch.testing.assert_close(y[-1], expected[0], rtol=0.05, atol=0.05)
    assert len(folds) == 1
    assert layer.weight.isnan().all()
    with pytest.raises(RuntimeError, match="offload=True"):
        layer(x)
    with torch.no_grad(), pytest.raises(RuntimeError, match="offload=True"):
        fn.norm_linear(x, layer.weight, scale=torch.zeros_like(x))
    layer.train()
    assert torch.equal(layer.weight, weight)
    layer(x).sum().backward()


def test_threads_that_share_an_offloaded_layer(folds: list[int]) -> None:
    """Each on a stream of its own: none reads NaN, nor memory that was freed."""
    layer, x = a_layer(), inputs()[0]
    with torch.no_grad():
        expected = fn.freeze(layer)(x)
    threads = 4
    start = threading.Barrier(threads)

    def run(_: int) -> Tensor:
        start.wait()
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            results = [layer(x) for _ in range(8)]
            torch.cuda.current_stream().synchronize()
        assert all(torch.equal(y, results[0]) for y in results)
        return results[0]

    with ThreadPoolExecutor(threads) as pool:
        for _ in range(20):
            fn.freeze(layer, offload=True)
            for y in pool.map(run, range(threads)):
                assert torch.equal(y, expected)
            assert layer.weight.isnan().all()
            torch.full((1 << 20,), float("nan"), **BFLOAT16)
    assert len(folds) == 1 + 20


@pytest.mark.as_dispatched
def test_small_calls_find_what_was_kept(
    folds: list[int], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fused_norm.chain.library.load_node", lambda: object())
    layer = fn.LayerNormLinear(4096, 4096, **BFLOAT16).eval()
    x = torch.randn(64, 4096, **BFLOAT16)
    fn.freeze(layer)
    with torch.no_grad():
        layer(x)
        assert len(folds) == 1
        if "C++" in request.node.name:
            # From now on, Python is not asked.
            monkeypatch.setattr("fused_norm.ops.norm_linear.call", lambda *_: pytest.fail("asked"))
        check_layer(layer, x)


def have_workspaces() -> None:
    """Have cuBLAS and cuBLASLt allocate what they keep from their first product on, 32 MiB each.

    That is for this thread, and for those that fold.
    """
    x = torch.randn(64, 1024, **BFLOAT16)

    def multiplied() -> tuple[Tensor, ...]:
        return torch.mm(x, x.t()), F.linear(x, x, x[:, 0].contiguous())

    multiplied()
    allocate(multiplied, x.device)


def test_offloaded_model_takes_no_more_memory() -> None:
    # What earlier tests left would be freed meanwhile.
    gc.collect()
    have_workspaces()
    x = torch.randn(64, 1024, **BFLOAT16)
    before = torch.cuda.memory_allocated()
    model = nn.Sequential(*(fn.LayerNormLinear(1024, 1024, **BFLOAT16) for _ in range(16))).eval()
    plain = torch.cuda.memory_allocated() - before
    with torch.no_grad():
        expected = model(x)
        fn.freeze(model, offload=True)
        torch.testing.assert_close(model(x), expected, rtol=0.05, atol=0.05)
    torch.cuda.synchronize()
    gc.collect()
    # The placeholder of all weights is as large as one of them.
    assert torch.cuda.memory_allocated() - before - expected.nbytes < plain * 1.15


@pytest.mark.parametrize("is_tied", [True, False])
def test_offloaded_model_with_a_head_takes_no_more_memory(
    is_tied: bool, folds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["fused_norm.freeze"], "_SMALL_BYTES", 0)
    gc.collect()
    have_workspaces()
    tokens = torch.randint(8192, (64,), device="cuda")
    before = torch.cuda.memory_allocated()
    embedding = nn.Embedding(8192, 1024, **BFLOAT16)
    head = fn.LayerNormLinear(1024, 8192, bias=False, **BFLOAT16)
    nn.init.normal_(head.weight, std=1024**-0.5)
    if is_tied:
        embedding.weight = head.weight
    model = nn.Sequential(embedding, head).eval()
    plain = torch.cuda.memory_allocated() - before
    with torch.no_grad():
        expected = model(tokens)
        fn.freeze(model)
        torch.testing.assert_close(model(tokens), expected, rtol=0.05, atol=0.05)
        assert len(folds) == 1
        fn.freeze(model, offload=True)
        for _ in range(2):
            torch.testing.assert_close(model(tokens), expected, rtol=0.05, atol=0.05)
    assert len(folds) == 1
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() - before - expected.nbytes < plain * 1.15


@pytest.mark.parametrize("rows", [50, 5000])
def test_graph_sees_the_weights_of_its_replay(rows: int) -> None:
    tensors = inputs(rows)
    for _ in range(3):
        fn.fused_layernorm_linear(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fn.fused_layernorm_linear(*tensors)
    tensors[3].mul_(-2)
    graph.replay()
    assert_within_budget("y", y, eager(*as_float64(tensors)), eager(*tensors))


def captured(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    with torch.no_grad():
        for _ in range(2):
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run()
    graph.replay()
    return graph, y


def _other_norm(layer: fn.LayerNormLinear, x: Tensor) -> None:
    with torch.no_grad(), fn.frozen_parameters():
        for _ in range(3):
            fn.norm_linear(x, layer.weight, normalization="rms_norm")


def _data_of_gamma(layer: fn.LayerNormLinear, x: Tensor) -> None:
    layer.layer_norm_weight.data = layer.layer_norm_weight.data.clone()


def _in_training(layer: fn.LayerNormLinear, x: Tensor) -> None:
    layer.train()


@pytest.mark.parametrize("then", [_other_norm, _data_of_gamma, _in_training])
@pytest.mark.parametrize("frozen_by", ["freeze", "context"])
def test_graph_keeps_what_it_reads(
    then: Callable[[fn.LayerNormLinear, Tensor], None], frozen_by: str, folds: list[int]
) -> None:
    """Regression: its fold was freed when the weight met another norm or got other data."""
    layer, x = a_layer(), inputs()[0]
    if frozen_by == "freeze":
        graph, y = captured(lambda: fn.freeze(layer)(x) if not frozen.is_any() else layer(x))
    else:
        with fn.frozen_parameters():
            graph, y = captured(lambda: layer(x))
    assert len(folds) == 1
    expected = y.clone()
    then(layer, x)
    gc.collect()
    torch.cuda.empty_cache()
    for _ in range(8):
        # Whatever was freed is NaN now.
        torch.full((128, 256), float("nan"), **BFLOAT16)
    graph.replay()
    assert torch.equal(y, expected)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("is_frozen", [False, True])
def test_graph_trees_of_the_compiler(is_frozen: bool) -> None:
    """Regression: what was kept between calls was allocated in a graph's memory."""
    layers = nn.Sequential(*(fn.LayerNormLinear(256, 256, **BFLOAT16) for _ in range(3))).eval()
    x = torch.randn(64, 256, **BFLOAT16)
    if is_frozen:
        fn.freeze(layers)
    compiled = torch.compile(layers, mode="reduce-overhead")
    with torch.no_grad():
        expected = layers(x)
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(x), expected, rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_option_of_the_backend(mode: str | None, folds: list[int]) -> None:
    model = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 128)).to(**BFLOAT16).eval()
    x = inputs()[0]
    options: dict[str, Any] = {"freeze": True, "small": True}
    if mode:
        options["triton.cudagraphs"] = True
    compiled = torch.compile(model, backend="fused_norm", options=options)
    with torch.no_grad():
        expected = model(x)
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(x), expected, rtol=0.05, atol=0.05)
    assert len(folds) == 1
    model.train()
    torch._dynamo.reset()


def test_streams_and_threads() -> None:
    layer, x = fn.freeze(a_layer()), inputs()[0]
    expected = check_layer(layer, x)

    def run(_: int) -> Tensor:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(4):
                y = layer(x)
        stream.synchronize()
        return y

    with ThreadPoolExecutor(8) as pool:
        for y in pool.map(run, range(32)):
            assert torch.equal(y, expected)


@pytest.mark.parametrize("mean", [0, 1, 10, 100, 1000])
@pytest.mark.parametrize("rows", [50, 1500])
def test_large_means(mean: float, rows: int) -> None:
    tensors = inputs(rows, mean=mean)
    check(tensors)
    with fn.frozen_parameters():
        for _ in range(3):
            check(tensors)


def test_misaligned_tensors() -> None:
    x, gamma, beta, weight, bias = inputs()
    shifted = []
    for tensor in (x, weight):
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
        shifted.append(room[1:].view_as(tensor).copy_(tensor))
    with fn.frozen_parameters():
        for _ in range(3):
            check([shifted[0], gamma, beta, shifted[1], bias])


def test_inference_tensors(folds: list[int]) -> None:
    with torch.inference_mode():
        tensors = [t.clone() for t in inputs()]
        for number in (1, 2):
            for _ in range(3):
                check(tensors)
            with fn.frozen_parameters():
                for _ in range(3):
                    y = check(tensors)
                assert len(folds) == number
                assert y.is_inference()
            tensors[3].mul_(2)


def test_pair_that_a_gate_joins(folds: list[int]) -> None:
    """Products with an activation take rows that were normalized, also of frozen parameters."""
    x, gamma, beta, gate, bias = inputs()
    tensors = [x, gamma, beta, gate, bias, torch.randn_like(gate) / 16, torch.randn_like(bias)]

    def composed(*tensors: Tensor) -> Tensor:
        x, gamma, beta, gate, bias, up, up_bias = tensors
        z = F.layer_norm(x, (256,), gamma, beta)
        return F.silu(F.linear(z, gate, bias)) * F.linear(z, up, up_bias)

    for changed in (1, 3, 5):
        with fn.frozen_parameters():
            for _ in range(3):
                x, gamma, beta, gate, bias, up, up_bias = tensors
                (y,) = family_call(
                    *(x, [gate, up], [bias, up_bias], (None, None, None), True, False),
                    norm_weight=gamma,
                    norm_bias=beta,
                    activation="swiglu",
                )
                assert_within_budget("y", y, composed(*as_float64(tensors)), composed(*tensors))
        tensors[changed].mul_(1.25)
    assert not folds
