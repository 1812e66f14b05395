"""Tile registers of an x86 CPU (AMX): their shape, and the instructions on them.

A tile register holds 16 rows of 64 bytes. One instruction adds a[16, 32] @ b[32, 16] in bfloat16 to
c[16, 16] in float32, where row r of b holds the pairs b[2r, j], b[2r + 1, j]: rows of a matrix as they
are make tiles of a, and panels as they are packed make tiles of b.

Tiles 0 to 3 hold sums of 32 rows and 32 columns, 4 and 5 the rows, 6 and 7 the columns. Each thread has
its own configuration, which PyTorch's products set as well, so it is restored.
"""

from std.ffi import external_call
from std.memory import stack_allocation
from std.sys import llvm_intrinsic

from ...team import Data, Part
from .blocking import Blocking
from .memory import buffer

comptime TILE_ROWS = 16
"""Rows of a tile register."""

comptime TILE_BYTES = 64
"""Bytes in a row of a tile register."""

comptime TILES_ROWS = 2 * TILE_ROWS
"""Rows, and columns, of sums in tile registers."""

comptime _ARCH_PRCTL = 158
comptime _REQUEST_PERMISSION = 0x1023
comptime _TILE_DATA = 18
"""arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)."""

comptime _CONFIG_BYTES = 64
comptime _ROW_BYTES = 16
comptime _ROWS = 48
"""Where the bytes and the number of rows of each register stand in a configuration."""


def permits_tiles() -> Bool:
    """Asks Linux for the tile registers, which it gives to processes that ask.

    Returns:
        Whether this process may use them.
    """
    return (
        external_call["syscall", Int](
            _ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA
        )
        == 0
    )


def set_tile_rows(rows: Int):
    """Configures the calling thread's registers for sums of up to 32 rows, and makes them zero.

    Args:
        rows: Rows of the left operand and of the sums, from 1 on.
    """
    var config = stack_allocation[_CONFIG_BYTES, UInt8, alignment=64]()
    for i in range(_CONFIG_BYTES):
        config[unsafe_offset=i] = 0
    config[unsafe_offset=0] = 1  # the only palette there is
    var upper = UInt8(min(rows, TILE_ROWS))
    # A tile of no rows would be none: one that is not used has as many as any.
    var lower = (
        UInt8(rows - TILE_ROWS) if TILE_ROWS
        < rows
        < TILES_ROWS else UInt8(TILE_ROWS)
    )
    comptime for t in range(8):
        var count = UInt8(TILE_ROWS)
        comptime if t == 0 or t == 1 or t == 4:
            count = upper
        elif t == 2 or t == 3 or t == 5:
            count = lower
        config[unsafe_offset=_ROW_BYTES + 2 * t] = TILE_BYTES
        config[unsafe_offset=_ROWS + t] = count
    llvm_intrinsic["llvm.x86.ldtilecfg", NoneType](config)


def with_tiles[dtype: DType, part: Part](data: Data, index: Int):
    """Runs a part with the tile registers configured, if it uses them, and leaves them as they were.

    Parameters:
        dtype: Element type of the tensors.
        part: The part.

    Args:
        data: Its arguments.
        index: Its index.
    """
    comptime if Blocking[dtype].has_tiles:
        var before = stack_allocation[_CONFIG_BYTES, UInt8, alignment=64]()
        llvm_intrinsic["llvm.x86.sttilecfg", NoneType](before)
        set_tile_rows(TILES_ROWS)
        part(data, index)
        # Without a palette this releases them: nothing is left for a context
        # switch to save.
        llvm_intrinsic["llvm.x86.ldtilecfg", NoneType](before)
    else:
        part(data, index)


@always_inline
def zero_tile[tile: Int]():
    """Makes a tile zero.

    Parameters:
        tile: Which.
    """
    llvm_intrinsic["llvm.x86.tilezero", NoneType](Int8(tile))


@always_inline
def load_tile[tile: Int, *, once: Bool = False](address: Int, stride: Int):
    """Loads a tile.

    Parameters:
        tile: Which.
        once: Whether it is not needed soon again: a hint not to push other
            data out of the first cache.

    Args:
        address: Where it begins.
        stride: Bytes between its rows.
    """
    comptime name = "llvm.x86.tileloaddt164" if once else "llvm.x86.tileloadd64"
    llvm_intrinsic[name, NoneType](
        Int8(tile), buffer[DType.uint8](address), Int64(stride)
    )


@always_inline
def store_tile[tile: Int](address: Int, stride: Int):
    """Stores a tile.

    Parameters:
        tile: Which.

    Args:
        address: Where it begins.
        stride: Bytes between its rows.
    """
    llvm_intrinsic["llvm.x86.tilestored64", NoneType](
        Int8(tile), buffer[DType.uint8](address), Int64(stride)
    )


@always_inline
def multiply_tiles[sums: Int, rows: Int, columns: Int]():
    """Adds the product of two tiles to a third.

    Parameters:
        sums: What is added to.
        rows: The left operand.
        columns: The right one.
    """
    llvm_intrinsic["llvm.x86.tdpbf16ps", NoneType](
        Int8(sums), Int8(rows), Int8(columns)
    )
