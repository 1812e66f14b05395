"""Tiles that end where the matrix does: TMA fills boxes that are outside in part more slowly.

The last tiles of rows and of columns start earlier, where the matrix has as many and there are few waves. What two tiles
have of c, both compute alike, from the same k blocks in the same order. A matrix with fewer has boxes of what there is: of
the other rows, and columns, nothing is stored.
"""

from ..epilogue import Epilogue
from ..row_hook import RowHook
from .config import TILE_ROWS, Config
from .parts import WHOLE

# Measured on an H200 (docs/hopper-log.md, "Few tiles").
comptime _MOST_WAVES = 2
comptime _LONG = 512


def stays_inside[E: Epilogue, H: RowHook](config: Config) -> Bool:
    """Tells whether a product's tiles are such.

    Parameters:
        E: What becomes of the sums.
        H: What is done with the rows.

    Args:
        config: Compile-time choices of the matrix kernel.

    Returns:
        Whether c depends on the operands alone, not on what was there, and nothing is kept of a tile as a whole.
    """
    return (
        config.parts == WHOLE
        and not (config.a_transposed or config.adds or config.any_columns)
        and not H.passes_on
        and not (E.adds or E.adds_last or E.activates or E.gradients > 0)
        and not (E.quantizes or E.scales_blocks or E.sums_rows or E.weighs)
        and E.stores
    )


def box_rows[E: Epilogue, H: RowHook](config: Config, m: Int) -> Int:
    """Counts the rows of a box of a.

    Parameters:
        E: What becomes of the sums.
        H: What is done with the rows.

    Args:
        config: Compile-time choices.
        m: Rows of a.

    Returns:
        Those of a tile, or all there are.
    """
    return min(TILE_ROWS, m) if stays_inside[E, H](config) else TILE_ROWS


def box_columns_of_b[E: Epilogue, H: RowHook](config: Config, n: Int) -> Int:
    """Counts the rows of a box of b that is not transposed, which are columns of the product.

    Parameters:
        E: What becomes of the sums.
        H: What is done with the rows.

    Args:
        config: Compile-time choices.
        n: Columns of the product.

    Returns:
        A block's part of a tile's, or all there are where no other block shares them.
    """
    var whole = config.b_box_rows()
    if stays_inside[E, H](config) and config.sharers() == 1:
        return min(whole, n)
    return whole


def is_worth_it(tiles: Int, clusters: Int, k: Int) -> Bool:
    """Tells whether boxes that are outside in part take longer than what two tiles both compute and store.

    Args:
        tiles: Tiles of clusters.
        clusters: Clusters that run together.
        k: Length of the sums.

    Returns:
        Whether it does: in few waves, each of long sums.
    """
    return tiles <= _MOST_WAVES * clusters and k >= _LONG
