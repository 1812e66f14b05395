"""What goes wrong in models of others: their initializers, and other kinds of modules."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accuracy import make_inputs
from strategies import tell_again
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from weights import Wrapped

import fused_norm as fn
from fused_norm.call import memory
from fused_norm.chain import kernels
from fused_norm.native import build, cpu_features

K, N = 24, 10


class ScaledLayerNorm(nn.LayerNorm):
    """Another forward under a familiar name."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class LowRankLinear(nn.Linear):
    """An adapter as a subclass."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class OwnName(nn.Linear):
    """A subclass that changes nothing."""


def patched(module: nn.Module) -> nn.Module:
    """What accelerate does to modules that it moves between devices."""
    old = module.forward
    module.forward = lambda *args: old(*args)  # type: ignore[method-assign]
    return module


def hooked(module: nn.Module, register: str) -> nn.Module:
    getattr(module, register)(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("ln", "linear", "error", "words"),
    [
        (
            nn.Linear(K, N),
            nn.LayerNorm(K),
            TypeError,
            "ln must be an nn.LayerNorm or an nn.RMSNorm, got Linear",
        ),
        (
            nn.GroupNorm(1, K),
            nn.Linear(K, N),
            TypeError,
            "ln must be an nn.LayerNorm or an nn.RMSNorm, got Group",
        ),
        (nn.LayerNorm(K), nn.Identity(), TypeError, "linear must be an nn.Linear, got Identity"),
        (ScaledLayerNorm(K), nn.Linear(K, N), TypeError, "got ScaledLayerNorm, which computes"),
        (nn.LayerNorm(K), LowRankLinear(K, N), TypeError, "got LowRankLinear, which computes"),
        (nn.LayerNorm(K), patched(nn.Linear(K, N)), TypeError, "with its own forward"),
        (
            hooked(nn.LayerNorm(K), "register_forward_hook"),
            nn.Linear(K, N),
            ValueError,
            "ln has hooks",
        ),
        (
            nn.LayerNorm(K),
            hooked(nn.Linear(K, N), "register_full_backward_hook"),
            ValueError,
            "linear has hooks",
        ),
        (
            nn.LayerNorm(K),
            prune.random_unstructured(nn.Linear(K, N), "weight", 0.5),
            ValueError,
            "linear has hooks",
        ),
        (
            nn.LayerNorm(K),
            parametrizations.weight_norm(nn.Linear(K, N)),
            ValueError,
            "linear has parametrizations",
        ),
    ],
)
def test_from_modules_refuses_what_it_would_drop(
    ln: Any, linear: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        fn.LayerNormLinear.from_modules(ln, linear)


class ScaledRMSNorm(nn.RMSNorm):
    """As models write it: a subclass, and another formula."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("modules", "error", "words"),
    [
        (
            (nn.Linear(K, N), nn.Linear(N, K), nn.RMSNorm(K)),
            TypeError,
            "ln must be an nn.LayerNorm",
        ),
        ((nn.RMSNorm(K), nn.RMSNorm(K), nn.Linear(N, K)), TypeError, "fc1 must be an nn.Linear"),
        ((nn.RMSNorm(K), nn.Linear(K, N), nn.GELU()), TypeError, "fc2 must be an nn.Linear"),
        (
            (nn.RMSNorm(K), nn.Linear(N, K), nn.Linear(K, N)),
            ValueError,
            f"ln must normalize the shape ({N},) that fc1 takes",
        ),
        ((ScaledRMSNorm(K), nn.Linear(K, N), nn.Linear(N, K)), TypeError, "got ScaledRMSNorm"),
        ((nn.RMSNorm(K), LowRankLinear(K, N), nn.Linear(N, K)), TypeError, "got LowRankLinear"),
        (
            (nn.RMSNorm(K), nn.Linear(K, N), hooked(nn.Linear(N, K), "register_forward_pre_hook")),
            ValueError,
            "fc2 has hooks, which from_modules would drop",
        ),
        (
            (nn.RMSNorm(K), parametrizations.weight_norm(nn.Linear(K, N)), nn.Linear(N, K)),
            ValueError,
            "fc1 has parametrizations",
        ),
    ],
)
def test_mlp_from_modules_refuses_what_it_would_drop(
    modules: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        fn.LayerNormMLP.from_modules(*modules)


def test_from_modules_refuses_an_adapter() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = nn.Sequential(nn.LayerNorm(K), nn.Linear(K, N))
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["1"]), model)
    with pytest.raises(TypeError, match=r"linear must be an nn\.Linear, got Linear"):
        fn.LayerNormLinear.from_modules(*model)


def test_from_modules_refuses_a_norm_that_a_model_brings() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    with pytest.raises(TypeError, match=r"nn\.RMSNorm, got LlamaRMSNorm"):
        fn.LayerNormLinear.from_modules(llama.LlamaRMSNorm(K), nn.Linear(K, N))


