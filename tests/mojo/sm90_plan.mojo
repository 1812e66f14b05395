"""Prints the strategy that is planned for forwards on Hopper: no GPU is asked.

The first three arguments are files of what strategies cost in bfloat16, float16 and float32. For each group of five
after them, M, K, N, in_graph, may_keep, a line with the strategies in these dtypes; then the strategy in bfloat16 where
x is not aligned, where the weight is not, and of an RMSNorm without parameters; then whether our product is faster in
bfloat16 and float16.
"""

from std.sys import argv

from op.call import Call
from op.norm_linear.sm90.choice import choose_forward

from costs_file import CostsFile


def main() raises:
    var numbers = argv()
    var files = List[CostsFile]()
    for i in range(1, 4):
        files.append(CostsFile(String(numbers[i])))
    var bfloat16 = files[0].costs()
    var float16 = files[1].costs()
    var float32 = files[2].costs()
    for i in range(4, len(numbers), 5):
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
            choose_forward[DType.bfloat16](call, bfloat16),
            choose_forward[DType.float16](call, float16),
            choose_forward[DType.float32](call, float32),
            choose_forward[DType.bfloat16](shifted_x, bfloat16),
            choose_forward[DType.bfloat16](shifted_weight, bfloat16),
            choose_forward[DType.bfloat16](bare, bfloat16),
            Int(bfloat16.is_faster(call.M, call.K, call.N)),
            Int(float16.is_faster(call.M, call.K, call.N)),
        )
    _ = files^
