"""Prints what is planned for grouped Linear layers on Hopper, without a GPU.

The first argument is a file of what strategies cost in bfloat16. For each group of six after it, M, K, three N (0 for
none) and a pitch, a line: whether one launch makes all products
in bfloat16, in float16 and in float32; whether one sums dgrad; the strategy of the forward, launched
and where a fold may be kept; the same where the last bias is not aligned; the tiles and the k blocks of all. Then
come the parts of these.
"""

from std.sys import argv

from op.call import Call, Part
from op.gemm.sm90.parts import Parts, steps_of
from op.norm_linear.sm90.parts import sizes_of
from op.norm_linear.sm90.grouped import folded_strategy, products_pay
from op.norm_linear.sm90.grouped_backward import input_gradients_pay

from costs_file import PROCESSORS, CostsFile


def print_places(call: Call, step: Int):
    """Prints the part and the place there of each tile, or k block."""
    var sizes = sizes_of(call)
    for i in range(steps_of(sizes, step)):
        var place = Parts(sizes, step).find(UInt32(i))
        print(place[0], place[1], sep=":", end=" ")
    print()


def main() raises:
    var numbers = argv()
    var file = CostsFile(String(numbers[1]))
    var costs = file.costs()
    for i in range(2, len(numbers), 6):
        var parts = List[Part]()
        var call = Call()
        call.M = Int(numbers[i])
        call.K = Int(numbers[i + 1])
        call.pitch = Int(numbers[i + 5])
        for j in range(3):
            var n = Int(numbers[i + 2 + j])
            if n != 0:
                parts.append(Part(n, 0, 0, 0, 0, 0))
                call.N += n
        call.parts = Int(parts.unsafe_ptr())
        call.part_count = len(parts)
        print(
            Int(products_pay[DType.bfloat16](call, PROCESSORS)),
            Int(products_pay[DType.float16](call, PROCESSORS)),
            Int(products_pay[DType.float32](call, PROCESSORS)),
            Int(input_gradients_pay[DType.bfloat16](call, PROCESSORS)),
            folded_strategy[DType.bfloat16](call, costs),
            end=" ",
        )
        call.may_keep = 1
        print(folded_strategy[DType.bfloat16](call, costs), end=" ")
        parts[len(parts) - 1].bias = 8
        print(
            Int(products_pay[DType.bfloat16](call, PROCESSORS)),
            steps_of(sizes_of(call), 128),
            steps_of(sizes_of(call), 64),
        )
        print_places(call, 128)
        print_places(call, 64)
        _ = parts^
    _ = file^
