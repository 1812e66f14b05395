"""The rows that a matrix kernel takes further, and how threads get at them."""

from ...rows.gpu_row import GlobalPointer, widen
from .counters import Counter

comptime WIDTH = 8
"""Elements of one load."""
comptime Eight = SIMD[DType.float32, WIDTH]
"""Eight neighbouring elements."""


@fieldwise_init
struct RowPass(TrivialRegisterPassable):
    """The tensors by address, all of them dense."""

    var rows: Int32
    """M."""
    var length: Int32
    """K, a multiple of 8."""
    var early: Int32
    """Rows that are there before the last tiles, a multiple of 64."""
    var tile_columns: Int32
    """Tiles that a row of dz comes from."""
    var z: Int64
    """The normalized rows [M, K], to write in place of their gradient dz."""
    var x: Int64
    """The input [M, K]."""
    var affine: Int64
    """Gamma, then beta [2, K] in float32."""
    var mean: Int64
    """The row means [M]."""
    var rstd: Int64
    """The reciprocal standard deviations [M]."""
    var dx: Int64
    """The gradient of x [M, K], to write."""
    var stored: Counter
    """For each slice of 64 rows, what has been stored of it; zero at first, as
    are the other counters."""
    var summed: Counter
    """For each slice, of how many rows the sums have been found."""
    var ticket: Counter
    """How many units have been taken."""
    var factors: Int64
    """Scratch memory [M, 4] in float32."""
    var sums: Int64
    """Partial sums over rows [2, parts, K] in float32, to write: for dgamma,
    then for dbeta."""

    def __init__(out self):
        """Names no tensors."""
        var none = 0
        self = Self(
            rows=0,
            length=0,
            early=0,
            tile_columns=0,
            z=0,
            x=0,
            affine=0,
            mean=0,
            rstd=0,
            dx=0,
            stored={unsafe_from_address = none},
            summed={unsafe_from_address = none},
            ticket={unsafe_from_address = none},
            factors=0,
            sums=0,
        )


@always_inline
def value_at(address: Int64, index: Int) -> Float32:
    """Loads a value.

    Args:
        address: Address of a vector in float32.
        index: Which one.

    Returns:
        The value.
    """
    return (
        GlobalPointer[DType.float32](unsafe_from_address=Int(address))
        .unsafe_offset(index)
        .unsafe_load()
    )


@always_inline
def load_eight[dtype: DType](address: Int64, index: Int) -> SIMD[dtype, WIDTH]:
    """Loads eight neighbouring elements.

    Parameters:
        dtype: Their type.

    Args:
        address: Address of the first of all elements, a multiple of 16.
        index: Which ones, a multiple of 8.

    Returns:
        The elements.
    """
    return (
        GlobalPointer[dtype](unsafe_from_address=Int(address))
        .unsafe_offset(index)
        .unsafe_load[width=WIDTH, alignment=16]()
    )


@always_inline
def store_eight[
    dtype: DType, //
](address: Int64, index: Int, values: SIMD[dtype, WIDTH]):
    """Stores eight neighbouring elements.

    Parameters:
        dtype: Their type.

    Args:
        address: Address of the first of all elements, a multiple of 16.
        index: Which ones, a multiple of 8.
        values: The elements.
    """
    GlobalPointer[dtype](unsafe_from_address=Int(address)).unsafe_offset(
        index
    ).unsafe_store[alignment=16](values)


@always_inline
def to_float32[dtype: DType, //](values: SIMD[dtype, WIDTH]) -> Eight:
    """Converts elements.

    Parameters:
        dtype: Their type.

    Args:
        values: The elements.

    Returns:
        The same in float32.
    """
    return widen[dtype=dtype, width=WIDTH, accum=DType.float32](values)
