"""Descriptions of matrices for TMA."""

from std.sys import size_of
from std.utils import StaticTuple
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.host.nvidia.tma import (
    TensorMapDataType,
    TensorMapFloatOOBFill,
    TensorMapInterleave,
    TensorMapL2Promotion,
    TensorMapSwizzle,
)

from ...argument import KernelArgument
from ..epilogue import Epilogue
from .config import Config
from .eight_bits import is_eight_bits
from .parts import MAP_BYTES
from .wgmma import row_elements

comptime _MAP_WORDS = MAP_BYTES // 8
comptime Map = Maps[1]
"""A tensor map."""


def maps_of_c[E: Epilogue](config: Config) -> Int:
    """Counts the matrices that a product stores.

    Parameters:
        E: What becomes of the sums.

    Args:
        config: Compile-time choices of the matrix kernel.

    Returns:
        Their tensor maps: of c; where it is the gradient of an activation's input, of the activation, and of the
        gradient of what a gate multiplies.
    """
    return config.c_count() + E.gradients


@align(64)
struct Maps[count: Int](ImplicitlyCopyable, KernelArgument):
    """Tensor maps of matrices that stand for one operand, as a kernel gets them.

    They stay in memory: MAX's `TMADescriptor` is passed between functions byte by byte.

    Parameters:
        count: How many.
    """

    var data: StaticTuple[UInt64, _MAP_WORDS * Self.count]
    """The maps, one after another."""

    def __init__(out self):
        """Starts with zeros."""
        self.data = StaticTuple[UInt64, _MAP_WORDS * Self.count](fill=0)

    def __init__(out self, first: Map):
        """Starts with one, which stands for all of them until others do.

        Args:
            first: The first.
        """
        self = Self()
        comptime for i in range(Self.count):
            self.set(i, first)

    def set(mut self, i: Int, map: Map):
        """Sets a map.

        Args:
            i: Which one.
            map: The map.
        """
        comptime for word in range(_MAP_WORDS):
            self.data[i * _MAP_WORDS + word] = map.data[word]


def tensor_map[
    dtype: DType,
    kind: TensorMapDataType = TensorMapDataType.from_dtype[dtype](),
](
    ctx: DeviceContext,
    address: Int,
    rows: Int,
    columns: Int,
    box_rows: Int,
    pitch: Int = 0,
    box_columns: Int = row_elements[dtype](),
) raises -> Map:
    """Describes a row-major matrix to TMA, in boxes of 128, 64 or 32 bytes of
    each row, swizzled as wide.

    Parameters:
        dtype: Type of the elements.
        kind: How TMA treats them.

    Args:
        ctx: The device.
        address: Global address of the matrix, a multiple of 16.
        rows: Its rows.
        columns: Its columns, a multiple of 16 bytes.
        box_rows: Rows of one box.
        pitch: Elements from one row to the next, a multiple of 16 bytes; 0 for its columns.
        box_columns: Columns of one box.

    Returns:
        The tensor map.

    Raises:
        If the driver refuses.
    """
    var map = Map()
    var sizes = SIMD[DType.int64, 2](Int64(columns), Int64(rows))
    var row_bytes = Int64((pitch if pitch else columns) * size_of[dtype]())
    var box = SIMD[DType.int32, 2](Int32(box_columns), Int32(box_rows))
    var box_bytes = box_columns * size_of[dtype]()
    var swizzle = TensorMapSwizzle.SWIZZLE_128B
    if box_bytes == 64:
        swizzle = TensorMapSwizzle.SWIZZLE_64B
    elif box_bytes == 32:
        swizzle = TensorMapSwizzle.SWIZZLE_32B
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
        swizzle._value,
        TensorMapL2Promotion.L2_256B._value,
        TensorMapFloatOOBFill.NONE._value,
    )
    return map


def operand_map[
    dtype: DType, transposed: Bool
](
    ctx: DeviceContext,
    address: Int,
    rows: Int,
    k: Int,
    box_rows: Int,
    pitch: Int = 0,
) raises -> Map:
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
        box_rows: Stored rows that are copied together.
        pitch: Elements from one stored row to the next, 0 for as many as one has.

    Returns:
        The tensor map.

    Raises:
        If the driver refuses.
    """
    comptime if transposed:
        return tensor_map[dtype](ctx, address, k, rows, box_rows, pitch)
    elif dtype == DType.float32:
        return tensor_map[dtype, TensorMapDataType.TFLOAT32](
            ctx, address, rows, k, box_rows, pitch
        )
    elif is_eight_bits[dtype]():
        # TMA knows bytes, and copies these as they are.
        return tensor_map[dtype, TensorMapDataType.UINT8](
            ctx, address, rows, k, box_rows, pitch
        )
    else:
        return tensor_map[dtype](ctx, address, rows, k, box_rows, pitch)
