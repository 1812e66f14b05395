"""What Python keeps of a device and a stream, and hands to every call by its address."""

from std.memory import OpaquePointer
from std.python import PythonObject
from max.gpu.host import DeviceContext

from ...device import Gpu


@fieldwise_init
struct Launcher[dtype: DType](Movable, Writable):
    """A device and one of its streams, kept between calls.

    The parameter keeps the types of two extensions apart that are loaded into
    one process.

    Parameters:
        dtype: Type of x, the weight and y.
    """

    var gpu: Gpu
    """The device and the stream."""
    var alone: Bool
    """Whether nobody else's kernels hold multiprocessors until other GPUs have
    come as far, as those of collectives do."""

    def write_to(self, mut writer: Some[Writer]):
        """Writes the type's name.

        Args:
            writer: Where to.
        """
        writer.write("Launcher")

    def write_repr_to(self, mut writer: Some[Writer]):
        """Writes the type's name.

        Args:
            writer: Where to.
        """
        writer.write("Launcher")

    @staticmethod
    def py_init(
        out self: Launcher[Self.dtype], args: PythonObject, kwargs: PythonObject
    ) raises:
        """Opens a device and wraps a stream.

        Args:
            args: Device index, raw stream, and whether it is alone.
            kwargs: None.

        Returns:
            The launcher.

        Raises:
            If the device does not open.
        """
        var ctx = DeviceContext(Int(py=args[0]))
        var stream = ctx.create_external_stream(
            OpaquePointer[MutAnyOrigin](unsafe_from_address=Int(py=args[1]))
        )
        self = Self(Gpu(ctx, stream), Int(py=args[2]) != 0)

    @staticmethod
    def address(py_self: PythonObject) raises -> PythonObject:
        """Returns what stands for the launcher in calls.

        Args:
            py_self: The launcher, which has to outlive the calls.

        Returns:
            Its address.

        Raises:
            If it is none.
        """
        return PythonObject(Int(py_self.downcast_value_ptr[Self]()))


@always_inline
def launcher_at[
    dtype: DType
](address: Int) -> Pointer[Launcher[dtype], MutUntrackedOrigin]:
    """Finds a launcher again.

    Parameters:
        dtype: Type of x, the weight and y.

    Args:
        address: Its address, as `Launcher.address` gave it.

    Returns:
        The launcher.
    """
    return {unsafe_from_address = address}
