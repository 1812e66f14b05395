"""Prints the terms of forwards on Hopper, which the cost model multiplies by its costs, without a GPU.

For each group of three arguments M, K, N, a line: those with our product behind a pass, with PyTorch's, with our
product of a fold, and with ours in float32.
"""

from std.sys import argv

from op.norm_linear.sm90.terms import (
    BEHIND_PASS,
    IN_FLOAT32,
    LIBRARY,
    OF_FOLD,
    TERMS,
    terms,
)

comptime PROCESSORS = 132


def main() raises:
    var numbers = argv()
    for at in range(1, len(numbers), 3):
        var m = Int(numbers[at])
        var k = Int(numbers[at + 1])
        var n = Int(numbers[at + 2])
        for product in [BEHIND_PASS, LIBRARY, OF_FOLD, IN_FLOAT32]:
            var found = terms(m, k, n, PROCESSORS, product)
            for i in range(TERMS):
                print(found[i], end=" ")
        print()
