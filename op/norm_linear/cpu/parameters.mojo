"""Parameters and their gradients, of any type."""

from ...gemm.cpu.blocking import Blocking
from ...gemm.cpu.memory import Buffer, buffer, load_first, store_first
from ...rounding import converted


def in_type_of_sums[
    dtype: DType
](
    room: Int,
    address: Int,
    count: Int,
    *,
    default: Int,
    is_float32: Bool,
    offset: Float64 = 0,
    padded: Bool = False,
) -> Buffer[Blocking[dtype].accum]:
    """Converts a parameter's values if they must be.

    Parameters:
        dtype: Element type of the other tensors.

    Args:
        room: Address of room for the values, up to a whole panel.
        address: Address of the parameter; 0 if there is none.
        count: Number of values.
        default: The value of every element of an absent parameter.
        is_float32: Whether it is float32 whatever the type of other tensors.
        offset: Added to every value of a parameter that is there.
        padded: Whether panels are read to their end.

    Returns:
        The values.
    """
    comptime B = Blocking[dtype]
    comptime Lanes = SIMD[B.accum, B.width]
    var target = buffer[B.accum](room)
    var all = B.panels(count) * B.tile_n if padded else count
    if address == 0:
        for k in range(0, all, B.width):
            store_first(target.unsafe_offset(k), Lanes(default), all - k)
        return target
    var is_accum = dtype == B.accum or (is_float32 and B.accum == DType.float32)
    if is_accum and offset == 0 and not padded:
        return buffer[B.accum](address)
    for k in range(0, all, B.width):
        var left = max(count - k, 0)
        var values: Lanes
        if is_accum:
            values = load_first[B.width](
                buffer[B.accum](address).unsafe_offset(k), left
            )
        else:
            values = converted[B.accum](
                load_first[B.width](
                    buffer[dtype](address).unsafe_offset(k), left
                )
            )
        if offset != 0:
            values += offset.cast[B.accum]()
        store_first(target.unsafe_offset(k), values, all - k)
    return target


def store_gradient[
    dtype: DType
](
    address: Int,
    is_float32: Bool,
    k: Int,
    value: SIMD[DType.float64, Blocking[dtype].width],
    count: Int,
):
    """Stores up to a vector of a gradient of gamma or beta.

    Parameters:
        dtype: Element type of the other tensors.

    Args:
        address: Address of the gradient.
        is_float32: Whether it is float32 whatever the type of other tensors.
        k: Index of the first value.
        value: The values.
        count: Number of values that may be written.
    """
    var rounded = value.cast[Blocking[dtype].accum]()
    if is_float32:
        store_first(
            buffer[DType.float32](address).unsafe_offset(k),
            rounded.cast[DType.float32](),
            count,
        )
    else:
        store_first(
            buffer[dtype](address).unsafe_offset(k),
            converted[dtype](rounded),
            count,
        )
