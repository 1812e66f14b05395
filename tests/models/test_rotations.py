"""Rotary embeddings that the backend fuses in models, and those that it leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accuracy import assert_within_budget
from compiling import ITS_OWN_WARNINGS
from torch import Tensor

import fused_norm as fn
from fused_norm.chain import rotary
from fused_norm.models.rotations import _LEAST_ELEMENTS
from fused_norm.models.sites import ROTARY, Site

pytestmark = ITS_OWN_WARNINGS
transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 61}
GATED = SIZES | {"intermediate_size": 96, "num_key_value_heads": 1, "pad_token_id": 0}
# Halves; with norms of heads, before and after they change places with rows; of the first elements,
# of neighbors; in float32, and cosines repeated.
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "Llama": (GATED, "rotary of both"),
    "Qwen3": (GATED | {"head_dim": 32}, "rotary of both: rms_norm"),
    "Gemma3": (GATED | {"head_dim": 32}, "rotary of both: rms_norm"),
    "GPTNeoX": (SIZES | {"intermediate_size": 96, "rotary_pct": 0.5}, "rotary of both"),
    "GPTJ": (
        {"n_embd": 64, "n_layer": 1, "n_head": 2, "rotary_dim": 16, "vocab_size": 61},
        "rotary of both",
    ),
    "Glm": (GATED | {"head_dim": 32}, "rotary of both"),
    "Cohere": (GATED, "rotary of both"),
}
IDS = torch.arange(14).reshape(2, 7)


def model_of(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    of_text = "Gemma3Text" if name == "Gemma3" else name
    kinds = {"bos_token_id": 0, "eos_token_id": 0} if name in ("GPTJ", "Cohere") else {}
    config = getattr(transformers, f"{of_text}Config")(**MODELS[name][0], **kinds)
    found: torch.nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return found.to(dtype)


def sites(run: Callable[..., Any], *args: Any, **options: Any) -> list[Site]:
    report = fn.explain(run, *args, options={"small": True} | options)
    return [site for site in report.sites if site.kind == ROTARY]


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    model = model_of(name)

    def run(ids: Tensor) -> Tensor:
        logits: Tensor = model(ids, use_cache=False).logits
        return logits

    found = sites(run, IDS)
    assert [site.calls for site in found] == [[MODELS[name][1]]] * 2, found
    assert all(site.bytes_saved > 0 and site.ops_before > 4 for site in found)
    torch._dynamo.reset()
    compiled = torch.compile(
        run, backend="fused_norm", options={"small": True, "then": "eager"}, fullgraph=True
    )
    results = []
    for call in (compiled, run):
        logits = call(IDS)
        grads = torch.autograd.grad(logits.square().mean(), list(model.parameters()))
        results.append([logits, *grads])
    for mine, other in zip(*results, strict=True):
        scale = other.abs().max()
        assert (mine - other).abs().max() <= 1e-5 * scale + 1e-9


def test_narrow_model_is_nearer_to_the_truth() -> None:
    """A bfloat16 rotation is rounded once instead of three times."""
    name = "Qwen3"
    wide, narrow = model_of(name).double(), model_of(name, torch.bfloat16)
    wide.load_state_dict({k: v.double() for k, v in narrow.state_dict().items()})
    with torch.no_grad():
        truth = wide(IDS, use_cache=False).logits
        errors = []
        for run in (narrow, torch.compile(narrow, backend="fused_norm", options={"small": True})):
            errors.append((run(IDS, use_cache=False).logits.double() - truth).norm().item())
    assert errors[1] <= 1.1 * errors[0]


def test_dynamic_shapes_and_exported_programs() -> None:
    model = model_of("Llama").eval()
    with torch.no_grad():
        compiled = torch.compile(
            model, backend="fused_norm", options={"small": True, "then": "eager"}, dynamic=True
        )
        for rows in (5, 9):
            ids = torch.arange(2 * rows).reshape(2, rows)
            mine = compiled(ids, use_cache=False).logits
            torch.testing.assert_close(mine, model(ids, use_cache=False).logits)
    rows = _LEAST_ELEMENTS // 96 + 1
    q, cos = torch.randn(1, rows, 3, 32), torch.rand(rows, 32)
    program = torch.export.export(_Rotating(), (q, cos, cos.sin()))
    optimized = fn.optimize(program)
    targets = [str(node.target) for node in optimized.graph.nodes]
    assert "fused_norm.rotary.default" in targets
    torch.testing.assert_close(
        optimized.module()(q, cos, cos.sin()), _Rotating()(q, cos, cos.sin())
    )


def turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class _Rotating(torch.nn.Module):
    def forward(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = q.transpose(1, 2)
        return q * cos + turned(q) * sin


def plain(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Rows before heads, as vision models have them."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return q * cos + turned(q) * sin


def normed(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return plain(F.rms_norm(q, (q.shape[-1],), 1 + cos[0].tanh() / 2, 1e-6), cos, sin)


def split_off(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Queries and keys of one projection, in views of it."""
    q, k = q.chunk(2, 2)
    return plain(q, cos, sin), plain(k, cos, sin)


