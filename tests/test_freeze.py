"""Freezing: what ends it, what it forbids, and that nothing outlives a call without it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accuracy import make_inputs
from processes import run_python
from torch import Tensor, nn

import fused_norm as fn
from fused_norm import recipes
from fused_norm.call import contexts, frozen
from fused_norm.call.offload import key_of
from fused_norm.chain import library
from fused_norm.ops import node, norm_linear
from fused_norm.ops.fp8 import scaled_linear

x = torch.randn(6, 32)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    gc.collect()
    assert not frozen.is_any()
    yield
    torch._dynamo.reset()
    gc.collect()
    assert not frozen.is_any()


def a_model(device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    options = {"device": device, "dtype": dtype}
    return nn.Sequential(
        fn.LayerNormLinear(32, 16, **options),
        nn.Linear(16, 32, **options),
        fn.LayerNormMLP(32, 64, **options),
    ).eval()


def test_a_call_is_held_by_what_froze_all_of_its_parameters() -> None:
    """A fold of a frozen weight and a gamma that is not would go stale."""
    layer = fn.LayerNormLinear(32, 16).eval()
    keys = tuple(key_of(p) for p in (layer.weight, layer.layer_norm_weight))
    part = fn.freeze(nn.ParameterList([layer.weight]).eval())
    assert frozen.holding((keys[0], None)) is not None
    assert frozen.holding(keys) is None
    fn.unfreeze(part)
    fn.freeze(layer)
    assert frozen.holding(keys) is not None
    fn.unfreeze(layer)


def is_frozen(model: nn.Module) -> bool:
    return len(frozen.of(model.parameters())) > 0


def test_gradients_of_frozen_parameters_are_an_error(device: str) -> None:
    model, rows = a_model(device), x.to(device)
    assert fn.freeze(model) is model
    with torch.no_grad():
        model(rows)
    for module in (model, model[1]):
        with pytest.raises(RuntimeError, match="frozen"):
            module(
                torch.randn(6, module[0].in_features if module is model else 16, device=device)
            ).sum().backward()
    fn.unfreeze(model)
    model(rows).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_parameters_without_gradients_let_them_through() -> None:
    """What trains an adapter, or an input, changes no frozen parameter."""
    model = a_model().requires_grad_(False)
    fn.freeze(model)
    rows = x.clone().requires_grad_()
    model(rows).sum().backward()
    other = a_model()
    expected = x.clone().requires_grad_()
    other(expected).sum().backward()
    torch.testing.assert_close(rows.grad, expected.grad)
    fn.unfreeze(model)


def test_small_calls_are_not_left_where_something_is_to_be_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the node, which leaves them to Python until something is, did so for good."""
    monkeypatch.setattr(norm_linear, "is_host_bound", lambda t: True)
    monkeypatch.setattr(library, "load_node", lambda: object())
    monkeypatch.setattr(node, "module", lambda: None)
    forward, made = norm_linear.ops.forward, list[int]()
    monkeypatch.setattr(
        norm_linear.ops, "forward", lambda *given: made.append(1) or forward(*given)
    )
    layer, other = fn.LayerNormLinear(32, 16).eval(), fn.LayerNormLinear(32, 16).eval()
    with torch.no_grad():
        expected = layer(x)
        assert not made
        fn.freeze(layer)
        torch.testing.assert_close(layer(x), expected)
        assert made == [1]
        other(x)
        assert made == [1]
    fn.unfreeze(layer)


def test_a_model_in_training_is_refused() -> None:
    model = a_model()
    model[1].train()
    with pytest.raises(RuntimeError, match="evaluation mode"):
        fn.freeze(model)


def _train(model: nn.Sequential) -> None:
    assert model.train() is model
    assert model.training


def _train_a_part(model: nn.Sequential) -> None:
    model[1].train()
    assert model[1].training
    assert not model[0].training


def _train_a_parent(model: nn.Sequential) -> None:
    nn.ModuleList([model]).train()


