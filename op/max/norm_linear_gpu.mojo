"""Runs a call on a GPU for MAX: row programs around the matrix products of the vendor's BLAS.

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
from ..gemm.activation import GATED
from ..passes.normalize import normalize_bytes, run_normalize
from ..passes.normalize_backward import workspace
from ..passes.passes import activate, normalize, normalize_backward_of
from ..rows.operands import accumulator


def forward[
    dtype: DType, norm_dtype: DType, *, is_family: Bool = False
](call: Call, ctx: DeviceContext) raises:
    """Computes y, the sum if there is a residual, mean and rstd.

    Parameters:
        dtype: The type of x.
        norm_dtype: The type of the norm's parameters.
        is_family: Whether there may be a modulation or an activation.

    Args:
        call: The forward, without workspace or a place for z.
        ctx: The device.

    Raises:
        If a launch fails.
    """
    var z = ctx.enqueue_create_buffer[dtype](call.M * call.K)
    var placed = call
    placed.z = Int(z.unsafe_ptr())
    var runner = _runner[dtype](ctx)
    comptime if is_family:
        var scratch = ctx.enqueue_create_buffer[DType.uint8](
            max(normalize_bytes[dtype](call), 1)
        )
        placed.workspace = Int(scratch.unsafe_ptr())
        normalize[dtype](runner, placed)
        _ = scratch^
    else:
        run_normalize[dtype, norm_dtype](runner, placed)

    comptime if is_family:
        if call.activation != 0:
            var columns = call.N * (2 if call.activation >= GATED else 1)
            var product = ctx.enqueue_create_buffer[dtype](
                0 if call.h != 0 else call.M * columns
            )
            if call.h == 0:
                placed.h = Int(product.unsafe_ptr())
            _multiply_and_add[dtype](ctx, placed, placed.h, columns)
            placed.a = call.y
            activate[dtype](runner, placed)
            _ = product^
            _ = z^
            return
    _multiply_and_add[dtype](ctx, placed, call.y, call.N)
    _ = z^


def _multiply_and_add[
    dtype: DType
](ctx: DeviceContext, call: Call, product: Int, N: Int) raises:
    """Writes z W^T + b, added to the bias before it is rounded."""
    if call.bias != 0:
        var target = _elements[dtype](product)
        var bias = _elements[dtype](call.bias)

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
        product,
        call.z,
        call.weight,
        call.M,
        call.K,
        N,
        transpose_b=True,
        beta=Float32(1) if call.bias != 0 else Float32(0),
    )


def backward[
    dtype: DType, norm_dtype: DType
](call: Call, ctx: DeviceContext) raises:
    """Computes dx, dgamma, dbeta, dweight and dbias.

    Parameters:
        dtype: The type of x.
        norm_dtype: The type of the norm's parameters.

    Args:
        call: The backward, without workspace or a place for dz and z.
        ctx: The device.

    Raises:
        If a launch fails, and for float32 on an AMD GPU.
    """
    comptime if dtype == DType.float32:
        # The binding gives rocBLAS a wrong stride for a transposed left operand.
        if ctx.api() == "hip":
            raise Error("no float32 backward in MAX graphs on AMD GPUs")
    # dz = dy @ weight, in whose place z comes for dy^T @ z
    var z = ctx.enqueue_create_buffer[dtype](call.M * call.K)
    var runner = _runner[dtype](ctx)
    var scratch = ctx.enqueue_create_buffer[DType.uint8](
        workspace[dtype, dtype](runner, call).bytes
    )
    var placed = call
    placed.z = Int(z.unsafe_ptr())
    placed.dz = placed.z
    placed.workspace = Int(scratch.unsafe_ptr())
    _multiply[dtype](
        ctx, placed.dz, call.dy, call.weight, call.M, call.N, call.K
    )
    normalize_backward_of[dtype, norm_dtype, dtype](runner, placed)
    _multiply[dtype](
        ctx,
        call.dweight,
        call.dy,
        placed.z,
        call.N,
        call.M,
        call.K,
        transpose_a=True,
    )
    _ = z^
    _ = scratch^


def _runner[
    dtype: DType
](ctx: DeviceContext) raises -> GpuRunner[accumulator[dtype]()]:
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
