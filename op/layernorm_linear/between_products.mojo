"""Computes what the composed backward on a GPU needs between its matrix products.

    dz = dy W;  dx, dgamma, dbeta from dz and x;  z = LayerNorm(x) again;  db = sum over rows dy;  dW = dy^T z

That is one pass over dz and x, one over dy, and one launch that adds up the partial sums of both, in a fixed
order and without atomics.
"""

from ..rows.columns import Totals
from ..device import Gpu
from ..rows.launch import launch_rows
from ..rows.launch_columns import (
    ColumnSum,
    column_sums_bytes,
    launch_columns,
    launch_rows_and_columns,
    launch_totals,
)
from ..rows.layernorm import (
    LayerNormBackward,
    LayerNormBackwardRows,
    LayerNormTo,
)
from ..rows.operands import Addresses, Operands, accumulator
from ..rows.values import SAME


def _product_dtype[dtype: DType, narrow: DType]() -> DType:
    return dtype if narrow == SAME else narrow


def workspace_bytes[
    dtype: DType, narrow: DType = SAME
](gpu: Gpu, M: Int, K: Int, N: Int) -> Int:
    """Returns the size of the workspace of `BetweenProducts`.

    Parameters:
        dtype: Element type of the tensors.
        narrow: That of z, dy and db, if it is another.

    Args:
        gpu: Where to run.
        M: Rows.
        K: Features; 0 if neither dgamma nor dbeta is wanted.
        N: Outputs; 0 if db is not wanted.

    Returns:
        The number of bytes.
    """
    comptime product_dtype = _product_dtype[dtype, narrow]()
    return column_sums_bytes[LayerNormBackward[narrow], dtype](
        gpu, M, K
    ) + column_sums_bytes[ColumnSum, product_dtype](gpu, M, N)


@fieldwise_init
struct BetweenProducts(TrivialRegisterPassable):
    """The tensors by address, all of them dense; 0 for one that is not wanted or not there."""

    var M: Int
    """Rows."""
    var K: Int
    """Features."""
    var N: Int
    """Outputs."""
    var dx: Int64
    """The gradient of x `[M, K]`, to write."""
    var dgamma: Int64
    """The gradient of LayerNorm's weight `[K]`, to write."""
    var dbeta: Int64
    """The gradient of LayerNorm's bias `[K]`, to write."""
    var db: Int64
    """The gradient of the Linear layer's bias `[N]`, to write."""
    var z: Int64
    """The normalized rows `[M, K]`, to write; may be dz."""
    var dz: Int64
    """Their gradient `[M, K]`; not needed for z alone."""
    var dy: Int64
    """The gradient of the output `[M, N]`; not needed without db."""
    var x: Int64
    """The input `[M, K]`."""
    var gamma: Int64
    """LayerNorm's weight `[K]`."""
    var beta: Int64
    """LayerNorm's bias `[K]`."""
    var mean: Int64
    """The row means `[M]`."""
    var rstd: Int64
    """The reciprocal standard deviations `[M]`."""
    var eps: Float64
    """Added to the variance before the square root."""
    var workspace: Int64
    """Scratch memory of `workspace_bytes`, from a multiple of 16 bytes on."""

    def rows[accum: DType](self) -> Operands[accum]:
        """Names the tensors for the pass over dz and x.

        Parameters:
            accum: Type computed in.

        Returns:
            The operands of `LayerNormBackward`.
        """
        var rows = Operands[accum](self.M, self.K)
        rows.inputs[0] = self.dz
        rows.inputs[1] = self.x
        rows.features[0] = self.gamma
        rows.features[1] = self.beta
        rows.absent[0] = 1
        rows.saved[0] = self.mean
        rows.saved[1] = self.rstd
        rows.outputs[0] = self.dx
        rows.outputs[1] = self.z
        return rows

    def launch[
        dtype: DType, ln_dtype: DType, narrow: DType = SAME
    ](self, gpu: Gpu) raises:
        """Computes what is wanted.

        Parameters:
            dtype: Element type of the tensors.
            ln_dtype: Element type of LayerNorm's parameters.
            narrow: That of z, dy and db, if it is another; z is not dz then.

        Args:
            gpu: Where to run.

        Raises:
            If a launch fails.
        """
        comptime accum = accumulator[dtype]()
        comptime product_dtype = _product_dtype[dtype, narrow]()
        var totals = Totals()
        var partial = self.workspace

        var rows = self.rows[accum]()
        if self.dgamma != 0 or self.dbeta != 0:
            rows.column_sums = partial
            partial += Int64(
                column_sums_bytes[LayerNormBackward[narrow], dtype](
                    gpu, self.M, self.K
                )
            )
            var sums = Addresses(fill=0)
            sums[0] = self.dgamma
            sums[1] = self.dbeta
            launch_rows_and_columns[
                LayerNormBackward[narrow],
                LayerNormBackwardRows[narrow],
                dtype,
                ln_dtype,
            ](gpu, rows, sums, totals)
        elif self.dx != 0:
            launch_rows[LayerNormBackwardRows[narrow], dtype, ln_dtype](
                gpu, rows
            )
        elif self.z != 0:
            rows.inputs[0] = self.x
            rows.outputs[0] = self.z
            rows.number = self.eps.cast[accum]()
            launch_rows[LayerNormTo[narrow], dtype, ln_dtype](gpu, rows)

        if self.db != 0:
            var outputs = Operands[accumulator[product_dtype]()](self.M, self.N)
            outputs.inputs[0] = self.dy
            outputs.column_sums = partial
            var sums = Addresses(fill=0)
            sums[0] = self.db
            launch_columns[ColumnSum, product_dtype, product_dtype](
                gpu, outputs, sums, totals
            )
        launch_totals[product_dtype](gpu, totals)