def make_layers() -> dict[str, tuple[Any, str]]:
    """Return modules with the name of a weight."""
    return {
        "LayerNormLinear": (fn.LayerNormLinear(K, N), "weight"),
        "options": (
            fn.LayerNormLinear(K, N, normalization="RMSNorm", parameters_split=("query", "key")),
            "query_weight",
        ),
        "LayerNormMLP": (fn.LayerNormMLP(K, N), "fc1_weight"),
    }


CHANGES = {
    "pruned": lambda layer, name: prune.random_unstructured(layer, name, 0.5),
    "weight norm": lambda layer, name: parametrizations.weight_norm(layer, name),
}


@pytest.mark.parametrize("name", make_layers())
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_used_and_not_passed_on(name: str, change: str) -> None:
    """Pruning and weight norm replace the Parameter with another tensor."""
    layer, weight = make_layers()[name]
    plain = copy.deepcopy(layer)
    CHANGES[change](layer, weight)
    with torch.no_grad():
        layer.layer_norm_weight.uniform_()
        for parameter in layer.parameters():
            parameter.mul_(2)
        layer(torch.ones(1, K))  # whose hook computes the weight again
        for part in ("layer_norm_weight", "layer_norm_bias", *plain.state_dict()):
            if getattr(plain, part) is not None:
                getattr(plain, part).copy_(getattr(layer, part))
    x = torch.randn(5, K)
    torch.testing.assert_close(layer(x), plain(x))
    layer(x).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    assert layer.double()(x.double()).dtype is torch.float64
    what = "hooks" if change == "pruned" else "parametrizations"
    with pytest.raises(ValueError, match=f"the module has {what}, which to_modules would drop"):
        layer.to_modules()


class Quantized(Wrapped):
    """One that has PyTorch's ops alone."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.values, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise NotImplementedError(str(function))


def test_quantized_weights_take_their_own_ops() -> None:
    x, up, down = torch.randn(5, K), torch.randn(N, K), torch.randn(K, N)
    quantized = Quantized(up), Quantized(down)
    z = F.layer_norm(x, (K,))
    y = fn.fused_layernorm_linear(x, None, None, quantized[0])
    torch.testing.assert_close(y, F.linear(z, up))
    y = fn.norm_linear(x, quantized[0], normalization="rms_norm", activation="relu")
    torch.testing.assert_close(y, F.linear(F.rms_norm(x, (K,), eps=1e-5), up).relu())
    y = fn.norm_mlp(x, quantized[0], None, quantized[1], activation="gelu", residual_out=x)
    torch.testing.assert_close(y, F.linear(F.gelu(F.linear(z, up)), down) + x)
    total, _ = fn.linear_add(x, quantized[0], None, y[:, :N])
    torch.testing.assert_close(total, F.linear(x, up) + y[:, :N])


def test_encoder_layer_of_pytorch() -> None:
    """Its fast path reads its modules' parameters by name: it raises, and can be switched off."""
    layer = nn.TransformerEncoderLayer(K, 2, N, 0.0, "gelu", batch_first=True, norm_first=True)
    layer.eval().requires_grad_(False)
    x = torch.randn(2, 3, K)
    expected = layer(x)
    layer.linear1 = fn.LayerNormLinear.from_modules(layer.norm2, layer.linear1)
    layer.norm2 = nn.Identity()
    with pytest.raises(AttributeError, match="'Identity' object has no attribute"):
        layer(x)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        torch.testing.assert_close(layer(x), expected)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(layer.train()(x), expected)


