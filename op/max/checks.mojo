"""Checks of the ops for MAX: types when they are compiled, shapes when they are called."""

from extensibility import ManagedTensorSlice
from max.gpu.host import DeviceBuffer, DeviceContext

from ..rows.operands import accumulator


def clear[
    target: StaticString
](tensor: ManagedTensorSlice, ctx: DeviceContext) raises:
    """Writes the zeros that a sum over no rows is, if it is wanted.

    Parameters:
        target: The device's kind.

    Args:
        tensor: Where to; without elements, nowhere.
        ctx: The device.

    Raises:
        If it cannot be queued.
    """
    if tensor.size() == 0:
        return
    comptime if target == "cpu":
        # A graph does not wait for what is queued on a CPU.
        for i in range(tensor.size()):
            tensor.unsafe_ptr()[unsafe_offset=i] = 0
    else:
        ctx.enqueue_memset(
            DeviceBuffer[tensor.dtype](
                ctx, tensor.unsafe_ptr(), tensor.size(), owning=False
            ),
            Scalar[tensor.dtype](0),
        )


def require_dtypes[
    target: StaticString, dtype: DType, ln_dtype: DType, accum: DType
]():
    """Refuses to compile an op for types that have no kernel.

    Parameters:
        target: The device's kind.
        dtype: The type of x.
        ln_dtype: The type of the norm's parameters.
        accum: The type of the statistics.
    """
    comptime is_low = dtype == DType.bfloat16 or dtype == DType.float16
    comptime assert (
        is_low or dtype == DType.float32 or dtype == DType.float64
    ), "x must be float32, bfloat16, float16 or float64"
    comptime assert (
        target == "cpu" or dtype != DType.float64
    ), "float64 has no GPU kernel"
    comptime assert ln_dtype == dtype or (
        is_low and ln_dtype == DType.float32
    ), (
        "LayerNorm's parameters must have the dtype of x, or be float32 beside"
        " bfloat16 and float16"
    )
    comptime assert (
        accum == accumulator[dtype]()
    ), "mean and rstd must be float32, and float64 beside float64"


def require_sizes[op: StaticString](K: Int, N: Int) raises:
    """Refuses a weight without elements.

    Parameters:
        op: The op's name.

    Args:
        K: Features.
        N: Outputs.

    Raises:
        If there are none.
    """
    if K == 0 or N == 0:
        raise Error(
            op,
            ": linear_weight must have at least 1 row and 1 column, got ",
            N,
            " x ",
            K,
        )


def address[
    op: StaticString, name: StaticString
](tensor: ManagedTensorSlice, *expected: Int) raises -> Int:
    """Returns the address of a tensor, which has to have the given shape.

    Parameters:
        op: The op's name.
        name: The tensor's.

    Args:
        tensor: The tensor.
        expected: Its sizes.

    Returns:
        The address.

    Raises:
        If it has another shape.
    """
    for i in range(tensor.rank):
        require_size[op, name](i, tensor.dim_size(i), expected[i])
    return Int(tensor.unsafe_ptr())


def optional[
    op: StaticString, name: StaticString
](tensor: ManagedTensorSlice, *expected: Int) raises -> Int:
    """Returns the address of a tensor of the given shape, 0 for one without elements.

    Parameters:
        op: The op's name.
        name: The tensor's.

    Args:
        tensor: The tensor.
        expected: Its sizes.

    Returns:
        The address, or 0.

    Raises:
        If it has another shape.
    """
    if tensor.size() == 0:
        return 0
    for i in range(tensor.rank):
        require_size[op, name](i, tensor.dim_size(i), expected[i])
    return Int(tensor.unsafe_ptr())


def require_size[
    op: StaticString, name: StaticString
](dimension: Int, size: Int, expected: Int) raises:
    """Raises unless a dimension has the size expected.

    Parameters:
        op: The op's name.
        name: The tensor's.

    Args:
        dimension: Which.
        size: What it has.
        expected: What it should have.

    Raises:
        If they differ.
    """
    if size != expected:
        raise Error(
            op,
            ": dimension ",
            dimension,
            " of ",
            name,
            " must be ",
            expected,
            ", got ",
            size,
        )
