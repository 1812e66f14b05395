"""Lays out the workspace, and says when it pays to share work."""

from std.sys import size_of

from .blocking import Buffer, CACHE_LINE

comptime FEW_ROWS = 192
"""Up to this many rows, packing the weight into memory costs more than it saves."""

comptime SLAB_BYTES = 1 << 20
"""What the rows of a slab may take of the cache."""

comptime LEAST_SLAB_ROWS = 96
"""Rows of a slab, however long they are: as many share what is read of the weight."""

comptime MOST_SLAB_ROWS = 256
"""Rows of a slab, however short they are: more of them gain nothing."""

comptime SERIAL_PRODUCTS = 1 << 19
"""Products that one thread finishes sooner than a team would start."""


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
        var bytes = count * size_of[dtype]()
        self.next += (bytes + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
        return address


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


@always_inline
def ceildiv(a: Int, b: Int) -> Int:
    """Divides, rounding up.

    Args:
        a: Dividend.
        b: Divisor.

    Returns:
        The quotient.
    """
    return (a + b - 1) // b


def useful_threads(products: Int, threads: Int) -> Int:
    """Decides how many threads pay for so much work.

    Args:
        products: Number of products to sum.
        threads: Threads at hand.

    Returns:
        All of them, or one.
    """
    return 1 if products < SERIAL_PRODUCTS else threads


struct Slabs(TrivialRegisterPassable):
    """Divides rows into slabs, so that workers get equal shares."""

    var M: Int
    """Rows."""
    var tile_m: Int
    """Rows of a register tile; slabs begin at multiples of it."""
    var count: Int
    """Number of slabs."""

    def __init__(out self, M: Int, tile_m: Int, workers: Int, row_bytes: Int):
        """Divides the rows.

        Args:
            M: Rows.
            tile_m: Rows of a register tile.
            workers: Threads that take slabs.
            row_bytes: What a row takes of a worker's memory.
        """
        self.M = M
        self.tile_m = tile_m
        var most = max(
            LEAST_SLAB_ROWS, min(MOST_SLAB_ROWS, SLAB_BYTES // row_bytes)
        )
        var slabs = ceildiv(ceildiv(M, most), workers) * workers
        self.count = min(slabs, ceildiv(M, tile_m))

    def first(self, slab: Int) -> Int:
        """Finds where a slab begins.

        Args:
            slab: Index of the slab; the number of slabs gives the end.

        Returns:
            Its first row.
        """
        var tiles = ceildiv(self.M, self.tile_m)
        return min(self.M, tiles * slab // self.count * self.tile_m)

    def most_rows(self) -> Int:
        """Counts the rows of the largest slab.

        Returns:
            Their number.
        """
        var tiles = ceildiv(self.M, self.tile_m)
        return ceildiv(tiles, self.count) * self.tile_m
