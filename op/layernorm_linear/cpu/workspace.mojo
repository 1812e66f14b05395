"""Lays out the workspace and divides work among threads."""

from std.sys import size_of

from .blocking import Blocking, Buffer, CACHE_LINE, Panels, ceildiv

comptime GROUP_ROWS = 1024
"""Most rows of a group; more do not make packing the weight any cheaper."""

comptime GROUP_BYTES = 8 << 20
"""What a group's intermediate rows may fill of a third-level cache."""

comptime LEAST_GROUP_ROWS = 128
"""Rows of a group however long they are, lest packing the weight dominate."""

comptime LEAST_BLOCK_ROWS = 64
"""Fewest rows that repay packing a panel of the weight once more."""

comptime TASKS_PER_WORKER = 8
"""Tasks for each thread, so that none waits long for the last."""

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
        self.next += ceildiv(count * size_of[dtype](), CACHE_LINE) * CACHE_LINE
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


def useful_threads(products: Int, threads: Int) -> Int:
    """Decides how many threads pay for so much work.

    Args:
        products: Number of products to sum.
        threads: Threads at hand.

    Returns:
        All of them, or one.
    """
    return 1 if products < SERIAL_PRODUCTS else threads


struct RowGroups(Copyable, Movable):
    """Divides a product of many rows by the weight into groups and tasks.

    The rows of a group are prepared together and stay in the cache that all
    threads share. A task is one panel of the weight, which it packs just
    before use, times the group's rows, or times a block of them if there are
    too few panels for all threads.
    """

    var M: Int
    """Rows."""
    var count: Int
    """Number of groups."""
    var rows: Int
    """Rows of a group; the last may have fewer."""
    var blocks: Int
    """Blocks of rows in a group."""
    var block_rows: Int
    """Rows of a block; the last may have fewer."""
    var tasks: Int
    """Tasks of a group."""

    def __init__(
        out self,
        M: Int,
        row_bytes: Int,
        panels: Int,
        tile_m: Int,
        workers: Int,
    ):
        """Divides the rows.

        Args:
            M: Rows.
            row_bytes: Size of a row of the group's intermediate.
            panels: Panels of the weight.
            tile_m: Rows of a register tile.
            workers: Threads that take tasks.
        """
        var most = max(
            min(GROUP_BYTES // row_bytes, GROUP_ROWS), LEAST_GROUP_ROWS
        )
        self.M = M
        self.rows = _share(M, ceildiv(M, most), tile_m)
        self.count = ceildiv(M, self.rows)
        var blocks = ceildiv(TASKS_PER_WORKER * workers, panels)
        blocks = min(blocks, self.rows // LEAST_BLOCK_ROWS)
        if workers == 1:
            blocks = 1
        self.block_rows = _share(self.rows, max(blocks, 1), tile_m)
        self.blocks = ceildiv(self.rows, self.block_rows)
        self.tasks = panels * self.blocks

    def rows_of(self, group: Int) -> Int:
        """Counts the rows of a group.

        Args:
            group: Index of the group.

        Returns:
            Their number.
        """
        return min(self.rows, self.M - group * self.rows)

    def rows_of_block(self, group: Int, block: Int) -> Int:
        """Counts the rows of a block.

        Args:
            group: Index of the group.
            block: Index of the block in the group.

        Returns:
            Their number, which may be 0 in the last group.
        """
        return max(
            0,
            min(self.block_rows, self.rows_of(group) - block * self.block_rows),
        )


def _share(rows: Int, parts: Int, tile_m: Int) -> Int:
    """Returns equal shares of whole register tiles."""
    return min(rows, ceildiv(ceildiv(rows, parts), tile_m) * tile_m)
