"""The math of a head, on two pieces at a time that are rotated into each other.

    z = x rstd (gamma + offset);  y = z cos + J(z) sin        J of pieces (a, b) is (-b, a)
    dz = dy cos - J(dy sin);  g = dz (gamma + offset);  dx = rstd (g - n mean(g n))        n = x rstd

The second of these is the first transposed: J^T = -J. With interleaved rotation, J acts on neighbors within a piece.
Elements that are not rotated come after those that are; there, y = z.
"""

from max.gpu.memory import AddressSpace
from std.sys import is_gpu

from ..rounding import rounded, widened


@fieldwise_init
struct Places(TrivialRegisterPassable):
    """Where a pair of pieces of `width` elements starts in its head."""

    var a: Int
    """The first."""
    var b: Int
    """The second."""
    var is_rotated: Bool
    """Whether the pair is rotated; `rotary` is a multiple of two pieces."""

    def __init__(out self, index: Int, width: Int, rotary: Int):
        """Locates a pair.

        Args:
            index: Which of the D / (2 width) pairs.
            width: Elements of a piece.
            rotary: How many elements are rotated.
        """
        var half = rotary // 2
        self.is_rotated = index * width < half
        if self.is_rotated:
            self.a = index * width
            self.b = half + self.a
        else:
            self.a = 2 * index * width
            self.b = self.a + width


@fieldwise_init
struct Pair[dtype: DType, width: Int](TrivialRegisterPassable):
    """Two pieces of a head.

    Parameters:
        dtype: The type computed in.
        width: Elements of a piece.
    """

    var a: SIMD[Self.dtype, Self.width]
    """The first."""
    var b: SIMD[Self.dtype, Self.width]
    """The second."""

    @always_inline
    def __mul__(self, other: Self) -> Self:
        """Multiplies element by element.

        Args:
            other: The factors.

        Returns:
            The products.
        """
        return {self.a * other.a, self.b * other.b}

    @always_inline
    def __mul__(self, factor: Scalar[Self.dtype]) -> Self:
        """Multiplies by a number.

        Args:
            factor: The number.

        Returns:
            The products.
        """
        return {self.a * factor, self.b * factor}

    @always_inline
    def __sub__(self, other: Self) -> Self:
        """Subtracts element by element.

        Args:
            other: What to subtract.

        Returns:
            The differences.
        """
        return {self.a - other.a, self.b - other.b}

    @always_inline
    def __add__(self, other: Self) -> Self:
        """Adds element by element.

        Args:
            other: What to add.

        Returns:
            The sums.
        """
        return {self.a + other.a, self.b + other.b}

    @always_inline
    def sum(self) -> Scalar[Self.dtype]:
        """Adds up both pieces.

        Returns:
            The sum.
        """
        return (self.a + self.b).reduce_add()

    @always_inline
    def widened[wide: DType](self) -> Pair[wide, Self.width]:
        """Widens both pieces.

        Parameters:
            wide: The type computed in.

        Returns:
            The pieces.
        """
        return {widened[wide](self.a), widened[wide](self.b)}

    @always_inline
    def turned(self, is_interleaved: Bool) -> Self:
        """Turns each two elements by 90 degrees: J.

        Args:
            is_interleaved: Whether they are neighbors.

        Returns:
            The turned pieces.
        """
        if is_interleaved:
            return self.turned[True]()
        return self.turned[False]()

    @always_inline
    def turned[is_interleaved: Bool](self) -> Self:
        """Turns each two elements by 90 degrees: J.

        Parameters:
            is_interleaved: Whether they are neighbors.

        Returns:
            The turned pieces.
        """
        comptime if is_interleaved:
            return {_turned(self.a), _turned(self.b)}
        else:
            return {-self.b, self.a}

    @always_inline
    def store[
        to: DType, alignment: Int
    ](self, address: Int, start: Int, places: Places):
        """Stores both, rounded.

        Parameters:
            to: The type of the tensor.
            alignment: Bytes that pieces are aligned to.

        Args:
            address: Address of the tensor.
            start: Index of the head's first element.
            places: Where the pieces are in it.
        """
        comptime space = AddressSpace.GLOBAL if is_gpu() else AddressSpace.GENERIC
        var head = _at[to, space](address, start)
        head.unsafe_offset(places.a).unsafe_store[alignment=alignment](
            rounded[to](self.a)
        )
        head.unsafe_offset(places.b).unsafe_store[alignment=alignment](
            rounded[to](self.b)
        )


@always_inline
def _turned[
    dtype: DType, //, width: Int
](v: SIMD[dtype, width]) -> SIMD[dtype, width]:
    var parts = v.deinterleave()
    return rebind[SIMD[dtype, width]]((-parts[1]).interleave(parts[0]))


@always_inline
def _at[
    dtype: DType, space: AddressSpace
](address: Int, index: Int) -> Pointer[
    Scalar[dtype], MutAnyOrigin, address_space=space
]:
    return Pointer[Scalar[dtype], MutAnyOrigin, address_space=space](
        unsafe_from_address=address
    ).unsafe_offset(index)


@always_inline
def load[
    dtype: DType, accum: DType, width: Int, alignment: Int
](address: Int, start: Int, places: Places) -> Pair[accum, width]:
    """Loads a pair.

    Parameters:
        dtype: The type of the tensor.
        accum: The type computed in.
        width: Elements of a piece.
        alignment: Bytes that pieces are aligned to.

    Args:
        address: Address of the tensor.
        start: Index of the head's first element.
        places: Where the pieces are in it.

    Returns:
        The pair.
    """
    comptime space = AddressSpace.GLOBAL if is_gpu() else AddressSpace.GENERIC
    var head = _at[dtype, space](address, start)
    return {
        widened[accum](
            head.unsafe_offset(places.a).unsafe_load[
                width=width, alignment=alignment
            ]()
        ),
        widened[accum](
            head.unsafe_offset(places.b).unsafe_load[
                width=width, alignment=alignment
            ]()
        ),
    }
