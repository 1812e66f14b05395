"""Some heads of one row of a dense tensor, which a group of a GPU's lanes has together: they have the same angles.

Nothing that depends on a load is between the loads of a share: heads that are not there are loaded from where another
one is, and not stored. So the memory has work while a thread waits.
"""

from std.sys import size_of
from std.utils import StaticTuple

from .call import RotaryCall
from .divisor import Divisor
from .lanes import width_of
from .pair import Pair
from .way import Slice, Way, shares_of_row
from .words import store_at, unpacked, words_at


struct Tensor[way: Way](TrivialRegisterPassable):
    """The heads of one of a call's tensors.

    Parameters:
        way: What is done with them.
    """

    var x: Int
    """Address of the heads."""
    var dy: Int
    """Address of their gradient."""
    var heads: UInt32
    """Heads of a row."""
    var pitch: Int
    """Elements from one row of x to the next."""
    var D: Int
    """Elements of a head."""
    var shares_of_row: UInt32
    """Shares of each row."""
    var shares: UInt32
    """Shares of all rows."""
    var divisor: Divisor
    """What divides by the shares of a row."""

    @always_inline
    def __init__(
        out self, call: RotaryCall, is_second: Bool, D: Int, divisor: Divisor
    ):
        """Describes a tensor.

        Args:
            call: The heads.
            is_second: Whether those of the second tensor.
            D: Elements of a head.
            divisor: What divides by the shares of a row.
        """
        self.x = call.second_x if is_second else call.x
        self.dy = call.dy
        self.heads = UInt32(call.second_heads if is_second else call.heads)
        self.pitch = Int(Int32(call.second_pitch if is_second else call.pitch))
        self.D = D
        self.shares_of_row = shares_of_row[Self.way](self.heads)
        self.shares = UInt32(call.M) * self.shares_of_row
        self.divisor = divisor


struct Spot[way: Way](TrivialRegisterPassable):
    """Where a share is.

    Parameters:
        way: What is done with it.
    """

    var index: UInt32
    """Which of the tensor's."""
    var row: UInt32
    """Its row."""
    var turn: UInt32
    """Which row of cosines and sines that has."""
    var is_here: Bool
    """Whether the share is there: otherwise, it is where the last one is."""

    @always_inline
    def __init__(
        out self,
        tensor: Tensor[Self.way],
        index: UInt32,
        end: UInt32,
        call: RotaryCall,
        positions: Divisor,
    ):
        """Locates a share.

        Args:
            tensor: Whose.
            index: Which share.
            end: Shares from this one on are not there.
            call: The heads.
            positions: What divides by the rows of cosines.
        """
        self.index = min(index, tensor.shares - 1)
        self.row = tensor.divisor.quotient(self.index)
        self.turn = self.row - positions.quotient(self.row) * UInt32(
            call.positions
        )
        self.is_here = index < end


struct Share[dtype: DType, way: Way](TrivialRegisterPassable):
    """Heads of one row: where they are, and what was loaded of them, in words of 32 bits.

    Parameters:
        dtype: The type of x, y and their gradients.
        way: What is done with them.
    """

    comptime width = width_of[Self.dtype]()
    """Elements of a piece."""
    comptime bytes = Self.width * size_of[Self.dtype]()
    """Bytes of a piece."""
    comptime Pieces = StaticTuple[
        SIMD[DType.uint32, Self.bytes // 4], Self.way.heads()
    ]
    """A piece of each head."""

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
        tensor: Tensor[Self.way],
        spot: Spot[Self.way],
        call: RotaryCall,
        slice: Slice[Self.dtype, Self.way],
    ):
        """Loads a share.

        Args:
            tensor: Whose.
            spot: Where it is.
            call: The heads.
            slice: What of it.
        """
        comptime size = size_of[Self.dtype]()
        comptime load = words_at[Self.bytes // 4, Self.bytes]
        comptime Nothing = Self.Pieces(fill=0)
        comptime most = Self.way.heads()
        var head = (spot.index - spot.row * tensor.shares_of_row) * UInt32(most)
        var heads = min(Int32(tensor.heads - head), Int32(most))
        self.start = Int(spot.row * tensor.heads + head) * tensor.D
        self.angles = Int(spot.turn) * Int(Int32(call.angles))
        self.heads = heads if spot.is_here else Int32(0)
        self.xa = Nothing
        self.xb = Nothing
        self.da = Nothing
        self.db = Nothing
        var x = (
            tensor.x
            + (Int(spot.row) * tensor.pitch + Int(head) * tensor.D) * size
        )
        var dy = tensor.dy + self.start * size
        comptime for i in range(most):
            var step = (i * tensor.D * size) if Int32(i) < heads else 0
            comptime if Self.way.is_normalized or not Self.way.is_backward:
                self.xa[i] = load(x + step + slice.places.a * size)
                self.xb[i] = load(x + step + slice.places.b * size)
            comptime if Self.way.is_backward:
                self.da[i] = load(dy + step + slice.places.a * size)
                self.db[i] = load(dy + step + slice.places.b * size)

    @always_inline
    def x[accum: DType, width: Int](self, head: Int) -> Pair[accum, width]:
        """Returns a pair of x.

        Parameters:
            accum: The type computed in.
            width: Elements of a piece.

        Args:
            head: Which head of the share.

        Returns:
            The pair.
        """
        comptime read = unpacked[Self.dtype, accum, width]
        return {read(self.xa[head]), read(self.xb[head])}

    @always_inline
    def dy[accum: DType, width: Int](self, head: Int) -> Pair[accum, width]:
        """Returns a pair of the gradient.

        Parameters:
            accum: The type computed in.
            width: Elements of a piece.

        Args:
            head: Which head of the share.

        Returns:
            The pair.
        """
        comptime read = unpacked[Self.dtype, accum, width]
        return {read(self.da[head]), read(self.db[head])}

    @always_inline
    def store[
        accum: DType, width: Int, //
    ](
        self,
        results: StaticTuple[Pair[accum, width], Self.way.heads()],
        output: Int,
        slice: Slice[Self.dtype, Self.way],
    ):
        """Stores a pair of each head that is there.

        Parameters:
            accum: The type computed in.
            width: Elements of a piece.

        Args:
            results: The pairs.
            output: Address of a dense tensor.
            slice: Which pairs.
        """
        comptime size = size_of[Self.dtype]()
        var heads = self.heads if slice.has_pair else Int32(0)
        comptime for i in range(Self.way.heads()):
            if Int32(i) < heads:
                var target = output + (self.start + i * slice.D) * size
                store_at[Self.dtype](
                    results[i].a, target + slice.places.a * size
                )
                store_at[Self.dtype](
                    results[i].b, target + slice.places.b * size
                )
