"""Prints what a softcap makes of logits, and its slope: mojo run softcap.mojo CAP EIGHTHS..."""

from std.sys import argv

from op.head.softcap import capped, slope


def main() raises:
    """Prints a line for each logit, given in eighths."""
    var arguments = argv()
    var cap = Float32(Int(String(arguments[1])))
    for i in range(2, len(arguments)):
        var z = Float32(Int(String(arguments[i]))) / 8
        print(capped[1](z, cap), slope[1](z, cap))
