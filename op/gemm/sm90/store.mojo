"""From sums to c: applies the epilogue, rounds, and stores by TMA, or by threads where c has any number of columns.

Each warp owns 16 rows of a tile, or twice as many, and stores them independently, in
boxes of up to 128 bytes of each row. It cycles through some boxes in shared memory,
so that no warp waits for another one.
"""

from std.memory import OpaquePointer
from std.sys import size_of
from std.utils import StaticTuple
from max.gpu.primitives import warp

from ..epilogue import ColumnTerms, Epilogue, RowTerms
from .addend import TileAddend
from .barriers import warp_sync
from .boxes import Boxes
from .clear_vectors import clear_vectors
from .config import Config
from .elements import Elements, swizzle
from .h_rows import HRows
from .kept_maxima import KeptMaxima
from .shared_memory import (
    pack_pair,
    shared_pair,
    store_matrix_x4,
    store_shared_pair,
)
from .sums import Sums
from .tma import fence_async_shared, store_commit, store_tile

comptime RowPair = SIMD[DType.float32, 2]
"""Of the two rows of a warp's 16 that a lane has: a number each."""


@doc_hidden
@fieldwise_init
struct TileRows[E: Epilogue, width: Int, any_columns: Bool = False](
    TrivialRegisterPassable
):
    """16 rows of a warp of a tile of c, as one of its threads sees them, in boxes of `width` columns."""

    var epilogue: Self.E
    """Finishes them."""
    var upper: RowTerms[]
    """Terms of row lane / 4."""
    var lower: RowTerms[]
    """Terms of row lane / 4 + 8."""
    var row: UInt32
    """First of the rows."""
    var column: UInt32
    """First column of the tile."""
    var lane: UInt32
    """Lane of the thread."""
    var elements: Elements
    """Where threads store c."""

    @always_inline
    def finish[
        S: Sums, //, columns: Int, column: Int, wants_weights: Bool = False
    ](self, sums: S, vectors: UInt32) -> SIMD[DType.float32, 4]:
        """Finishes what a lane has of eight columns, a pair of the upper row and
        one of the lower, or finds their weights."""
        comptime Pair = SIMD[DType.float32, 2]
        comptime at = column // 2
        comptime first_size = size_of[Self.E.vector_type(0)]()
        var terms = ColumnTerms[DType.float32, 2, Self.E.vectors](fill=Pair(0))
        comptime for i in range(Self.E.vectors):
            comptime size = size_of[Self.E.vector_type(i)]()
            terms[i] = shared_pair[Self.E.vector_type(i)](
                vectors
                + (self.lane & 3) * UInt32(2 * size)
                + UInt32(i * columns * first_size + column * size)
            )
        var upper_sums = Pair(sums.at[at](), sums.at[at + 1]())
        var lower_sums = Pair(sums.at[at + 2](), sums.at[at + 3]())
        comptime if wants_weights:
            var of_upper = self.epilogue.weights[DType.float32, 2](
                upper_sums, terms
            )
            return of_upper.join(
                self.epilogue.weights[DType.float32, 2](lower_sums, terms)
            )
        var its_row = Int(self.row + (self.lane >> 2))
        var its_column = Int(self.column + (self.lane & 3) * 2) + column
        var high = self.epilogue.finish[DType.float32, 2](
            upper_sums,
            self.upper,
            terms,
            its_row,
            its_column,
        )
        var low = self.epilogue.finish[DType.float32, 2](
            lower_sums,
            self.lower,
            terms,
            its_row + 8,
            its_column,
        )
        return high.join(low)

    @always_inline
    def _put[
        dtype: DType, group: Int
    ](
        self,
        box: UInt32,
        first: SIMD[DType.float32, 4],
        second: SIMD[DType.float32, 4],
    ):
        """Stores what a lane has of two neighboring groups of eight columns in a
        box."""
        var lane = self.lane
        comptime pitch = Self.width * size_of[dtype]()
        comptime if dtype == DType.float32:
            comptime for half in range(2):
                var four = second if half == 1 else first
                # Row lane / 4, and the one 8 below: 16 bytes of it are
                # the columns of two lanes.
                var row = lane >> 2
                var chunk = UInt32(2 * (group + half)) + ((lane >> 1) & 1)
                var place = (
                    box
                    + row * UInt32(pitch)
                    + ((chunk ^ swizzle[pitch](row)) << 4)
                    + (lane & 1) * 8
                )
                store_shared_pair(place, four.slice[2]())
                store_shared_pair(
                    place + UInt32(8 * pitch), four.slice[2, offset=2]()
                )
        else:
            # Lane l names row l % 8 of matrix l / 8; the matrices are the upper
            # and lower eight rows of two neighboring groups of eight columns.
            var chunk = (UInt32(group) + (lane >> 4)) ^ swizzle[pitch](lane)
            store_matrix_x4(
                box + (lane & 15) * UInt32(pitch) + chunk * 16,
                pack_pair[dtype](first.slice[2]()),
                pack_pair[dtype](first.slice[2, offset=2]()),
                pack_pair[dtype](second.slice[2]()),
                pack_pair[dtype](second.slice[2, offset=2]()),
            )

    @always_inline
    def put_sixteen[
        dtype: DType, group: Int
    ](self, box: UInt32, values: SIMD[DType.float32, 8]):
        """Stores what a lane has of 16 columns in a box."""
        self._put[dtype, group](
            box, values.slice[4](), values.slice[4, offset=4]()
        )

    @always_inline
    def send[
        dtype: DType
    ](self, map: OpaquePointer[ImmUntrackedOrigin], box: UInt32, column: Int32):
        """Stores a box that the warp's threads have filled."""
        comptime if Self.any_columns:
            warp_sync()
            self.elements.store[dtype, Self.width](
                box, self.row, UInt32(column), self.lane
            )
            return
        fence_async_shared()
        warp_sync()
        if self.lane == 0:
            store_tile(map, box, column, Int32(self.row))
            store_commit()

    @always_inline
    def _store_box[
        groups: Int, //, dtype: DType, stride: Int, first: Int
    ](
        self,
        map: OpaquePointer[ImmUntrackedOrigin],
        box: UInt32,
        column: Int32,
        fours: StaticTuple[SIMD[DType.float32, 4], groups],
    ):
        """Stores groups of eight columns, `stride` apart, as a box."""
        comptime for group in range(0, Self.width // 8, 2):
            self._put[dtype, group](
                box,
                fours[first + group * stride],
                fours[first + (group + 1) * stride],
            )
        self.send[dtype](map, box, column)

    @always_inline
    def store_activated[
        S: Sums, bytes: Int, //, dtype: DType, columns: Int, in_halves: Bool
    ](
        self,
        sums: S,
        vectors: UInt32,
        mut boxes: Boxes[bytes],
        c_map: OpaquePointer[ImmUntrackedOrigin],
        h_map: OpaquePointer[ImmUntrackedOrigin],
        n: UInt32,
    ):
        """Finishes, activates and stores the rows, and h if it is wanted. A gate's
        c has n columns; the values that its tile's gates multiply are the tile's other
        half, or follow each eight of them."""
        comptime stride = 2 if Self.E.is_gate else 1
        comptime box_groups = Self.width // 8
        var of_c = self.elements.n // UInt32(stride)
        var kept = KeptMaxima(
            self.epilogue.maxima(),
            self.epilogue.maxima() + 4 * Int64(of_c),
            self.epilogue.has_one_maximum(),
            self.elements.m,
            of_c,
            self.row,
            self.lane,
        )
        comptime if Self.E.keeps_maxima:
            if kept.of_columns != 0:
                comptime assert in_halves or stride == 1
                clear_vectors[Self.E, columns, stride, columns // stride](
                    vectors,
                    kept.n - self.column // UInt32(stride),
                    self.lane,
                )
        comptime for box in range(columns // stride // Self.width):
            var column = Int32(self.column) // Int32(stride) + Int32(
                box * Self.width
            )
            var fours = StaticTuple[
                SIMD[DType.float32, 4], stride * box_groups
            ]()
            comptime for group in range(stride * box_groups):
                comptime adjacent = (box * stride * box_groups + group) * 8
                comptime separate = (
                    group % 2 * columns // 2
                    + (box * box_groups + group // 2) * 8
                )
                comptime at = separate if in_halves else adjacent
                fours[group] = self.finish[columns, at](sums, vectors)
            # After the last of a gate's columns, its part of h would be in the other half.
            var is_in_part = stride == 1 or UInt32(column) < n
            if self.epilogue.h() != 0 and is_in_part:
                comptime for part in range(stride):
                    self._store_box[dtype, stride, part](
                        h_map,
                        boxes.take(self.lane),
                        column + Int32(part) * Int32(n),
                        fours,
                    )
            # All of a box in one call, so that their special functions overlap.
            var h = SIMD[DType.float32, 4 * box_groups]()
            var gated = SIMD[DType.float32, 4 * box_groups]()
            comptime for group in range(box_groups):
                h = h.insert[offset=4 * group](fours[group * stride])
                gated = gated.insert[offset=4 * group](
                    fours[group * stride + stride - 1]
                )
            var a = self.epilogue.activated[4 * box_groups](h, gated)
            var activated = StaticTuple[SIMD[DType.float32, 4], box_groups]()
            comptime for group in range(box_groups):
                activated[group] = a.slice[4, offset=4 * group]()
            self._store_box[dtype, 1, 0](
                c_map, boxes.take(self.lane), column, activated
            )
            comptime if Self.E.keeps_maxima:
                if kept.of_columns != 0:
                    kept.see(activated, UInt32(column))
        comptime if Self.E.keeps_maxima:
            if kept.of_columns != 0:
                kept.keep_rows()

    @always_inline
    def store[
        S: Sums,
        bytes: Int,
        config: Config,
        tile_columns: Int,
        parts: Int,
        //,
        dtype: DType,
        columns: Int,
        half: Int = 0,
    ](
        self,
        sums: S,
        vectors: UInt32,
        mut boxes: Boxes[bytes],
        c_map: OpaquePointer[ImmUntrackedOrigin],
        addend: TileAddend[config],
        h_rows: HRows[tile_columns, parts],
    ):
        """Finishes and stores the rows, plus what is added last, and keeps their sums where the epilogue wants them."""
        var totals = RowPair(0)
        # Of columns past the last one there are no sums. What a lane has left, in 32 bits, is compared with
        # constants: the columns themselves would take more registers than there are.
        var left = Int32(self.elements.n) - Int32(
            self.column + (self.lane & 3) * 2
        )
        comptime for box in range(columns // Self.width):
            var box_address = UInt32(0)
            comptime if Self.E.stores:
                box_address = boxes.take(self.lane)
            comptime if config.loads_h:
                h_rows.wait[half, box]()
            comptime for group in range(0, Self.width // 8, 2):
                var fours = StaticTuple[SIMD[DType.float32, 4], 2]()
                comptime for half in range(2):
                    comptime column = box * Self.width + (group + half) * 8
                    fours[half] = self.finish[columns, column](sums, vectors)
                    comptime if Self.E.sums_rows:
                        comptime for i in range(4):
                            if left > Int32(column + i % 2):
                                totals[i // 2] += fours[half][i]
                    comptime if Self.E.weighs:
                        fours[half] *= self.finish[columns, column, True](
                            sums, vectors
                        )
                comptime if Self.E.adds_last:
                    var more: SIMD[DType.float32, 8]
                    comptime if config.loads_h:
                        more = h_rows.sixteen[dtype, half, box, 0, group]()
                    else:
                        more = addend.sixteen[
                            dtype, half, box * Self.width + group * 8
                        ](self.lane)
                    comptime for i in range(2):
                        fours[i] += more.slice[4, offset=4 * i]()
                comptime if Self.E.stores:
                    self._put[dtype, group](box_address, fours[0], fours[1])
            comptime if config.loads_h:
                h_rows.release[half, box]()
            comptime if Self.E.stores:
                self.send[dtype](
                    c_map,
                    box_address,
                    Int32(self.column) + Int32(box * Self.width),
                )
        comptime if Self.E.sums_rows:
            self._keep_sums(totals, Int(self.column) // columns)

    @always_inline
    def _keep_sums(self, own: RowPair, tile: Int):
        """Adds up what the four lanes have that share two rows."""
        var totals = own
        comptime for distance in [1, 2]:
            comptime for i in range(2):
                totals[i] += warp.shuffle_xor(totals[i], UInt32(distance))
        if self.lane & 3 == 0:
            comptime for i in range(2):
                var row = self.row + (self.lane >> 2) + UInt32(8 * i)
                if row < self.elements.m:
                    self.epilogue.keep_row_sum(Int(row), tile, totals[i])
