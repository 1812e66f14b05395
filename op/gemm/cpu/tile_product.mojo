"""Multiplies blocks of matrices in tile registers, as `microkernel.mojo` does in vector registers.

The right operand is a packed panel of up to 32 columns. The left one is rows, in place or of the
workspace, or panels of 32 rows. Every sum is one chain of steps of 32 products in order, whatever else is
computed and whichever operand the weight is, so its bits are always the same.
"""

from std.math import ceildiv

from .interleave import Interleaved, Nothing
from .blocking import Blocking
from .epilogue import Output, TileEpilogue
from .memory import (
    Buffer,
    Matrix,
    prefetch_for_read,
    store_first,
)
from .tiles import (
    TILES_ROWS,
    TILE_BYTES,
    TILE_ROWS,
    load_tile,
    multiply_tiles,
    set_tile_rows,
    store_tile,
    zero_tile,
)

comptime STREAM_ROWS = 0
"""The left operand comes from the second cache, and must not push the right one out of the first."""
comptime STREAM_COLUMNS = 1
"""The right one does."""

comptime TILES_STEP = TILES_ROWS * TILE_BYTES
"""Bytes of a panel for one step: two tiles."""


@fieldwise_init
struct Tiles(TrivialRegisterPassable):
    """Says where the tiles of an operand are."""

    var address: Int
    """Of the first one."""
    var stride: Int
    """Bytes between rows of a tile."""
    var step: Int
    """Bytes from step to step."""
    var second: Int
    """Bytes from the first 16 rows, or columns, to the second."""

    @staticmethod
    def of_rows(address: Int, stride: Int) -> Self:
        """Finds the tiles of rows.

        Args:
            address: Where the first row begins.
            stride: Bytes between rows.

        Returns:
            The tiles of up to 32 rows.
        """
        return {address, stride, TILE_BYTES, TILE_ROWS * stride}

    @staticmethod
    def of_row_panels(address: Int, panel: Int) -> Self:
        """Finds the tiles of rows that are packed as columns, 16 in a panel.

        Args:
            address: Where the first panel begins.
            panel: Bytes from a panel to the next.

        Returns:
            The tiles of up to 32 columns.
        """
        return {address, TILE_BYTES, TILES_STEP // 2, panel}

    @always_inline
    def after(self, steps: Int) -> Self:
        """Skips steps.

        Args:
            steps: How many.

        Returns:
            The tiles from there on.
        """
        return {
            self.address + steps * self.step,
            self.stride,
            self.step,
            self.second,
        }

    @staticmethod
    def of_left_panel(address: Int) -> Self:
        """Finds the tiles of a panel that `pack_left_panel` packed.

        Args:
            address: Where it begins.

        Returns:
            The tiles.
        """
        return {address, TILE_BYTES, TILES_STEP, TILES_STEP // 2}

    @staticmethod
    def of_panel(address: Int, tiles: Int) -> Self:
        """Finds the tiles of a panel of the right operand.

        Args:
            address: Where it begins.
            tiles: Tiles across: 2, or 1 for one of up to 16 columns.

        Returns:
            The tiles.
        """
        return {
            address,
            tiles * TILE_BYTES,
            tiles * TILES_STEP // 2,
            TILE_BYTES,
        }

    @always_inline
    def at[second: Int](self, step: Int) -> Int:
        """Finds a tile.

        Parameters:
            second: 1 for the second 16 rows, or columns.

        Args:
            step: Which step.

        Returns:
            Its address.
        """
        return self.address + step * self.step + second * self.second


@no_inline
def _add_products[
    rows: Int, columns: Int, Work: Interleaved, stream: Int
](
    c: Matrix[DType.float32],
    a: Tiles,
    b: Tiles,
    steps: Int,
    accumulate: Bool,
    mut meanwhile: Work,
):
    """Computes sums of some tiles."""
    comptime rows_once = stream == STREAM_ROWS
    comptime columns_once = stream == STREAM_COLUMNS
    var stride = c.stride * 4
    comptime for i in range(rows):
        comptime for j in range(columns):
            if accumulate:
                load_tile[2 * i + j](
                    Int(c.at(i * TILE_ROWS, j * TILE_ROWS)), stride
                )
            else:
                zero_tile[2 * i + j]()
    for step in range(steps):
        load_tile[6, once=columns_once](b.at[0](step), b.stride)
        load_tile[4, once=rows_once](a.at[0](step), a.stride)
        multiply_tiles[0, 4, 6]()
        comptime if rows > 1:
            load_tile[5, once=rows_once](a.at[1](step), a.stride)
            multiply_tiles[2, 5, 6]()
        comptime if columns > 1:
            load_tile[7, once=columns_once](b.at[1](step), b.stride)
            multiply_tiles[1, 4, 7]()
            comptime if rows > 1:
                multiply_tiles[3, 5, 7]()
        meanwhile.step()
    comptime for i in range(rows):
        comptime for j in range(columns):
            store_tile[2 * i + j](
                Int(c.at(i * TILE_ROWS, j * TILE_ROWS)), stride
            )


@always_inline
def add_products[
    Work: Interleaved, //, stream: Int
](
    c: Matrix[DType.float32],
    a: Tiles,
    b: Tiles,
    rows: Int,
    columns: Int,
    steps: Int,
    accumulate: Bool,
    mut meanwhile: Work,
):
    """Computes sums of up to 32 rows and 32 columns.

    Parameters:
        Work: The interleaved work.
        stream: Which operand is not in the first cache, and need not stay there.

    Args:
        c: The sums, columns in whole tiles.
        a: The left operand, of which no row is read that is not there.
        b: The right one.
        rows: Rows, at most 32.
        columns: Columns, at most 32.
        steps: Steps to take, each of 32 products.
        accumulate: Whether to add to what `c` holds.
        meanwhile: The interleaved work.
    """
    if rows < TILES_ROWS:
        set_tile_rows(rows)
    comptime for i in range(1, 3):
        comptime for j in range(1, 3):
            if i == 1 + Int(rows > TILE_ROWS) and j == 1 + Int(
                columns > TILE_ROWS
            ):
                _add_products[i, j, Work, stream](
                    c, a, b, steps, accumulate, meanwhile
                )
    if rows < TILES_ROWS:
        set_tile_rows(TILES_ROWS)


def multiply_block_by_tiles[
    dtype: DType, Epilogue: TileEpilogue, *, a_is_panel: Bool
](
    c: Matrix[Blocking[dtype].accum],
    a: Matrix[Blocking[dtype].operand],
    b: Buffer[Blocking[dtype].operand],
    rows: Int,
    columns: Int,
    depth: Int,
    accumulate: Bool,
    output: Optional[Output[dtype, Epilogue]],
    next_follows: Bool,
):
    """Multiplies rows of the left operand by a block of one panel of the right one.

    Parameters:
        dtype: Element type of the tensors.
        Epilogue: What is done to complete sums.
        a_is_panel: Whether `a` is packed in panels of 32 rows instead of in
            rows.

    Args:
        c: Sums that are not complete, in whole tiles of columns.
        a: Left operand at the block's first step: rows, or panels.
        b: The panel at the block's first step.
        rows: Rows of the product.
        columns: Columns of the panel.
        depth: Products to sum; both operands are zero beyond.
        accumulate: Whether to add what `c` holds.
        output: Where the sum goes instead of to `c`, if it is complete.
        next_follows: Whether the panel's block that is multiplied next is in
            memory behind this one.
    """
    comptime B = Blocking[dtype]
    var sums = rebind[Matrix[DType.float32]](c)
    var tiles = ceildiv(columns, TILE_ROWS)
    var steps = ceildiv(depth, B.step)
    var panel = Tiles.of_panel(Int(b), tiles)
    var blocks = ceildiv(rows, TILES_ROWS)
    var bytes = steps * panel.step
    for block in range(blocks):
        var first = block * TILES_ROWS
        var count = min(TILES_ROWS, rows - first)
        if next_follows:
            for i in range(
                bytes * block // blocks, bytes * (block + 1) // blocks, 64
            ):
                prefetch_for_read(
                    b.unsafe_bitcast[UInt8]().unsafe_offset(bytes + i)
                )
        var left: Tiles
        comptime if a_is_panel:
            left = Tiles.of_left_panel(Int(a.at(block)))
        else:
            left = Tiles.of_rows(Int(a.at(first)), a.stride * 2)
        var nothing = Nothing()
        add_products[stream=STREAM_ROWS](
            sums.part(first, 0),
            left,
            panel,
            count,
            columns,
            steps,
            accumulate,
            nothing,
        )
        if output:
            _finish[dtype](c, output.value(), first, count, columns)


@always_inline
def _finish[
    dtype: DType, Epilogue: TileEpilogue
](
    c: Matrix[Blocking[dtype].accum],
    output: Output[dtype, Epilogue],
    first: Int,
    rows: Int,
    columns: Int,
):
    """Stores complete sums."""
    comptime B = Blocking[dtype]
    comptime width = 2 * B.width
    if columns > B.width:
        for row in range(first, first + rows):
            var sums = c.at(row).unsafe_load[width=width]()
            store_first(
                output.c.at(row),
                output.epilogue.finish(row, 0, sums).cast[dtype](),
                output.columns,
            )
        return
    for row in range(first, first + rows):
        var sums = c.at(row).unsafe_load[width=B.width]()
        store_first(
            output.c.at(row),
            output.epilogue.finish(row, 0, sums).cast[dtype](),
            output.columns,
        )
