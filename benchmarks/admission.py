"""Who is timed on a case: the providers that serve it and agree with float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks import check, failures, memory
from benchmarks.case import Case, Mode
from benchmarks.plan import Listener, Plan
from benchmarks.provider import Bind, Provider
from benchmarks.runs import Result


@dataclass
class Prepared:
    """A provider that has been found right, ready to be bound to inputs."""

    provider: Provider
    bind: Bind


@dataclass
class Admission:
    """What the comparison with float64 found.

    Attributes:
        results: Of every provider, in order.
        ready: The providers that are right.
        eager: The errors of the first, PyTorch, that the others are held to.
    """

    results: list[tuple[Provider, Result]] = field(default_factory=list)
    ready: list[Prepared] = field(default_factory=list)
    eager: dict[str, float] = field(default_factory=dict)

    def results_in(self, mode: Mode) -> list[Result]:
        """Return copies of the results, to be filled in for a mode."""
        return [
            Result(result.provider, result.status, result.message, dict(result.errors))
            for provider, result in self.results
            if _differs_in(provider, mode)
        ]

    def ready_in(self, mode: Mode) -> list[Prepared]:
        """Return the providers to time in a mode."""
        return [prepared for prepared in self.ready if _differs_in(prepared.provider, mode)]


def admit(
    case: Case, chosen: Sequence[tuple[Provider, object]], plan: Plan, listener: Listener
) -> dict[bool, Admission]:
    """Compare every provider with float64: as inference runs it (False), and training (True).

    One of the two is left out where the plan times only the other.

    Args:
        case: The case.
        chosen: Providers, PyTorch first, and what was loaded of each.
        plan: Says which modes are timed, and seeds the inputs.
        listener: Hears of each comparison.
    """
    kinds = sorted({mode != "forward" for mode in plan.modes})
    admissions = {gradients: Admission() for gradients in kinds}
    try:
        memory.require(case, len(chosen))
        inputs, grad_outputs = case.inputs(plan.seed), case.grad_outputs(plan.seed)
    except (RuntimeError, MemoryError) as error:
        # There is not enough memory: the case is skipped, and its results say so.
        for admission in admissions.values():
            for provider, _ in chosen:
                result = Result(provider.name, "ok")
                failures.record(result, error)
                admission.results.append((provider, result))
        return admissions
    truths: dict[object, check.Truth] = {}
    for provider, loaded in chosen:
        listener.doing(f"checking {provider.name} on {case}")
        bind = None
        for gradients, admission in admissions.items():
            result = Result(provider.name, "ok")
            admission.results.append((provider, result))
            if reason := provider.refuse(case):
                result.status, result.message = "unsupported", reason
                continue
            formula = provider.formula or case.op.reference
            with failures.kept(result):
                if formula not in truths:
                    truths[formula] = check.truth(formula, case, inputs, grad_outputs)
                bind = bind or provider.prepare(loaded, case)
                result.errors = check.errors(
                    bind, inputs, grad_outputs, truths[formula], gradients=gradients
                )
            if bind is None or result.status != "ok":
                continue
            admission.eager = admission.eager or result.errors
            if wrong := check.verdict(result.errors, admission.eager, case.dtype):
                result.status, result.message = "wrong", wrong
            else:
                admission.ready.append(Prepared(provider, bind))
    return admissions


def _differs_in(provider: Provider, mode: Mode) -> bool:
    return provider.modes is None or mode in provider.modes