def of_pairs(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """As diffusers writes Flux's, in float32 and back."""
    real, imaginary = q.reshape(*q.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack((-imaginary, real), dim=-1).flatten(3)
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    return (q.float() * cos + turned.float() * sin).to(q.dtype)


RIGHT = {run.__name__: run for run in (plain, normed, split_off, of_pairs)}


def the_other_way(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    a, b = q.chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return q * cos + torch.cat((b, -a), -1) * sin


def not_negated(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    a, b = q.chunk(2, -1)
    return q * cos.unsqueeze(-2) + torch.cat((b, a), -1) * sin.unsqueeze(-2)


def of_another(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return q * cos.unsqueeze(-2) + turned(q + 1) * sin.unsqueeze(-2)


def subtracted(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return q * cos.unsqueeze(-2) - turned(q) * sin.unsqueeze(-2)


def of_heads(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Each head has angles of its own, and all rows the same: heads are rows, and rows heads."""
    cos, sin = (v[:3].view(1, 1, 3, -1) for v in (cos, sin))
    return q * cos + turned(q) * sin


def of_all(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Each head of each row has angles of its own."""
    cos, sin = (v.unsqueeze(-2).expand(5, 3, -1) + v[:3] for v in (cos, sin))
    return q * cos + turned(q) * sin


def read_by_others(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    a = F.rms_norm(q, (q.shape[-1],), None, 1e-6)
    return plain(a, cos, sin), a.exp()


def written_between(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q = q.clone()
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first = q * c
    q.mul_(2)
    return first + turned(q) * s


def written_after(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q = q.clone()
    y = plain(q, cos, sin)
    q.zero_()
    return y, q


def in_place(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    y = q * cos.unsqueeze(-2)
    return y.add_(turned(q) * sin.unsqueeze(-2))


def of_wrong_halves(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    a, b = q[..., : q.shape[-1] // 4], q[..., q.shape[-1] // 4 :]
    return q * cos.unsqueeze(-2) + torch.cat((-b, a), -1) * sin.unsqueeze(-2)


def layer_normed(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """A norm of heads that no kernel has: the rotation alone is one."""
    return plain(F.layer_norm(q, (q.shape[-1],)), cos, sin)


def twice(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """What is rotated is a rotation's result."""
    return plain(plain(q, cos, sin), cos + 1, sin)


def twice_with_norms(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return normed(normed(q, cos, sin), cos + 1, sin)


def sines_of_each_sequence(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """All sequences share cosines, but not sines."""
    sin = torch.stack((sin, 2 * sin)).unsqueeze(2)
    return q * cos.unsqueeze(-2) + turned(q) * sin


def one_sine_a_row(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return q * cos.unsqueeze(-2) + turned(q) * sin[:, :1].unsqueeze(-2)


def one_cosine_a_row(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return q * cos[:, :1].unsqueeze(-2) + turned(q) * sin.unsqueeze(-2)


def source_written_after_a_copy(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """The copy could be left out, were its source not written."""
    source = q * 1
    copy = source.clone()
    source.mul_(2)
    return plain(copy, cos, sin), source


def narrow_inside(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return plain(q.bfloat16(), cos, sin)


def under_autocast(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        z = F.linear(q, torch.eye(q.shape[-1], dtype=q.dtype))
    return plain(z.float(), cos, sin)


OTHERS = (
    *(the_other_way, not_negated, of_another, subtracted, of_heads, of_all),
    read_by_others,
    *(twice, twice_with_norms, sines_of_each_sequence, one_sine_a_row, one_cosine_a_row),
    source_written_after_a_copy,
    *(written_between, written_after, in_place, of_wrong_halves, layer_normed, under_autocast),
)
ODD = {run.__name__: run for run in OTHERS}
FUSED = {
    "twice",
    "twice_with_norms",
    "of_heads",
    "read_by_others",
    "written_after",
    "layer_normed",
    "under_autocast",
}


@pytest.mark.parametrize("name", [*RIGHT, *ODD])
@pytest.mark.parametrize("follows", [False, True])
def test_forms(name: str, follows: bool) -> None:
    run = (RIGHT | ODD)[name]
    q = torch.randn(2, 5, 4 if name == "split_off" else 3, 32)
    cos, sin = torch.randn(2, 5, 32)
    if follows:
        q.requires_grad_()
    with torch.set_grad_enabled(follows):
        count = 2 if name in ("split_off", "twice", "twice_with_norms") else 1
        is_fused = name in RIGHT or (name in FUSED and not (follows and name == "written_after"))
        fused = [site for site in sites(run, q, cos, sin) if site.fused]
        assert len(fused) == (count if is_fused else 0)
        torch._dynamo.reset()
        compiled = torch.compile(
            run, backend="fused_norm", options={"small": True, "then": "eager"}
        )
        results = []
        # float64 is the truth, except for what rounds to a type of its own.
        wide = [t.detach().double().requires_grad_(t.requires_grad) for t in (q, cos, sin)]
        for call, given in ((compiled, (q, cos, sin)), (run, (q, cos, sin)), (run, wide)):
            ys = call(*given)
            ys = list(ys) if isinstance(ys, tuple) else [ys]
            if follows:
                ys += torch.autograd.grad(sum(y.sin().sum() for y in ys), given[0])
            results.append(ys)
    for mine, other, truth in zip(*results, strict=True):
        assert mine.stride() == other.stride()
        assert mine.requires_grad == other.requires_grad
        if name in ("under_autocast", "narrow_inside"):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
        else:
            assert_within_budget(name, mine, truth, other)


def test_what_is_left_says_why() -> None:
    q = torch.randn(2, 5, 3, 32)
    cos, sin = torch.randn(2, 5, 32)

    def reason(*tensors: Tensor, **options: Any) -> str:
        torch._dynamo.reset()
        (site,) = sites(plain, *tensors, **options)
        assert not site.fused
        return site.reason

    assert "a call this small" in reason(q, cos, sin, small=None)
    narrow = [t.bfloat16() for t in (q, cos, sin)]
    assert "rounds in between" in reason(*narrow, rounding="model")
    torch._dynamo.reset()
    (site,) = sites(narrow_inside, q, cos, sin, rounding="model")
    assert "rounds in between" in site.reason
    assert "gradients of cosines" in reason(q, cos.clone().requires_grad_(), sin)
    # Of pairs of neighbors in narrow tensors, Flux's way.
    narrow = [q.bfloat16(), cos, sin]
    torch._dynamo.reset()
    (site,) = sites(of_pairs, *narrow)
    assert site.fused
    with torch.no_grad():
        mine = torch.compile(
            of_pairs, backend="fused_norm", options={"small": True, "then": "eager"}
        )(*narrow)
        torch.testing.assert_close(mine, of_pairs(*narrow), rtol=1e-2, atol=1e-2)
    assert "rotates 24 of 24" in reason(q[..., :24], cos[..., :24], sin[..., :24])
    assert "not those of rows" in reason(q, cos[:1], sin[:1])


def test_calls_of_many_elements_are_fused_unasked() -> None:
    rows = _LEAST_ELEMENTS // (3 * 32) + 1
    q = torch.randn(1, rows, 3, 32)
    cos, sin = torch.randn(2, rows, 32)
    (site,) = sites(plain, q, cos, sin, small=None)
    assert site.fused


def test_which_heads_a_gpu_has_a_kernel_for() -> None:
    device = torch.device("cuda", 0)
    for D, size in ((128, 128), (72, 72), (256, 64), (80, 0)):
        assert rotary.has_kernel(device, torch.bfloat16, D, size)
    for D, size in ((1024, 64), (128, 12), (68, 0)):
        assert not rotary.has_kernel(device, torch.bfloat16, D, size)
