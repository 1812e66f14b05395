"""Cases of the op family in which every possible pair of two options' values occurs."""

from __future__ import annotations

import functools
import itertools
import operator
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from family import GRID, is_possible


def pairwise(grid: Mapping[str, Sequence[Any]], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Give cases in which every possible pair of two options' values occurs."""
    random_ = random.Random(seed)
    # A bit for each pair of two options' values: sets of pairs would take seconds.
    place = itertools.count()
    words = {name: [str(value) for value in values] for name, values in grid.items()}
    bits = [
        (a, b, {pair: 1 << next(place) for pair in itertools.product(words[a], words[b])})
        for a, b in itertools.combinations(grid, 2)
    ]

    def draw() -> dict[str, Any]:
        while True:
            case = {name: random_.choice(values) for name, values in grid.items()}
            if is_possible(case):
                return case

    def pairs(case: Mapping[str, Any]) -> int:
        of_case = {name: str(value) for name, value in case.items()}
        return functools.reduce(operator.or_, (of[of_case[a], of_case[b]] for a, b, of in bits))

    # What thousands of draws never show cannot be.
    missing = functools.reduce(operator.or_, (pairs(draw()) for _ in range(6000)))
    while missing:
        case = max((draw() for _ in range(60)), key=lambda c: (pairs(c) & missing).bit_count())
        if found := pairs(case) & missing:
            missing &= ~found
            yield case


CASES = list(pairwise(GRID))