def _load(model: nn.Sequential) -> None:
    model.load_state_dict(a_model().state_dict())


def _load_a_part(model: nn.Sequential) -> None:
    model[2].load_state_dict(a_model()[2].state_dict())


def _unfreeze_a_part(model: nn.Sequential) -> None:
    fn.unfreeze(model[0])


ENDS = [_train, _train_a_part, _train_a_parent, _load, _load_a_part, _unfreeze_a_part]


@pytest.mark.parametrize("end", ENDS, ids=lambda f: f.__name__.strip("_"))
def test_what_ends_it(end: Callable[[nn.Sequential], None]) -> None:
    model = fn.freeze(a_model())
    assert is_frozen(model)
    model.eval()
    assert is_frozen(model)
    end(model)
    assert not is_frozen(model)
    assert not any("train" in vars(m) for m in model.modules())
    model(x).sum().backward()
    fn.freeze(model.eval())
    assert is_frozen(model)
    fn.unfreeze(model)


@pytest.mark.parametrize("offload", [False, True])
def test_a_users_own_train_is_kept(offload: bool) -> None:
    """As latent diffusion models set it for the parts that they do not train."""
    model = a_model()
    vars(model[2])["train"] = lambda mode=True: model[2]
    fn.freeze(model, offload=offload)
    copied = copy.deepcopy(model)
    for each in (model, copied):
        for _ in range(2):
            each.train()
            assert [part.training for part in each] == [True, True, False]
            assert not is_frozen(each)


