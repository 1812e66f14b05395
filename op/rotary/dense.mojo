"""Normalizes and rotates heads of dense tensors on a GPU, forward and backward: all loads of some heads in flight at once.

Nothing that depends on a load is between loads: heads that are not there are loaded from where another one is, and not
stored. So the memory has work while a thread waits.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    thread_idx,
)
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp
from std.math import ceildiv, rsqrt
from std.memory import bitcast, stack_allocation
from std.sys import size_of
from std.utils import StaticTuple

from ..device import Gpu
from ..pdl import pdl_attributes, pdl_trigger, pdl_wait
from ..rounding import rounded
from ..rows.operands import accumulator
from .call import RotaryCall
from .pair import Pair, Places


@fieldwise_init
struct Way(TrivialRegisterPassable):
    """How a kernel goes over heads, known when it is compiled."""

    var is_backward: Bool
    """Whether it computes the gradient."""
    var is_normalized: Bool
    """Whether heads are."""
    var is_interleaved: Bool
    """Whether an element is rotated with its neighbor."""
    var D: Int
    """Elements of a head, all of them rotated, by angles of the type of x; 0 where none of that is known."""
    var width: Int
    """Elements of a piece."""
    var sums: Int
    """Elements of a piece whose squares are added up first."""
    var share: Int
    """Heads of a row that a group of lanes has together."""
    var threads: Int
    """Threads of a block."""
    var blocks: Int
    """Blocks that an SM has room for."""
    var turns: Int
    """Shares of a group, one after another, in a forward; 0 for as many as make each SM busy once."""
    var is_ahead: Bool
    """Whether the next share is loaded while one is computed."""


@always_inline
def quotient(n: UInt32, magic: UInt32, shift: UInt32) -> UInt32:
    """Divides a number of at most 30 bits by what `magic_of` was told.

    Args:
        n: The number.
        magic: See there.
        shift: See there.

    Returns:
        The quotient, rounded down.
    """
    return UInt32((UInt64(n) * UInt64(magic)) >> UInt64(shift))


def magic_of(d: Int) -> Tuple[UInt32, UInt32]:
    """Finds what divides numbers of at most 30 bits by a multiplication and a shift.

    Args:
        d: The divisor, positive.

    Returns:
        The factor and the shift.
    """
    var log = 0
    while 1 << log < d:
        log += 1
    return UInt32(ceildiv(1 << (30 + log), d)), UInt32(30 + log)


def launch[
    dtype: DType, way: Way
](gpu: Gpu, call: RotaryCall, log_lanes: Int) raises:
    """Launches the forward or the backward.

    Parameters:
        dtype: The type of x, y and their gradients.
        way: How.

    Args:
        gpu: Where to run.
        call: The heads.
        log_lanes: The binary logarithm of the lanes of a head.

    Raises:
        If the launch fails.
    """
    comptime kernel = heads_kernel[dtype, way]
    var compiled = gpu.context.compile_function[kernel]()
    var groups = way.threads >> log_lanes
    var shares = call.M * ceildiv(call.heads, way.share)
    var seconds = call.M * ceildiv(call.second_heads, way.share)
    var turns = way.turns
    if turns == 0:
        turns = max(
            1,
            ceildiv(
                shares + seconds, groups * way.blocks * max(1, gpu.processors)
            ),
        )
    var size = groups * turns
    var blocks = ceildiv(shares, size)
    if call.dgamma != 0:
        blocks = call.parts
        size = ceildiv(shares, blocks)
    var row, row_shift = magic_of(ceildiv(call.heads, way.share))
    var other, other_shift = magic_of(
        max(1, ceildiv(call.second_heads, way.share))
    )
    var turn, turn_shift = magic_of(max(1, call.positions))
    gpu.stream.enqueue_function(
        compiled,
        call,
        Int32(log_lanes),
        Int32(blocks),
        Int32(size),
        row,
        row_shift,
        other,
        other_shift,
        turn,
        turn_shift,
        grid_dim=blocks + ceildiv(seconds, size),
        block_dim=way.threads,
        attributes=pdl_attributes(),
    )


struct _Share[dtype: DType, way: Way](TrivialRegisterPassable):
    """Heads of one row: where they are, and what was loaded of them, in words of 32 bits."""

    comptime words = Self.way.width * size_of[Self.dtype]() // 4
    """Words of a piece."""
    comptime Piece = SIMD[DType.uint32, Self.words]
    """What a piece is loaded as."""
    comptime Pieces = StaticTuple[Self.Piece, Self.way.share]
    """One of each head."""

    var start: Int
    """Index of the first element in dense tensors."""
    var angles: Int
    """Index of the first cosine of the row."""
    var heads: Int32
    """How many there are; 0 of a share that is not there."""
    var xa: Self.Pieces
    """Pieces of x."""
    var xb: Self.Pieces
    """The others of x."""
    var da: Self.Pieces
    """Pieces of dy."""
    var db: Self.Pieces
    """The others of dy."""

    @always_inline
    def __init__(
        out self,
        x: Int,
        dy: Int,
        all_heads: UInt32,
        pitch: Int,
        D: Int,
        places: Places,
        item: UInt32,
        row: UInt32,
        shares_of_row: UInt32,
        is_here: Bool,
        angles: Int,
    ):
        """Loads a share.

        Args:
            x: Address of x.
            dy: Address of the gradient.
            all_heads: Heads of a row.
            pitch: Elements from one row of x to the next.
            D: Elements of a head.
            places: Where the pieces are in it.
            item: Which share.
            row: Its row.
            shares_of_row: Shares of each row.
            is_here: Whether its results are wanted.
            angles: Index of the first cosine of the row.
        """
        comptime size = size_of[Self.dtype]()
        comptime bytes = Self.way.width * size
        comptime count = Self.words
        var head = (item - row * shares_of_row) * UInt32(Self.way.share)
        var heads = min(Int32(all_heads - head), Int32(Self.way.share))
        self.start = Int(row * all_heads + head) * D
        self.angles = angles
        self.heads = heads if is_here else Int32(0)
        self.xa = {fill = Self.Piece(0)}
        self.xb = {fill = Self.Piece(0)}
        self.da = {fill = Self.Piece(0)}
        self.db = {fill = Self.Piece(0)}
        var source = x + (Int(row) * pitch + Int(head) * D) * size
        var gradient = dy + self.start * size
        comptime for i in range(Self.way.share):
            var step = (i * D * size) if Int32(i) < heads else 0
            comptime if Self.way.is_normalized or not Self.way.is_backward:
                self.xa[i] = _at(source + step, places.a * size).unsafe_load[
                    width=count, alignment=bytes
                ]()
                self.xb[i] = _at(source + step, places.b * size).unsafe_load[
                    width=count, alignment=bytes
                ]()
            comptime if Self.way.is_backward:
                self.da[i] = _at(gradient + step, places.a * size).unsafe_load[
                    width=count, alignment=bytes
                ]()
                self.db[i] = _at(gradient + step, places.b * size).unsafe_load[
                    width=count, alignment=bytes
                ]()


@always_inline
def _at(
    address: Int, bytes: Int
) -> Pointer[UInt32, MutAnyOrigin, address_space=AddressSpace.GLOBAL]:
    return {unsafe_from_address = address + bytes}


@always_inline
def _unpacked[
    dtype: DType, accum: DType, width: Int
](words: SIMD[DType.uint32, _]) -> SIMD[accum, width]:
    """Widens the numbers of some words: one instruction for each of bfloat16."""
    comptime if dtype == DType.bfloat16 and accum == DType.float32:
        comptime Bits = SIMD[DType.uint32, width // 2]
        var bits = rebind[Bits](words)
        var low = bitcast[accum, width // 2](bits << Bits(16))
        var high = bitcast[accum, width // 2](bits & Bits(0xFFFF0000))
        return rebind[SIMD[accum, width]](low.interleave(high))
    else:
        return bitcast[dtype, width](words).cast[accum]()


@always_inline
def _unpacked_at[
    dtype: DType, accum: DType, width: Int
](address: Int, index: Int) -> SIMD[accum, width]:
    comptime size = size_of[dtype]()
    return _unpacked[dtype, accum, width](
        _at(address, index * size).unsafe_load[
            width=width * size // 4, alignment=min(16, width * size)
        ]()
    )


@always_inline
def _either[
    dtype: DType, accum: DType, width: Int
](address: Int, index: Int, is_float32: Bool) -> SIMD[accum, width]:
    """Loads numbers of one of two types without a branch, in which other loads would wait for these."""
    comptime size = size_of[dtype]()
    comptime if dtype == DType.bfloat16 and accum == DType.float32:
        comptime count = width // 2
        comptime bytes = 4 * count
        var base = address + index * (4 if is_float32 else size)
        var lower = _at(base, 0).unsafe_load[width=count, alignment=bytes]()
        var upper = _at(base, bytes if is_float32 else 0).unsafe_load[
            width=count, alignment=bytes
        ]()
        var own = _unpacked[dtype, accum, width](lower)
        var wide = bitcast[accum, width](lower.join(upper))
        return wide if is_float32 else own
    else:
        if is_float32:
            return _unpacked_at[DType.float32, accum, width](address, index)
        return _unpacked_at[dtype, accum, width](address, index)


@always_inline
def _gamma[
    dtype: DType, accum: DType, width: Int
](call: RotaryCall, address: Int, other: Int, places: Places) -> Pair[
    accum, width
]:
    """Loads what a pair is multiplied by after it was normalized."""
    var offset = SIMD[accum, width](call.weight_offset.cast[accum]())
    var one = SIMD[accum, width](1)
    var is_float32 = call.gamma_is_float32 != 0 and address != 0
    # Without gamma, something else is read, of at least that many numbers.
    var read = address if address != 0 else other
    comptime Read = _either[dtype, accum, width]
    var a = Read(read, places.a, is_float32) + offset
    var b = Read(read, places.b, is_float32) + offset
    return {a if address != 0 else one, b if address != 0 else one}


@always_inline
def _angles[
    dtype: DType, accum: DType, width: Int, is_interleaved: Bool, fixed: Bool
](call: RotaryCall, start: Int, places: Places, is_half: Bool) -> StaticTuple[
    Pair[accum, width], 2
]:
    """Loads cosines and sines of a pair that is rotated, all of them before the first is used."""
    var is_float32 = call.angles_are_float32 != 0
    comptime if is_interleaved:
        if is_half:
            # One angle for two neighbors.
            comptime half = width // 2
            comptime Half = _scalars[dtype, accum, half]
            var a = start + places.a // 2
            var b = start + places.b // 2
            var ca = Half(call.cos, a, is_float32)
            var cb = Half(call.cos, b, is_float32)
            var sa = Half(call.sin, a, is_float32)
            var sb = Half(call.sin, b, is_float32)
            return StaticTuple[Pair[accum, width], 2](
                _twice[width](ca, cb), _twice[width](sa, sb)
            )
    # Of half the angles, both pieces have the same.
    var a = start + places.a
    var b = start + (places.a if is_half else places.b)
    comptime if fixed:
        comptime Read = _unpacked_at[dtype, accum, width]
        return StaticTuple[Pair[accum, width], 2](
            Pair(Read(call.cos, a), Read(call.cos, b)),
            Pair(Read(call.sin, a), Read(call.sin, b)),
        )
    else:
        comptime Read = _either[dtype, accum, width]
        return StaticTuple[Pair[accum, width], 2](
            Pair(Read(call.cos, a, is_float32), Read(call.cos, b, is_float32)),
            Pair(Read(call.sin, a, is_float32), Read(call.sin, b, is_float32)),
        )


@always_inline
def _scalars[
    dtype: DType, accum: DType, width: Int
](address: Int, index: Int, is_float32: Bool) -> SIMD[accum, width]:
    """Loads numbers that may be aligned to fewer than four bytes each."""
    if is_float32:
        return (
            _first[DType.float32](address, index)
            .unsafe_load[width=width, alignment=width * 4]()
            .cast[accum]()
        )
    return (
        _first[dtype](address, index)
        .unsafe_load[width=width, alignment=width * size_of[dtype]()]()
        .cast[accum]()
    )


@always_inline
def _first[
    dtype: DType
](address: Int, index: Int) -> Pointer[
    Scalar[dtype], MutAnyOrigin, address_space=AddressSpace.GLOBAL
]:
    return Pointer[
        Scalar[dtype], MutAnyOrigin, address_space=AddressSpace.GLOBAL
    ](unsafe_from_address=address).unsafe_offset(index)


@always_inline
def _twice[
    accum: DType, half: Int, //, width: Int
](a: SIMD[accum, half], b: SIMD[accum, half]) -> Pair[accum, width]:
    return {
        rebind[SIMD[accum, width]](a.interleave(a)),
        rebind[SIMD[accum, width]](b.interleave(b)),
    }


@always_inline
def _part[
    accum: DType, //, sums: Int, index: Int
](v: Pair[accum, _]) -> Pair[accum, sums]:
    return {
        v.a.slice[sums, offset=index * sums](),
        v.b.slice[sums, offset=index * sums](),
    }


@always_inline
def _add_over_lanes[
    accum: DType, //, count: Int, chains: Int, lanes: Int
](mut sums: StaticTuple[Scalar[accum], count], log_lanes: Int32) -> StaticTuple[
    Scalar[accum], count // chains
]:
    """Adds up over the lanes of each head, in the order of lanes that have one chain each."""
    comptime if lanes > 0:
        comptime for level in range(6):
            comptime at_level = lanes >> (level + 1)
            comptime if at_level > 0:
                comptime for i in range(count):
                    sums[i] += warp.shuffle_xor(sums[i], UInt32(at_level))
    else:
        for level in range(Int(log_lanes)):
            var distance = UInt32(1) << UInt32(Int(log_lanes) - 1 - level)
            comptime for i in range(count):
                sums[i] += warp.shuffle_xor(sums[i], distance)
    var totals = StaticTuple[Scalar[accum], count // chains](fill=0)
    comptime for i in range(count // chains):
        totals[i] = sums[i * chains]
        comptime if chains == 2:
            totals[i] += sums[i * chains + 1]
    return totals


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(way.threads)),
    `nvvm.minctasm`=SIMDLength(way.blocks),
)
def heads_kernel[
    dtype: DType, way: Way
](
    call: RotaryCall,
    log_lanes: Int32,
    blocks: Int32,
    size: Int32,
    row_magic: UInt32,
    row_shift: UInt32,
    other_magic: UInt32,
    other_shift: UInt32,
    turn_magic: UInt32,
    turn_shift: UInt32,
):
    """Normalizes and rotates heads, or computes the gradient of that.

    Grid: shares of x, `size` a block, then those of the second tensor. Block: way.threads threads.

    Parameters:
        dtype: The type of x, y and their gradients.
        way: How.

    Args:
        call: The heads.
        log_lanes: The binary logarithm of the lanes of a head.
        blocks: How many blocks have heads of x.
        size: Shares of a block.
        row_magic: What divides by the shares of a row of x.
        row_shift: Likewise.
        other_magic: What divides by those of the second tensor.
        other_shift: Likewise.
        turn_magic: What divides by the rows of cosines.
        turn_shift: Likewise.
    """
    comptime accum = accumulator[dtype]()
    comptime width = way.width
    comptime share = way.share
    comptime backward = way.is_backward
    comptime normalized = way.is_normalized
    comptime chains = width // way.sums
    comptime fixed = way.D > 0
    comptime lanes_if_fixed = way.D // (2 * width)
    comptime bytes = size_of[dtype]()
    comptime Share = _Share[dtype, way]
    comptime is_single = way.turns == 1 and not (backward and normalized)
    comptime if backward:
        pdl_wait()
        pdl_trigger()
    var block = Int32(block_idx.x)
    var is_second = False
    comptime if not backward:
        is_second = block >= blocks
    if is_second:
        block -= blocks
    var all_heads = UInt32(call.second_heads if is_second else call.heads)
    var pitch = Int(Int32(call.second_pitch if is_second else call.pitch))
    var x = call.second_x if is_second else call.x
    var gamma = call.second_gamma if is_second else call.gamma
    var output = call.dx
    comptime if not backward:
        output = call.second_y if is_second else call.y
    var magic = other_magic if is_second else row_magic
    var shift = other_shift if is_second else row_shift
    var D = Int(Int32(call.D))
    var thread = Int32(thread_idx.x)
    var lanes = Int32(1) << log_lanes
    var group = thread >> log_lanes
    var groups = Int32(way.threads) >> log_lanes
    comptime if fixed:
        D = way.D
        lanes = Int32(lanes_if_fixed)
        group = Int32(UInt32(thread) // UInt32(lanes_if_fixed))
        groups = Int32(way.threads // lanes_if_fixed)
    var lane = Int(thread & (lanes - 1))
    var has_pair = True
    var places = Places(lane * width, way.D // 2 + lane * width, True)
    comptime if not fixed:
        has_pair = lane * 2 * width < D
        # A lane without a pair loads the first.
        places = Places(lane if has_pair else 0, width, Int(Int32(call.rotary)))
    var shares_of_row = (all_heads + UInt32(share - 1)) // UInt32(share)
    var shares = UInt32(call.M) * shares_of_row
    var first = UInt32(block) * UInt32(size) + UInt32(group)
    var last = min(UInt32(block + 1) * UInt32(size), shares)
    var is_half = call.angles != call.rotary
    var item = min(first, shares - 1)
    var row = quotient(item, magic, shift)
    var turn = row - quotient(row, turn_magic, turn_shift) * UInt32(
        call.positions
    )
    comptime if not backward:
        pdl_wait()
        pdl_trigger()
    var next = Share(
        x,
        call.dy,
        all_heads,
        pitch,
        D,
        places,
        item,
        row,
        shares_of_row,
        first < last,
        Int(turn) * Int(Int32(call.angles)),
    )
    var g = Pair[accum, width](1, 1)
    comptime if normalized:
        g = _gamma[dtype, accum, width](call, gamma, x, places)
    var sums = Pair[accum, width](0, 0)
    var begin = UInt32(block) * UInt32(size)
    while True:
        comptime if backward and not is_single:
            # A part may have no heads.
            if begin >= last:
                break
        var own = next
        var c = Pair[accum, width](1, 1)
        var s = Pair[accum, width](0, 0)
        comptime if way.is_ahead:
            # The next share is on its way while this one is computed.
            if begin + UInt32(groups) < last:
                var following = begin + UInt32(groups) + UInt32(group)
                item = min(following, shares - 1)
                row = quotient(item, magic, shift)
                turn = row - quotient(row, turn_magic, turn_shift) * UInt32(
                    call.positions
                )
                next = Share(
                    x,
                    call.dy,
                    all_heads,
                    pitch,
                    D,
                    places,
                    item,
                    row,
                    shares_of_row,
                    following < last,
                    Int(turn) * Int(Int32(call.angles)),
                )
        comptime if fixed:
            var both = _angles[dtype, accum, width, way.is_interleaved, fixed](
                call, own.angles, places, is_half
            )
            c = both[0]
            s = both[1]
        else:
            if places.is_rotated:
                var both = _angles[
                    dtype, accum, width, way.is_interleaved, fixed
                ](call, own.angles, places, is_half)
                c = both[0]
                s = both[1]
        var rstds = StaticTuple[Scalar[accum], share](fill=1)
        comptime if normalized:
            var squares = StaticTuple[Scalar[accum], share * chains](fill=0)
            comptime for i in range(share):
                comptime for j in range(chains):
                    var v = _part[way.sums, j](_x[accum](own, i))
                    squares[i * chains + j] = (v * v).sum()
                    comptime if not fixed:
                        if not has_pair:
                            squares[i * chains + j] = 0
            rstds = rebind[type_of(rstds)](
                _add_over_lanes[share * chains, chains, lanes_if_fixed](
                    squares, log_lanes
                )
            )
            comptime for i in range(share):
                comptime if fixed:
                    rstds[i] = rsqrt(
                        rstds[i] / Scalar[accum](way.D) + call.eps.cast[accum]()
                    )
                else:
                    rstds[i] = rsqrt(
                        rstds[i] / Scalar[accum](D) + call.eps.cast[accum]()
                    )
        var results = StaticTuple[Pair[accum, width], share](
            fill=Pair[accum, width](0, 0)
        )
        comptime if not backward:
            comptime for i in range(share):
                var z = _x[accum](own, i)
                comptime if normalized:
                    z = z * rstds[i] * g
                if places.is_rotated:
                    z = z * c + z.turned[way.is_interleaved]() * s
                results[i] = z
        else:
            var partial = StaticTuple[Scalar[accum], share * chains](fill=0)
            comptime for i in range(share):
                var z = _dy[accum](own, i)
                if places.is_rotated:
                    z = z * c - (z * s).turned[way.is_interleaved]()
                comptime if normalized:
                    var n = _x[accum](own, i) * rstds[i]
                    # Without an eps, a head that is not there has no rstd.
                    if Int32(i) < own.heads and has_pair:
                        sums = sums + z * n
                    z = z * g
                    var products = z * n
                    comptime for j in range(chains):
                        partial[i * chains + j] = _part[way.sums, j](
                            products
                        ).sum()
                        comptime if not fixed:
                            if not has_pair:
                                partial[i * chains + j] = 0
                results[i] = z
            comptime if normalized:
                var means = _add_over_lanes[
                    share * chains, chains, lanes_if_fixed
                ](partial, log_lanes)
                comptime for i in range(share):
                    var n = _x[accum](own, i) * rstds[i]
                    var mean = means[i]
                    comptime if fixed:
                        mean = mean / Scalar[accum](way.D)
                    else:
                        mean = mean / Scalar[accum](D)
                    results[i] = (results[i] - n * mean) * rstds[i]
        var there = own.heads if has_pair else Int32(0)
        comptime for i in range(share):
            if Int32(i) < there:
                var target = output + (own.start + i * D) * bytes
                _store[dtype](results[i].a, target + places.a * bytes)
                _store[dtype](results[i].b, target + places.b * bytes)
        comptime if is_single:
            break
        comptime if not way.is_ahead:
            if begin + UInt32(groups) < last:
                var following = begin + UInt32(groups) + UInt32(group)
                item = min(following, shares - 1)
                row = quotient(item, magic, shift)
                turn = row - quotient(row, turn_magic, turn_shift) * UInt32(
                    call.positions
                )
                next = Share(
                    x,
                    call.dy,
                    all_heads,
                    pitch,
                    D,
                    places,
                    item,
                    row,
                    shares_of_row,
                    following < last,
                    Int(turn) * Int(Int32(call.angles)),
                )
        begin += UInt32(groups)
        comptime if not backward:
            if begin >= last:
                break
    comptime if backward and normalized:
        if call.dgamma != 0:
            _store_sums[accum, width, way.threads](
                sums,
                D,
                places,
                has_pair,
                Int(group),
                Int(groups),
                call.dgamma,
            )


@always_inline
def _x[
    dtype: DType, way: Way, //, accum: DType
](own: _Share[dtype, way], index: Int) -> Pair[accum, way.width]:
    return {
        _unpacked[dtype, accum, way.width](own.xa[index]),
        _unpacked[dtype, accum, way.width](own.xb[index]),
    }


@always_inline
def _dy[
    dtype: DType, way: Way, //, accum: DType
](own: _Share[dtype, way], index: Int) -> Pair[accum, way.width]:
    return {
        _unpacked[dtype, accum, way.width](own.da[index]),
        _unpacked[dtype, accum, way.width](own.db[index]),
    }


@always_inline
def _store[
    accum: DType, width: Int, //, to: DType
](v: SIMD[accum, width], address: Int):
    Pointer[Scalar[to], MutAnyOrigin, address_space=AddressSpace.GLOBAL](
        unsafe_from_address=address
    ).unsafe_store[alignment=width * size_of[to]()](rounded[to](v))


@always_inline
def _store_sums[
    accum: DType, width: Int, threads: Int
](
    sums: Pair[accum, width],
    d: Int,
    places: Places,
    has_pair: Bool,
    group: Int,
    groups: Int,
    dgamma: Int,
):
    """Adds up what a block's groups have summed, in order, and stores it as the block's part."""
    comptime Shared = AddressSpace.SHARED
    # A group has as much room as its lanes have elements, and the lanes of a block are its threads.
    var room = stack_allocation[
        threads * 2 * width, Scalar[accum], address_space=Shared
    ]()
    if has_pair:
        var own = room.unsafe_offset(group * d)
        comptime for i in range(width):
            own.unsafe_offset(places.a + i).unsafe_store(sums.a[i])
            own.unsafe_offset(places.b + i).unsafe_store(sums.b[i])
    barrier()
    for i in range(Int(thread_idx.x), d, threads):
        var sum = Scalar[accum](0)
        for j in range(groups):
            sum += room.unsafe_offset(j * d + i).unsafe_load()
        Pointer[Scalar[accum], MutAnyOrigin](
            unsafe_from_address=dgamma
        ).unsafe_offset(Int(block_idx.x) * d + i).unsafe_store(sum)
