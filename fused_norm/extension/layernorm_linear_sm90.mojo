"""A CPython extension that launches the sm_90a kernels on PyTorch's stream."""

from std.os import abort
from std.memory import OpaquePointer
from std.python import PythonObject
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype
from max.gpu.host import DeviceAttribute, DeviceContext, DeviceStream

from op.layernorm_linear.sm90.config import Config
from op.layernorm_linear.sm90.epilogue import CORRECTED, PLAIN, SCALED
from op.layernorm_linear.sm90.launch import launch_matrix

comptime CONFIGS = [
    Config(slices=1, columns=256, stages=4, lead=2, cluster=2),
    Config(slices=1, columns=256, stages=4, lead=0, cluster=2),
    Config(slices=1, columns=256, stages=4, lead=1, cluster=2),
    Config(slices=2, columns=128, stages=4, lead=0, cluster=2),
    Config(slices=2, columns=128, stages=4, lead=2, cluster=2),
    Config(slices=1, columns=256, stages=4, lead=2, cluster=1),
    Config(slices=1, columns=128, stages=6, lead=2, cluster=2),
    Config(slices=1, columns=256, stages=2, lead=0, cluster=1),
]
comptime DTYPE = get_defined_dtype["dtype", DType.bfloat16]()


@fieldwise_init
struct Launcher(Movable, Writable):
    """A device and one of its streams, kept between calls."""

    var ctx: DeviceContext
    var stream: DeviceStream
    var multiprocessors: Int

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
        out self: Launcher, args: PythonObject, kwargs: PythonObject
    ) raises:
        """Opens a device and wraps a stream.

        Args:
            args: Device index and raw stream.
            kwargs: None.
        """
        var ctx = DeviceContext(Int(py=args[0]))
        var stream = ctx.create_external_stream(
            OpaquePointer[MutAnyOrigin](unsafe_from_address=Int(py=args[1]))
        )
        self = Self(
            ctx,
            stream,
            ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT),
        )

    @staticmethod
    def matrix(
        py_self: PythonObject, args: PythonObject
    ) raises -> PythonObject:
        """Queues y = epilogue(x @ w^T).

        Args:
            py_self: The launcher.
            args: Addresses y, x, w, mean, rstd, s, c; sizes m, n, k; variant,
                band, mode.

        Returns:
            None.
        """
        var launcher = py_self.downcast_value_ptr[Self]()
        var variant = Int(py=args[10])
        var mode = Int(py=args[12])
        comptime for i in range(len(CONFIGS)):
            comptime for kind in range(3):
                if variant == i and mode == kind:
                    launch_matrix[DTYPE, CONFIGS[i], kind](
                        launcher[].ctx,
                        launcher[].stream,
                        Int(py=args[0]),
                        Int(py=args[1]),
                        Int(py=args[2]),
                        Int(py=args[3]),
                        Int(py=args[4]),
                        Int(py=args[5]),
                        Int(py=args[6]),
                        Int(py=args[7]),
                        Int(py=args[8]),
                        Int(py=args[9]),
                        Int(py=args[11]),
                        launcher[].multiprocessors,
                    )
        return PythonObject(None)


@export
def PyInit_layernorm_linear_sm90() abi("C") -> PythonObject:
    """Makes the module.

    Returns:
        The module.
    """
    try:
        var builder = PythonModuleBuilder("layernorm_linear_sm90")
        _ = (
            builder.add_type[Launcher]("Launcher")
            .def_py_init[Launcher.py_init]()
            .def_py_method[Launcher.matrix]("matrix")
        )
        return builder.finalize()
    except e:
        abort(t"failed to create layernorm_linear_sm90: {e}")
