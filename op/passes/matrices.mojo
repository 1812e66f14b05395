"""Matrices that a pass takes in one launch: their record, and what a kernel gets of it."""

from std.math import ceildiv
from std.utils import StaticTuple

from ..argument import KernelArgument
from ..call import Call

comptime MOST_MATRICES = 8
"""The most matrices in one launch."""


@fieldwise_init
struct Matrix(TrivialRegisterPassable):
    """One matrix of a call, whose `parts` and `part_count` are those of its matrices; addresses are 0 as in `Call`.

    It may be consecutive columns of a whole matrix [M, whole], whose results and maxima it has in common with the others.
    """

    var M: Int
    """Its rows."""
    var K: Int
    """Its columns."""
    var x: Int
    """The matrix [M, K]."""
    var maxima: Int
    """The largest magnitudes of the whole matrix, as `workspace` of a call."""
    var z: Int
    """The whole matrix in 8 bits [M, whole]."""
    var z_scale: Int
    """Scales of the rows of that [M], float32."""
    var zt: Int
    """Its transpose in 8 bits [whole, pitch]."""
    var zt_scale: Int
    """Scales of the rows of that [whole], float32."""
    var pitch: Int
    """Elements from one row of the transpose to the next."""
    var whole: Int
    """Columns of the whole matrix, 0 if these are all; otherwise all parts have multiples of 8."""
    var skipped: Int
    """Those before its own."""

    @staticmethod
    def at(call: Call, i: Int) -> Self:
        """Returns one of a call's matrices.

        Args:
            call: The call; without parts, its own fields are the only matrix.
            i: Which one.

        Returns:
            The matrix.
        """
        if call.parts == 0:
            return Self(
                call.M,
                call.K,
                call.x,
                call.workspace,
                call.z,
                call.z_scale,
                call.zt,
                call.zt_scale,
                call.pitch,
                0,
                0,
            )
        return Pointer[Self, MutUntrackedOrigin](
            unsafe_from_address=call.parts
        ).unsafe_offset(i)[]


@fieldwise_init
struct Piece(TrivialRegisterPassable):
    """A matrix as a kernel gets it."""

    var x: Int64
    """Address of the matrix [m, k] in bfloat16."""
    var maxima: Int64
    """Address of its maxima."""
    var z: Int64
    """Address of its columns of the result [m, whole], or 0."""
    var z_scale: Int64
    """Address of its scales [m]."""
    var zt: Int64
    """Address of the transposed result [k, pitch], or 0."""
    var zt_scale: Int64
    """Address of its scales [k]."""
    var m: Int32
    """Rows."""
    var k: Int32
    """Columns, a multiple of 8."""
    var whole: Int32
    """Elements from one row of the result to the next."""
    var to_rows: Int32
    """Maxima from the first of its columns to those of rows."""
    var pitch: Int32
    """Bytes of a row of the transposed result."""
    var first: Int32
    """Rows of blocks before its own."""


# Not passable in registers: the compiler damages structs of many fields that functions pass to each other.
struct Matrices(ImplicitlyCopyable, KernelArgument, Movable):
    """The matrices of a launch, one below the other: a row of blocks is of one of them."""

    var pieces: StaticTuple[Piece, MOST_MATRICES]
    """The matrices; what is behind the last one begins after all rows of blocks."""
    var across: Int
    """Columns of the widest one."""
    var down: Int
    """Rows of blocks."""

    def __init__(out self, call: Call, rows: Int) raises:
        """Takes them from a call.

        Args:
            call: The call.
            rows: Rows of a block.

        Raises:
            If there are too many.
        """
        var count = call.part_count if call.parts != 0 else 1
        if count > MOST_MATRICES:
            raise Error(t"{count} matrices are too many for a launch")
        self.across = 0
        self.down = 0
        self.pieces = {fill = Piece(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, Int32.MAX)}
        for i in range(count):
            var own = Matrix.at(call, i)
            var whole = own.whole if own.whole != 0 else own.K
            # One maximum is that of all parts.
            var maxima = 0 if call.one_scale != 0 else 4 * own.skipped
            self.pieces[i] = Piece(
                Int64(own.x),
                Int64(own.maxima + maxima),
                Int64(own.z + own.skipped if own.z != 0 else 0),
                Int64(own.z_scale),
                Int64(own.zt + own.skipped * own.pitch if own.zt != 0 else 0),
                Int64(own.zt_scale + 4 * own.skipped),
                Int32(own.M),
                Int32(own.K),
                Int32(whole),
                Int32(whole - own.skipped),
                Int32(own.pitch),
                Int32(self.down),
            )
            self.across = max(self.across, own.K)
            self.down += ceildiv(max(own.M, own.pitch), rows)

    @always_inline
    def of_block(self, row: Int) -> Piece:
        """Finds the matrix of a block.

        Args:
            row: Its row of blocks.

        Returns:
            The matrix.
        """
        var piece = self.pieces[0]
        comptime for i in range(1, MOST_MATRICES):
            if Int32(row) >= self.pieces[i].first:
                piece = self.pieces[i]
        return piece
