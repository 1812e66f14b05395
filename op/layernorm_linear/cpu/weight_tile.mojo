"""Computes a tile of `dy^T @ x_hat`, and the column sums of dy beside it."""

from .blocking import Blocking, Buffer, CACHE_LINE, Panels, ceildiv
from .microkernel import multiply_block
from .pack import pack_panel
from .parameter_gradients import TREE_ROWS, add_column_sums
from .prefetch import Upcoming
from .workspace import Arena, buffer


struct TileMemory[dtype: DType](TrivialRegisterPassable):
    """Lays out what a worker needs for a tile.

    Parameters:
        dtype: Element type of the tensors.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    var product_stride: Int
    """Distance between rows of the tile."""
    var product: Int
    """Address of the tile."""
    var dy_stride: Int
    """Distance between panels of dy."""
    var dy: Int
    """Address of a packed block of dy."""
    var x_hat: Int
    """Address of a packed block of a panel of x_hat."""
    var dbias: Int
    """Address of the column sums of dy, in float64."""

    def __init__(out self, mut arena: Arena, rows: Int, panels: Int):
        """Reserves the arrays.

        Args:
            arena: Where from.
            rows: Rows of the tile.
            panels: Panels across the tile.
        """
        comptime B = Self.B
        self.product_stride = B.row_stride[B.accum](panels * B.tile_n)
        self.product = arena.take[B.accum](rows * self.product_stride)
        # Not a power of two, so that panels do not share cache sets.
        self.dy_stride = B.depth * B.tile_m + CACHE_LINE
        self.dy = arena.take[B.operand](
            ceildiv(rows, B.tile_m) * self.dy_stride
        )
        self.x_hat = arena.take[B.operand](B.block_size)
        self.dbias = arena.take[DType.float64](rows + B.width)


@fieldwise_init
struct WeightTile[dtype: DType](Copyable, Movable):
    """A tile of the weight, and the tensors that its gradient is made from.

    Parameters:
        dtype: Element type of the tensors.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    var memory: TileMemory[Self.dtype]
    """The worker's memory."""
    var panels: Panels
    """Panels of features."""
    var first_row: Int
    """First row of the tile, an output."""
    var rows: Int
    """Rows of the tile."""
    var first_panel: Int
    """First panel of the tile."""
    var last_panel: Int
    """End of the tile's panels."""
    var dy: Buffer[Self.dtype]
    """Gradient of the output `[M, N]`."""
    var x: Buffer[Self.dtype]
    """Input `[M, K]`."""
    var mean: Buffer[Self.B.accum]
    """Row means `[M]`."""
    var rstd: Buffer[Self.B.accum]
    """Reciprocal standard deviations `[M]`."""
    var M: Int
    """Rows."""
    var N: Int
    """Outputs."""

    def compute(self, with_product: Bool):
        """Sums over all rows.

        Args:
            with_product: Whether to compute the product, not only the sums.
        """
        comptime B = Self.B
        var dbias = buffer[DType.float64](self.memory.dbias)
        for i in range(self.rows + B.width):
            dbias.unsafe_offset(i).unsafe_store(0)
        for m in range(0, self.M, B.depth):
            var depth = min(B.depth, self.M - m)
            # Few rows at a time, so that they are still near when they are
            # packed.
            for i in range(0, depth, TREE_ROWS):
                var dy = self.dy.unsafe_offset(
                    (m + i) * self.N + self.first_row
                )
                var count = min(TREE_ROWS, depth - i)
                add_column_sums[Self.dtype](dbias, dy, self.N, count, self.rows)
                if with_product:
                    self._pack_dy(dy, i, count)
            if with_product:
                for panel in range(self.first_panel, self.last_panel):
                    self._add_product(m, depth, panel)

    def _pack_dy(self, dy: Buffer[Self.dtype], first: Int, count: Int):
        """Packs a few rows of dy."""
        comptime B = Self.B
        for i in range(0, self.rows, B.tile_m):
            pack_panel[Self.dtype, width=B.tile_m](
                buffer[B.operand](self.memory.dy).unsafe_offset(
                    i // B.tile_m * self.memory.dy_stride + first * B.tile_m
                ),
                dy.unsafe_offset(i),
                self.N,
                min(B.tile_m, self.rows - i),
                1,
                count,
            )

    def _add_product(self, m: Int, depth: Int, panel: Int):
        """Adds what a block of rows contributes to a panel."""
        comptime B = Self.B
        var column = self.panels.first(panel)
        var vectors = self.panels.vectors(panel)
        var x_hat = buffer[B.operand](self.memory.x_hat)
        pack_panel[Self.dtype, width=B.width, normalize=True](
            x_hat,
            self.x.unsafe_offset(m * self.panels.columns + column),
            self.panels.columns,
            self.panels.first(panel + 1) - column,
            vectors,
            depth,
            self.mean.unsafe_offset(m),
            self.rstd.unsafe_offset(m),
        )
        multiply_block[Self.dtype, a_is_panel=True](
            buffer[B.accum](self.memory.product).unsafe_offset(
                column - self.panels.first(self.first_panel)
            ),
            self.memory.product_stride,
            buffer[B.operand](self.memory.dy),
            self.memory.dy_stride,
            x_hat,
            self.rows,
            vectors,
            ceildiv(depth, B.pair),
            m > 0,
            self._upcoming(m, panel),
        )

    def _upcoming(self, m: Int, panel: Int) -> Upcoming:
        """Returns the block of x that is packed after this one."""
        comptime B = Self.B
        if panel + 1 == self.last_panel:
            if m + B.depth >= self.M:
                return Upcoming.none()
            return self._upcoming(m + B.depth, self.first_panel - 1)
        var column = self.panels.first(panel + 1)
        return Upcoming.block(
            self.x.unsafe_offset(m * self.panels.columns + column),
            self.panels.columns,
            min(B.depth, self.M - m),
            self.panels.first(panel + 2) - column,
        )
