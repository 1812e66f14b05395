"""Measures whole models: images or tokens a second and peak memory, in inference and training.

    python scripts/measure/whole_models.py --json FILE.json --table FILE.md --plot FILE.png
    python scripts/measure/whole_models.py --json FILE.json --table FILE.md --only-show

Models are those of examples/: ViT-L (timm), LLaMA 3.2 1B, Whisper large-v3-turbo, Qwen3 0.6B,
GPT-2 XL, BERT and ModernBERT large, SigLIP so400m (transformers) and DiT-XL/2 (diffusers), with
random weights; one whose library is missing is left out, and says so. Eager, torch.compile and this
library's backend share a model's parameters and are interleaved, in a new random order each round.
Training is forward and backward, with new gradients and no optimizer. Each is first compared with
the model in float32, one call of a batch at a time, so that it takes little memory: whatever errs
more than twice as much as eager is not timed. In inference, `fused_norm-frozen` is a copy of the
model that is frozen, with weights offloaded; its memory counts what it takes more than the model.
By request, `fused_norm-small` fuses calls of every size (`small=True`), and `fused_norm-rowwise`
computes in FP8, with weights that inference quantizes once; its errors may be a tenth larger than
those of `torchao-rowwise`, and either's 32 times those of eager, as e4m3 rounds 32 times as
coarsely as bfloat16. `--resume` measures what a file lacks.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from model_providers import FP8, FROZEN, PROVIDERS, TORCHAO, default, has_own, provided
from model_tables import line, plot, table
from torch import Tensor, nn

from benchmarks.case import dtype_name
from benchmarks.environment import describe
from benchmarks.memory import is_out_of_memory, peak
from benchmarks.timing import Budget, Rounds, launching
from fused_norm.models import Site
from fused_norm.models.sites import OTHERS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

# Calls in a batch of inference and training, as many as keep an H200 busy.
MODELS = {
    **{"vit": (256, 128), "llama": (8, 4), "whisper": (16, 8), "dit": (64, 64)},
    **{"qwen3": (8, 4), "gpt2": (16, 8), "bert": (64, 32), "modernbert": (32, 16)},
    "siglip": (64, 32),
}
MODES = ("forward", "train")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What errs more than this of eager's error is wrong; less than the other is rounding alone.
MOST_ERROR, LEAST_ERROR = 2.0, 1e-5
# In FP8: of torchao's error, and of eager's, by as much as e4m3 rounds more coarsely than bfloat16.
MOST_FP8_ERROR, COARSER = 1.1, 32.0
ERRORS = ("output error", "gradient error")
# Elements that are compared at once.
_AT_ONCE = 1 << 26
Step = Callable[[], list[Tensor]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the files, and return 1 if something was wrong or failed."""
    options = _parser().parse_args(arguments)
    # Of one function for all providers: layers that share theirs would run uncompiled in the last.
    torch._dynamo.config.recompile_limit = 64
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    run: dict[str, Any] = {"measurements": []}
    if options.json.exists() and (options.resume or options.only_show):
        run = json.loads(options.json.read_text())
    if not options.only_show:
        environment = dataclasses.asdict(describe(device, options.commit))
        options.commit = environment["commit"]
        environment["command"] = f"python scripts/measure/whole_models.py {' '.join(sys.argv[1:])}"
        run |= {"environment": environment, "dtype": dtype_name(dtype)}
        known = {(m["model"], m["mode"]) for m in run["measurements"]}
        end = time.perf_counter() + options.time_limit
        for name in options.model or MODELS:
            for mode in options.mode or MODES:
                if (name, mode) in known:
                    continue
                if time.perf_counter() > end:
                    print(f"{name} {mode}: left out, the time is over", flush=True)
                    continue
                found = measure(name, mode, device, dtype, options)
                if found is not None:
                    run["measurements"].append(found)
                    options.json.parent.mkdir(parents=True, exist_ok=True)
                    options.json.write_text(json.dumps(run, indent=1) + "\n")
                    print(line(found), flush=True)
    if options.table is not None:
        options.table.write_text(table(run))
    if options.plot is not None:
        plot(run, options.plot)
    results = [r for m in run["measurements"] for r in m["results"].values()]
    return int(not results or any(result["status"] != "ok" for result in results))


