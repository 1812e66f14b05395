"""Measures training steps of language models with and without the head: tokens a second, memory.

    python scripts/measure/head_training.py --json FILE.json --table FILE.md
    python scripts/measure/head_training.py --json FILE.json --table FILE.md --only-show

GPT-2 124M, LLaMA 3.2 1B and Qwen3 0.6B of transformers with random weights. A step is forward,
backward and AdamW, whose rate of 0 leaves the parameters that all providers share as they are. The
loss is transformers' own; providers called `...-head` take `fn.linear_cross_entropy` in its place,
on the rows before the vocabulary, and `fused_norm` is the backend, which finds the head itself.
Providers alternate, in a new random order each round; one whose loss or gradients are far from
eager's is not timed. Memory is the peak of forward and backward beyond what was there before,
gradients included; their own bytes are shown next to it, so the difference is activations.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import fused_norm as fn
from benchmarks.case import dtype_name
from benchmarks.environment import describe
from benchmarks.memory import is_out_of_memory, peak
from benchmarks.report import size as bytes_in_words
from benchmarks.timing import Budget, Rounds, launching
from fused_norm.models import Site, backend
from fused_norm.models.sites import HEAD

# Sequences and tokens of each.
LARGE = {"gpt2": (16, 1024), "llama-1b": (4, 2048), "qwen3-0.6b": (4, 2048)}
TINY = (2, 24)
_LLAMA = {
    **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192},
    **{"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8},
    "tie_word_embeddings": True,
}
_QWEN3 = {
    **{"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128},
    **{"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
    "tie_word_embeddings": True,
}
_TINY = {
    **{"vocab_size": 1003, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
}
_TINY_GPT2 = {"vocab_size": 1003, "n_embd": 64, "n_layer": 2, "n_head": 4}
PROVIDERS = ("eager", "eager-head", "compile", "compile-head", "fused_norm")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Relative distances to eager's gradients that roundings explain.
MOST_DISTANCE = {torch.float32: 1e-3, torch.bfloat16: 8e-2}


def build(name: str, size: str) -> tuple[Any, tuple[int, int]]:
    """Return a model, and how many sequences and tokens of each it is called with.

    Args:
        name: One of LARGE.
        size: `"large"`, or `"tiny"` to try the script.
    """
    given: dict[str, Any] = {"use_cache": False}
    is_tiny = size == "tiny"
    if name == "gpt2":
        given |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        given |= _TINY_GPT2 if is_tiny else {}
        config: Any = transformers.GPT2Config(**given)
        model: Any = transformers.GPT2LMHeadModel(config)
        # Without it, transformers warns, which breaks a compiled graph before the loss.
        model.loss_type = "ForCausalLM"
    elif name == "llama-1b":
        given |= {**_LLAMA, **(_TINY if is_tiny else {})}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**given))
    else:
        given |= {**_QWEN3, **(_TINY if is_tiny else {})}
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**given))
    return model, TINY if is_tiny else LARGE[name]


class Loss(nn.Module):
    """A model's own loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of the tokens that follow, of shape `[]`."""
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


