"""Descriptions of matrices for the copy engine."""

from std.utils import IndexList
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.host.nvidia.tma import (
    TMADescriptor,
    TensorMapL2Promotion,
    TensorMapSwizzle,
    create_tma_descriptor,
)

from .wgmma import K_BLOCK


def tensor_map[
    dtype: DType
](
    ctx: DeviceContext,
    address: Int,
    rows: Int,
    columns: Int,
    box_rows: Int,
) raises -> TMADescriptor:
    """Describes a row-major matrix to the copy engine, in boxes of 64 columns.

    Parameters:
        dtype: Type of the elements.

    Args:
        ctx: The device.
        address: Global address of the matrix, a multiple of 16.
        rows: Its rows.
        columns: Its columns, a multiple of 8.
        box_rows: Rows of one box.

    Returns:
        The tensor map.

    Raises:
        If the driver refuses.
    """
    return create_tma_descriptor[
        dtype,
        2,
        TensorMapSwizzle.SWIZZLE_128B,
        TensorMapL2Promotion.L2_256B,
    ](
        DeviceBuffer[dtype](
            ctx,
            Pointer[Scalar[dtype], MutAnyOrigin](unsafe_from_address=address),
            1,
            owning=False,
        ),
        IndexList[2](rows, columns),
        IndexList[2](columns, 1),
        IndexList[2](box_rows, K_BLOCK),
    )


def operand_map[
    dtype: DType, transposed: Bool
](
    ctx: DeviceContext, address: Int, rows: Int, k: Int, box_rows: Int
) raises -> TMADescriptor:
    """Describes an operand of a product, in the boxes it is copied in.

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
        return tensor_map[dtype](ctx, address, k, rows, K_BLOCK)
    else:
        return tensor_map[dtype](ctx, address, rows, k, box_rows)
