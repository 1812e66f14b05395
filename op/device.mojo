"""A GPU and a stream: where kernels are launched. Python keeps them by address."""

from max.gpu.host import DeviceAttribute, DeviceContext, DeviceStream
from std.memory import OpaquePointer
from std.memory.alloc import unsafe_alloc
from std.python._cpython import Py_ssize_t, PyObjectPtr

from .python import Arguments, Values, failure, integer


@fieldwise_init
struct Gpu(Copyable, Movable):
    """A GPU and the stream to launch on."""

    var context: DeviceContext
    """The device."""
    var stream: DeviceStream
    """Where kernels are enqueued."""
    var processors: Int
    """The number of SMs."""

    def __init__(out self, context: DeviceContext, stream: DeviceStream) raises:
        """Asks the device for its size.

        Args:
            context: The device.
            stream: The stream to launch on.

        Raises:
            If the device does not answer.
        """
        self.context = context
        self.stream = stream
        self.processors = context.get_attribute(
            DeviceAttribute.MULTIPROCESSOR_COUNT
        )


@fieldwise_init
struct Launcher(Movable):
    """A device and one of PyTorch's streams, kept between calls for the life of the process."""

    var gpu: Gpu
    """The device and the stream."""
    var alone: Bool
    """Whether no collective runs at the same time: one holds SMs until other GPUs have caught up."""
    var costs: Int
    """Address of what calls cost on such devices, 0 where that is not measured."""

    @staticmethod
    def at(address: Int) -> Pointer[Launcher, MutUntrackedOrigin]:
        """Finds a launcher again.

        Args:
            address: As `new_launcher` returned it.

        Returns:
            The launcher.
        """
        return {unsafe_from_address = address}


def new_launcher(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Makes a launcher from a device index, a raw stream and `alone`, and returns its address.

    Args:
        module: The extension.
        values: Three integers.
        count: 3.

    Returns:
        An integer, the `context` of calls.
    """
    var arguments = Arguments(values)
    var device = arguments.integer()
    var raw_stream = arguments.integer()
    var alone = arguments.integer() != 0
    try:
        var context = DeviceContext(device)
        var stream = context.create_external_stream(
            OpaquePointer[MutAnyOrigin](unsafe_from_address=raw_stream)
        )
        var room = unsafe_alloc[Launcher](1)
        room.unsafe_write(Launcher(Gpu(context, stream), alone, 0))
        return integer(Int(room))
    except error:
        return failure(error)


def use_costs(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Gives a launcher, by its address, the address of what calls cost on its device.

    Args:
        module: The extension.
        values: Two integers.
        count: 2.

    Returns:
        0.
    """
    var arguments = Arguments(values)
    var launcher = Launcher.at(arguments.integer())
    launcher[].costs = arguments.integer()
    return integer(0)
