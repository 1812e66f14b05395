"""From accumulators to y: scale, shift, round, store.

Each warp owns 16 rows of a 64-row slice and stores them by itself, in boxes of
128 bytes of each row that alternate between two places in shared memory, so that no warp
waits for another one.
"""

from std.memory import OpaquePointer, bitcast
from std.sys import _RegisterPackType, inlined_assembly, size_of
from std.utils import StaticTuple

from .config import BOX_BYTES
from .ptx import (
    fence_async_shared,
    store_commit,
    store_matrix_x4,
    store_tile,
    store_wait_read,
    warp_sync,
)
from .wgmma import ROW_BYTES, Accumulator, row_elements

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
def store_shared_pair(address: UInt32, pair: SIMD[DType.float32, 2]):
    """Stores two neighbouring values.

    Args:
        address: Their shared address, a multiple of 8.
        pair: The values.
    """
    inlined_assembly[
        "st.shared.v2.f32 [$0], {$1, $2};",
        NoneType,
        constraints="r,f,f,~{memory}",
    ](address, pair[0], pair[1])


@always_inline
def _shared_pair_of[dtype: DType](address: UInt32) -> SIMD[DType.float32, 2]:
    comptime if dtype == DType.float32:
        return shared_pair(address)
    else:
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
def _finish_group[
    S: Sums,
    //,
    dtype: DType,
    mode: Int,
    columns: Int,
    at: Int,
    column: Int,
](
    sums: S, upper: RowFactors, lower: RowFactors, vectors: UInt32, lane: UInt32
) -> SIMD[DType.float32, 4]:
    """Finishes what a lane has of eight columns: a pair of the upper row, and
    one of the lower."""
    var s = SIMD[DType.float32, 2](0)
    var c = SIMD[DType.float32, 2](0)
    comptime if mode == BIASED:
        comptime size = size_of[dtype]()
        c = _shared_pair_of[dtype](
            vectors + (lane & 3) * UInt32(2 * size) + UInt32(column * size)
        )
    comptime if mode == CORRECTED:
        var pair_address = vectors + (lane & 3) * 8
        c = shared_pair(pair_address + UInt32(column * 4))
        s = shared_pair(pair_address + UInt32((columns + column) * 4))
    var high = finish_pair[mode](
        SIMD[DType.float32, 2](sums.at[at](), sums.at[at + 1]()), upper, s, c
    )
    var low = finish_pair[mode](
        SIMD[DType.float32, 2](sums.at[at + 2](), sums.at[at + 3]()),
        lower,
        s,
        c,
    )
    return high.join(low)


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
        y_map: Tensor map of y, boxes of 16 rows of 128 bytes.
        column: First column of the tile.
        row: First of the 16 rows.
    """
    comptime box_columns = row_elements[dtype]()
    comptime for box in range(columns // box_columns):
        var box_address = boxes + UInt32((box & 1) * BOX_BYTES)
        # The last store from this box has read it: the one before the last, but
        # where a tile has only one box, the last.
        if lane == 0:
            store_wait_read[1 if columns > box_columns else 0]()
        warp_sync()
        comptime for group in range(0, box_columns // 8, 2):
            var fours = StaticTuple[SIMD[DType.float32, 4], 2]()
            comptime for half in range(2):
                comptime column = box * box_columns + (group + half) * 8
                fours[half] = _finish_group[
                    dtype, mode, columns, first + column // 2, column
                ](sums, upper, lower, vectors, lane)
            comptime if dtype == DType.float32:
                comptime for half in range(2):
                    # Row lane / 4, and the one 8 below: 16 bytes of it are the
                    # columns of two lanes.
                    var row = lane >> 2
                    var chunk = UInt32(2 * (group + half)) + ((lane >> 1) & 1)
                    var place = (
                        box_address
                        + row * ROW_BYTES
                        + ((chunk ^ row) << 4)
                        + (lane & 1) * 8
                    )
                    store_shared_pair(place, fours[half].slice[2]())
                    store_shared_pair(
                        place + 8 * ROW_BYTES, fours[half].slice[2, offset=2]()
                    )
            else:
                # Lane l names row l % 8 of matrix l / 8; the matrices are the
                # upper and lower eight rows of two neighbouring groups of eight
                # columns.
                var chunk = (UInt32(group) + (lane >> 4)) ^ (lane & 7)
                store_matrix_x4(
                    box_address + (lane & 15) * ROW_BYTES + chunk * 16,
                    _pack[dtype](fours[0][0], fours[0][1]),
                    _pack[dtype](fours[0][2], fours[0][3]),
                    _pack[dtype](fours[1][0], fours[1][1]),
                    _pack[dtype](fours[1][2], fours[1][3]),
                )
        fence_async_shared()
        warp_sync()
        if lane == 0:
            store_tile(
                y_map,
                box_address,
                column + Int32(box * box_columns),
                row,
            )
            store_commit()
