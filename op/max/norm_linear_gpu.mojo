"""Matrix products on a GPU for MAX, by the vendor's BLAS, and the runner of passes.

All is on the stream of a `DeviceContext`. float32 products are float32's, not TF32's.
"""

from layout import Coord, TileTensor
from layout.tile_layout import row_major
from linalg.matmul.vendor.blas import matmul
from max.algorithm import elementwise
from max.gpu.host import DeviceContext

from ..call import Call
from ..device import Gpu
from ..passes.gpu import GpuRunner
from ..rows.operands import accumulator


def linear[dtype: DType](call: Call, ctx: DeviceContext) raises:
    """Computes y = x W^T + bias, added to the bias before it is rounded.

    Parameters:
        dtype: The type of x.

    Args:
        call: A forward that names these.
        ctx: The device.

    Raises:
        If a launch fails.
    """
    if call.bias != 0:
        var target = _elements[dtype](call.y)
        var bias = _elements[dtype](call.bias)
        var N = call.N

        def copy_bias[
            width: Int, alignment: Int = 1
        ](index: Coord) {var N, var target, var bias}:
            var row = Int(index[0].value())
            var column = Int(index[1].value())
            target.unsafe_offset(row * N + column).unsafe_store(
                bias.unsafe_offset(column).unsafe_load()
            )

        elementwise[1, target="gpu"](copy_bias, (call.M, N), ctx)
    _multiply[dtype](
        ctx,
        call.y,
        call.x,
        call.weight,
        call.M,
        call.K,
        call.N,
        transpose_b=True,
        beta=Float32(1) if call.bias != 0 else Float32(0),
    )


def linear_backward[dtype: DType](call: Call, ctx: DeviceContext) raises:
    """Computes which of dx = dy W and dweight = dy^T x are wanted.

    Parameters:
        dtype: The type of x.

    Args:
        call: A backward that names these.
        ctx: The device.

    Raises:
        If a launch fails, and for dweight in float32 on an AMD GPU.
    """
    if call.dx != 0:
        _multiply[dtype](
            ctx, call.dx, call.dy, call.weight, call.M, call.N, call.K
        )
    if call.dweight == 0:
        return
    comptime if dtype == DType.float32:
        # The binding gives rocBLAS a wrong stride for a transposed left operand.
        if ctx.api() == "hip":
            raise Error("no float32 backward in MAX graphs on AMD GPUs")
    _multiply[dtype](
        ctx,
        call.dweight,
        call.dy,
        call.x,
        call.N,
        call.M,
        call.K,
        transpose_a=True,
    )


def gpu_runner[
    dtype: DType
](ctx: DeviceContext) raises -> GpuRunner[accumulator[dtype]()]:
    """Returns what runs passes on the stream of a context.

    Parameters:
        dtype: The type of x.

    Args:
        ctx: The device.

    Returns:
        The runner.

    Raises:
        If the device does not answer.
    """
    return GpuRunner[accumulator[dtype]()](Gpu(ctx, ctx.stream()))


@always_inline
def _elements[
    dtype: DType
](address: Int) -> Pointer[Scalar[dtype], MutAnyOrigin]:
    return {unsafe_from_address = address}


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
        TileTensor(_elements[dtype](c), row_major(Coord(rows, columns))),
        TileTensor(
            _elements[dtype](a),
            row_major(
                Coord(inner, rows) if transpose_a else Coord(rows, inner)
            ),
        ),
        TileTensor(
            _elements[dtype](b),
            row_major(
                Coord(columns, inner) if transpose_b else Coord(inner, columns)
            ),
        ),
        c_row_major=True,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        beta=beta,
    )
