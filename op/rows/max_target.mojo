"""What the registrations of row programs have in common: the device, and tensors as rows."""

from extensibility import ManagedTensorSlice
from max.gpu.host import DeviceContext
from std.sys.info import num_physical_cores

from op.team import Team

from ..device import Gpu
from .cpu import Cpu
from .launch import GpuRows
from .operands import Operands, RowTarget, accumulator
from .program import RowProgram


def require_same(
    name: StaticString, tensor: ManagedTensorSlice, like: ManagedTensorSlice
) raises:
    """Raises unless two tensors have one shape.

    Args:
        name: The tensor's name.
        tensor: The tensor.
        like: The one it has to be like.

    Raises:
        If their shapes differ.
    """
    var same = tensor.rank == like.rank
    comptime for i in range(min(tensor.rank, like.rank)):
        same = same and tensor.dim_size(i) == like.dim_size(i)
    if not same:
        raise Error(t"{name} must have the shape of the others")


def require_one(name: StaticString, tensor: ManagedTensorSlice) raises:
    """Raises unless a tensor has one element.

    Args:
        name: The tensor's name.
        tensor: The tensor.

    Raises:
        If it has not one.
    """
    if tensor.size() != 1:
        raise Error(t"{name} must have one element")


def address_of(tensor: ManagedTensorSlice) -> Int64:
    """Returns the address of a tensor's first element.

    Args:
        tensor: The tensor.

    Returns:
        The address.
    """
    return Int64(Int(tensor.unsafe_ptr()))


def length_of(tensor: ManagedTensorSlice) -> Int:
    """Returns the number of elements of a row.

    Args:
        tensor: The tensor.

    Returns:
        The size of its last dimension.
    """
    return tensor.dim_size(tensor.rank - 1)


def rows_of(tensor: ManagedTensorSlice) -> Int:
    """Returns the number of rows.

    Args:
        tensor: The tensor.

    Returns:
        The product of all dimensions but the last.
    """
    var rows = 1
    comptime for i in range(tensor.rank - 1):
        rows *= tensor.dim_size(i)
    return rows


@fieldwise_init
struct Target[target: StaticString](RowTarget):
    """The device that MAX runs an op on.

    Parameters:
        target: `"cpu"` or `"gpu"`.
    """

    var ctx: DeviceContext
    """The context that MAX hands to an op."""

    def run[
        P: RowProgram, dtype: DType, ftype: DType
    ](self, operands: Operands[accumulator[dtype]()]) raises:
        """Takes all rows through a program.

        Parameters:
            P: The row program.
            dtype: The type of inputs and outputs.
            ftype: The type of the features.

        Args:
            operands: The tensors.

        Raises:
            If a launch fails.
        """
        comptime if Self.target == "cpu":
            _cpu().run[P, dtype, ftype](operands)
        else:
            GpuRows(Gpu(self.ctx, self.ctx.stream())).run[P, dtype, ftype](
                operands
            )

    def add_up[
        accum: DType, dtype: DType
    ](self, terms: Int64, count: Int, output: Int64, accumulate: Bool) raises:
        """Sums a vector in a fixed order.

        Parameters:
            accum: The type of the terms.
            dtype: The type of the sum.

        Args:
            terms: Address of the vector.
            count: The number of its elements.
            output: Address of the sum.
            accumulate: Whether to add to what is there.

        Raises:
            If a launch fails.
        """
        comptime if Self.target == "cpu":
            _cpu().add_up[accum, dtype](terms, count, output, accumulate)
        else:
            GpuRows(Gpu(self.ctx, self.ctx.stream())).add_up[accum, dtype](
                terms, count, output, accumulate
            )


def _cpu() -> Cpu:
    return Cpu(Team(0, num_physical_cores()))
