"""Divides by multiplications and shifts: mojo run divisor.mojo D N D N ... prints the quotients of the pairs."""

from std.sys import argv

from op.rotary.divisor import Divisor


def main() raises:
    """Prints a line for each pair."""
    var arguments = argv()
    for i in range(1, len(arguments), 2):
        var divisor = Divisor(Int(String(arguments[i])))
        print(divisor.quotient(UInt32(Int(String(arguments[i + 1])))))
