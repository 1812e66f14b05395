"""Prints the way that is planned for forwards on Hopper: no GPU is asked.

For each group of five arguments M, K, N, in_graph, may_keep, a line with the ways in bfloat16, float16 and float32;
then the way in bfloat16 where x is not aligned, where the weight is not, and of an RMSNorm without parameters; then
how much of the device's time the tiles of our product use, in percent.
"""

from std.sys import argv

from op.call import Call
from op.gemm.sm90.tiling import Tiling
from op.norm_linear.sm90.choice import choose_forward

comptime PROCESSORS = 132


def main() raises:
    var numbers = argv()
    for i in range(1, len(numbers), 5):
        var call = Call()
        call.M = Int(numbers[i])
        call.K = Int(numbers[i + 1])
        call.N = Int(numbers[i + 2])
        call.in_graph = Int(numbers[i + 3])
        call.may_keep = Int(numbers[i + 4])
        var shifted_x = call
        shifted_x.x = 2
        var shifted_weight = call
        var bare = call
        bare.normalization = 1
        shifted_weight.weight = 2
        print(
            choose_forward[DType.bfloat16](call, PROCESSORS),
            choose_forward[DType.float16](call, PROCESSORS),
            choose_forward[DType.float32](call, PROCESSORS),
            choose_forward[DType.bfloat16](shifted_x, PROCESSORS),
            choose_forward[DType.bfloat16](shifted_weight, PROCESSORS),
            choose_forward[DType.bfloat16](bare, PROCESSORS),
            Tiling.best(call.M, call.N, call.K, PROCESSORS).percent,
        )
