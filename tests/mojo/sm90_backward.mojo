"""Prints which products of backwards are planned on Hopper, without a GPU.

The first argument is a file of what strategies cost in bfloat16. For each group of three after it, M, K and N, a line:
whether our product is taken for dW, without db and with it; whether those of dz and dW are PyTorch's, likewise; and
whether the kernel for few rows makes dz.
"""

from std.sys import argv

from op.call import Call
from op.norm_linear.sm90.backward_plan import few_rows_pay, is_too_wide
from op.norm_linear.sm90.linear_backward import weight_gradient_pays

from costs_file import CostsFile


def main() raises:
    var numbers = argv()
    var file = CostsFile(String(numbers[1]))
    var costs = file.costs()
    for i in range(2, len(numbers), 3):
        var call = Call()
        call.M = Int(numbers[i])
        call.K = Int(numbers[i + 1])
        call.N = Int(numbers[i + 2])
        var alone = weight_gradient_pays[DType.bfloat16](call, costs)
        var wide = is_too_wide(call)
        call.dbias = 1
        var both = weight_gradient_pays[DType.bfloat16](call, costs)
        print(
            Int(alone),
            Int(both),
            Int(wide),
            Int(is_too_wide(call)),
            Int(few_rows_pay(call, costs)),
        )
    _ = file^
