"""Prints activations as a product that stores 8 bits computes them: mojo run activations.mojo KIND BITS...

The numbers are given and printed as their bits in float32: what a GPU makes of one, the same where it knows the kind,
then what each choice does that leaves out other kinds.
"""

from std.memory import bitcast
from std.sys import argv

from op.gemm.activation import GELU, OTHERS, SMOOTH, _narrow_share, activate


def main() raises:
    """Prints a line for each number."""
    var arguments = argv()
    comptime for own in range(6):
        comptime among = SMOOTH if own >= Int(GELU) else OTHERS
        var kind = Int32(Int(String(arguments[1])))
        if kind == Int32(own):
            for i in range(2, len(arguments)):
                var word = UInt32(Int(String(arguments[i])))
                var h = bitcast[DType.float32](word)
                print(
                    bitcast[DType.uint32](h * _narrow_share[width=1](kind, h)),
                    bitcast[DType.uint32](
                        h * _narrow_share[width=1, only=own](kind, h)
                    ),
                    bitcast[DType.uint32](activate[width=1](kind, h)),
                    bitcast[DType.uint32](activate[width=1, among=own](-1, h)),
                    bitcast[DType.uint32](
                        activate[width=1, among=among](kind, h)
                    ),
                )