def test_weight_that_lies_column_by_column(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a Conv1D's weight was copied in every call, and its gradient once more."""
    x, gamma, beta, weight, bias = make_inputs((3, 5), K, N, device=device, requires_grad=True)
    weight = weight.detach().t().contiguous().requires_grad_()
    copied = []
    in_memory = memory._in_memory

    def noted(tensor: Tensor) -> Tensor:
        copied.append(tensor.shape)
        return in_memory(tensor)

    monkeypatch.setattr(memory, "_in_memory", noted)
    h = F.linear(F.layer_norm(x, (K,), gamma, beta), weight.t(), bias)
    leaves = (x, gamma, beta, weight, bias)
    for y, expected in (
        (fn.fused_layernorm_linear(x, gamma, beta, weight.t(), bias), h),
        (
            fn.norm_linear(
                *(x, weight.t(), bias),
                norm_weight=gamma,
                norm_bias=beta,
                activation="gelu",
            ),
            F.gelu(h),
        ),
    ):
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        dy = torch.randn_like(y)
        mine = torch.autograd.grad(y, leaves, dy)
        assert mine[3].stride() == weight.stride()
        for ours, theirs in zip(
            mine, torch.autograd.grad(expected, leaves, dy, retain_graph=True), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert not copied


def test_from_modules_takes_subclasses_that_change_nothing() -> None:
    ln, linear = nn.LayerNorm(K), OwnName(K, N)
    x = torch.randn(5, K)
    layer = fn.LayerNormLinear.from_modules(ln, linear)
    torch.testing.assert_close(layer(x), linear(ln(x)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: fn.LayerNormLinear(K, N),
        lambda: fn.LayerNormLinear(K, N, normalization="RMSNorm", parameters_split=("a", "b")),
        lambda: fn.LayerNormLinear(K, N, zero_centered_gamma=True),
        lambda: fn.LayerNormMLP(K, N, activation="swiglu"),
    ],
)
def test_transformers_leaves_the_weight_alone(make: Callable[[], nn.Module]) -> None:
    """It initializes by the class's name, and filled the weight of a LayerNormLinear with ones."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layer = make()
            self.post_init()

    layer = Model(transformers.PretrainedConfig()).layer
    for name, parameter in layer.named_parameters():
        if name == "layer_norm_weight":
            assert (parameter == 1 - layer.zero_centered_gamma).all()
        elif name == "layer_norm_bias":
            assert (parameter == 0).all()
        else:
            features = layer.fc2_weight.shape[1] if name.startswith("fc2") else K
            assert 0.5 < parameter.abs().max() * features**0.5 <= 1, name
            assert parameter.std() > 0.05, name


def test_trainer_and_weight_decay(tmp_path: Path) -> None:
    """It knows norms by name, and `layer_norm_weight` is not one: the names can be changed."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")

    class Trainer(transformers.Trainer):
        def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
            names = super().get_decay_parameter_names(model)
            return [name for name in names if not name.endswith("layer_norm_weight")]

    model = nn.Sequential(fn.LayerNormLinear(K, N), fn.LayerNormMLP(N, K))
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    names = {
        kind: kind(model, arguments).get_decay_parameter_names(model)
        for kind in (transformers.Trainer, Trainer)
    }
    weights = ["0.weight", "1.fc1_weight", "1.fc2_weight"]
    assert sorted(names[Trainer]) == weights
    assert sorted(names[transformers.Trainer]) == sorted(
        [*weights, "0.layer_norm_weight", "1.layer_norm_weight"]
    )


def test_transformers_initializes_what_a_checkpoint_lacks(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layer = fn.LayerNormLinear(K, N)
            self.post_init()

    model = Model(transformers.PretrainedConfig())
    nn.init.normal_(model.layer.layer_norm_weight)
    nn.init.normal_(model.layer.weight)
    state = model.state_dict()
    lacking = {name: value for name, value in state.items() if name != "layer.weight"}
    model.save_pretrained(tmp_path, state_dict=lacking)
    layer = Model.from_pretrained(tmp_path).layer
    assert torch.equal(layer.layer_norm_weight, model.layer.layer_norm_weight)
    assert 0.5 < layer.weight.abs().max() * K**0.5 <= 1
    assert layer.weight.std() > 0.05


@pytest.mark.as_dispatched
@pytest.mark.parametrize(
    ("flags", "is_left"),
    [
        ({"amx_bf16", "avx2"}, True),
        ({"avx512_bf16", "sse4a"}, False),
        ({"avx512_bf16"}, False),
        ({"avx2", "avx512f"}, False),
        ({"amx_tile", "amx_bf16", "avx512_bf16"}, False),
    ],
    ids=["AMX alone", "AVX-512 BF16 of AMD", "of Intel", "AVX-512", "AMX"],
)
def test_bfloat16_goes_where_it_is_faster(
    flags: set[str], is_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the CPU's flags: its model's name may be masked as an older one's."""
    # Whatever the flags, the kernels of this machine run.
    features = build.Extension("norm_linear_cpu", "bfloat16").features
    monkeypatch.setattr(build, "compiler_features", lambda name: features)
    monkeypatch.setattr(cpu_features, "flags", lambda: frozenset(flags))
    monkeypatch.setattr(cpu_features, "_permits_tiles", lambda: True)
    monkeypatch.delenv(cpu_features.CPU_VARIABLE, raising=False)
    caches = cpu_features._fast_products, cpu_features.has_tiles
    for cache in caches:
        cache.cache_clear()
    tell_again()
    question, answer = kernels.Question(dtype=15, is_cpu=True), kernels.Answer()
    try:
        kernels.find(question, answer)
        x, gamma, beta, weight, bias = make_inputs((5,), K, N, dtype=torch.bfloat16)
        y = fn.fused_layernorm_linear(x, gamma, beta, weight, bias)
    finally:
        monkeypatch.undo()
        for cache in caches:
            cache.cache_clear()
        tell_again()
    assert (answer.product == b"") == is_left
    expected = F.linear(F.layer_norm(x, (K,), gamma, beta), weight, bias)
    torch.testing.assert_close(y, expected, rtol=1.6e-2, atol=1e-2)


def test_flags_are_those_of_the_machine() -> None:
    flags = cpu_features.flags()
    path = Path("/proc/cpuinfo")
    assert bool(flags) == path.exists()
    if flags:
        text = path.read_text()
        assert all(f" {flag}" in text for flag in flags)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compilers_take_the_choice_for_granted(backend: str) -> None:
    """Regression: tracing went on into the reading of the CPU's flags."""
    layer = fn.LayerNormLinear(K, N, dtype=torch.bfloat16)
    x = torch.randn(5, K, dtype=torch.bfloat16, requires_grad=True)
    y = torch.compile(layer, fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(y, layer(x))
    y.float().sum().backward()
    assert x.grad is not None
