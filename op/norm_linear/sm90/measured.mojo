"""Which way of the forward is fastest on Hopper at the sizes that were measured.

Written by scripts/measure/dispatch.py, which measured
benchmarks/results/h200-dispatch.json as well:
`python scripts/measure/dispatch.py --table` writes it anew from there. Where a call is
DECLINED, our norm around PyTorch's product is faster, which takes the host longer
to launch.
"""

from ..plan import DECLINED, FUSED, KEPT_FOLD, NEW_FOLD


@fieldwise_init
struct Measured(TrivialRegisterPassable):
    """Sizes, and the fastest way there: launched one by one or replayed in a CUDA
    graph, where a fold may be kept or not."""

    var K: Int
    """Features."""
    var N: Int
    """Outputs."""
    var M: Int
    """Rows."""
    var launched_kept: Int
    """Launched, and a fold may be kept."""
    var launched: Int
    """Launched, and none may."""
    var graph_kept: Int
    """In a graph, and a fold may be kept."""
    var graph: Int
    """In a graph, and none may."""
    var passed: Int
    """Behind a pass that is there anyway: FUSED for our product, DECLINED for PyTorch's."""


# fmt: off
comptime MEASURED = [
    #        K      N      M      launched: kept, none  graph: kept, none   passed
    Measured(4096,  4096,  1,     KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(4096,  4096,  16,    KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(4096,  4096,  64,    KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(4096,  4096,  128,   KEPT_FOLD, FUSED,     KEPT_FOLD, DECLINED,  DECLINED),
    Measured(4096,  4096,  256,   FUSED,     FUSED,     DECLINED,  DECLINED,  DECLINED),
    Measured(4096,  4096,  512,   DECLINED,  DECLINED,  DECLINED,  DECLINED,  DECLINED),
    Measured(4096,  4096,  1024,  KEPT_FOLD, DECLINED,  KEPT_FOLD, DECLINED,  DECLINED),
    Measured(4096,  4096,  2048,  KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(4096,  4096,  4096,  KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(4096,  4096,  8192,  KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(4096,  4096,  16384, KEPT_FOLD, NEW_FOLD,  KEPT_FOLD, NEW_FOLD,  FUSED),
    Measured(1024,  1024,  1,     KEPT_FOLD, FUSED,     FUSED,     FUSED,     FUSED),
    Measured(1024,  1024,  16,    KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(1024,  1024,  64,    KEPT_FOLD, FUSED,     FUSED,     FUSED,     FUSED),
    Measured(1024,  1024,  128,   KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(1024,  1024,  256,   KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(1024,  1024,  512,   KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(1024,  1024,  1024,  KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(1024,  1024,  2048,  KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(1024,  1024,  4096,  KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(1024,  1024,  8192,  KEPT_FOLD, NEW_FOLD,  KEPT_FOLD, NEW_FOLD,  FUSED),
    Measured(1024,  1024,  16384, KEPT_FOLD, NEW_FOLD,  KEPT_FOLD, NEW_FOLD,  FUSED),
    Measured(768,   2304,  1,     KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(768,   2304,  16,    KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(768,   2304,  64,    KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(768,   2304,  128,   KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(768,   2304,  256,   KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(768,   2304,  512,   KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(768,   2304,  1024,  KEPT_FOLD, FUSED,     KEPT_FOLD, DECLINED,  DECLINED),
    Measured(768,   2304,  2048,  KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(768,   2304,  4096,  KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(768,   2304,  8192,  KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(768,   2304,  16384, KEPT_FOLD, NEW_FOLD,  KEPT_FOLD, NEW_FOLD,  FUSED),
    Measured(4096,  12288, 1,     DECLINED,  DECLINED,  DECLINED,  DECLINED,  DECLINED),
    Measured(4096,  12288, 16,    DECLINED,  DECLINED,  DECLINED,  DECLINED,  DECLINED),
    Measured(4096,  12288, 64,    DECLINED,  DECLINED,  DECLINED,  DECLINED,  DECLINED),
    Measured(4096,  12288, 128,   DECLINED,  DECLINED,  DECLINED,  DECLINED,  DECLINED),
    Measured(4096,  12288, 256,   DECLINED,  DECLINED,  DECLINED,  DECLINED,  DECLINED),
    Measured(4096,  12288, 512,   FUSED,     FUSED,     FUSED,     FUSED,     FUSED),
    Measured(4096,  12288, 1024,  FUSED,     FUSED,     FUSED,     FUSED,     FUSED),
    Measured(4096,  12288, 2048,  KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(4096,  12288, 4096,  KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(4096,  12288, 8192,  KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(4096,  12288, 16384, KEPT_FOLD, NEW_FOLD,  KEPT_FOLD, NEW_FOLD,  FUSED),
    Measured(2048,  2048,  1,     KEPT_FOLD, FUSED,     FUSED,     FUSED,     FUSED),
    Measured(2048,  2048,  16,    KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(2048,  2048,  64,    KEPT_FOLD, FUSED,     FUSED,     FUSED,     FUSED),
    Measured(2048,  2048,  128,   KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(2048,  2048,  256,   KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(2048,  2048,  512,   KEPT_FOLD, FUSED,     DECLINED,  DECLINED,  DECLINED),
    Measured(2048,  2048,  1024,  KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(2048,  2048,  2048,  KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(2048,  2048,  4096,  KEPT_FOLD, NEW_FOLD,  KEPT_FOLD, NEW_FOLD,  FUSED),
    Measured(2048,  2048,  8192,  KEPT_FOLD, NEW_FOLD,  KEPT_FOLD, NEW_FOLD,  FUSED),
    Measured(2048,  2048,  16384, KEPT_FOLD, NEW_FOLD,  KEPT_FOLD, NEW_FOLD,  FUSED),
    Measured(1024,  4096,  1,     KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(1024,  4096,  16,    KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(1024,  4096,  64,    KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(1024,  4096,  128,   KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(1024,  4096,  256,   KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(1024,  4096,  512,   KEPT_FOLD, FUSED,     KEPT_FOLD, DECLINED,  DECLINED),
    Measured(1024,  4096,  1024,  KEPT_FOLD, FUSED,     KEPT_FOLD, DECLINED,  DECLINED),
    Measured(1024,  4096,  2048,  KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(1024,  4096,  4096,  KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(1024,  4096,  8192,  KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(1024,  4096,  16384, KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(1280,  5120,  1,     KEPT_FOLD, FUSED,     DECLINED,  DECLINED,  DECLINED),
    Measured(1280,  5120,  16,    KEPT_FOLD, FUSED,     DECLINED,  DECLINED,  DECLINED),
    Measured(1280,  5120,  64,    KEPT_FOLD, FUSED,     DECLINED,  DECLINED,  DECLINED),
    Measured(1280,  5120,  128,   KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(1280,  5120,  256,   KEPT_FOLD, FUSED,     KEPT_FOLD, DECLINED,  DECLINED),
    Measured(1280,  5120,  512,   FUSED,     FUSED,     FUSED,     FUSED,     FUSED),
    Measured(1280,  5120,  1024,  FUSED,     FUSED,     FUSED,     FUSED,     FUSED),
    Measured(1280,  5120,  2048,  FUSED,     FUSED,     FUSED,     FUSED,     FUSED),
    Measured(1280,  5120,  4096,  KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(1280,  5120,  8192,  KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
    Measured(1280,  5120,  16384, KEPT_FOLD, FUSED,     KEPT_FOLD, FUSED,     FUSED),
]
"""The measurements, by weight and then by rows."""
# fmt: on
