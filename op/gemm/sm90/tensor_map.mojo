"""Descriptions of matrices for TMA."""

from std.sys import size_of
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.host.nvidia.tma import (
    TMADescriptor,
    TensorMapDataType,
    TensorMapFloatOOBFill,
    TensorMapInterleave,
    TensorMapL2Promotion,
    TensorMapSwizzle,
)

from .wgmma import row_elements


def tensor_map[
    dtype: DType,
    kind: TensorMapDataType = TensorMapDataType.from_dtype[dtype](),
](
    ctx: DeviceContext,
    address: Int,
    rows: Int,
    columns: Int,
    box_rows: Int,
) raises -> TMADescriptor:
    """Describes a row-major matrix to TMA, in boxes of 128 bytes of
    each row.

    Parameters:
        dtype: Type of the elements.
        kind: How TMA treats them.

    Args:
        ctx: The device.
        address: Global address of the matrix, a multiple of 16.
        rows: Its rows.
        columns: Its columns, a multiple of 16 bytes.
        box_rows: Rows of one box.

    Returns:
        The tensor map.

    Raises:
        If the driver refuses.
    """
    var map = TMADescriptor()
    var sizes = SIMD[DType.int64, 2](Int64(columns), Int64(rows))
    var row_bytes = Int64(columns * size_of[dtype]())
    var box = SIMD[DType.int32, 2](
        Int32(row_elements[dtype]()), Int32(box_rows)
    )
    var steps = SIMD[DType.int32, 2](1)
    DeviceBuffer[dtype](
        ctx,
        Pointer[Scalar[dtype], MutAnyOrigin](unsafe_from_address=address),
        1,
        owning=False,
    )._tensor_map_encode_tiled(
        Pointer(to=map).unsafe_bitcast[NoneType](),
        kind._value,
        2,
        Pointer(to=sizes).unsafe_bitcast[Int64](),
        Pointer(to=row_bytes),
        Pointer(to=box).unsafe_bitcast[Int32](),
        Pointer(to=steps).unsafe_bitcast[Int32](),
        TensorMapInterleave.INTERLEAVE_NONE._value,
        TensorMapSwizzle.SWIZZLE_128B._value,
        TensorMapL2Promotion.L2_256B._value,
        TensorMapFloatOOBFill.NONE._value,
    )
    return map


def operand_map[
    dtype: DType, transposed: Bool
](
    ctx: DeviceContext, address: Int, rows: Int, k: Int, box_rows: Int
) raises -> TMADescriptor:
    """Describes an operand of a product, in the boxes it is copied in.

    TMA rounds float32 to tf32, where tensor cores would drop the lower
    bits.

    Parameters:
        dtype: Type of the elements.
        transposed: Whether it is stored as [k, rows].

    Args:
        ctx: The device.
        address: Its global address, a multiple of 16.
        rows: Its rows.
        k: Its columns, which the products are summed over.
        box_rows: Rows that are copied together.

    Returns:
        The tensor map.

    Raises:
        If the driver refuses.
    """
    comptime if transposed:
        return tensor_map[dtype](ctx, address, k, rows, row_elements[dtype]())
    elif dtype == DType.float32:
        return tensor_map[dtype, TensorMapDataType.TFLOAT32](
            ctx, address, rows, k, box_rows
        )
    else:
        return tensor_map[dtype](ctx, address, rows, k, box_rows)
