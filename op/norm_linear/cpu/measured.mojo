"""Which of our product and PyTorch's is faster on a CPU with tile registers.

Written by scripts/dispatch_cpu.py, which measured benchmarks/cpu-dispatch.json as well:
`python scripts/dispatch_cpu.py --table` writes it anew from there.
"""

from ..plan import DECLINED, FUSED


@fieldwise_init
struct Measured(TrivialRegisterPassable):
    """Sizes, and the faster way there."""

    var dtype: DType
    """Element type of the tensors."""
    var K: Int
    """Features."""
    var N: Int
    """Outputs."""
    var M: Int
    """Rows."""
    var forward: Int
    """Of a forward alone."""
    var training: Int
    """Of a forward and its backward together."""


# fmt: off
comptime MEASURED = [
    #        dtype           K     N     M     forward   training
    Measured(DType.bfloat16, 1024, 1024, 64,   FUSED,    FUSED),
]
"""The measurements, by type, weight and rows."""
# fmt: on
