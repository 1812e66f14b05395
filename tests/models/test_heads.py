"""Heads of models in the forms that people write: found, or left for a reason that is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import with_sites
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import fused_norm as fn
from fused_norm.models.fuse import Options, fuse
from fused_norm.models.sites import HEAD, Site

V, K = 503, 16


@pytest.fixture(autouse=True)
def _no_head_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_norm.ops.head.FEW_LOGITS", 0)


class Model(nn.Module):
    """A norm, a Linear layer, and what a subclass makes of its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(K)
        self.lm_head = nn.Linear(K, V, bias=False)

    def logits(self, x: Tensor) -> Tensor:
        found: Tensor = self.lm_head(self.norm(x))
        return found


class Transformers(Model):
    """The loss of transformers' causal language models."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.logits(x).float()
        labels = F.pad(labels, (0, 1), value=-100)
        shifted = labels[..., 1:].contiguous().view(-1)
        loss = F.cross_entropy(logits.view(-1, V), shifted, ignore_index=-100, reduction="sum")
        return loss / labels.numel()


class Shifted(Model):
    """The same as it was: logits are shifted, not labels."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.logits(x).float()
        shifted = logits[..., :-1, :].contiguous()
        return nn.CrossEntropyLoss()(shifted.view(-1, V), labels[..., 1:].contiguous().view(-1))


class NanoGPT(Model):
    """nanoGPT's loss."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.logits(x)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-1)


class Torchtitan(Model):
    """torchtitan's loss."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(self.logits(x).flatten(0, 1).float(), labels.flatten(0, 1))


class Capped(Model):
    """Gemma's logits, with smoothed labels."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = torch.tanh(self.logits(x) / 30.0) * 30.0
        return F.cross_entropy(logits.view(-1, V), labels.view(-1), label_smoothing=0.1)


class Returned(Model):
    """Logits that the caller gets as well."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.logits(x)
        return F.cross_entropy(logits.view(-1, V), labels.view(-1)), logits


class Counted(Model):
    """Logits that an accuracy reads as well."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.logits(x)
        right = (logits.argmax(-1) == labels).float().mean()
        return F.cross_entropy(logits.view(-1, V), labels.view(-1)), right


class Dense(Model):
    """Classes along the second dimension of three."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(self.logits(x).transpose(1, 2), labels)


class Written(Model):
    """Logits that are written in place."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.logits(x)
        logits[..., 0] = 0
        return F.cross_entropy(logits.view(-1, V), labels.view(-1))


FOUND = [Transformers, Shifted, NanoGPT, Torchtitan, Capped]
LEFT = {
    Returned: "logits are read by output as well",
    Counted: "logits are read by argmax as well",
    Dense: "its input comes from transpose",
    Written: "logits are read by setitem as well",
}


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 9, K), torch.randint(0, V, (2, 9))


def first(result: Any) -> Tensor:
    loss: Tensor = result[0] if isinstance(result, tuple) else result
    return loss


@pytest.mark.parametrize("kind", [*FOUND, *LEFT])
def test_heads_are_found_or_left(kind: type[Model]) -> None:
    model = kind()
    report = fn.explain(model, *inputs(), options={"small": True})
    (site,) = [site for site in report.sites if site.kind == HEAD]
    assert site.path == ("" if kind is Dense else "lm_head")
    assert site.fused == (kind in FOUND)
    assert site.reason == LEFT.get(kind, "")
    assert (HEAD in report.summary()) == site.fused


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", [*FOUND, *LEFT])
def test_values_and_gradients(kind: type[Model], dynamic: bool) -> None:
    model = kind()
    torch.compiler.reset()
    options = {"then": "eager", "small": True}
    compiled = torch.compile(
        model, backend="fused_norm", options=options, dynamic=dynamic, fullgraph=True
    )
    loss, exact = first(compiled(*inputs())), first(model(*inputs()))
    torch.testing.assert_close(loss, exact)
    leaves = list(model.parameters())
    found = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(found, torch.autograd.grad(exact, leaves))


# Of Dynamo's own look at the logits.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen3", "Gemma2"])
def test_heads_of_transformers(kind: str) -> None:
    """The library's models with its own `ForCausalLMLoss`; Gemma's logits have a softcap."""
    transformers = pytest.importorskip("transformers", reason="uv sync --group models")
    names = ("n_embd", "n_layer", "n_head") if kind == "GPT2" else ("hidden_size",)
    sizes: dict[str, Any] = dict(zip(names, (32, 1, 2), strict=False)) | {
        "vocab_size": V,
        "use_cache": False,
    }
    if kind != "GPT2":
        sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
        sizes |= {"intermediate_size": 48, "head_dim": 16}
    else:
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, kind + suffix)(config)
    # GPT-2 has none, and the library warns, which breaks the graph before the loss.
    model.loss_type = "ForCausalLM"

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Any:
            return self.model(input_ids=ids, labels=ids).loss

    loss, ids = Loss(), torch.randint(0, V, (2, 9))
    options = {"then": "eager", "small": True}
    torch.compiler.reset()
    heads = [s for s in fn.explain(loss, ids, options=options).sites if s.kind == HEAD]
    assert [(site.fused, site.reason) for site in heads] == [(True, "")]
    torch.compiler.reset()
    found = torch.compile(loss, backend="fused_norm", options=options)(ids)
    exact = loss(ids)
    torch.testing.assert_close(found, exact)
    leaves = [p for p in model.parameters() if p.requires_grad]
    for a, b in zip(
        torch.autograd.grad(found, leaves), torch.autograd.grad(exact, leaves), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_contrastive_loss() -> None:
    """open_clip's: the features of texts are the vocabulary of images, and vice versa."""
    open_clip = pytest.importorskip("open_clip", reason="uv sync --group models")
    torch.manual_seed(0)
    inputs = [F.normalize(torch.randn(64, K), dim=-1) for _ in range(2)] + [torch.tensor(10.0)]
    leaves = [v.requires_grad_() for v in inputs]
    loss, options = open_clip.ClipLoss(), {"then": "eager", "small": True}
    torch.compiler.reset()
    heads = [s for s in fn.explain(loss, *leaves, options=options).sites if s.kind == HEAD]
    assert [(site.fused, site.reason) for site in heads] == [(True, "")] * 2
    torch.compiler.reset()
    found, exact = (
        torch.compile(loss, backend="fused_norm", options=options)(*leaves),
        loss(*leaves),
    )
    torch.testing.assert_close(found, exact)
    gradients = (torch.autograd.grad(y, leaves) for y in (found, exact))
    torch.testing.assert_close(*gradients)


