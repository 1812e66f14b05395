"""Derives the parameters' gradients from one matrix product.

With G = dy^T @ x_hat and the linear bias's gradient db = dy^T @ 1,

    dW = G * gamma + db (x) beta,
    dgamma = sum over n of W * G,    dbeta = sum over n of W * db,

so that nothing of the input's size is read for the LayerNorm's parameters.
Sums over n are taken in chunks of fixed size, so that they do not depend on how
the product is divided.
"""

from .blocking import Blocking, Buffer
from .pack import load_first, store_first
from .parameters import Parameter

comptime SUM_ROWS = 32
"""Outputs whose contributions to dgamma and dbeta make one partial sum."""

comptime CHUNK = 256
"""Columns of dy that are summed together."""


def sum_columns[
    dtype: DType
](
    sums: Buffer[DType.float64],
    dbias: Int,
    dy: Buffer[dtype],
    stride: Int,
    rows: Int,
    columns: Int,
):
    """Sums columns of dy, row after row: rows may lie where cache lines collide.

    Parameters:
        dtype: Element type of dy.

    Args:
        sums: One sum per column, with room for whole vectors; overwritten.
        dbias: Where they go as a gradient; 0 where it is not wanted.
        dy: First element of the columns.
        stride: Distance between rows of dy.
        rows: Number of rows.
        columns: Number of columns.
    """
    comptime B = Blocking[dtype]
    comptime Lanes = SIMD[DType.float64, B.width]
    for j in range(0, columns, B.width):
        sums.unsafe_offset(j).unsafe_store(Lanes(0))
    for row in range(rows):
        var line = dy.unsafe_offset(row * stride)
        for j in range(0, columns, B.width):
            var value = load_first[B.width](line.unsafe_offset(j), columns - j)
            var target = sums.unsafe_offset(j)
            target.unsafe_store(
                target.unsafe_load[width=B.width]()
                + value.cast[DType.float64]()
            )
    if dbias != 0:
        var target = Buffer[dtype](unsafe_from_address=dbias)
        for j in range(columns):
            target.unsafe_offset(j).unsafe_store(
                sums.unsafe_offset(j).unsafe_load().cast[dtype]()
            )


@fieldwise_init
struct WeightRows[dtype: DType](TrivialRegisterPassable):
    """Rows of the linear weight and what their gradients are made from.

    Parameters:
        dtype: Element type of the weight.
    """

    var rows: Int
    """Number of rows, at most `SUM_ROWS`."""
    var columns: Int
    """Number of columns."""
    var weight: Buffer[Self.dtype]
    """First element of the weight."""
    var stride: Int
    """Distance between rows of the weight and of its gradient."""
    var product: Buffer[Blocking[Self.dtype].accum]
    """First element of G, readable in whole vectors."""
    var product_stride: Int
    """Distance between rows of G."""
    var bias_gradient: Buffer[DType.float64]
    """Gradient of the linear bias at these rows."""
    var gamma: Buffer[Blocking[Self.dtype].accum]
    """LayerNorm's weight at the columns."""
    var beta: Buffer[Blocking[Self.dtype].accum]
    """LayerNorm's bias at the columns."""

    def store_weight_gradient(self, target: Buffer[Self.dtype]):
        """Computes the rows of dW.

        Args:
            target: First element of the gradient's rows.
        """
        comptime B = Blocking[Self.dtype]
        for n in range(self.rows):
            var db = (
                self.bias_gradient.unsafe_offset(n)
                .unsafe_load()
                .cast[B.accum]()
            )
            for k in range(0, self.columns, B.width):
                var left = self.columns - k
                var g = self.product.unsafe_offset(
                    n * self.product_stride + k
                ).unsafe_load[width=B.width]()
                var gamma = load_first[B.width](
                    self.gamma.unsafe_offset(k), left
                )
                var beta = load_first[B.width](self.beta.unsafe_offset(k), left)
                store_first(
                    target.unsafe_offset(n * self.stride + k),
                    g.fma(gamma, beta * db).cast[Self.dtype](),
                    left,
                )

    def store_partial_sums(
        self,
        dgamma: Optional[Buffer[Blocking[Self.dtype].accum]],
        dbeta: Optional[Buffer[Blocking[Self.dtype].accum]],
    ):
        """Computes these rows' share of dgamma and dbeta.

        Args:
            dgamma: Where to store the share of dgamma, if wanted.
            dbeta: Where to store the share of dbeta, if wanted.
        """
        comptime B = Blocking[Self.dtype]
        comptime Lanes = SIMD[B.accum, B.width]
        for k in range(0, self.columns, B.width):
            var left = self.columns - k
            var gamma_sum = Lanes(0)
            var beta_sum = Lanes(0)
            for n in range(self.rows):
                var w = load_first[B.width](
                    self.weight.unsafe_offset(n * self.stride + k), left
                ).cast[B.accum]()
                if dgamma:
                    gamma_sum = w.fma(
                        self.product.unsafe_offset(
                            n * self.product_stride + k
                        ).unsafe_load[width=B.width](),
                        gamma_sum,
                    )
                var db = self.bias_gradient.unsafe_offset(n).unsafe_load()
                beta_sum = w.fma(Lanes(db.cast[B.accum]()), beta_sum)
            if dgamma:
                store_first(dgamma.value().unsafe_offset(k), gamma_sum, left)
            if dbeta:
                store_first(dbeta.value().unsafe_offset(k), beta_sum, left)


def sum_partials[
    dtype: DType
](
    target: Parameter,
    partial: Buffer[Blocking[dtype].accum],
    chunks: Int,
    K: Int,
    first: Int,
    last: Int,
):
    """Adds up the partial sums of some features of dgamma or dbeta.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        target: The gradient.
        partial: Partial sums `[chunks, K]`.
        chunks: Number of partial sums of each feature.
        K: Number of features.
        first: First feature.
        last: End of the features.
    """
    comptime B = Blocking[dtype]
    for k in range(first, last, B.width):
        var left = last - k
        var total = SIMD[DType.float64, B.width](0)
        for c in range(chunks):
            total += load_first[B.width](
                partial.unsafe_offset(c * K + k), left
            ).cast[DType.float64]()
        target.store[dtype](k, total.cast[B.accum](), left)
