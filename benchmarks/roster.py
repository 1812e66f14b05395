"""Who takes part in a run: the providers asked for that are installed and serve some case."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from benchmarks import failures, providers
from benchmarks.case import Case
from benchmarks.plan import Listener, Plan
from benchmarks.provider import Provider
from benchmarks.runs import ProviderInfo
from benchmarks.shapes import SETS


class Roster:
    """The providers of a run, each loaded once.

    Args:
        plan: Names the providers and the cases.
        listener: Hears of each that is looked for.
    """

    def __init__(self, plan: Plan, listener: Listener) -> None:
        self._plan = plan
        self._listener = listener
        self._loaded: dict[tuple[str, str], object] = {}

    def find(self) -> Iterator[ProviderInfo]:
        """Load the providers one after another, and say of each what is wrong with it, if it is."""
        names = self._plan.names
        for op in dict.fromkeys(case.op.name for case in self._plan.cases):
            cases = [case for case in self._plan.cases if case.op.name == op]
            for provider in providers.of_op(op):
                if names is not None and provider.name not in names and provider.role != "baseline":
                    continue
                self._listener.doing(f"looking for {provider.name}")
                refusals = {provider.refuse(case) for case in cases}
                if None in refusals:
                    loaded, problem = load(provider)
                else:
                    loaded, problem = None, "; ".join(sorted(filter(None, refusals)))
                if not problem:
                    self._loaded[op, provider.name] = loaded
                yield ProviderInfo(
                    op,
                    provider.name,
                    provider.role,
                    provider.description,
                    "" if problem else provider.versions(),
                    problem,
                )

    def of_case(self, case: Case) -> list[tuple[Provider, object]]:
        """Return the providers to measure on a case, and what was loaded of each."""
        found = []
        for provider in providers.of_op(case.op.name):
            key = case.op.name, provider.name
            if key not in self._loaded:
                continue
            # What is loaded was asked for, unless no names were given.
            is_wanted = self._plan.names is not None or not provider.only_on_request
            if is_wanted or case.shape in SETS["puzzle"]:
                found.append((provider, self._loaded[key]))
        return found


def load(provider: Provider) -> tuple[object, str]:
    """Return what a provider runs, and what is missing for it or an empty string.

    Args:
        provider: The provider.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return provider.load(), ""
    except ImportError as error:
        return None, f"not installed: {failures.first_line(error)}"
    except Exception as error:
        # Other projects' imports, and the drivers and compilers behind, fail in ways of their own.
        message = f"{type(error).__name__}: {failures.first_line(error)}"
        return None, f"cannot be imported: {message}"
