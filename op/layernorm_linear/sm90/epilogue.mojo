"""From accumulators to y: scale, shift, round, store.

Each warp owns 16 rows of a 64-row slice and stores them by itself, in boxes of
64 columns that alternate between two places in shared memory, so that no warp
waits for another one.
"""

from std.memory import OpaquePointer, bitcast
from std.sys import _RegisterPackType, inlined_assembly

from .config import BOX_BYTES
from .ptx import (
    fence_async_shared,
    store_commit,
    store_matrix_x4,
    store_tile,
    store_wait_read,
    warp_sync,
)
from .wgmma import Accumulator

comptime PLAIN = 0
"""Epilogue y = acc."""
comptime CORRECTED = 1
"""Epilogue y = rstd * (acc - mean * s) + c."""
comptime WIDE = 2
"""Epilogue y = acc or y += acc, in float32."""
comptime BIASED = 3
"""Epilogue y = acc + bias, a vector in y's type."""


trait Sums(TrivialRegisterPassable):
    """Sums of products that one thread has."""

    def at[i: Int](self) -> Float32:
        """Returns a sum.

        Parameters:
            i: Which one.

        Returns:
            The sum.
        """
        ...


@fieldwise_init
struct Accumulators[count: Int](Sums):
    """Sums as the tensor cores leave them.

    Parameters:
        count: How many there are.
    """

    var values: Accumulator[Self.count]
    """The sums."""

    @always_inline
    def at[i: Int](self) -> Float32:
        """Returns a sum.

        Parameters:
            i: Which one.

        Returns:
            The sum.
        """
        return rebind[Float32](self.values[i])


@fieldwise_init
struct RowFactors(TrivialRegisterPassable):
    """What the epilogue multiplies and subtracts in one row."""

    var rstd: Float32
    """Reciprocal standard deviation of the row of x."""
    var mean: Float32
    """Mean of the row of x."""


@always_inline
def _pack[dtype: DType](low: Float32, high: Float32) -> UInt32:
    comptime kind = "bf16x2" if dtype == DType.bfloat16 else "f16x2"
    return inlined_assembly[
        "cvt.rn." + kind + ".f32 $0, $1, $2;",
        UInt32,
        constraints="=r,f,f",
        has_side_effect=False,
    ](high, low)


@always_inline
def shared_pair(address: UInt32) -> SIMD[DType.float32, 2]:
    """Loads two neighbouring values.

    Args:
        address: Their shared address, a multiple of 8.

    Returns:
        The values.
    """
    var pair = inlined_assembly[
        "ld.shared.v2.f32 {$0, $1}, [$2];",
        _RegisterPackType[Float32, Float32],
        constraints="=f,=f,r,~{memory}",
    ](address)
    return SIMD[DType.float32, 2](pair[0], pair[1])


@always_inline
def _shared_narrow_pair[
    dtype: DType
](address: UInt32) -> SIMD[DType.float32, 2]:
    var word = inlined_assembly[
        "ld.shared.b32 $0, [$1];",
        UInt32,
        constraints="=r,r,~{memory}",
    ](address)
    return bitcast[dtype, 2](word).cast[DType.float32]()


@always_inline
def finish_pair[
    mode: Int
](
    acc: SIMD[DType.float32, 2],
    row: RowFactors,
    s: SIMD[DType.float32, 2],
    c: SIMD[DType.float32, 2],
) -> SIMD[DType.float32, 2]:
    """Turns two neighbouring accumulators of a row into values of y.

    Parameters:
        mode: `PLAIN`, `CORRECTED` or `BIASED`.

    Args:
        acc: The accumulators.
        row: Factors of their row.
        s: Sums of the weight's rows, for the two columns.
        c: Constants of the two columns.

    Returns:
        The values, in float32.
    """
    comptime if mode == PLAIN:
        return acc
    elif mode == BIASED:
        return acc + c
    else:
        var centred = s.fma(SIMD[DType.float32, 2](-row.mean), acc)
        return centred.fma(SIMD[DType.float32, 2](row.rstd), c)


@always_inline
def store_slice[
    S: Sums,
    //,
    dtype: DType,
    mode: Int,
    columns: Int,
    first: Int,
](
    sums: S,
    upper: RowFactors,
    lower: RowFactors,
    vectors: UInt32,
    boxes: UInt32,
    lane: UInt32,
    y_map: OpaquePointer[ImmUntrackedOrigin],
    column: Int32,
    row: Int32,
):
    """Finishes and stores this warp's 16 rows of one 64-row slice.

    Parameters:
        S: How the sums are kept.
        dtype: Type of y.
        mode: `PLAIN`, `CORRECTED` or `BIASED`.
        columns: Columns of the tile.
        first: The slice's first sum.

    Args:
        sums: The tile's sums.
        upper: Factors of row lane / 4.
        lower: Factors of row lane / 4 + 8.
        vectors: Shared address of c, followed by s; or of the bias.
        boxes: Shared address of this warp's two boxes.
        lane: Lane of the thread.
        y_map: Tensor map of y, boxes of 16 by 64.
        column: First column of the tile.
        row: First of the 16 rows.
    """
    # Lane l names row l % 8 of matrix l / 8; the matrices are the upper and
    # lower eight rows of two neighbouring groups of eight columns.
    var matrix_row = (lane & 7) + (lane & 8)
    var row_address = boxes + matrix_row * 128
    var group_of_lane = lane >> 4
    var pair_address = vectors + (lane & 3) * 8

    comptime for box in range(columns // 64):
        comptime box_offset = (box & 1) * BOX_BYTES
        # The last store from this box has read it: the one before the last, but
        # where a tile has only one box, the last.
        if lane == 0:
            store_wait_read[1 if columns > 64 else 0]()
        warp_sync()
        var box_address = row_address + UInt32(box_offset)
        comptime for group in range(0, 8, 2):
            var words = SIMD[DType.uint32, 4]()
            comptime for half in range(2):
                comptime at = first + box * 32 + (group + half) * 4
                var s = SIMD[DType.float32, 2](0)
                var c = SIMD[DType.float32, 2](0)
                comptime offset = (box * 64 + (group + half) * 8) * 4
                comptime if mode == BIASED:
                    c = _shared_narrow_pair[dtype](
                        vectors + (lane & 3) * 4 + UInt32(offset // 2)
                    )
                comptime if mode == CORRECTED:
                    c = shared_pair(pair_address + UInt32(offset))
                    s = shared_pair(pair_address + UInt32(columns * 4 + offset))
                var high = finish_pair[mode](
                    SIMD[DType.float32, 2](
                        sums.at[at](),
                        sums.at[at + 1](),
                    ),
                    upper,
                    s,
                    c,
                )
                var low = finish_pair[mode](
                    SIMD[DType.float32, 2](
                        sums.at[at + 2](),
                        sums.at[at + 3](),
                    ),
                    lower,
                    s,
                    c,
                )
                words[2 * half] = _pack[dtype](high[0], high[1])
                words[2 * half + 1] = _pack[dtype](low[0], low[1])
            var chunk = (UInt32(group) + group_of_lane) ^ (lane & 7)
            store_matrix_x4(
                box_address + chunk * 16,
                words[0],
                words[1],
                words[2],
                words[3],
            )
        fence_async_shared()
        warp_sync()
        if lane == 0:
            store_tile(
                y_map,
                boxes + UInt32(box_offset),
                column + Int32(box * 64),
                row,
            )
            store_commit()
