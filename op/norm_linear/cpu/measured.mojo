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
    Measured(DType.bfloat16, 128,  128,  1,    FUSED,    FUSED),
    Measured(DType.bfloat16, 128,  128,  4,    FUSED,    FUSED),
    Measured(DType.bfloat16, 128,  128,  16,   FUSED,    FUSED),
    Measured(DType.bfloat16, 128,  128,  64,   FUSED,    FUSED),
    Measured(DType.bfloat16, 128,  128,  128,  FUSED,    FUSED),
    Measured(DType.bfloat16, 128,  128,  256,  FUSED,    FUSED),
    Measured(DType.bfloat16, 128,  128,  512,  FUSED,    FUSED),
    Measured(DType.bfloat16, 128,  128,  1024, FUSED,    FUSED),
    Measured(DType.bfloat16, 128,  128,  2048, FUSED,    FUSED),
    Measured(DType.bfloat16, 128,  128,  4096, FUSED,    FUSED),
    Measured(DType.bfloat16, 768,  768,  1,    FUSED,    FUSED),
    Measured(DType.bfloat16, 768,  768,  4,    FUSED,    FUSED),
    Measured(DType.bfloat16, 768,  768,  16,   FUSED,    FUSED),
    Measured(DType.bfloat16, 768,  768,  64,   FUSED,    FUSED),
    Measured(DType.bfloat16, 768,  768,  128,  FUSED,    FUSED),
    Measured(DType.bfloat16, 768,  768,  256,  FUSED,    DECLINED),
    Measured(DType.bfloat16, 768,  768,  512,  FUSED,    FUSED),
    Measured(DType.bfloat16, 768,  768,  1024, FUSED,    FUSED),
    Measured(DType.bfloat16, 768,  768,  2048, FUSED,    FUSED),
    Measured(DType.bfloat16, 768,  768,  4096, FUSED,    FUSED),
    Measured(DType.bfloat16, 768,  3072, 1,    FUSED,    FUSED),
    Measured(DType.bfloat16, 768,  3072, 4,    FUSED,    FUSED),
    Measured(DType.bfloat16, 768,  3072, 16,   FUSED,    FUSED),
    Measured(DType.bfloat16, 768,  3072, 64,   FUSED,    FUSED),
    Measured(DType.bfloat16, 768,  3072, 128,  FUSED,    FUSED),
    Measured(DType.bfloat16, 768,  3072, 256,  FUSED,    FUSED),
    Measured(DType.bfloat16, 768,  3072, 512,  FUSED,    FUSED),
    Measured(DType.bfloat16, 768,  3072, 1024, FUSED,    FUSED),
    Measured(DType.bfloat16, 768,  3072, 2048, FUSED,    FUSED),
    Measured(DType.bfloat16, 1024, 1024, 1,    FUSED,    FUSED),
    Measured(DType.bfloat16, 1024, 1024, 4,    FUSED,    FUSED),
    Measured(DType.bfloat16, 1024, 1024, 16,   FUSED,    FUSED),
    Measured(DType.bfloat16, 1024, 1024, 64,   FUSED,    FUSED),
    Measured(DType.bfloat16, 1024, 1024, 128,  FUSED,    FUSED),
    Measured(DType.bfloat16, 1024, 1024, 256,  FUSED,    FUSED),
    Measured(DType.bfloat16, 1024, 1024, 512,  FUSED,    FUSED),
    Measured(DType.bfloat16, 1024, 1024, 1024, FUSED,    FUSED),
    Measured(DType.bfloat16, 1024, 1024, 2048, FUSED,    FUSED),
    Measured(DType.bfloat16, 1024, 1024, 4096, FUSED,    FUSED),
    Measured(DType.bfloat16, 4096, 4096, 1,    DECLINED, FUSED),
    Measured(DType.bfloat16, 4096, 4096, 4,    FUSED,    FUSED),
    Measured(DType.bfloat16, 4096, 4096, 16,   FUSED,    FUSED),
    Measured(DType.bfloat16, 4096, 4096, 64,   FUSED,    FUSED),
    Measured(DType.bfloat16, 4096, 4096, 128,  FUSED,    FUSED),
    Measured(DType.bfloat16, 4096, 4096, 256,  DECLINED, DECLINED),
    Measured(DType.float16,  128,  128,  1,    FUSED,    FUSED),
    Measured(DType.float16,  128,  128,  4,    FUSED,    FUSED),
    Measured(DType.float16,  128,  128,  16,   FUSED,    FUSED),
    Measured(DType.float16,  128,  128,  64,   FUSED,    FUSED),
    Measured(DType.float16,  128,  128,  128,  FUSED,    FUSED),
    Measured(DType.float16,  128,  128,  256,  FUSED,    FUSED),
    Measured(DType.float16,  128,  128,  512,  FUSED,    FUSED),
    Measured(DType.float16,  128,  128,  1024, FUSED,    FUSED),
    Measured(DType.float16,  128,  128,  2048, FUSED,    FUSED),
    Measured(DType.float16,  128,  128,  4096, FUSED,    FUSED),
    Measured(DType.float16,  768,  768,  1,    FUSED,    FUSED),
    Measured(DType.float16,  768,  768,  4,    FUSED,    FUSED),
    Measured(DType.float16,  768,  768,  16,   FUSED,    FUSED),
    Measured(DType.float16,  768,  768,  64,   FUSED,    FUSED),
    Measured(DType.float16,  768,  768,  128,  FUSED,    FUSED),
    Measured(DType.float16,  768,  768,  256,  FUSED,    FUSED),
    Measured(DType.float16,  768,  768,  512,  FUSED,    FUSED),
    Measured(DType.float16,  768,  768,  1024, FUSED,    FUSED),
    Measured(DType.float16,  768,  768,  2048, FUSED,    FUSED),
    Measured(DType.float16,  768,  768,  4096, FUSED,    FUSED),
    Measured(DType.float16,  768,  3072, 1,    DECLINED, FUSED),
    Measured(DType.float16,  768,  3072, 4,    FUSED,    FUSED),
    Measured(DType.float16,  768,  3072, 16,   FUSED,    FUSED),
    Measured(DType.float16,  768,  3072, 64,   FUSED,    FUSED),
    Measured(DType.float16,  768,  3072, 128,  FUSED,    FUSED),
    Measured(DType.float16,  768,  3072, 256,  FUSED,    DECLINED),
    Measured(DType.float16,  768,  3072, 512,  FUSED,    FUSED),
    Measured(DType.float16,  768,  3072, 1024, FUSED,    DECLINED),
    Measured(DType.float16,  768,  3072, 2048, FUSED,    FUSED),
    Measured(DType.float16,  1024, 1024, 1,    DECLINED, FUSED),
    Measured(DType.float16,  1024, 1024, 4,    FUSED,    FUSED),
    Measured(DType.float16,  1024, 1024, 16,   FUSED,    FUSED),
    Measured(DType.float16,  1024, 1024, 64,   FUSED,    FUSED),
    Measured(DType.float16,  1024, 1024, 128,  FUSED,    FUSED),
    Measured(DType.float16,  1024, 1024, 256,  FUSED,    DECLINED),
    Measured(DType.float16,  1024, 1024, 512,  FUSED,    FUSED),
    Measured(DType.float16,  1024, 1024, 1024, FUSED,    FUSED),
    Measured(DType.float16,  1024, 1024, 2048, FUSED,    FUSED),
    Measured(DType.float16,  1024, 1024, 4096, FUSED,    FUSED),
    Measured(DType.float16,  4096, 4096, 1,    DECLINED, FUSED),
    Measured(DType.float16,  4096, 4096, 4,    FUSED,    FUSED),
    Measured(DType.float16,  4096, 4096, 16,   FUSED,    FUSED),
    Measured(DType.float16,  4096, 4096, 64,   FUSED,    FUSED),
    Measured(DType.float16,  4096, 4096, 128,  DECLINED, FUSED),
    Measured(DType.float16,  4096, 4096, 256,  DECLINED, DECLINED),
    Measured(DType.float32,  128,  128,  1,    FUSED,    DECLINED),
    Measured(DType.float32,  128,  128,  4,    FUSED,    DECLINED),
    Measured(DType.float32,  128,  128,  16,   FUSED,    DECLINED),
    Measured(DType.float32,  128,  128,  64,   FUSED,    DECLINED),
    Measured(DType.float32,  128,  128,  128,  FUSED,    DECLINED),
    Measured(DType.float32,  128,  128,  256,  FUSED,    FUSED),
    Measured(DType.float32,  128,  128,  512,  FUSED,    FUSED),
    Measured(DType.float32,  128,  128,  1024, FUSED,    FUSED),
    Measured(DType.float32,  128,  128,  2048, FUSED,    FUSED),
    Measured(DType.float32,  128,  128,  4096, FUSED,    FUSED),
    Measured(DType.float32,  768,  768,  1,    DECLINED, DECLINED),
    Measured(DType.float32,  768,  768,  4,    DECLINED, DECLINED),
    Measured(DType.float32,  768,  768,  16,   FUSED,    DECLINED),
    Measured(DType.float32,  768,  768,  64,   FUSED,    FUSED),
    Measured(DType.float32,  768,  768,  128,  FUSED,    FUSED),
    Measured(DType.float32,  768,  768,  256,  DECLINED, DECLINED),
    Measured(DType.float32,  768,  768,  512,  FUSED,    DECLINED),
    Measured(DType.float32,  768,  768,  1024, FUSED,    FUSED),
    Measured(DType.float32,  768,  768,  2048, FUSED,    DECLINED),
    Measured(DType.float32,  768,  768,  4096, FUSED,    DECLINED),
    Measured(DType.float32,  768,  3072, 1,    DECLINED, DECLINED),
    Measured(DType.float32,  768,  3072, 4,    DECLINED, FUSED),
    Measured(DType.float32,  768,  3072, 16,   FUSED,    FUSED),
    Measured(DType.float32,  768,  3072, 64,   FUSED,    FUSED),
    Measured(DType.float32,  768,  3072, 128,  FUSED,    FUSED),
    Measured(DType.float32,  768,  3072, 256,  FUSED,    FUSED),
    Measured(DType.float32,  768,  3072, 512,  FUSED,    DECLINED),
    Measured(DType.float32,  768,  3072, 1024, DECLINED, DECLINED),
    Measured(DType.float32,  768,  3072, 2048, DECLINED, DECLINED),
    Measured(DType.float32,  1024, 1024, 1,    DECLINED, DECLINED),
    Measured(DType.float32,  1024, 1024, 4,    DECLINED, DECLINED),
    Measured(DType.float32,  1024, 1024, 16,   FUSED,    DECLINED),
    Measured(DType.float32,  1024, 1024, 64,   FUSED,    FUSED),
    Measured(DType.float32,  1024, 1024, 128,  FUSED,    FUSED),
    Measured(DType.float32,  1024, 1024, 256,  FUSED,    DECLINED),
    Measured(DType.float32,  1024, 1024, 512,  FUSED,    DECLINED),
    Measured(DType.float32,  1024, 1024, 1024, FUSED,    DECLINED),
    Measured(DType.float32,  1024, 1024, 2048, DECLINED, DECLINED),
    Measured(DType.float32,  1024, 1024, 4096, DECLINED, DECLINED),
    Measured(DType.float32,  4096, 4096, 1,    DECLINED, FUSED),
    Measured(DType.float32,  4096, 4096, 4,    FUSED,    FUSED),
    Measured(DType.float32,  4096, 4096, 16,   FUSED,    FUSED),
    Measured(DType.float32,  4096, 4096, 64,   FUSED,    FUSED),
    Measured(DType.float32,  4096, 4096, 128,  FUSED,    FUSED),
    Measured(DType.float32,  4096, 4096, 256,  DECLINED, DECLINED),
]
"""The measurements, by type, weight and rows."""
# fmt: on
