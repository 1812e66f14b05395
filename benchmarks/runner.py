"""Runs a benchmark: every case, every provider, correctness first, and nothing lost on the way."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks import environment, failures, interference, measuring
from benchmarks.admission import Admission, admit
from benchmarks.case import Case, Mode, dtype_name
from benchmarks.plan import Listener, Plan
from benchmarks.roster import Roster
from benchmarks.runs import SCHEMA, Measurement, Run

# A run is resumed only if these have not changed.
SAME_TO_GO_ON = ("device", "cpu", "threads", "gpu", "driver", "tf32", "torch", "mojo", "commit")


class Runner:
    """Runs a plan. `run` always holds what has been measured.

    Args:
        plan: What to measure.
        listener: Hears of progress.
    """

    def __init__(self, plan: Plan, listener: Listener) -> None:
        self._plan = plan
        self._listener = listener
        self._roster = Roster(plan, listener)
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
                    f"the earlier run cannot be resumed: its {name} is "
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
        known = {(info.op, info.name): info for info in self.run.providers}
        for info in self._roster.find():
            if earlier := known.get((info.op, info.name)):
                self.run.providers.remove(earlier)
            self.run.providers.append(info)

    def _measure_ceilings(self) -> None:
        known = {ceiling.dtype for ceiling in self.run.ceilings}
        for dtype in dict.fromkeys(case.dtype for case in self._plan.cases):
            if dtype_name(dtype) in known:
                continue
            self._listener.doing(f"the machine's ceilings in {dtype_name(dtype)}")
            self.run.ceilings.append(environment.ceiling(dtype, self._plan.device))

    def _measure_case(self, case: Case) -> None:
        known = {measurement.key() for measurement in self.run.measurements}
        name, dtype = case.op.name, dtype_name(case.dtype)
        modes = [m for m in self._plan.modes if (name, m, dtype, case.sizes) not in known]
        self._listener.skipped(len(self._plan.modes) - len(modes))
        if not modes:
            return
        # The memory of the previous case is free: nothing refers to it anymore.
        _forget_compiled()
        chosen = self._roster.of_case(case)
        admissions = admit(case, chosen, self._plan, self._listener)
        for mode in modes:
            self._measure(case, mode, admissions[mode != "forward"])

    def _measure(self, case: Case, mode: Mode, admission: Admission) -> None:
        cache = self.run.environment.cache_bytes
        measurement = measuring.blank(case, mode, admission, cache, self._plan)
        ready = admission.ready_in(mode)
        try:
            if ready:
                self._listener.doing(f"{mode} of {case}")
                measuring.fill(measurement, case, mode, ready, self._plan)
        finally:
            # Also on Ctrl-C: what the rounds so far have found is kept.
            self.run.measurements.append(measurement)
            measuring.compare(measurement, self.run)
            self._keep_time()
        if self._plan.interference and mode == "forward":
            self._measure_interference(case, measurement)
        self._listener.did(self.run, measurement)

    def _measure_interference(self, case: Case, measurement: Measurement) -> None:
        ours = measurement.of("fused_norm")
        if ours is None or ours.status != "ok":
            return
        if case.device.type != "cpu" or case.op.name != "layernorm_linear":
            return
        self._listener.doing(f"PyTorch's ops beside ours on {case}")
        # What was timed stands, whatever is raised here.
        with failures.kept(ours):
            sets, plan = measurement.input_sets, self._plan
            self.run.interference.append(interference.measure(case, sets, plan.budget, plan.seed))


def _forget_compiled() -> None:
    """Drop what torch.compile holds for the case before, with its limits on recompiling."""
    # Nothing compiled yet is nothing to drop, and importing the compiler takes seconds.
    if "torch._dynamo" in sys.modules:
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
