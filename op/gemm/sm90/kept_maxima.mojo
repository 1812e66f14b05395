"""Keeps the largest magnitudes of rows and columns of c while it is stored: the pass that quantizes c needs no other one.

They have the format of op/passes/maxima.mojo.
"""

from std.utils import StaticTuple
from max.gpu.primitives import warp

from ...magnitudes import MAGNITUDES, keep_largest, larger_half, larger_halves
from .shared_memory import pack_pair


@doc_hidden
struct KeptMaxima(TrivialRegisterPassable):
    """What a lane has seen of two rows of a warp's 16, rounded to bfloat16: pairs of neighboring columns."""

    var of_columns: Int64
    """Address of the maxima of columns, 4 bytes each, or of the one of all; 0 if none are kept."""
    var of_rows: Int64
    """Address of those of rows."""
    var is_one: Bool
    """Whether there is one of all."""
    var m: UInt32
    """Rows of the matrix."""
    var n: UInt32
    """Columns of the matrix."""
    var row: UInt32
    """First of the 16 rows."""
    var lane: UInt32
    """Lane of the thread."""
    var upper: UInt32
    """Of row lane / 4, the larger magnitudes."""
    var lower: UInt32
    """Of row lane / 4 + 8."""

    @always_inline
    def __init__(
        out self,
        of_columns: Int64,
        of_rows: Int64,
        is_one: Bool,
        m: UInt32,
        n: UInt32,
        row: UInt32,
        lane: UInt32,
    ):
        """Has seen nothing."""
        self.of_columns = of_columns
        self.of_rows = of_rows
        self.is_one = is_one
        self.m = m
        self.n = n
        self.row = row
        self.lane = lane
        self.upper = 0
        self.lower = 0

    @always_inline
    def see[
        groups: Int, //
    ](
        mut self,
        fours: StaticTuple[SIMD[DType.float32, 4], groups],
        column: UInt32,
    ):
        """Compares groups of eight columns and keeps the maxima of columns. Columns past the last one have zeros."""
        var words = StaticTuple[UInt32, groups](fill=0)
        comptime for group in range(groups):
            words[group] = self.compare(fours[group], True)
        self.keep_columns(words, column)

    @always_inline
    def compare(mut self, four: SIMD[DType.float32, 4], counts: Bool) -> UInt32:
        """Compares a group of eight columns, of which a lane has a pair of the upper row and one of the lower; and
        returns the larger ones of its two columns. Rows past the last one do not count."""
        var row = self.row + (self.lane >> 2)
        var of_upper = MAGNITUDES if counts and row < self.m else 0
        var of_lower = MAGNITUDES if counts and row + 8 < self.m else 0
        var above = pack_pair[DType.bfloat16](four.slice[2]()) & of_upper
        var below = (
            pack_pair[DType.bfloat16](four.slice[2, offset=2]()) & of_lower
        )
        self.upper = larger_halves(self.upper, above)
        self.lower = larger_halves(self.lower, below)
        return larger_halves(above, below)

    @always_inline
    def keep_columns[
        groups: Int, //
    ](self, words: StaticTuple[UInt32, groups], column: UInt32):
        """Keeps the maxima of columns, of which a word has those of a lane."""
        if not self.is_one:
            self._keep_columns(words, column)

    @always_inline
    def _keep_columns[
        groups: Int, //
    ](self, given: StaticTuple[UInt32, groups], column: UInt32):
        """Compares over the warp's rows. Of two lanes, each goes on with half of the groups, as long as there are two."""
        var words = given
        var group = UInt32(0)
        var is_first = True
        comptime for level in range(3):
            comptime distance = UInt32(16 >> level)
            comptime half = (groups >> level) // 2
            var is_high = self.lane & distance != 0
            comptime if half > 0:
                comptime for i in range(half):
                    var sent = words[i] if is_high else words[i + half]
                    var own = words[i + half] if is_high else words[i]
                    words[i] = larger_halves(
                        own, warp.shuffle_xor(sent, distance)
                    )
                group += UInt32(half) if is_high else 0
            else:
                words[0] = larger_halves(
                    words[0], warp.shuffle_xor(words[0], distance)
                )
                is_first = is_first and not is_high
        var own_column = column + 8 * group + (self.lane & 3) * 2
        if is_first and own_column < self.n:
            keep_largest(self.of_columns, Int(own_column), words[0] & 0xFFFF)
            keep_largest(self.of_columns, Int(own_column) + 1, words[0] >> 16)

    @always_inline
    def keep_rows(self):
        """Keeps the maxima of rows, or that of all."""
        var bits = larger_half(self.upper) | larger_half(self.lower) << 16
        comptime for distance in [1, 2]:
            bits = larger_halves(bits, warp.shuffle_xor(bits, UInt32(distance)))
        if self.is_one:
            comptime for distance in [4, 8, 16]:
                bits = larger_halves(
                    bits, warp.shuffle_xor(bits, UInt32(distance))
                )
            if self.lane == 0:
                keep_largest(self.of_columns, 0, larger_half(bits))
            return
        var row = self.row + (self.lane >> 2)
        if self.lane & 3 == 0:
            if row < self.m:
                keep_largest(self.of_rows, Int(row), bits & 0xFFFF)
            if row + 8 < self.m:
                keep_largest(self.of_rows, Int(row) + 8, bits >> 16)
