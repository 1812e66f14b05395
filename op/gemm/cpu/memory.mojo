"""Memory accesses of CPU kernels: matrices, parts of vectors, arrays in a workspace, prefetches."""

from std.math import align_up, iota
from std.memory import bitcast
from std.sys import size_of
from std.sys.intrinsics import (
    PrefetchOptions,
    masked_load,
    masked_store,
    prefetch,
)

comptime Buffer[dtype: DType] = Pointer[Scalar[dtype], MutUntrackedOrigin]
"""Points to elements of a tensor or of the workspace.

Parameters:
    dtype: The element type.
"""

comptime CACHE_LINE = 64
"""Alignment of every array in the workspace, in bytes."""


@always_inline
def buffer[dtype: DType](address: Int) -> Buffer[dtype]:
    """Makes a pointer to the array at an address.

    Parameters:
        dtype: Element type.

    Args:
        address: Address of the first element; not 0.

    Returns:
        The pointer.
    """
    return Buffer[dtype](unsafe_from_address=address)


@fieldwise_init
struct Matrix[dtype: DType](TrivialRegisterPassable):
    """Rows at equal distances, or a part of them.

    Parameters:
        dtype: Element type.
    """

    var start: Buffer[Self.dtype]
    """The first element."""
    var stride: Int
    """Distance between rows, in elements."""

    def __init__(out self, address: Int, stride: Int):
        """Refers to the matrix at an address.

        Args:
            address: Address of the first element; not 0.
            stride: Distance between rows, in elements.
        """
        self.start = buffer[Self.dtype](address)
        self.stride = stride

    @always_inline
    def at(self, row: Int, column: Int = 0) -> Buffer[Self.dtype]:
        """Finds an element.

        Args:
            row: Its row.
            column: Its column.

        Returns:
            The element.
        """
        return self.start.unsafe_offset(row * self.stride + column)

    @always_inline
    def part(self, row: Int, column: Int) -> Self:
        """Finds the part that begins at an element.

        Args:
            row: Its row.
            column: Its column.

        Returns:
            The part.
        """
        return Self(self.at(row, column), self.stride)


@fieldwise_init
struct Arena(TrivialRegisterPassable):
    """Hands out aligned arrays one after the other."""

    var next: Int
    """Address or offset of the first free byte."""

    def take[dtype: DType](mut self, count: Int) -> Int:
        """Reserves an array.

        Parameters:
            dtype: Element type.

        Args:
            count: Number of elements.

        Returns:
            Where it begins.
        """
        var address = self.next
        self.next += align_up(count * size_of[dtype](), CACHE_LINE)
        return address


@always_inline
def lanes_below[width: Int](count: Int) -> SIMD[DType.bool, width]:
    """Returns a mask whose first `count` lanes are true.

    Parameters:
        width: Number of lanes.

    Args:
        count: Number of true lanes; more than `width` counts as all.

    Returns:
        The mask.
    """
    return iota[DType.int32, width]().lt(Int32(min(count, width)))


@always_inline
def load_first[
    dtype: DType, //, width: Int
](source: Buffer[dtype], count: Int) -> SIMD[dtype, width]:
    """Loads up to `width` elements and fills the rest with zeros.

    Parameters:
        dtype: Element type.
        width: Number of lanes.

    Args:
        source: First element.
        count: Number of elements that may be read.

    Returns:
        The elements.
    """
    if count >= width:
        return source.unsafe_load[width=width]()
    comptime Bits = _bits[dtype]()
    return bitcast[dtype, width](
        masked_load[width](
            source.unsafe_bitcast[Scalar[Bits]](),
            lanes_below[width](count),
            SIMD[Bits, width](0),
        )
    )


@always_inline
def store_first[
    dtype: DType, width: Int, //
](target: Buffer[dtype], value: SIMD[dtype, width], count: Int):
    """Stores up to `width` elements.

    Parameters:
        dtype: Element type.
        width: Number of lanes.

    Args:
        target: First element to overwrite.
        value: The elements.
        count: Number of elements that may be written.
    """
    if count >= width:
        target.unsafe_store(value)
    else:
        comptime Bits = _bits[dtype]()
        masked_store[width](
            bitcast[Bits, width](value),
            target.unsafe_bitcast[Scalar[Bits]](),
            lanes_below[width](count),
        )


def _bits[dtype: DType]() -> DType:
    """Returns the type under whose name masks work without a step for each number."""
    return DType.uint16 if size_of[dtype]() == 2 else dtype


@always_inline
def prefetch_for_write[dtype: DType, //](target: Buffer[dtype]):
    """Starts to fetch the line of an element that will be overwritten.

    Parameters:
        dtype: Element type.

    Args:
        target: The element.
    """
    prefetch[PrefetchOptions().for_write().high_locality().to_data_cache()](
        target
    )


@always_inline
def prefetch_for_read[dtype: DType, //](source: Buffer[dtype]):
    """Starts to fetch the line of an element; it need not exist.

    Parameters:
        dtype: Element type.

    Args:
        source: The element.
    """
    prefetch[PrefetchOptions().for_read().medium_locality().to_data_cache()](
        source
    )
