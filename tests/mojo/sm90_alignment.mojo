"""Prints what is planned on Hopper for calls with one tensor at no multiple of 16 bytes, without a GPU.

For each argument, the place of a field of the record, a line: the strategies of a forward that is to fold, of one of a
gate's pair that is, and of one that is to normalize first; then whether ours are y, dx, the outputs of several weights,
and what a backward and the gradient of a weight ask. -1 shifts nothing.
"""

from std.sys import argv

from op.call import Call, Part
from op.gemm.activation import GATED, SILU
from op.norm_linear.plan import FUSED, NEW_FOLD
from op.norm_linear.sm90.choice import choose_forward, has_kernels
from op.norm_linear.sm90.costs import Costs
from op.norm_linear.sm90.linear import linear_pays
from op.norm_linear.sm90.linear_backward import input_gradient_pays
from op.norm_linear.sm90.grouped import products_pay

comptime PROCESSORS = 132
comptime dtype = DType.bfloat16


def shifted(call: Call, field: Int) -> Call:
    """Moves the tensor of a field by an element."""
    var calls = [call]
    if field >= 0:
        var place = Pointer[Int, MutUntrackedOrigin](
            unsafe_from_address=Int(calls.unsafe_ptr())
        ).unsafe_offset(field)
        place[] += 2
    return calls[0]


def main() raises:
    var costs = Costs(PROCESSORS, 0)
    var numbers = argv()
    for i in range(1, len(numbers)):
        var field = Int(numbers[i])
        var call = Call()
        call.M = 4096
        call.K = 2048
        call.N = 2048
        var fold = call
        fold.strategy = NEW_FOLD
        var gate = fold
        gate.activation = GATED + Int(SILU)
        var passed = call
        passed.strategy = FUSED
        var parts = [Part(2048, 0, 0, 0, 0, 0), Part(2048, 0, 0, 0, 0, 0)]
        var several = call
        several.N = 4096
        several.parts = Int(parts.unsafe_ptr())
        several.part_count = 2
        print(
            choose_forward[dtype](shifted(fold, field), costs),
            choose_forward[dtype](shifted(gate, field), costs),
            choose_forward[dtype](shifted(passed, field), costs),
            Int(linear_pays[dtype](shifted(call, field), costs)),
            Int(input_gradient_pays[dtype](shifted(call, field), costs)),
            Int(products_pay[dtype](shifted(several, field), PROCESSORS)),
            Int(has_kernels[dtype](shifted(call, field))),
        )
        _ = parts^
