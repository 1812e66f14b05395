"""What kernels of dense heads are compiled for, and which elements of them a GPU's lane has."""

from .call import RotaryCall
from .lanes import Lane, log_lanes_of, width_of
from .pair import Places


@fieldwise_init
struct Way(TrivialRegisterPassable):
    """What a kernel does, known when it is compiled."""

    var is_backward: Bool
    """Whether it computes the gradient."""
    var is_normalized: Bool
    """Whether heads are."""
    var is_interleaved: Bool
    """Whether an element is rotated with its neighbor."""
    var D: Int
    """Elements of a head, all of them rotated, by angles of the type of x; 0 where none of that is known."""

    @always_inline
    def sums(self) -> Bool:
        """Returns whether gamma has a gradient.

        Returns:
            Whether it may have.
        """
        return self.is_backward and self.is_normalized

    @always_inline
    def heads(self) -> Int:
        """Returns the most heads of a share: fewer where two tensors of them are loaded.

        Returns:
            How many.
        """
        return 2 if self.sums() else 4


@always_inline
def shares_of_row[way: Way](heads: UInt32) -> UInt32:
    """Returns the shares that a row is divided into.

    Parameters:
        way: What is done with its heads.

    Args:
        heads: How many it has.

    Returns:
        How many shares.
    """
    return (heads + UInt32(way.heads() - 1)) // UInt32(way.heads())


struct Slice[dtype: DType, way: Way](TrivialRegisterPassable):
    """What a lane has of each head.

    Parameters:
        dtype: The type of x, y and their gradients.
        way: What is done with them.
    """

    comptime width = width_of[Self.dtype]()
    """Elements of a piece."""
    comptime is_known = Self.way.D > 0
    """Whether all lanes have a pair, which is rotated."""
    comptime log = log_lanes_of[Self.dtype](Self.way.D) if Self.is_known else -1
    """The binary logarithm of the lanes of a head, where it is known."""

    var D: Int
    """Elements of a head."""
    var log_lanes: Int32
    """The binary logarithm of its lanes."""
    var lane: Lane
    """Which lane this is."""
    var has_pair: Bool
    """Whether it has any."""
    var places: Places
    """Where its pieces are in a head."""
    var is_half: Bool
    """Whether two elements have one angle."""

    @always_inline
    def __init__(out self, call: RotaryCall, log_lanes: Int32):
        """Finds the thread's own.

        Args:
            call: The heads.
            log_lanes: The binary logarithm of the lanes of a head.
        """
        self.is_half = call.angles != call.rotary
        comptime if Self.is_known:
            self.D = Self.way.D
            self.log_lanes = Int32(Self.log)
            self.lane = Lane(self.log_lanes)
            self.has_pair = True
            var start = self.lane.index * Self.width
            self.places = Places(start, Self.way.D // 2 + start, True)
        else:
            # The products of numbers of 32 bits are one instruction each.
            self.D = Int(Int32(call.D))
            self.log_lanes = log_lanes
            self.lane = Lane(log_lanes)
            self.has_pair = self.lane.index * 2 * Self.width < self.D
            # A lane without a pair loads the first.
            self.places = Places(
                self.lane.index if self.has_pair else 0,
                Self.width,
                Int(Int32(call.rotary)),
            )
