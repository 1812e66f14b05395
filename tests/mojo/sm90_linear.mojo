"""Prints what is planned for a Linear layer alone on Hopper, without a GPU.

The first argument is a file of what strategies cost in bfloat16. For each group of three after it, M, K, N, a line:
whether y is ours in bfloat16, activated, gated with h kept, and with a residual added; dy weight; then y in float32, a
norm and an activation in float32, y from rows at no multiple of 16 bytes, and where no row may depend on another; then
the strategies of a norm with an activation and with a gate, where a fold may be kept.
"""

from std.sys import argv

from op.call import Call
from op.gemm.activation import GATED, GELU, RELU, SILU
from op.norm_linear.sm90.choice import choose_forward
from op.norm_linear.sm90.linear import linear_pays
from op.norm_linear.sm90.linear_backward import input_gradient_pays

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
        var activated = call
        activated.activation = Int(GELU)
        var rectified = call
        rectified.activation = Int(RELU)
        var gated = call
        gated.activation = GATED + Int(SILU)
        gated.h = 1
        var added = call
        added.residual = 16
        var shifted = added
        shifted.z = 8
        var invariant = call
        invariant.invariant = 1
        var strategies = List[Int]()
        for kind in [Int(GELU), GATED + Int(SILU)]:
            var kept = call
            kept.activation = kind
            kept.may_keep = 1
            kept.in_graph = 1
            strategies.append(
                choose_forward[DType.bfloat16](
                    kept, costs, linear_pays[DType.bfloat16](kept, costs)
                )
            )
        print(
            Int(linear_pays[DType.bfloat16](call, costs)),
            Int(linear_pays[DType.bfloat16](activated, costs)),
            Int(linear_pays[DType.bfloat16](gated, costs)),
            Int(linear_pays[DType.bfloat16](added, costs)),
            Int(input_gradient_pays[DType.bfloat16](call, costs)),
            Int(input_gradient_pays[DType.bfloat16](activated, costs)),
            Int(input_gradient_pays[DType.bfloat16](gated, costs)),
            Int(input_gradient_pays[DType.bfloat16](rectified, costs)),
            Int(linear_pays[DType.float32](call, costs)),
            choose_forward[DType.float32](activated, costs, True),
            Int(linear_pays[DType.bfloat16](shifted, costs)),
            Int(linear_pays[DType.bfloat16](invariant, costs)),
            strategies[0],
            strategies[1],
        )
    _ = file^
