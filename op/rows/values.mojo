"""The values of elements in the stages of a row program, and their reductions."""

from std.sys import inlined_assembly, is_nvidia_gpu
from std.utils import StaticTuple

comptime CAPACITY = 5
"""The most values that an element carries, and the most terms of one reduction."""

comptime MAX_STAGES = 6
"""The most stages of a program."""

comptime Terms[dtype: DType, width: Int] = StaticTuple[
    Values[dtype, width], MAX_STAGES
]
"""What every stage reduces, or its totals.

Parameters:
    dtype: The type computed in.
    width: The number of elements.
"""


struct Values[dtype: DType, width: Int](TrivialRegisterPassable):
    """Holds what neighboring elements of a row carry: up to CAPACITY SIMD vectors.

    Parameters:
        dtype: The type computed in.
        width: The number of elements.
    """

    comptime Lane = SIMD[Self.dtype, Self.width]
    """One value of every element."""

    var lanes: StaticTuple[Self.Lane, CAPACITY]
    """The values."""

    @always_inline
    def __init__(
        out self,
        a: Self.Lane = 0,
        b: Self.Lane = 0,
        c: Self.Lane = 0,
        d: Self.Lane = 0,
        e: Self.Lane = 0,
    ):
        """Holds the given values; those left out are zero.

        Args:
            a: The first value.
            b: The second value.
            c: The third value.
            d: The fourth value.
            e: The fifth value.
        """
        self.lanes = StaticTuple[Self.Lane, CAPACITY](a, b, c, d, e)

    @always_inline
    def __init__(out self, *, fill: Self.Lane):
        """Holds one value everywhere.

        Args:
            fill: The value.
        """
        self.lanes = StaticTuple[Self.Lane, CAPACITY](fill=fill)

    @always_inline
    def __getitem__(self, index: Int) -> Self.Lane:
        """Returns one value of every element.

        Args:
            index: Which of the values.

        Returns:
            The value.
        """
        return self.lanes[index]

    @always_inline
    def __setitem__(mut self, index: Int, value: Self.Lane):
        """Replaces one value of every element.

        Args:
            index: Which of the values.
            value: The new value.
        """
        self.lanes[index] = value


@fieldwise_init
struct Row[dtype: DType](TrivialRegisterPassable):
    """What the stages may know of the row they are in.

    Parameters:
        dtype: The type computed in.
    """

    var n: Scalar[Self.dtype]
    """The number of elements."""
    var inverse_n: Scalar[Self.dtype]
    """One over the number of elements."""
    var first: Values[Self.dtype, 1]
    """The row's first element of each input: a shift about which sums of large numbers can be taken."""
    var saved: Values[Self.dtype, 1]
    """The row's saved numbers, such as its mean."""
    var number: Scalar[Self.dtype]
    """A number that all rows share, such as eps."""
    var parameter: Scalar[Self.dtype]
    """The value of a 1-element tensor, for programs that have one; 0 otherwise."""
    var kind: Int32
    """Which of several functions the stages apply."""


@always_inline
def _larger[
    dtype: DType, width: Int, //
](a: SIMD[dtype, width], b: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns the larger of each two elements, NaN if one is NaN."""
    comptime if is_nvidia_gpu() and dtype == DType.float32:
        # One instruction, which takes magnitudes on its way.
        var larger = SIMD[dtype, width]()
        comptime for i in range(width):
            larger[i] = rebind[Scalar[dtype]](
                inlined_assembly[
                    "max.NaN.f32 $0, $1, $2;",
                    Float32,
                    constraints="=f,f,f",
                    has_side_effect=False,
                ](rebind[Float32](a[i]), rebind[Float32](b[i]))
            )
        return larger
    else:
        # a comparison with NaN is false, `ne` included
        return (a.gt(b) | ~a.eq(a)).select(a, b)


struct Redo(Equatable, TrivialRegisterPassable):
    """Says how a stage reduces its terms."""

    var _code: Int

    comptime ADD = Self(0)
    """Adds the terms."""
    comptime MAX = Self(1)
    """Takes the largest term; NaN if one is NaN."""

    @always_inline
    def __init__(out self, code: Int):
        """Makes a reduction of its code.

        Args:
            code: The code.
        """
        self._code = code

    @always_inline
    def __eq__(self, other: Self) -> Bool:
        """Compares two reductions.

        Args:
            other: The other one.

        Returns:
            Whether they are the same.
        """
        return self._code == other._code

    @always_inline
    def identity[dtype: DType, width: Int](self) -> SIMD[dtype, width]:
        """Returns what changes no total.

        Parameters:
            dtype: The type computed in.
            width: The number of elements.

        Returns:
            The neutral value.
        """
        if self == Self.MAX:
            return SIMD[dtype, width](Scalar[dtype].MIN)
        return SIMD[dtype, width](0)

    @always_inline
    def combine[
        dtype: DType, width: Int
    ](self, a: SIMD[dtype, width], b: SIMD[dtype, width]) -> SIMD[dtype, width]:
        """Reduces two terms to one.

        Parameters:
            dtype: The type computed in.
            width: The number of elements.

        Args:
            a: One term.
            b: The other term.

        Returns:
            The reduced term.
        """
        if self == Self.MAX:
            return _larger(a, b)
        return a + b

    @always_inline
    def across[
        dtype: DType, width: Int, //
    ](self, terms: SIMD[dtype, width]) -> Scalar[dtype]:
        """Reduces neighboring elements, pairwise.

        Parameters:
            dtype: The type computed in.
            width: The number of elements.

        Args:
            terms: The elements' terms.

        Returns:
            The reduced term.
        """
        comptime if width == 1:
            return terms[0]
        else:
            var halves = terms.split()
            return self.across(self.combine(halves[0], halves[1]))
