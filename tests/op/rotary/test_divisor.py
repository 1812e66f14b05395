"""Quotients that kernels of rotations take by a multiplication and a shift."""

from __future__ import annotations

import random

from mojo_programs import needs_mojo, printed

MOST = 1 << 30


@needs_mojo
def test_quotients() -> None:
    """Of all numbers below 2^30, those next to multiples of a divisor are the hardest."""
    draw = random.Random(0)
    divisors = {*range(1, 70), *(draw.randrange(1, MOST) for _ in range(40)), MOST - 1, MOST}
    divisors |= {(1 << log) + off for log in range(1, 30) for off in (-1, 1)}
    pairs = set()
    for d in divisors:
        last = (MOST - 1) // d * d
        multiples = {0, d, last, *(draw.randrange(last // d + 1) * d for _ in range(8))}
        near = {n + off for n in (*multiples, MOST - 1) for off in (-1, 0, 1)}
        pairs |= {(d, n) for n in near if 0 <= n < MOST}
    cases = sorted(pairs)
    assert list(map(int, printed("divisor", [], cases))) == [n // d for d, n in cases]
