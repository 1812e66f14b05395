"""Prints the terms of forwards on Hopper, which the cost model multiplies by its costs, without a GPU.

For each group of three arguments M, K, N, a line: those with our product, then those with PyTorch's.
"""

from std.sys import argv

from op.norm_linear.sm90.terms import TERMS, terms

comptime PROCESSORS = 132


def main() raises:
    var numbers = argv()
    for at in range(1, len(numbers), 3):
        var m = Int(numbers[at])
        var k = Int(numbers[at + 1])
        var n = Int(numbers[at + 2])
        for is_library in [False, True]:
            var found = terms(m, k, n, PROCESSORS, is_library)
            for i in range(TERMS):
                print(found[i], end=" ")
        print()
