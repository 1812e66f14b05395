"""Asks for cache lines ahead of their use."""

from std.sys import size_of
from std.sys.intrinsics import PrefetchOptions, prefetch

from .blocking import Buffer, CACHE_LINE


@always_inline
def prefetch_for_write[dtype: DType, //](target: Buffer[dtype]):
    """Starts to fetch the line of an element that will be written.

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
    """Starts to fetch the line of an element into the second-level cache.

    Lines whose addresses are a power of two apart would drive each other out
    of the few sets of the first level that they share.

    Parameters:
        dtype: Element type.

    Args:
        source: The element; it need not exist.
    """
    prefetch[PrefetchOptions().for_read().medium_locality().to_data_cache()](
        source
    )


@fieldwise_init
struct Upcoming(TrivialRegisterPassable):
    """A block of a matrix that will be read soon, to be fetched bit by bit.

    Where rows are far apart, as in a matrix of many columns, no hardware
    prefetcher foresees them.
    """

    var address: Int
    """Address of the first element."""
    var stride: Int
    """Distance between rows in bytes."""
    var rows: Int
    """Number of rows; 0 if there is nothing to fetch."""
    var bytes: Int
    """Bytes to fetch of each row."""

    @staticmethod
    def none() -> Self:
        """Makes an empty block.

        Returns:
            A block without rows.
        """
        return Self(0, 0, 0, 0)

    @staticmethod
    def block[
        dtype: DType, //
    ](source: Buffer[dtype], stride: Int, rows: Int, columns: Int) -> Self:
        """Describes a block.

        Parameters:
            dtype: Element type.

        Args:
            source: First element.
            stride: Distance between rows in elements.
            rows: Number of rows.
            columns: Number of columns.

        Returns:
            The block.
        """
        comptime size = size_of[dtype]()
        return Self(Int(source), stride * size, rows, columns * size)

    @always_inline
    def fetch(mut self, rows: Int):
        """Starts to fetch the next rows.

        Args:
            rows: Number of rows, of which there may be fewer.
        """
        var count = min(rows, self.rows)
        for _ in range(count):
            var line = self.address // CACHE_LINE * CACHE_LINE
            while line < self.address + self.bytes:
                prefetch_for_read(Buffer[DType.uint8](unsafe_from_address=line))
                line += CACHE_LINE
            self.address += self.stride
        self.rows -= count
