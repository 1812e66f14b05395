"""Lays out the workspace, and says when it pays to share work."""

from std.sys import size_of

from .blocking import Buffer, CACHE_LINE

comptime FEW_ROWS = 192
"""Up to this many rows, packing the weight into memory costs more than it saves."""

comptime SLAB_ROWS = 96
"""Most rows of a slab; with 1024 features they fill half of a 1 MiB cache."""

comptime SERIAL_PRODUCTS = 1 << 19
"""Products that one thread finishes sooner than a team would start."""


@fieldwise_init
struct Arena(TrivialRegisterPassable):
    """Hands out aligned arrays one after the other."""

    var next: Int
    """Address or offset of the first free byte."""

    def take[dtype: DType](mut self, count: Int) -> Int:
        """Reserves an array and returns where it begins.

        Parameters:
            dtype: Element type.

        Args:
            count: Number of elements.
        """
        var address = self.next
        var bytes = count * size_of[dtype]()
        self.next += (bytes + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
        return address


@always_inline
def buffer[dtype: DType](address: Int) -> Buffer[dtype]:
    """Returns the array at an address.

    Parameters:
        dtype: Element type.

    Args:
        address: Address of the first element; not 0.
    """
    return Buffer[dtype](unsafe_from_address=address)


@always_inline
def ceildiv(a: Int, b: Int) -> Int:
    """Returns the quotient rounded up.

    Args:
        a: Dividend.
        b: Divisor.
    """
    return (a + b - 1) // b


def useful_threads(products: Int, threads: Int) -> Int:
    """Returns how many threads pay for so much work: all, or one.

    Args:
        products: Number of products to sum.
        threads: Threads at hand.
    """
    return 1 if products < SERIAL_PRODUCTS else threads


def slab_rows(M: Int, workers: Int, tile_m: Int) -> Int:
    """Returns how many rows make a slab, so that workers get equal shares.

    Args:
        M: Rows.
        workers: Threads that take slabs.
        tile_m: What the number of rows is a multiple of.
    """
    var slabs = ceildiv(ceildiv(M, SLAB_ROWS), workers) * workers
    return ceildiv(ceildiv(M, slabs), tile_m) * tile_m