class Biased(Torchtitan):
    """The same with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(K, V)


@contextmanager
def dtypes(dtype: torch.dtype) -> Iterator[None]:
    """Have tensors be made in a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def implementation(kind: type[Model], dtype: str, device: str) -> str:
    """Return what computes the head of a model whose tensors are fake, so that nothing runs."""
    sites: list[Site] = []

    def look(module: Any, inputs: Any) -> Any:
        sites.extend(fuse(module, Options(small=True)))
        return lambda *_: (torch.zeros(()),)

    torch.compiler.reset()
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with fakes, torch.device(device), dtypes(getattr(torch, dtype)):
        x, labels = torch.randn(2, 9, K), torch.zeros(2, 9, dtype=torch.int64)
        torch.compile(kind(), backend=look)(x, labels)
    (site,) = [site for site in sites if site.kind == HEAD]
    assert site.fused, site.reason
    return site.implementation


ON_CHUNKS = "PyTorch's ops on chunks of rows"


@pytest.mark.parametrize(
    ("kind", "dtype", "device", "words"),
    [
        (Torchtitan, "bfloat16", "cuda", "kernels"),
        (Torchtitan, "float16", "cuda", ON_CHUNKS),
        (Torchtitan, "float32", "cuda", ON_CHUNKS),
        (Torchtitan, "bfloat16", "cpu", ON_CHUNKS),
        # A vocabulary that is not a multiple of 8.
        (Biased, "bfloat16", "cuda", ON_CHUNKS),
        # Softcap and smoothed labels together.
        (Capped, "bfloat16", "cuda", ON_CHUNKS),
    ],
)
def test_explain_says_what_computes_a_head(
    kind: type[Model],
    dtype: str,
    device: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fused_norm.chain.head_sm90.kernels.is_hopper", lambda index: True)
    monkeypatch.setattr("fused_norm.chain.head_sm90.is_built", lambda: True)
    assert implementation(kind, dtype, device) == words


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_heads_on_a_gpu_that_is_not_there() -> None:
    assert implementation(Torchtitan, "bfloat16", "cuda") == ON_CHUNKS


def test_small_heads_are_left_to_pytorch() -> None:
    (site, *_) = fn.explain(NanoGPT(), *inputs()).sites
    assert site.reason == "PyTorch's ops are faster for a call this small"


def test_autocast() -> None:
    model = Torchtitan()
    torch.compiler.reset()
    options = {"then": "eager", "small": True}
    compiled = torch.compile(model, backend="fused_norm", options=options)
    with torch.autocast("cpu", torch.bfloat16):
        loss, exact = compiled(*inputs()), model(*inputs())
    assert loss.dtype is exact.dtype
    torch.testing.assert_close(loss, exact, rtol=2e-2, atol=2e-2)


def test_rows_of_dynamic_features() -> None:
    """Regression: a weight that is an argument leaves a graph without a number of features."""

    def function(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(x, w)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1))

    compiled, sites = with_sites(function, dynamic=True, small=True)
    for rows, features in (((2, 5), 16), ((3, 4), 24)):
        x, w = torch.randn(*rows, features), torch.randn(30, features)
        target = torch.randint(30, rows)
        torch.testing.assert_close(compiled(x, w, target), function(x, w, target))
    assert [site.fused for site in sites] == [True]
