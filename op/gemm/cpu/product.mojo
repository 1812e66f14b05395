"""A product of packed rows and one panel of the right operand, block by block along the depth."""

from std.math import ceildiv

from .blocking import Blocking
from .epilogue import NoEpilogue, Output, TileEpilogue
from .memory import Buffer, Matrix
from .microkernel import multiply_block
from .pack_transposed import pack_transposed


trait PanelSource(TrivialRegisterPassable):
    """Has the blocks of a panel of the right operand."""

    comptime type: DType
    """Element type of the tensors."""
    comptime next_follows: Bool
    """Whether blocks follow each other in memory, in the order of their use."""

    def block(
        self, columns: Int, k: Int, depth: Int
    ) -> Buffer[Blocking[Self.type].operand]:
        """Provides a block.

        Args:
            columns: Columns of the panel.
            k: The block's first step, a multiple of `Blocking.depth`.
            depth: Its steps.

        Returns:
            The block as the microkernel reads it.
        """
        ...


@fieldwise_init
struct Packed[dtype: DType, in_order: Bool](PanelSource):
    """A panel that has been packed.

    Parameters:
        dtype: Element type of the tensors.
        in_order: Whether the panel that follows in memory is used next.
    """

    comptime type = Self.dtype
    """Element type of the tensors."""
    comptime next_follows = Self.in_order
    """Whether blocks follow each other in memory, in the order of their use."""

    var panel: Buffer[Blocking[Self.dtype].operand]
    """The whole panel."""

    @always_inline
    def block(
        self, columns: Int, k: Int, depth: Int
    ) -> Buffer[Blocking[Self.type].operand]:
        """Finds a block.

        Args:
            columns: Columns of the panel.
            k: The block's first step.
            depth: Its steps.

        Returns:
            Where it is.
        """
        comptime B = Blocking[Self.dtype]
        return self.panel.unsafe_offset(k * ceildiv(columns, B.width) * B.width)


@fieldwise_init
struct PackedOnUse[dtype: DType](PanelSource):
    """Rows of a weight, packed just before they are used as columns.

    Parameters:
        dtype: Element type of the tensors.
    """

    comptime type = Self.dtype
    """Element type of the tensors."""
    comptime next_follows = False
    """Whether blocks follow each other in memory."""

    var room: Buffer[Blocking[Self.dtype].operand]
    """Room for a block."""
    var weight: Matrix[Self.dtype]
    """The panel's rows of it."""

    @always_inline
    def block(
        self, columns: Int, k: Int, depth: Int
    ) -> Buffer[Blocking[Self.type].operand]:
        """Packs a block.

        Args:
            columns: Columns of the panel.
            k: The block's first step.
            depth: Its steps.

        Returns:
            The room.
        """
        pack_transposed[Self.dtype](
            self.room, self.weight.part(0, k), columns, depth
        )
        return self.room


def multiply_panel[
    dtype: DType,
    Source: PanelSource,
    Epilogue: TileEpilogue = NoEpilogue,
    *,
    a_is_panel: Bool,
](
    c: Matrix[Blocking[dtype].accum],
    a: Matrix[Blocking[dtype].operand],
    b: Source,
    rows: Int,
    columns: Int,
    depth: Int,
    output: Optional[Output[dtype, Epilogue]] = None,
):
    """Multiplies rows of the left operand by one panel of the right one.

    Parameters:
        dtype: Element type of the tensors.
        Source: What has the panel's blocks.
        Epilogue: What is done to complete sums.
        a_is_panel: Whether `a` is packed in panels of `tile_m` instead of in
            rows.

    Args:
        c: The product in the type of sums; only room for it with an output.
        a: Left operand: rows, or panels.
        b: The panel.
        rows: Rows of the product.
        columns: Columns of the panel.
        depth: Products to sum.
        output: Where the product goes, if not to `c`.
    """
    comptime B = Blocking[dtype]
    for k in range(0, depth, B.depth):
        var steps = min(B.depth, depth - k)
        var complete: Optional[Output[dtype, Epilogue]] = None
        if k + steps == depth:
            complete = output
        multiply_block[dtype, a_is_panel=a_is_panel](
            c,
            a.part(0, k * (B.tile_m if a_is_panel else 1)),
            rebind[Buffer[B.operand]](b.block(columns, k, steps)),
            rows,
            columns,
            steps,
            k > 0,
            complete,
            Source.next_follows,
        )
