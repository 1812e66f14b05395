"""Runs a benchmark: every case, every provider, correctness first, and nothing lost on the way."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fused_norm.bench import check, environment, interference, memory, providers
from fused_norm.bench.ops import Case, Mode, dtype_name
from fused_norm.bench.providers import Bind, Bound, Provider
from fused_norm.bench.results import SCHEMA, Measurement, ProviderInfo, Result, Run
from fused_norm.bench.shapes import SETS
from fused_norm.bench.timing import Budget, CpuTimer, GpuTimer, Rounds, Step, Timer

# A run is gone on with where these are what they were.
SAME_TO_GO_ON = ("device", "cpu", "threads", "gpu", "driver", "tf32", "torch", "mojo", "commit")


@dataclass(frozen=True)
class Plan:
    """What to measure and how.

    Attributes:
        cases: In order.
        modes: Of each case.
        device: Where.
        names: Providers to measure besides the baselines, or None for all that are installed.
        budget: How long for each provider.
        seed: Seed of the random inputs.
        is_warm: Whether one set of inputs is used over and over, so that it stays in the cache.
        most_sets: Sets of inputs at most.
        interference: Whether to measure what our calls do to PyTorch's.
        measures_memory: Whether to measure memory.
        time_limit: Seconds after which no further measurement begins.
        commit: The git commit, where there is no checkout to ask.
        earlier: A run to go on with: what it has measured is kept and not measured again.
    """

    cases: Sequence[Case]
    modes: Sequence[Mode]
    device: torch.device
    names: Sequence[str] | None = None
    budget: Budget = field(default_factory=Budget)
    seed: int = 0
    is_warm: bool = False
    most_sets: int = 32
    interference: bool = False
    measures_memory: bool = True
    time_limit: float = float("inf")
    commit: str | None = None
    earlier: Run | None = None

    @property
    def steps(self) -> int:
        """How many measurements there are."""
        return len(self.cases) * len(self.modes)


class Listener:
    """Hears what a run does; this one keeps it to itself."""

    def doing(self, text: str) -> None:
        """Hear what is being done now."""

    def did(self, run: Run, measurement: Measurement) -> None:
        """Hear of a measurement that is done."""

    def skipped(self, count: int) -> None:
        """Hear of measurements that will not be made."""


@dataclass
class _Prepared:
    """A provider that has been found right, ready to be bound to inputs."""

    provider: Provider
    bind: Bind


@dataclass
class _Checked:
    """What the comparison with float64 found.

    Attributes:
        results: By provider, in order.
        ready: The providers that are right.
        eager: The errors of the first, PyTorch, that the others are held to.
    """

    results: dict[str, Result] = field(default_factory=dict)
    ready: list[_Prepared] = field(default_factory=list)
    eager: dict[str, float] = field(default_factory=dict)


class Runner:
    """Runs a plan. `run` always holds what has been measured.

    Args:
        plan: What to measure.
        listener: Hears of progress.
    """

    def __init__(self, plan: Plan, listener: Listener) -> None:
        self._plan = plan
        self._listener = listener
        self._loaded: dict[tuple[str, str], object] = {}
        self._began = time.perf_counter()
        self._seconds_before = 0.0
        self.run = Run(
            schema=SCHEMA,
            environment=environment.describe(plan.device, plan.commit),
            seed=plan.seed,
            seconds=plan.budget.seconds,
            finished=False,
            wall_seconds=0.0,
        )
        if plan.earlier is not None:
            self._go_on(plan.earlier)

    def execute(self) -> Run:
        """Measure everything. A KeyboardInterrupt ends it; `run` then holds what there is."""
        try:
            self._find_providers()
            self._measure_ceilings()
            late = False
            for case in self._plan.cases:
                late = time.perf_counter() - self._began > self._plan.time_limit
                if late:
                    self._listener.skipped(len(self._plan.modes))
                else:
                    with _saved_tensors_kept("backward" in self._plan.modes):
                        self._measure_case(case)
            self.run.finished = not late
        finally:
            self._keep_time()
            if after := environment.clocks(self._plan.device):
                self.run.environment.clocks += f" before, {after} after"
        return self.run

    def _go_on(self, earlier: Run) -> None:
        now, then = self.run.environment, earlier.environment
        for name in SAME_TO_GO_ON:
            if getattr(now, name) != getattr(then, name):
                raise ValueError(
                    f"the earlier run cannot be gone on with: its {name} is "
                    f"{getattr(then, name)}, and now it is {getattr(now, name)}"
                )
        self.run.providers = earlier.providers
        self.run.ceilings = earlier.ceilings
        self.run.measurements = earlier.measurements
        self.run.interference = earlier.interference
        self._seconds_before = earlier.wall_seconds

    def _keep_time(self) -> None:
        now = time.perf_counter() - self._began
        self.run.wall_seconds = round(self._seconds_before + now, 1)

    def _find_providers(self) -> None:
        for op in dict.fromkeys(case.op.name for case in self._plan.cases):
            for provider in providers.of_op(op):
                names = self._plan.names
                if names is not None and provider.name not in names and provider.role != "baseline":
                    continue
                self._listener.doing(f"looking for {provider.name}")
                cases = [case for case in self._plan.cases if case.op.name == op]
                refusals = {provider.refuse(case) for case in cases}
                if None in refusals:
                    loaded, problem = load(provider)
                else:
                    loaded, problem = None, "; ".join(sorted(filter(None, refusals)))
                known = [p for p in self.run.providers if (p.op, p.name) == (op, provider.name)]
                if known:
                    self.run.providers.remove(known[0])
                self.run.providers.append(
                    ProviderInfo(
                        op,
                        provider.name,
                        provider.role,
                        provider.description,
                        "" if problem else provider.versions(),
                        problem,
                    )
                )
                if not problem:
                    self._loaded[op, provider.name] = loaded

    def _measure_ceilings(self) -> None:
        known = {ceiling.dtype for ceiling in self.run.ceilings}
        for dtype in dict.fromkeys(case.dtype for case in self._plan.cases):
            if dtype_name(dtype) in known:
                continue
            self._listener.doing(f"the machine's ceilings in {dtype_name(dtype)}")
            self.run.ceilings.append(environment.ceiling(dtype, self._plan.device))

    def _chosen(self, case: Case) -> list[Provider]:
        names = self._plan.names
        found = []
        for provider in providers.of_op(case.op.name):
            if (case.op.name, provider.name) not in self._loaded:
                continue
            # Of those loaded, all were asked for, unless nobody asked for any.
            is_wanted = names is not None or not provider.only_on_request
            if is_wanted or case.shape in SETS["puzzle"]:
                found.append(provider)
        return found

    def _measure_case(self, case: Case) -> None:
        known = {measurement.key() for measurement in self.run.measurements}
        name, dtype = case.op.name, dtype_name(case.dtype)
        modes = [m for m in self._plan.modes if (name, m, dtype, case.sizes) not in known]
        self._listener.skipped(len(self._plan.modes) - len(modes))
        if not modes:
            return
        # The memory of the case before is free by now: nothing of it is referenced any more.
        _forget_compiled()
        chosen = self._chosen(case)
        checked: dict[bool, _Checked] = {}
        try:
            memory.require(case, len(chosen))
            checked = self._check(case, chosen)
        except Exception as error:
            # The inputs or their reference cannot be made: the case is skipped, and said to be.
            results = {p.name: failure(p.name, error) for p in chosen}
            checked = dict.fromkeys((False, True), _Checked(results))
        for mode in modes:
            self._measure(case, mode, checked[mode != "forward"])

    def _check(self, case: Case, chosen: Sequence[Provider]) -> dict[bool, _Checked]:
        """Compare every provider with float64: as inference runs it (False), and training (True).

        The second is left out where only the first is to be timed.
        """
        inputs, grad_output = case.inputs(self._plan.seed), case.grad_output(self._plan.seed)
        kinds = sorted({mode != "forward" for mode in self._plan.modes})
        truths: dict[object, check.Truth] = {}
        checked = {gradients: _Checked() for gradients in kinds}
        for provider in chosen:
            self._listener.doing(f"checking {provider.name} on {case}")
            bind = None
            for gradients, state in checked.items():
                result = Result(provider.name, "ok")
                state.results[provider.name] = result
                if reason := provider.refuse(case):
                    result.status, result.message = "unsupported", reason
                    continue
                formula = provider.formula or case.op.reference
                # A provider may raise whatever it likes: its words are kept, the others go on.
                try:
                    if formula not in truths:
                        truths[formula] = check.truth(formula, inputs, case.op.names, grad_output)
                    loaded = self._loaded[case.op.name, provider.name]
                    bind = bind or provider.prepare(loaded, case)
                    result.errors = check.errors(
                        bind, inputs, grad_output, truths[formula], gradients=gradients
                    )
                except Exception as error:
                    _fail(result, error)
                    continue
                state.eager = state.eager or result.errors
                if wrong := check.verdict(result.errors, state.eager, case.dtype):
                    result.status, result.message = "wrong", wrong
                else:
                    state.ready.append(_Prepared(provider, bind))
        return checked

    def _measure(
        self,
        case: Case,
        mode: Mode,
        checked: _Checked,
    ) -> None:
        plan = self._plan
        ready = [p for p in checked.ready if _differs_in(p.provider, mode)]
        cache = 0 if plan.is_warm else self.run.environment.cache_bytes
        most = plan.most_sets
        sets, past = memory.input_sets(case, mode, cache, most=most, providers=len(ready))
        measurement = Measurement(
            op=case.op.name,
            mode=mode,
            dtype=dtype_name(case.dtype),
            shape=list(case.sizes),
            flops=case.op.operations(case.shape, mode),
            bytes=case.op.traffic(case.shape, mode, case.dtype.itemsize),
            input_sets=sets,
            is_past_cache=past,
            results=[
                _copy(result)
                for name, result in checked.results.items()
                if _differs_in(providers.PROVIDERS[case.op.name, name], mode)
            ],
        )
        try:
            if ready:
                self._listener.doing(f"{mode} of {case}")
                self._time(case, mode, ready, measurement)
        finally:
            # Also on Ctrl-C: what the rounds so far have found is kept.
            self.run.measurements.append(measurement)
            compare(measurement, self.run)
            self._keep_time()
        if plan.interference and mode == "forward":
            self._measure_interference(case, measurement)
        self._listener.did(self.run, measurement)

    def _time(
        self, case: Case, mode: Mode, ready: Sequence[_Prepared], measurement: Measurement
    ) -> None:
        seed = self._plan.seed
        on_gpu = case.device.type == "cuda"
        results = {result.provider: result for result in measurement.results}
        try:
            inputs = [case.inputs(seed + 10 * i) for i in range(measurement.input_sets)]
            grad_outputs = [case.grad_output(seed + 10 * i) for i in range(measurement.input_sets)]
        except Exception as error:
            # Memory may not suffice: nobody is timed, and the run goes on.
            for prepared in ready:
                _fail(results[prepared.provider.name], error)
            return
        # One side stream for all: graphs are captured on the stream that the forward ran on.
        side = torch.cuda.Stream(case.device) if on_gpu else None
        if on_gpu:
            # The inputs were made on another stream.
            torch.cuda.synchronize(case.device)
        timers: dict[str, Timer] = {}
        with torch.set_grad_enabled(mode != "forward"):
            for prepared in ready:
                provider, result = prepared.provider, results[prepared.provider.name]
                stream = None
                if side is not None:
                    stream = side if provider.capturable else torch.cuda.current_stream()
                # As in the check: whatever is raised stays with the provider that raised it.
                try:
                    with torch.cuda.stream(stream):
                        steps = [
                            step(prepared.bind(tensors), mode, grad_output)
                            for tensors, grad_output in zip(inputs, grad_outputs, strict=True)
                        ]
                        # What the first calls keep, a folded weight say, is no call's memory.
                        for _ in range(3):
                            steps[0]()
                        if self._plan.measures_memory:
                            result.peak_bytes = memory.peak(steps[0], case.device)
                except Exception as error:
                    # A provider may raise whatever it likes: the others go on.
                    _fail(result, error)
                    continue
                timers[provider.name] = (
                    CpuTimer(steps)
                    if stream is None
                    else GpuTimer(steps, stream, provider.capture if provider.capturable else None)
                )
            rounds = Rounds(timers, self._plan.budget, seed)
            try:
                rounds.run()
            finally:
                for name, timer in timers.items():
                    results[name].timings = rounds.timings(name)
                    if isinstance(timer, GpuTimer) and timer.problem:
                        results[name].message = timer.problem
                for name, raised in rounds.failures.items():
                    _fail(results[name], raised)

    def _measure_interference(self, case: Case, measurement: Measurement) -> None:
        ours = measurement.of("fused_norm")
        is_measured = ours is not None and ours.status == "ok"
        if not is_measured or case.device.type != "cpu" or case.op.name != "layernorm_linear":
            return
        assert ours is not None
        self._listener.doing(f"PyTorch's ops beside ours on {case}")
        # As everywhere: what ours raises is recorded with it, and the run goes on.
        try:
            sets, plan = measurement.input_sets, self._plan
            self.run.interference.append(interference.measure(case, sets, plan.budget, plan.seed))
        except Exception as error:
            # What was timed before stands, and the run goes on.
            _fail(ours, error)


def load(provider: Provider) -> tuple[object, str]:
    """Return what a provider runs, and what is missing for it or an empty string.

    Args:
        provider: The provider.
    """
    # Other projects' imports warn and fail in ways of their own, drivers and compilers included.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return provider.load(), ""
    except ImportError as error:
        return None, f"not installed: {_first_line(error)}"
    except Exception as error:
        # A package that is there and broken says so in its own way.
        return None, f"cannot be imported: {type(error).__name__}: {_first_line(error)}"


def step(bound: Bound, mode: Mode, grad_output: Tensor) -> Step:
    """Return what is timed.

    Args:
        bound: A provider's call on one set of inputs.
        mode: Forward, backward or both.
        grad_output: The gradient of the output.
    """
    call, leaves = bound
    if mode in ("forward", "forward_grad"):
        return call
    if mode == "backward":
        y = call()
        return lambda: torch.autograd.grad(y, leaves, grad_output, retain_graph=True)
    return lambda: torch.autograd.grad(call(), leaves, grad_output)


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


def failure(name: str, error: BaseException) -> Result:
    """Return the result of a provider that raised."""
    result = Result(name, "ok")
    _fail(result, error)
    return result


def _fail(result: Result, error: BaseException) -> None:
    result.status = "oom" if memory.is_out_of_memory(error) else "failed"
    result.message = f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""


def _differs_in(provider: Provider, mode: Mode) -> bool:
    return provider.modes is None or mode in provider.modes


def _copy(result: Result) -> Result:
    return Result(result.provider, result.status, result.message, dict(result.errors))


def _forget_compiled() -> None:
    """Drop what torch.compile holds for the case before, with its limits on recompiling."""
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _saved_tensors_kept(wanted: bool) -> Iterator[None]:
    """Have torch.compile's backwards leave saved tensors alone, so that one can be run again."""
    import torch._functorch.config as config

    patch: Callable[..., contextlib.AbstractContextManager[None]] = config.patch
    with patch(donated_buffer=False) if wanted else contextlib.nullcontext():
        yield
