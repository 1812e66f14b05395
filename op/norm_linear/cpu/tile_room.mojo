"""Lays out a thread's workspace for a tile of the weight's gradient."""

from std.math import ceildiv

from ...gemm.cpu.blocking import Blocking
from ...gemm.cpu.memory import Arena, CACHE_LINE


struct TileRoom[dtype: DType](TrivialRegisterPassable):
    """A worker's room for a tile of `dy^T @ x_hat` where rows are many.

    Parameters:
        dtype: Element type of the tensors.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    var product: Int
    """Address of the tile."""
    var product_stride: Int
    """Distance between its rows."""
    var dy: Int
    """Address of packed columns of dy."""
    var dy_stride: Int
    """Distance between their panels."""
    var x_hat: Int
    """Address of packed panels of x_hat."""

    def __init__(
        out self,
        mut arena: Arena,
        rows: Int,
        panels: Int,
        steps: Int,
        is_packed: Bool,
    ):
        """Reserves the arrays.

        Args:
            arena: Where from.
            rows: Rows of the tile.
            panels: Panels across the tile.
            steps: Rows of dy and x that are packed together.
            is_packed: Whether they have been packed before.
        """
        comptime B = Self.B
        self.product_stride = panels * B.tile_n + CACHE_LINE // 4
        self.product = arena.take[B.accum](rows * self.product_stride)
        self.dy_stride = steps * B.tile_m
        self.dy = arena.take[B.operand](
            0 if is_packed else ceildiv(rows, B.tile_m) * self.dy_stride
        )
        self.x_hat = arena.take[B.operand](
            0 if is_packed else panels * steps * B.tile_n
        )