def _parser() -> argparse.ArgumentParser:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="file to write, or to read")
    parser.add_argument("--table", type=Path, help="write a table in Markdown")
    parser.add_argument("--plot", type=Path, help="write a plot")
    parser.add_argument("--only-show", action="store_true", help="measure nothing")
    parser.add_argument("--resume", action="store_true", help="measure what the file lacks")
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--provider", action="append", choices=PROVIDERS, help="beside eager")
    parser.add_argument("--size", choices=("tiny", "large"), default="large")
    parser.add_argument("--batch", type=int, help="default: by the model")
    parser.add_argument("--then", default="inductor", help="what follows this library's pass")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if has_gpu else "float32")
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each provider")
    parser.add_argument("--time-limit", type=float, default=1e9, help="start nothing after that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="where there is no checkout to ask")
    return parser


def measure(
    name: str, mode: str, device: torch.device, dtype: torch.dtype, options: argparse.Namespace
) -> dict[str, Any] | None:
    """Return what was found of a model in one mode; None where its library is missing.

    Args:
        name: One of MODELS.
        mode: One of MODES.
        device: Where to run.
        dtype: Of parameters and inputs.
        options: Those of the command line.
    """
    try:
        example = importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(f"{name}: left out, {error.name} is not installed", flush=True)
        return None
    torch.manual_seed(options.seed)
    torch.compiler.reset()
    batch = options.batch or MODELS[name][MODES.index(mode)]
    model, inputs = example.build(options.size, batch)
    model = model.to(device, dtype).train(mode == "train")
    for module in model.modules():
        # Chance would make the providers differ: dropout, and the labels that diffusers drops.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout_prob", None), float):
            module.dropout_prob = 0.0
    inputs = {k: v.to(device, dtype if v.is_floating_point() else None) for k, v in inputs.items()}
    found: dict[str, Any] = {
        **{"model": name, "mode": mode, "size": options.size, "batch": batch},
        **{"unit": example.UNIT, "count": count_of(example, inputs), "commit": options.commit},
        "parameters": sum(p.numel() for p in model.parameters()),
        "fused": "",
    }
    sites: list[Site] = []
    with torch.set_grad_enabled(mode == "train"):
        found["results"] = _results(model, inputs, mode, options, sites)
    norms = [site for site in sites if site.kind not in OTHERS]
    if norms:
        found["fused"] = f"{sum(site.fused for site in norms)} of {len(norms)} norms"
    del model, inputs
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def count_of(example: Any, inputs: dict[str, Any]) -> int:
    """Return how many of its units an example's inputs have."""
    tokens = importlib.import_module("whole_model").count_tokens
    return int(getattr(example, "count", tokens)(inputs))


def _results(
    model: nn.Module, inputs: dict[str, Tensor], mode: str, options: Any, sites: list[Site]
) -> dict[str, Any]:
    """Return results by provider: those that are exact, timed alternately; add what was fused."""
    parameters = trained(model)
    output_of = importlib.import_module("whole_model").output_of

    def bound(run: Any, own: Sequence[Tensor], given: dict[str, Tensor]) -> Step:
        def step() -> list[Tensor]:
            y = output_of(run, given)
            if mode == "forward":
                return [y]
            return [y.detach(), *torch.autograd.grad(y, own, _gradient_of(y))]

        return step

    dtype = parameters[0].dtype
    # The same parameters, which narrow again to what they were.
    model.float()
    if mode == "train":
        y = output_of(model, next(_each_alone(inputs)))
        found = torch.autograd.grad(y, parameters, _gradient_of(y), allow_unused=True)
        # Of those that nothing reads, eager has no gradient, and AOTAutograd may have zeros.
        parameters = [p for p, g in zip(parameters, found, strict=True) if g is not None]
        del y, found
    exact = _summed(bound(model, parameters, each)() for each in _each_alone(inputs))
    model.to(dtype)
    asked = ["eager", *(p for p in options.provider or default(mode) if p != "eager")]
    asked = [p for p in asked if mode == "forward" or p != FROZEN]
    device = parameters[0].device
    places = [i for i, p in enumerate(model.parameters()) if any(p is own for own in parameters)]
    steps, results, more = dict[str, Step](), dict[str, dict[str, Any]](), dict[str, int]()
    # FP8 last, as it is held to torchao's errors.
    for provider in sorted(asked, key=lambda p: p == FP8):
        before = _allocated(device)
        try:
            owner, run = provided(provider, model, mode, options.then, sites)
        except Exception as error:
            # Another project may refuse a device in whatever way it likes.
            results[provider] = _failed(error)
            continue
        all_own = list(owner.parameters())
        steps[provider] = bound(run, [all_own[i] for i in places], inputs)
        results[provider] = _checked(steps[provider], exact, _errors_of(provider, results))
        more[provider] = 0
        if has_own(provider, mode) and results[provider]["status"] == "ok":
            # What is frozen is prepared in the second call. What it has instead of the model's
            # parameters is no more than those.
            steps[provider]()
            more[provider] = _allocated(device) - before - _size(model, device)
    good = [p for p in asked if results[p]["status"] == "ok"]
    for provider in good:
        held = peak(steps[provider], device)
        results[provider]["peak bytes"] = held if held is None else held + more[provider]
    rounds = Rounds(
        {p: launching(steps[p], device) for p in good},
        Budget(options.seconds, warm_up=options.seconds / 4, most=50),
        options.seed,
    )
    rounds.run()
    for provider in good:
        if provider in rounds.failures:
            results[provider] |= _failed(rounds.failures[provider])
            continue
        times = rounds.timings(provider)
        results[provider]["timings"] = {k: dataclasses.asdict(t) for k, t in times.items()}
    return results


def _gradient_of(y: Tensor) -> Tensor:
    """Return the gradient of an output that training begins with."""
    dy = torch.linspace(-1, 1, y.shape[-1], device=y.device, dtype=y.dtype)
    return dy.expand_as(y)


def _each_alone(inputs: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the calls of a batch in float32, one by one."""
    for i in range(next(iter(inputs.values())).shape[0]):
        each = {k: v[i : i + 1] for k, v in inputs.items()}
        yield {k: v.float() if v.is_floating_point() else v for k, v in each.items()}


def _summed(results: Iterable[list[Tensor]]) -> list[Tensor]:
    """Return the outputs of calls as one, and the sums of their gradients, in the host's memory."""
    outputs, gradients = list[Tensor](), list[Tensor]()
    for y, *found in results:
        outputs.append(y.cpu())
        if gradients:
            torch._foreach_add_(gradients, found)
        else:
            gradients = found
    return [torch.cat(outputs), *(g.cpu() for g in gradients)]


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that get a gradient.

    Args:
        model: The model.
    """
    return [p for p in model.parameters() if p.requires_grad]


def _allocated(device: torch.device) -> int:
    """Return the bytes of a GPU that tensors have."""
    if device.type != "cuda":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated(device)


def _size(model: nn.Module, device: torch.device) -> int:
    """Return the bytes of a GPU that parameters have."""
    return sum(p.nbytes for p in model.parameters()) if device.type == "cuda" else 0


def _errors_of(provider: str, results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the largest errors that a provider may have; none for eager."""
    if provider == "eager":
        return {}
    factor = COARSER if provider in (FP8, TORCHAO) else MOST_ERROR
    most = {key: max(factor * results["eager"].get(key, 0.0), LEAST_ERROR) for key in ERRORS}
    peer = results.get(TORCHAO, {})
    if provider == FP8 and peer.get("status") == "ok":
        most = {key: min(value, MOST_FP8_ERROR * peer[key]) for key, value in most.items()}
    return most


def _checked(step: Step, exact: list[Tensor], most: dict[str, float]) -> dict[str, Any]:
    """Return how far a provider is off, and whether it may be timed."""
    try:
        found = step()
        off = [_distance(a, b) for a, b in zip(found, exact, strict=True)]
    except Exception as error:
        # A model, a compiler or a driver of others may raise whatever it likes; the rest goes on.
        return _failed(error)
    # Of all gradients together: some, as of a bias that a softmax takes out, are rounding alone.
    result: dict[str, Any] = {"status": "ok"}
    for key, part in zip(ERRORS, (slice(0, 1), slice(1, None)), strict=True):
        norms = [torch.tensor(v).norm() for v in (off[part], [b.norm() for b in exact[part]]) if v]
        result[key] = (norms[0] / norms[1]).item() if norms else 0.0
    if any(result[key] > value for key, value in most.items()):
        result["status"] = "wrong"
    return result


def _distance(found: Tensor, exact: Tensor) -> float:
    """Return the norm of a difference, without the room for all of it on a device."""
    parts = zip(found.flatten().split(_AT_ONCE), exact.flatten().split(_AT_ONCE), strict=True)
    norms = torch.tensor([(a.float() - b.to(a.device)).norm() for a, b in parts])
    return float(norms.norm())


def _failed(error: Exception) -> dict[str, Any]:
    status = "oom" if is_out_of_memory(error) else "failed"
    return {"status": status, "message": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    sys.exit(main())
