"""Epilogues of a CPU's products, applied to sums before they leave the registers."""

from .memory import Buffer, Matrix


trait TileEpilogue(TrivialRegisterPassable):
    """Finishes the sums of a product, vector by vector, in the type of sums."""

    def finish[
        accum: DType, width: Int
    ](self, row: Int, column: Int, sums: SIMD[accum, width]) -> SIMD[
        accum, width
    ]:
        """Finishes a vector of one row's sums.

        Parameters:
            accum: The type of sums.
            width: Number of lanes.

        Args:
            row: Row of the block.
            column: Column of the first lane; lanes may be beyond the last one.
            sums: The sums.

        Returns:
            What is rounded and stored.
        """
        ...


@fieldwise_init
struct NoEpilogue(TileEpilogue):
    """Leaves the sums as they are."""

    @always_inline
    def finish[
        accum: DType, width: Int
    ](self, row: Int, column: Int, sums: SIMD[accum, width]) -> SIMD[
        accum, width
    ]:
        """Does nothing.

        Parameters:
            accum: The type of sums.
            width: Number of lanes.

        Args:
            row: Row of the block.
            column: Column of the first lane.
            sums: The sums.

        Returns:
            The sums.
        """
        return sums


@fieldwise_init
struct AddBias[dtype: DType](TileEpilogue):
    """Adds to each column its bias.

    Parameters:
        dtype: The type of sums.
    """

    var bias: Buffer[Self.dtype]
    """A number for each column of the panel."""

    @always_inline
    def finish[
        accum: DType, width: Int
    ](self, row: Int, column: Int, sums: SIMD[accum, width]) -> SIMD[
        accum, width
    ]:
        """Adds the bias.

        Parameters:
            accum: The type of sums.
            width: Number of lanes.

        Args:
            row: Row of the block.
            column: Column of the first lane.
            sums: The sums.

        Returns:
            The sums and the bias.
        """
        return (
            sums
            + self.bias.unsafe_offset(column)
            .unsafe_load[width=width]()
            .cast[accum]()
        )


@fieldwise_init
struct Output[dtype: DType, Epilogue: TileEpilogue](TrivialRegisterPassable):
    """Says where a block of the product goes when it is complete.

    Parameters:
        dtype: Element type of the output.
        Epilogue: What is done to it before.
    """

    var c: Matrix[Self.dtype]
    """Where the block goes."""
    var columns: Int
    """Columns to store, at most `tile_n`."""
    var epilogue: Self.Epilogue
    """What is done to it before, in rows and columns of the block."""
