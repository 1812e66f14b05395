"""Multiplies few rows by a weight in place: the memory's speed decides how long that takes.

Rows of the weight are loaded, transposed in registers and multiplied at once. Nothing of it is stored in
between, so that there are always loads for the memory to work on. Sums are those of `microkernel.mojo`,
and where there are tile registers those of `tile_product.mojo`, bit for bit.
"""

from std.math import ceildiv
from std.memory import bitcast, stack_allocation
from std.sys import CompilationTarget, llvm_intrinsic, size_of

from .blocking import Blocking
from .fetch import Fetch
from .memory import Matrix, buffer
from .microkernel import add_product, broadcast
from .pack_transposed import transpose

comptime _AHEAD_BYTES = 512
"""How far ahead of its use a line of the weight is asked for: arithmetic leaves the processor too few loads under way."""

comptime _CHAINS = 2
"""Blocks of one row's products that are summed side by side, since each sum waits for its last product."""

comptime _FLUSHES = 0x8040
"""The bits of MXCSR by which numbers below the normal ones are zero, read or written."""


comptime _SEVERAL_PASSES = (
    CompilationTarget.has_avx512f()
    and CompilationTarget._has_feature["sse4a"]()
)
"""Whether a vector's rows of the weight may be transposed several times, from the second cache, for more rows: measured on
AMD's CPUs, which alone have SSE4a, and transpose faster."""

comptime _CACHED = 1 << 20
"""Elements of a weight of bfloat16 that is packed faster than it is transposed twice, since caches hold it."""


def _at_once[dtype: DType]() -> Int:
    """Counts the rows for which a square's registers are enough, or cost less than packing the weight."""
    comptime if not CompilationTarget.has_avx512f():
        # Measured with AVX2: a square's registers that have to wait in memory cost less than packing.
        return 8 if CompilationTarget.has_avx2() else 0
    comptime if _SEVERAL_PASSES:
        return 12
    return 2 if Blocking[dtype].has_tiles else 8 if size_of[dtype]() > 2 else 6


struct FewRows[dtype: DType]:
    """What the kernel takes.

    Parameters:
        dtype: Element type of the weight.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    comptime left = Self.B.accum if Self.B.has_tiles else Self.B.operand
    """The type of the rows: where tiles multiply them otherwise, their operands in the type of sums."""

    comptime is_narrow = (
        size_of[Self.dtype]() == 2
        and not Self.B.has_dot
        and CompilationTarget.has_avx512f()
    )
    """Whether each number is one product, but takes so little memory that arithmetic would decide, not the memory's speed."""

    comptime at_once = _at_once[Self.dtype]()
    """The most rows that are multiplied in one pass."""

    comptime most = (
        Self.at_once if not _SEVERAL_PASSES else 32 if Self.B.has_dot else 48
    )
    """The most rows for which this is the fastest way: with more, packing the weight once saves some."""

    comptime takes_ahead = _SEVERAL_PASSES
    """Whether a thread takes its next task before the last is done, to ask for its first rows: measured on AMD's CPUs."""

    comptime unit = Self.B.width * Self.B.pair
    """Features of a square."""

    @staticmethod
    def takes(rows: Int, weight: Int) -> Bool:
        """Tells whether this is the fastest way.

        Args:
            rows: How many rows.
            weight: Elements of the weight.

        Returns:
            Whether it is.
        """
        if rows <= Self.at_once:
            return True
        return rows <= Self.most and not (Self.B.has_dot and weight < _CACHED)


def multiply_few_rows[
    dtype: DType
](
    c: Matrix[Blocking[dtype].accum],
    a: Matrix[FewRows[dtype].left],
    weight: Matrix[dtype],
    rows: Int,
    columns: Int,
    depth: Int,
    is_first: Bool,
    next: Int,
):
    """Multiplies rows by rows of a weight.

    Parameters:
        dtype: Element type of the weight.

    Args:
        c: The sums, in whole vectors.
        a: The rows, zero up to a multiple of `FewRows.unit`.
        weight: Its rows, each a column of the sums.
        rows: How many rows, at most `FewRows.most`: in passes of as many rows each.
        columns: How many rows of the weight.
        depth: Products to sum.
        is_first: Whether no rows of the weight were multiplied just before these.
        next: How many rows behind these, from first to first, those are that are multiplied next; 0 without any.
    """
    comptime B = Blocking[dtype]
    var flushing = _Flushing()
    comptime if B.has_tiles:
        flushing.begin()
    comptime at_once = FewRows[dtype].at_once
    var passes = ceildiv(rows, max(1, at_once))
    for column in range(0, columns, B.width):
        var follows = B.width
        if column + B.width >= columns:
            follows = next - column if next else 0
        for i in range(passes):
            var first = rows * i // passes
            var count = rows * (i + 1) // passes - first
            comptime for r in range(1, at_once + 1):
                if count == r:
                    _multiply[dtype, r](
                        c.part(first, column),
                        a.part(first, 0),
                        weight.part(column, 0),
                        min(B.width, columns - column),
                        depth,
                        is_first and column == 0,
                        follows,
                    )
    comptime if B.has_tiles:
        flushing.end()


