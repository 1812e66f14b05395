"""Sums of products, as one thread has them."""

from .wgmma import Accumulator


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


@doc_hidden
@fieldwise_init
struct Accumulators[count: Int, first: Int = 0](Sums):
    """Sums as the tensor cores leave them, from one of them on."""

    var values: Accumulator[Self.count]
    """The sums."""

    @always_inline
    def at[i: Int](self) -> Float32:
        """Returns a sum."""
        return rebind[Float32](self.values[Self.first + i])
