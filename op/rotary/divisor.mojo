"""Divides small numbers on a GPU, which has no instruction for that."""

from std.math import ceildiv

comptime MOST = 1 << 30
"""Numbers are smaller than this."""


struct Divisor(TrivialRegisterPassable):
    """A number to divide by: a multiplication and a shift."""

    var factor: UInt32
    """The reciprocal, rounded up."""
    var shift: UInt32
    """How many of its bits, and of a product's, are behind the point."""

    def __init__(out self, d: Int):
        """Finds the factor: as its error is less than d / 2^shift, that of a quotient is less than 1 / d.

        Args:
            d: The divisor, positive, at most MOST.
        """
        var log = 0
        while 1 << log < d:
            log += 1
        self.shift = UInt32(30 + log)
        self.factor = UInt32(ceildiv(1 << (30 + log), d))

    @always_inline
    def quotient(self, n: UInt32) -> UInt32:
        """Divides a number.

        Args:
            n: The number, less than MOST.

        Returns:
            The quotient, rounded down.
        """
        return UInt32((UInt64(n) * UInt64(self.factor)) >> UInt64(self.shift))