struct _Flushing(TrivialRegisterPassable):
    """Has vector registers treat numbers below the normal ones as tile registers do."""

    var before: UInt32
    """The thread's MXCSR."""

    def __init__(out self):
        """Keeps none."""
        self.before = 0

    def begin(mut self):
        """Begins to take them for zero."""
        var mode = stack_allocation[1, UInt32]()
        llvm_intrinsic["llvm.x86.sse.stmxcsr", NoneType](mode)
        self.before = mode[]
        mode[] |= _FLUSHES
        llvm_intrinsic["llvm.x86.sse.ldmxcsr", NoneType](mode)

    def end(self):
        """Goes on as before."""
        var mode = stack_allocation[1, UInt32]()
        mode[] = self.before
        llvm_intrinsic["llvm.x86.sse.ldmxcsr", NoneType](mode)


@no_inline
def _multiply[
    dtype: DType, rows: Int
](
    c: Matrix[Blocking[dtype].accum],
    a: Matrix[FewRows[dtype].left],
    weight: Matrix[dtype],
    columns: Int,
    depth: Int,
    is_first: Bool,
    next: Int,
):
    """Computes a vector of each row's sums."""
    comptime B = Blocking[dtype]
    comptime Acc = SIMD[B.accum, B.width]
    comptime unit = FewRows[dtype].unit
    comptime ahead = _AHEAD_BYTES // size_of[dtype]()
    comptime chains = max(1, _CHAINS // rows if FewRows[dtype].is_narrow else 1)
    comptime far = chains * B.depth
    var fetch = Fetch[dtype, FewRows[dtype].is_narrow](
        weight.stride, depth, is_first, next
    )
    var total = Array[Acc, rows](fill=Acc(0))
    var rest = 0
    comptime if chains > 1:
        if fetch.in_order:
            rest = depth - depth % far
        for first in range(0, rest, far):
            var acc = Array[Array[Acc, rows], chains](
                fill=Array[Acc, rows](fill=Acc(0))
            )
            for k in range(first, first + B.depth, unit):
                comptime for chain in range(chains):
                    var at = k + chain * B.depth
                    var square = fetch.square[far](weight, at, columns, unit)
                    transpose(square)
                    comptime for i in range(B.width):
                        _add_products[dtype](
                            acc[chain], a.part(0, at + i * B.pair), square[i]
                        )
            comptime for chain in range(chains):
                comptime for r in range(rows):
                    if first == 0 and chain == 0:
                        total[r] = acc[chain][r]
                    else:
                        total[r] = acc[chain][r] + total[r]
    for first in range(rest, depth, B.depth):
        var end = min(depth, first + B.depth)
        var whole = end - (end - first) % unit
        var acc = Array[Acc, rows](fill=Acc(0))
        comptime if B.has_tiles:
            acc = total.copy()
        for k in range(first, whole, unit):
            var square = fetch.square[ahead](weight, k, columns, unit)
            transpose(square)
            comptime if B.has_tiles:
                _add_step(acc, a.part(0, k), square)
            else:
                comptime for i in range(B.width):
                    _add_products[dtype](
                        acc, a.part(0, k + i * B.pair), square[i]
                    )
        if whole < end:
            var square = fetch.square[ahead](
                weight, whole, columns, end - whole
            )
            transpose(square)
            comptime if B.has_tiles:
                _add_step(acc, a.part(0, whole), square)
            else:
                for i in range(ceildiv(end - whole, B.pair)):
                    _add_products[dtype](
                        acc, a.part(0, whole + i * B.pair), square[i]
                    )
        comptime for r in range(rows):
            if B.has_tiles or first == 0:
                total[r] = acc[r]
            else:
                total[r] = acc[r] + total[r]
    comptime for r in range(rows):
        c.at(r).unsafe_store(total[r])


@always_inline
def _add_products[
    dtype: DType, rows: Int
](
    mut acc: Array[SIMD[Blocking[dtype].accum, Blocking[dtype].width], rows],
    a: Matrix[FewRows[dtype].left],
    column: SIMD[Blocking[dtype].accum, Blocking[dtype].width],
):
    """Adds a product, or the sum of a pair of products, to each sum."""
    comptime B = Blocking[dtype]
    comptime for r in range(rows):
        acc[r] = add_product[dtype](
            acc[r],
            broadcast[dtype](rebind[Matrix[B.operand]](a).at(r)),
            bitcast[B.operand, B.width * B.pair](column),
        )


@always_inline
def _add_step[
    left: DType, accum: DType, width: Int, rows: Int, //
](
    mut acc: Array[SIMD[accum, width], rows],
    a: Matrix[left],
    square: Array[SIMD[accum, width], width],
):
    """Adds 32 products to each sum as a tile register does: those of even and of odd features, then both."""
    comptime Acc = SIMD[accum, width]
    var even = Array[Acc, rows](fill=Acc(0))
    var odd = Array[Acc, rows](fill=Acc(0))
    comptime for i in range(width):
        var pairs = bitcast[DType.uint32, width](square[i])
        var lower = bitcast[accum, width](pairs << 16)
        var upper = bitcast[accum, width](pairs & 0xFFFF0000)
        comptime for r in range(rows):
            even[r] = Acc(a.at(r, 2 * i).unsafe_load().cast[accum]()).fma(
                lower, even[r]
            )
            odd[r] = Acc(a.at(r, 2 * i + 1).unsafe_load().cast[accum]()).fma(
                upper, odd[r]
            )
    comptime for r in range(rows):
        acc[r] += even[r] + odd[r]
