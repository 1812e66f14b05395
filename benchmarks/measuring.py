"""Measures one case in one mode: the time and the memory of every provider that is right."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks import failures, memory
from benchmarks.admission import Admission, Prepared
from benchmarks.case import Case, Mode, dtype_name
from benchmarks.plan import Plan
from benchmarks.provider import Bound
from benchmarks.runs import Measurement, Result, Run
from benchmarks.timing import CpuTimer, GpuTimer, Rounds, Step, Timer


def blank(case: Case, mode: Mode, admission: Admission, cache: int, plan: Plan) -> Measurement:
    """Return a measurement in which nothing has been timed yet.

    Args:
        case: The case.
        mode: The mode.
        admission: What the comparison with float64 found.
        cache: Bytes of the last-level cache.
        plan: Says how many sets of inputs there may be.
    """
    sets, is_past_cache = memory.input_sets(
        case,
        mode,
        0 if plan.is_warm else cache,
        most=plan.most_sets,
        providers=len(admission.ready_in(mode)),
    )
    return Measurement(
        op=case.op.name,
        mode=mode,
        dtype=dtype_name(case.dtype),
        shape=list(case.sizes),
        flops=case.op.operations(case.shape, mode),
        bytes=case.op.traffic(case.shape, mode, case.dtype.itemsize),
        input_sets=sets,
        is_past_cache=is_past_cache,
        results=admission.results_in(mode),
    )


def fill(
    measurement: Measurement, case: Case, mode: Mode, ready: Sequence[Prepared], plan: Plan
) -> None:
    """Time the providers. What the rounds so far have found is kept on a KeyboardInterrupt.

    Args:
        measurement: A blank one.
        case: Its case.
        mode: Its mode.
        ready: The providers to time.
        plan: Says how long, and whether to measure memory.
    """
    results = {result.provider: result for result in measurement.results}
    seeds = [plan.seed + 10 * index for index in range(measurement.input_sets)]
    try:
        inputs = [case.inputs(seed) for seed in seeds]
        gradients = [case.grad_outputs(seed) for seed in seeds]
    except (RuntimeError, MemoryError) as error:
        # There is not enough memory: no provider is timed, and the run goes on.
        for prepared in ready:
            failures.record(results[prepared.provider.name], error)
        return
    # One side stream for all: graphs are captured on the stream that the forward ran on.
    side = torch.cuda.Stream(case.device) if case.device.type == "cuda" else None
    if side is not None:
        # The inputs were made on another stream.
        torch.cuda.synchronize(case.device)
    timers: dict[str, Timer] = {}
    with torch.set_grad_enabled(mode != "forward"):
        for prepared in ready:
            provider, result = prepared.provider, results[prepared.provider.name]
            stream = None
            if side is not None:
                stream = side if provider.capturable else torch.cuda.current_stream()
            steps: list[Step] = []
            with failures.kept(result), torch.cuda.stream(stream):
                steps += [
                    _step(prepared.bind(tensors), mode, grad_outputs)
                    for tensors, grad_outputs in zip(inputs, gradients, strict=True)
                ]
                # What the first calls keep, such as a folded weight, is not memory of a call.
                for _ in range(3):
                    steps[0]()
                if plan.measures_memory:
                    result.peak_bytes = memory.peak(steps[0], case.device)
            if result.status != "ok":
                continue
            timers[provider.name] = (
                CpuTimer(steps)
                if stream is None
                else GpuTimer(steps, stream, provider.capture if provider.capturable else None)
            )
        _sample(timers, results, plan)


def compare(measurement: Measurement, run: Run) -> None:
    """Fill in the ratios to eager and to the floor.

    Args:
        measurement: One whose timings are known.
        run: The run that knows the providers' roles.
    """
    for role, name in (("baseline", "vs_eager"), ("floor", "vs_floor")):
        base = next(
            (r for r in measurement.results if run.role(measurement.op, r.provider) == role), None
        )
        for result in measurement.results:
            ratios = {
                metric: timing.median / base.timings[metric].median
                for metric, timing in result.timings.items()
                if base is not None and metric in base.timings
            }
            setattr(result, name, ratios)


def _step(bound: Bound, mode: Mode, grad_outputs: list[Tensor]) -> Step:
    """Return what is timed of a provider's call on one set of inputs."""
    call, leaves = bound
    if mode in ("forward", "forward_grad"):
        return call
    gradients = partial(
        torch.autograd.grad, inputs=leaves, grad_outputs=grad_outputs, allow_unused=True
    )
    if mode == "backward":
        return partial(gradients, call(), retain_graph=True)
    return lambda: gradients(call())


def _sample(timers: dict[str, Timer], results: dict[str, Result], plan: Plan) -> None:
    """Take the rounds, and keep what they have found however they end."""
    rounds = Rounds(timers, plan.budget, plan.seed)
    try:
        rounds.run()
    finally:
        for name, timer in timers.items():
            results[name].timings = rounds.timings(name)
            if isinstance(timer, GpuTimer) and timer.problem:
                results[name].message = timer.problem
        for name, error in rounds.failures.items():
            failures.record(results[name], error)
