"""Which way of the forward is fastest on Hopper, from benchmarks/h200-dispatch.json.

scripts/dispatch.py measured that file and prints this table: a test holds the two together. A
letter is a way at one number of rows: `k` a fold that is kept, `a` one made anew, `c` our LayerNorm
and our product, `t` our LayerNorm and PyTorch's product, which takes the host longer to launch.
"""

from __future__ import annotations

import functools
import math

ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# By K and N: launched one by one, with a kept fold or without one; in a CUDA graph, likewise.
FASTEST = {
    (4096, 4096): ("kkkkttkkkkk", "ccccttttcaa", "kkkkttkkkkk", "ccttttttcaa"),
    (1024, 1024): ("kkkkkkkkkkk", "ccccccccaaa", "kkkkkkkkkkk", "ccttttttaaa"),
    (768, 2304): ("kkkkkkkkkkk", "cccccccttca", "kkkkkkttkkk", "cctttttttca"),
    (4096, 12288): ("tttttckkkkt", "tttttcccttt", "tttttckkkkt", "tttttcccttt"),
}


@functools.lru_cache(maxsize=4096)
def fastest(rows: int, features: int, outputs: int, in_graph: bool, has_fold: bool) -> str:
    """Return the letter of the way that was fastest at the measured sizes next to these.

    Args:
        rows: M.
        features: K.
        outputs: N.
        in_graph: Whether the call is captured, so that launches cost nothing.
        has_fold: Whether a fold may be kept.
    """

    def distance(weight: tuple[int, int]) -> float:
        return abs(math.log(features / weight[0])) + abs(math.log(outputs / weight[1]))

    ways = FASTEST[min(FASTEST, key=distance)][2 * in_graph + (not has_fold)]
    nearest = min(range(len(ROWS)), key=lambda i: abs(math.log(rows / ROWS[i])))
    return ways[nearest]


def fastest_in_tf32(rows: int, features: int, outputs: int) -> str:
    """Return the letter of the way that is faster in tf32, `c` or `t`.

    A tile of y in float32 takes twice as long to store: where many tiles have short sums, that
    shows (docs/hopper-log.md, "float32").

    Args:
        rows: M.
        features: K.
        outputs: N.
    """
    return "t" if features <= 1024 and rows * outputs >= 2**24 else "c"
