"""Reads and writes LayerNorm's parameters, whatever type they have."""

from std.sys import size_of

from .blocking import Blocking, Buffer
from .pack import load_first, store_first
from .workspace import buffer


@fieldwise_init
struct Parameter(TrivialRegisterPassable):
    """Refers to LayerNorm's weight or bias, or a gradient; may be absent.

    Beside half-precision tensors it may be float32.
    """

    var address: Int
    """Address of the first of `K` elements; 0 if absent."""
    var is_float32: Bool
    """Whether it is float32 whatever the type of the other tensors."""

    def as_accum[
        dtype: DType
    ](self, room: Int, K: Int, default: Int) -> Buffer[Blocking[dtype].accum]:
        """Converts the parameter's values if they must be.

        Parameters:
            dtype: Element type of the other tensors.

        Args:
            room: Address of memory for `K` converted values.
            K: Number of features.
            default: The value of every element of an absent parameter.

        Returns:
            The values.
        """
        comptime B = Blocking[dtype]
        var target = buffer[B.accum](room)
        if self.address == 0:
            for k in range(K):
                target.unsafe_offset(k).unsafe_store(Scalar[B.accum](default))
            return target
        if dtype == B.accum or (self.is_float32 and B.accum == DType.float32):
            return buffer[B.accum](self.address)
        var source = buffer[dtype](self.address)
        for k in range(0, K, B.width):
            store_first(
                target.unsafe_offset(k),
                load_first[B.width](source.unsafe_offset(k), K - k).cast[
                    B.accum
                ](),
                K - k,
            )
        return target

    def store[
        dtype: DType
    ](
        self,
        k: Int,
        value: SIMD[Blocking[dtype].accum, Blocking[dtype].width],
        count: Int,
    ):
        """Stores up to a vector of values.

        Parameters:
            dtype: Element type of the other tensors.

        Args:
            k: Index of the first of them.
            value: The values.
            count: Number of values that may be written.
        """
        comptime B = Blocking[dtype]
        if self.is_float32:
            store_first(
                buffer[DType.float32](self.address).unsafe_offset(k),
                value.cast[DType.float32](),
                count,
            )
        else:
            store_first(
                buffer[dtype](self.address).unsafe_offset(k),
                value.cast[dtype](),
                count,
            )