def test_a_model_that_is_gone_is_not_frozen() -> None:
    model = fn.freeze(a_model())
    assert frozen.is_any()
    memory = [p.data_ptr() for p in model.parameters()]
    del model
    # By counting references alone.
    assert not frozen.is_any()
    assert memory


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copied", "pickled"]
)
def test_copies_are_not_frozen(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model = fn.freeze(a_model())
    other = duplicate(model)
    assert not is_frozen(other)
    other.train()
    assert other.training
    assert is_frozen(model)
    assert not model.training
    other(x).sum().backward()
    fn.unfreeze(model)


def test_models_that_share_a_parameter() -> None:
    first, second = a_model(), a_model()
    second[1].weight = first[1].weight
    fn.freeze(first)
    fn.freeze(second)
    assert len(frozen.of([first[1].weight])) == 1, "a second freeze is anew"
    fn.unfreeze(second)
    assert not is_frozen(second)


def test_moved_parameters_are_not_frozen() -> None:
    model = fn.freeze(a_model())
    model.double()
    assert not is_frozen(model)
    fn.freeze(model)
    model[0].weight.data = model[0].weight.data.clone()
    assert contexts.find([model[0].weight]) is None
    fn.unfreeze(model)


def offloaded(model: nn.Sequential) -> frozen.Frozen:
    """Freeze a model, and treat its first weight as one from which a fold was made."""
    fn.freeze(model, offload=True)
    (record,) = frozen.of([model[0].weight])
    weight = (model[0].weight,)
    found = contexts.find(weight)
    assert found is not None
    made = record.prepared(("test",), found[1], lambda: (torch.ones(1),), weight[0].device)
    assert made is not None
    return record


def test_offloaded_weights(device: str) -> None:
    model, rows = a_model(device), x.to(device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        expected = model(rows)
    record = offloaded(model)
    weight = model[0].weight
    assert weight.isnan().all()
    assert weight.is_contiguous()
    assert frozen.has_offloaded()
    # What was made of it is found by its placeholder.
    found = contexts.find([weight])
    assert found is not None
    assert record.offload.has_any_of(found[1])
    assert record.prepared(("test",), found[1], lambda: (), weight.device).tensors == (1,)
    for grads in (True, False):
        with torch.set_grad_enabled(grads), pytest.raises(RuntimeError, match="offload=True"):
            frozen.require_values([weight])
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    for name, value in torch.load(saved).items():
        assert torch.equal(value, before[name])
    assert not is_frozen(model)
    with torch.no_grad():
        assert torch.equal(model(rows), expected)


def test_no_call_reads_what_stands_for_an_offloaded_weight(device: str) -> None:
    model, rows = a_model(device), x.to(device)
    others = make_inputs(6, 32, 16, device=device)
    expected = fn.fused_layernorm_linear(*others)
    offloaded(model)
    layer = model[0]
    for grads in (True, False):
        for call in (
            lambda: layer(rows),
            lambda: fn.norm_linear(rows, layer.weight, normalization="rms_norm"),
            # Along with parameters that are not frozen.
            lambda: fn.norm_linear(rows, layer.weight, norm_weight=others[1]),
            lambda: fn.norm_linear(rows, [others[3], layer.weight]),
        ):
            with torch.set_grad_enabled(grads), pytest.raises(RuntimeError, match="offload=True"):
                call()
    assert torch.equal(fn.fused_layernorm_linear(*others), expected)
    fn.unfreeze(model)


def test_offloaded_weights_come_back(device: str) -> None:
    model, rows = a_model(device), x.to(device)
    before = model[0].weight.detach().clone()
    for trains in (True, False):
        offloaded(model.eval())
        if trains:
            model.train()
        else:
            fn.unfreeze(model)
        assert torch.equal(model[0].weight, before)
    model(rows).sum().backward()


def test_new_memory_of_an_offloaded_weight_stays(device: str) -> None:
    """Regression: the values that had left replaced newer ones."""
    model = a_model(device)
    offloaded(model)
    values = torch.randn_like(model[0].weight)
    model[0].weight.data = values
    fn.unfreeze(model)
    assert model[0].weight.data_ptr() == values.data_ptr()
    assert not model[0].weight.isnan().any()


@pytest.mark.parametrize(
    "use",
    [
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: copy.deepcopy(nn.Sequential(m))[0],
        lambda m: m.double().float(),
        lambda m: nn.Sequential(m).double().float()[0],
    ],
    ids=["copied", "pickled", "copied in another", "moved", "moved in another"],
)
def test_no_copy_is_of_what_stands_for_an_offloaded_weight(
    use: Callable[[nn.Module], nn.Module], device: str
) -> None:
    model = a_model(device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    offloaded(model)
    used = use(model)
    for each in (used, model):
        for name, value in each.state_dict().items():
            assert torch.equal(value, before[name])
        assert not is_frozen(each)
        assert not any("train" in vars(m) for m in each.modules())


def test_a_thread_that_ends_freezing_waits_for_values_that_are_leaving(device: str) -> None:
    model = a_model(device)
    before = model[0].weight.detach().clone()
    fn.freeze(model, offload=True)
    found = contexts.find([model[0].weight])
    assert found is not None
    other = threading.Thread(target=fn.unfreeze, args=(model,))

    def make() -> tuple[Tensor, ...]:
        other.start()
        other.join(0.1)
        return (torch.ones(1),)

    found[0].prepared(("test",), found[1], make, before.device)
    other.join()
    assert torch.equal(model[0].weight, before)
    assert found[0].prepared(("test",), found[1], make, before.device) is None


def test_values_do_not_leave_while_a_state_dict_is_made() -> None:
    model = fn.freeze(a_model(), offload=True)
    # Another thread's first call could move them after any module's hook.
    model.state_dict()
    assert not is_frozen(model)


def test_a_program_ends_quietly_with_a_frozen_model() -> None:
    program = (
        "import torch, fused_norm as fn\n"
        "model = fn.LayerNormLinear(32, 16).eval()\n"
        "with torch.no_grad():\n"
        "    fn.freeze(model)(torch.randn(6, 32))\n"
    )
    done = run_python("-c", program)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("recipe", list(recipes.RECIPES))
def test_weights_in_eight_bits(recipe: str, device: str) -> None:
    """They replace the originals, if those may leave, bit for bit."""
    torch.manual_seed(0)
    options = {"normalization": "RMSNorm", "bias": False, "recipe": recipe}
    model = fn.LayerNormMLP(256, 512, activation="swiglu", **options).to(device).eval()
    weights = dict(model.named_parameters())
    before = {name: value.detach().clone() for name, value in weights.items()}
    rows = torch.randn(32, 256, device=device)
    # Scales of frozen weights are not rounded to powers of two, as those of a model that trains.
    with torch.no_grad():
        fn.freeze(model)
        expected = model(rows)
        assert torch.equal(model(rows), expected)
        fn.freeze(model, offload=True)
        for _ in range(3):
            assert torch.equal(model(rows), expected)
    assert {name for name, p in weights.items() if p.isnan().all()} == {
        name for name, p in weights.items() if p.dim() == 2
    }
    # Neither in another recipe nor in a backward are there values to read.
    with pytest.raises(RuntimeError, match="offload=True"):
        fn.norm_linear(rows, weights["fc1_weight"])
    other = "rowwise" if recipe == "blockwise" else "blockwise"
    with pytest.raises(RuntimeError, match="offload=True"), torch.no_grad():
        fn.norm_linear(rows, weights["fc1_weight"], recipe=other)
    with pytest.raises(RuntimeError, match="offload=True"):
        model(rows.clone().requires_grad_()).sum().backward()
    fn.unfreeze(model)
    for name, value in weights.items():
        assert torch.equal(value, before[name])


def test_threads_that_share_an_offloaded_model(device: str) -> None:
    """None reads the placeholder of a weight that another has just moved."""
    torch.manual_seed(0)
    options = {"normalization": "RMSNorm", "bias": False, "recipe": "rowwise"}
    layers = (fn.LayerNormMLP(64, 128, activation="swiglu", **options) for _ in range(4))
    model = nn.Sequential(*layers).to(device).eval()
    rows = torch.randn(16, 64, device=device)
    with torch.no_grad():
        fn.freeze(model)
        expected = model(rows)
    threads, interval = 4, sys.getswitchinterval()
    start = threading.Barrier(threads)

    def run(_: int) -> Tensor:
        start.wait()
        with torch.no_grad():
            return model(rows)

    try:
        # As if each instruction of Python were another thread's turn.
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(20):
                fn.freeze(model, offload=True)
                for y in pool.map(run, range(threads)):
                    assert torch.equal(y, expected)
                assert frozen.has_offloaded()
    finally:
        sys.setswitchinterval(interval)
        fn.unfreeze(model)


def test_no_rows_are_frozen(device: str) -> None:
    """While a weight is offloaded, all that is quantized is asked whether it is that weight."""
    model, rows = a_model(device), torch.randn(32, 256, device=device)
    weight = torch.randn(256, 256, device=device)
    offloaded(model)
    with torch.no_grad(), fn.frozen_parameters():
        for _ in range(3):
            scaled_linear(rows, weight, None, recipe="rowwise")
        assert contexts.find([weight]) is not None
        assert not frozen.of([rows])
    fn.unfreeze(model)


def test_a_weight_that_stays_has_nothing_kept_of_it() -> None:
    """A shared one, and one so large that what stood for it would take as much as was gained."""
    model = a_model()
    model[1].weight = nn.Parameter(torch.randn(32, 16))
    tied = nn.ModuleList([model, nn.Linear(16, 32), nn.Linear(16, 1 << 20)]).eval()
    tied[1].weight = model[1].weight
    cpu = torch.device("cpu")
    for offload in (True, False):
        fn.freeze(tied, offload=offload)
        (record,) = frozen.of([model[0].weight])
        for weight in (model[1].weight, tied[2].weight):
            keys = (key_of(weight),)
            assert keys[0] not in record.offload.candidates
            made = record.prepared(("test",), keys, lambda: (torch.ones(1),), cpu)
            assert (made is None) is offload
        assert (key_of(model[0].weight) in record.offload.candidates) is offload
    fn.unfreeze(tied)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


@pytest.mark.parametrize("then", ["eager", "inductor"])
def test_option_of_the_backend(then: str) -> None:
    model = Block().eval()
    options = {"freeze": True, "then": then, "small": True}
    compiled = torch.compile(model, backend="fused_norm", options=options)
    expected = model(x).detach()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected)
    assert is_frozen(model)
    with pytest.raises(RuntimeError, match="frozen"):
        model(x).sum().backward()
    # Its owners were found.
    model.train()
    assert not is_frozen(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        compiled(x).square().mean().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
        assert is_frozen(model)
        # A run with gradients ends it, too.
        compiled(x)
        assert not is_frozen(model)
        model.train()


@pytest.mark.parametrize("then", ["eager", "inductor"])
def test_compiled_in_fp8_after_it_was_frozen(then: str, device: str) -> None:
    """PyTorch 2.11 had each call of the graph quantize the weight: AOTAutograd saw it frozen."""
    model = nn.Sequential(nn.RMSNorm(1024), nn.Linear(1024, 1024, bias=False)).to(device).eval()
    model = fn.freeze(model.bfloat16(), offload=True)
    options = {"fp8": "rowwise", "then": then, "small": True}
    compiled = torch.compile(model, backend="fused_norm", options=options)
    rows = torch.randn(160, 1024, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = compiled(rows)
        assert not expected.isnan().any()
        assert torch.equal(compiled(rows), expected)
    assert model[1].weight.isnan().all()


def test_freezing_of_inductor() -> None:
    model = Block().eval()
    compiled = torch.compile(model, backend="fused_norm", options={"freezing": True, "small": True})
    with torch.no_grad():
        expected = model(x)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected)
        assert is_frozen(model)


def test_a_context_that_is_entered_again_inside_ends() -> None:
    rows, weight = torch.randn(32, 64), torch.randn(64, 64)
    context = fn.frozen_parameters()
    with context:
        with context:
            before = [fn.norm_linear(rows, weight, recipe="rowwise") for _ in range(3)]
        assert torch.equal(fn.norm_linear(rows, weight, recipe="rowwise"), before[0])
    assert not frozen.is_any()
    weight.neg_()
    for _ in range(2):
        assert torch.equal(fn.norm_linear(rows, weight, recipe="rowwise"), -before[0])


def test_instances_of_one_class_are_frozen_apart() -> None:
    models = [Block().eval() for _ in range(2)]
    options = {"freeze": True, "then": "eager", "small": True}
    compiled = [torch.compile(m, backend="fused_norm", options=options) for m in models]
    with torch.no_grad():
        for run, model in zip(compiled, models, strict=True):
            torch.testing.assert_close(run(x), model(x))
    assert all(map(is_frozen, models))
    models[0].train()
    assert not is_frozen(models[0])
    assert is_frozen(models[1])


def test_train_ends_what_graphs_of_several_shapes_froze() -> None:
    model = Block().eval()
    options = {"freeze": True, "then": "eager", "small": True}
    compiled = torch.compile(model, backend="fused_norm", dynamic=False, options=options)
    for _ in range(2):
        with torch.no_grad():
            records = [(compiled(rows), frozen.of(model.parameters()))[1] for rows in (x, x[:3], x)]
        assert records[1] == records[2], "graphs do not end each other's freezing"
        model.train()
        assert not is_frozen(model)
        model(x).sum().backward()
        model.eval()


def test_a_graph_does_not_hold_models_that_are_gone() -> None:
    compiled = torch.compile(
        lambda model, rows: model(rows),
        backend="fused_norm",
        options={"freeze": True, "then": "eager", "small": True},
    )
    for _ in range(3):
        model = Block().eval()
        with torch.no_grad():
            compiled(model, x)
        assert is_frozen(model)
        del model
        gc.collect()
        assert not frozen.is_any()
