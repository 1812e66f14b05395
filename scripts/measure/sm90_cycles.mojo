"""Prints the estimated cycles of products on Hopper, which the cost model multiplies by its factors, without a GPU.

For each group of three arguments M, K, N, a line: those of our product, then of PyTorch's.
"""

from std.sys import argv

from op.gemm.sm90.tiling import fewest_cycles
from op.norm_linear.sm90.costs import library_cycles

comptime PROCESSORS = 132


def main() raises:
    var numbers = argv()
    for i in range(1, len(numbers), 3):
        var m = Int(numbers[i])
        var k = Int(numbers[i + 1])
        var n = Int(numbers[i + 2])
        print(
            fewest_cycles(m, n, k, PROCESSORS),
            library_cycles(m, n, k, PROCESSORS),
        )
