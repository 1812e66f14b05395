"""Computes LayerNorm followed by a Linear layer on a GPU, for MAX graphs.

The row programs' LayerNorm stands around the matrix products of the vendor's BLAS, all on the stream of a
`DeviceContext`. float32 products are float32's, not TF32's. (PyTorch's front door composes the same kernels
around PyTorch's own products instead.)
"""

from layout import Coord, TileTensor
from layout.tile_layout import row_major
from linalg.matmul.vendor.blas import matmul
from max.algorithm import elementwise
from max.gpu.host import DeviceContext

from ..device import Gpu
from ..rows.launch import launch_rows
from ..rows.layernorm import LayerNorm
from ..rows.operands import Operands, accumulator
from .between_products import BetweenProducts, workspace_bytes
from ..gemm.cpu.memory import buffer


def _multiply[
    dtype: DType
](
    ctx: DeviceContext,
    c: Int,
    a: Int,
    b: Int,
    rows: Int,
    inner: Int,
    columns: Int,
    *,
    transpose_a: Bool = False,
    transpose_b: Bool = False,
    beta: Float32 = 0,
) raises:
    """Computes `c[rows, columns] = a @ b + beta c`, all three row by row in memory."""
    matmul(
        ctx,
        TileTensor(buffer[dtype](c), row_major(Coord(rows, columns))),
        TileTensor(
            buffer[dtype](a),
            row_major(
                Coord(inner, rows) if transpose_a else Coord(rows, inner)
            ),
        ),
        TileTensor(
            buffer[dtype](b),
            row_major(
                Coord(columns, inner) if transpose_b else Coord(inner, columns)
            ),
        ),
        c_row_major=True,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        beta=beta,
    )


@fieldwise_init
struct Composed[dtype: DType, ln_dtype: DType](TrivialRegisterPassable):
    """A LayerNorm and a Linear layer on a GPU, by the addresses of their parameters.

    Parameters:
        dtype: Element type of the tensors.
        ln_dtype: Element type of LayerNorm's parameters.
    """

    comptime accum = accumulator[Self.dtype]()
    """The type of sums and statistics."""

    var M: Int
    """Rows."""
    var K: Int
    """Features."""
    var N: Int
    """Outputs."""
    var x: Int
    """Address of the input `[M, K]`."""
    var ln_weight: Int
    """Address of LayerNorm's weight `[K]`."""
    var ln_bias: Int
    """Address of LayerNorm's bias `[K]`."""
    var linear_weight: Int
    """Address of the Linear layer's weight `[N, K]`."""
    var eps: Float64
    """Added to the variance before the square root."""

    def _normalize(
        self, ctx: DeviceContext, z: Int, mean: Int, rstd: Int
    ) raises:
        """Computes the normalized rows and their statistics."""
        var operands = Operands[Self.accum](self.M, self.K)
        operands.inputs[0] = Int64(self.x)
        operands.features[0] = Int64(self.ln_weight)
        operands.features[1] = Int64(self.ln_bias)
        operands.outputs[0] = Int64(z)
        operands.results[0] = Int64(mean)
        operands.results[1] = Int64(rstd)
        operands.number = self.eps.cast[Self.accum]()
        launch_rows[LayerNorm, Self.dtype, Self.ln_dtype](
            Gpu(ctx, ctx.stream()), operands
        )

    def forward(
        self, ctx: DeviceContext, y: Int, mean: Int, rstd: Int, linear_bias: Int
    ) raises:
        """Computes the output and the statistics.

        Args:
            ctx: The device.
            y: Address of the output `[M, N]`.
            mean: Address of the row means `[M]`.
            rstd: Address of the reciprocal standard deviations `[M]`.
            linear_bias: Address of the Linear layer's bias `[N]`.

        Raises:
            If a launch fails.
        """
        var z = ctx.enqueue_create_buffer[Self.dtype](self.M * self.K)
        self._normalize(ctx, Int(z.unsafe_ptr()), mean, rstd)

        # The product adds to the bias before it is rounded.
        var N = self.N
        var target = buffer[Self.dtype](y)
        var bias = buffer[Self.dtype](linear_bias)

        def copy_bias[
            width: Int, alignment: Int = 1
        ](index: Coord) {var N, var target, var bias}:
            var row = Int(index[0].value())
            var column = Int(index[1].value())
            target.unsafe_offset(row * N + column).unsafe_store(
                bias.unsafe_offset(column).unsafe_load()
            )

        elementwise[1, target="gpu"](copy_bias, (self.M, N), ctx)
        _multiply[Self.dtype](
            ctx,
            y,
            Int(z.unsafe_ptr()),
            self.linear_weight,
            self.M,
            self.K,
            N,
            transpose_b=True,
            beta=1,
        )
        _ = z^

    def backward(
        self,
        ctx: DeviceContext,
        dx: Int,
        dln_weight: Int,
        dln_bias: Int,
        dlinear_weight: Int,
        dlinear_bias: Int,
        dy: Int,
        mean: Int,
        rstd: Int,
    ) raises:
        """Computes the five gradients.

        Args:
            ctx: The device.
            dx: Address of the input's gradient `[M, K]`.
            dln_weight: Address of the gradient of LayerNorm's weight `[K]`.
            dln_bias: Address of the gradient of LayerNorm's bias `[K]`.
            dlinear_weight: Address of the linear weight's gradient `[N, K]`.
            dlinear_bias: Address of the linear bias's gradient `[N]`.
            dy: Address of the output's gradient `[M, N]`.
            mean: Address of the row means `[M]`.
            rstd: Address of the reciprocal standard deviations `[M]`.

        Raises:
            If a launch fails, and for float32 on an AMD GPU.
        """
        comptime if Self.dtype == DType.float32:
            # The binding gives rocBLAS a wrong stride for a transposed left operand.
            if ctx.api() == "hip":
                raise Error("no float32 backward in MAX graphs on AMD GPUs")
        # dz = dy @ weight, in whose place z comes for dy^T @ z
        var z = ctx.enqueue_create_buffer[Self.dtype](self.M * self.K)
        var rows = Int(z.unsafe_ptr())
        _multiply[Self.dtype](
            ctx, rows, dy, self.linear_weight, self.M, self.N, self.K
        )
        var gpu = Gpu(ctx, ctx.stream())
        var workspace = ctx.enqueue_create_buffer[DType.uint8](
            workspace_bytes[Self.dtype](gpu, self.M, self.K, self.N)
        )
        BetweenProducts(
            M=self.M,
            K=self.K,
            N=self.N,
            dx=Int64(dx),
            dgamma=Int64(dln_weight),
            dbeta=Int64(dln_bias),
            db=Int64(dlinear_bias),
            z=Int64(rows),
            dz=Int64(rows),
            dy=Int64(dy),
            x=Int64(self.x),
            gamma=Int64(self.ln_weight),
            beta=Int64(self.ln_bias),
            mean=Int64(mean),
            rstd=Int64(rstd),
            eps=self.eps,
            workspace=Int64(Int(workspace.unsafe_ptr())),
        ).launch[Self.dtype, Self.ln_dtype](gpu)
        _multiply[Self.dtype](
            ctx,
            dlinear_weight,
            dy,
            rows,
            self.N,
            self.M,
            self.K,
            transpose_a=True,
        )
        _ = z^
        _ = workspace^