class Head(Loss):
    """The same by the head: no logits."""

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of the tokens that follow, of shape `[]`."""
        rows = self.model.base_model(input_ids=ids)[0]
        head = self.model.get_output_embeddings()
        # As transformers shifts: the last token of a sequence has nothing to tell.
        labels = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        found: Tensor = fn.linear_cross_entropy(rows, head.weight, labels, head.bias)
        return found


def providers(model: nn.Module, sites: list[Site]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return what computes the loss of a model, by name of the provider.

    Args:
        model: The model.
        sites: What the backend found is added to it.
    """
    ours: Any = functools.partial(backend, options={}, sites=sites)
    return {
        "eager": Loss(model),
        "eager-head": Head(model),
        "compile": torch.compile(Loss(model)),
        "compile-head": torch.compile(Head(model)),
        "fused_norm": torch.compile(Loss(model), backend=ours),
    }


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what was found of a model.

    Args:
        name: One of LARGE.
        options: Those of the command line.
    """
    torch.manual_seed(0)
    torch.compiler.reset()
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    model, shape = build(name, options.size)
    model = model.to(device, dtype).train()
    ids = torch.randint(model.config.vocab_size, shape, device=device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, fused=device.type == "cuda")
    found: dict[str, Any] = {"model": name, "size": options.size, "shape": list(shape)}
    found["gradients"] = sum(p.numel() * p.element_size() for p in parameters)
    results: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], object]] = {}
    expected: list[Tensor] = []
    sites: list[Site] = []
    known = providers(model, sites)
    for provider in (w for w in PROVIDERS if w == "eager" or w in (options.provider or PROVIDERS)):
        step = _step(known[provider], ids, optimizer)
        try:
            loss = step(False)
            gradients = [p.grad.detach() for p in parameters if p.grad is not None]
            result = _checked(loss, gradients, expected, dtype)
            if not expected:
                expected = [loss.cpu(), *(g.cpu() for g in gradients)]
            del gradients
            # The optimizer's state is there before memory is counted.
            step(True)
            optimizer.zero_grad(set_to_none=True)
            gc.collect()
            result["peak bytes"] = peak(functools.partial(step, False), device)
        except Exception as error:
            # A model, a compiler or a driver of others may raise what it likes; the rest goes on.
            status = "oom" if is_out_of_memory(error) else "failed"
            result = {"status": status, "message": f"{type(error).__name__}: {error}"[:500]}
        optimizer.zero_grad(set_to_none=True)
        results[provider] = result
        if result["status"] == "ok":
            steps[provider] = functools.partial(step, True)
    budget = Budget(options.seconds, warm_up=options.seconds / 4, most=50)
    rounds = Rounds(
        {provider: launching(step, device) for provider, step in steps.items()}, budget, 0
    )
    rounds.run()
    for provider in steps:
        if provider in rounds.failures:
            results[provider] = {
                "status": "failed",
                "message": str(rounds.failures[provider])[:500],
            }
            continue
        times = rounds.timings(provider)
        timing = times.get("launch") or times["wall"]
        results[provider]["seconds"] = timing.median * 1e-6
        results[provider]["tokens a second"] = ids.numel() / (timing.median * 1e-6)
    heads = [site for site in sites if site.kind == HEAD]
    found["head"] = "; ".join("fused" if site.fused else site.reason for site in heads)
    return found | {"results": results}


def _step(
    loss_of: Callable[[Tensor], Tensor], ids: Tensor, optimizer: torch.optim.Optimizer
) -> Callable[[bool], Tensor]:
    def step(is_whole: bool) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(ids)
        loss.backward()
        if is_whole:
            optimizer.step()
        return loss.detach()

    return step


def _checked(
    loss: Tensor, gradients: list[Tensor], expected: list[Tensor], dtype: torch.dtype
) -> dict[str, Any]:
    """Return how far a provider is from eager, and whether it may be timed."""
    result: dict[str, Any] = {"status": "ok", "loss": loss.item()}
    if not expected:
        return result
    off = [
        (a.float() - b.to(a.device).float()).norm()
        for a, b in zip(gradients, expected[1:], strict=True)
    ]
    all_ = [b.float().norm() for b in expected[1:]]
    result["distance"] = float(torch.tensor(off).norm() / torch.tensor(all_).norm())
    is_near = abs(loss.item() - expected[0].item()) < MOST_DISTANCE[dtype] * abs(loss.item())
    if not is_near or not result["distance"] < MOST_DISTANCE[dtype]:
        result["status"] = "wrong"
    return result


def table(run: dict[str, Any]) -> str:
    """Return the measurements as a table in Markdown.

    Args:
        run: What was written.
    """
    environment = run["environment"]
    machine = environment["gpu"] or environment["cpu"]
    lines = [
        f"{machine}, {run['dtype']}, torch {environment['torch']}, {environment['date']}. Time is "
        "that of eager in the same rounds; activations are the peak less the gradients.",
        "",
        "| model | tokens | provider | tokens a second | time | activations | of eager's | "
        "gradients' distance |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for m in run["measurements"]:
        eager = m["results"]["eager"]
        for provider, result in m["results"].items():
            start = f"| {m['model']} | {m['shape'][0]} x {m['shape'][1]} | `{provider}` | "
            if "seconds" not in result or "seconds" not in eager:
                lines.append(f"{start}{result['status']} | | | | |")
                continue
            held, base = (
                None if r["peak bytes"] is None else max(r["peak bytes"] - m["gradients"], 0)
                for r in (result, eager)
            )
            memory = "| " if held is None else f"{bytes_in_words(held)} | "
            memory += f"{held / base:.2f}" if held is not None and base else ""
            ratio = result["seconds"] / eager["seconds"]
            distance = f"{result['distance']:.1e}" if "distance" in result else ""
            rate = f"{result['tokens a second']:,.0f}"
            lines.append(f"{start}{rate} | {ratio:.2f} | {memory} | {distance} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the files, and return 1 if something was wrong or failed."""
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="file to write, or to read")
    parser.add_argument("--table", type=Path, help="write a table in Markdown")
    parser.add_argument("--only-show", action="store_true", help="measure nothing")
    parser.add_argument("--model", action="append", choices=LARGE)
    parser.add_argument("--provider", action="append", choices=PROVIDERS, help="beside eager")
    parser.add_argument("--size", choices=("tiny", "large"), default="large")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if has_gpu else "float32")
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each provider")
    parser.add_argument("--commit", help="where there is no checkout to ask")
    options = parser.parse_args(arguments)
    run: dict[str, Any] = {"measurements": []}
    if options.only_show:
        run = json.loads(options.json.read_text())
    else:
        environment = dataclasses.asdict(describe(torch.device(options.device), options.commit))
        run |= {"environment": environment, "dtype": dtype_name(DTYPES[options.dtype])}
        for name in options.model or LARGE:
            commit = {"commit": environment["commit"]}
            run["measurements"].append(measure(name, options) | commit)
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(run, indent=1) + "\n")
            print(json.dumps(run["measurements"][-1], indent=1), flush=True)
            gc.collect()
            if options.device != "cpu":
                torch.cuda.empty_cache()
    if options.table is not None:
        options.table.write_text(table(run))
    results = [r for m in run["measurements"] for r in m["results"].values()]
    return int(not results or any(result["status"] != "ok" for result in results))


if __name__ == "__main__":
    sys.exit(main())
