"""A CPython extension that launches the sm_90a kernels on PyTorch's stream."""

from std.os import abort
from std.memory import OpaquePointer
from std.python import PythonObject
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype
from max.gpu.host import DeviceAttribute, DeviceContext, DeviceStream

from op.layernorm_linear.sm90.config import Config
from op.layernorm_linear.sm90.epilogue import CORRECTED, PLAIN, SCALED
from op.layernorm_linear.sm90.launch import (
    launch_fold,
    launch_matrix,
    launch_statistics,
)

comptime CONFIGS = [
    Config(slices=1, columns=256, stages=4, cluster=2, gather=False),
    Config(slices=1, columns=256, stages=4, cluster=2, gather=True),
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
                        1e-5,
                        Int(py=args[5]),
                        Int(py=args[6]),
                        Int(py=args[7]),
                        Int(py=args[8]),
                        Int(py=args[9]),
                        Int(py=args[11]),
                        launcher[].multiprocessors,
                    )
        return PythonObject(None)


    @staticmethod
    def forward(
        py_self: PythonObject, args: PythonObject
    ) raises -> PythonObject:
        """Queues the row statistics of x and y = LayerNorm(x) W^T + b.

        Args:
            py_self: The launcher.
            args: Addresses y, mean, rstd, x, wc, s, c; sizes m, n, k; eps;
                variant, band.

        Returns:
            None.
        """
        var launcher = py_self.downcast_value_ptr[Self]()
        var mean = Int(py=args[1])
        var rstd = Int(py=args[2])
        var x = Int(py=args[3])
        var m = Int(py=args[7])
        var k = Int(py=args[9])
        var eps = Float32(py=args[10])
        var variant = Int(py=args[11])
        comptime for i in range(len(CONFIGS)):
            if variant == i:
                comptime if not CONFIGS[i].gather:
                    launch_statistics[DTYPE](
                        launcher[].ctx,
                        launcher[].stream,
                        mean,
                        rstd,
                        x,
                        m,
                        k,
                        eps,
                        launcher[].multiprocessors,
                    )
                launch_matrix[DTYPE, CONFIGS[i], CORRECTED](
                    launcher[].ctx,
                    launcher[].stream,
                    Int(py=args[0]),
                    x,
                    Int(py=args[4]),
                    mean,
                    rstd,
                    eps,
                    Int(py=args[5]),
                    Int(py=args[6]),
                    m,
                    Int(py=args[8]),
                    k,
                    Int(py=args[12]),
                    launcher[].multiprocessors,
                )
        return PythonObject(None)

    @staticmethod
    def stats(
        py_self: PythonObject, args: PythonObject
    ) raises -> PythonObject:
        """Queues the row statistics of x.

        Args:
            py_self: The launcher.
            args: Addresses mean, rstd, x; sizes m, k; eps.

        Returns:
            None.
        """
        var launcher = py_self.downcast_value_ptr[Self]()
        launch_statistics[DTYPE](
            launcher[].ctx,
            launcher[].stream,
            Int(py=args[0]),
            Int(py=args[1]),
            Int(py=args[2]),
            Int(py=args[3]),
            Int(py=args[4]),
            Float32(py=args[5]),
            launcher[].multiprocessors,
        )
        return PythonObject(None)

    @staticmethod
    def fold(
        py_self: PythonObject, args: PythonObject
    ) raises -> PythonObject:
        """Queues the fold of a weight.

        Args:
            py_self: The launcher.
            args: Addresses wc, s, c, w, gamma, beta, bias; sizes n, k;
                whether rows are centred; whether gamma, beta and bias are
                float32, and not of the weight's type.

        Returns:
            None.
        """
        var launcher = py_self.downcast_value_ptr[Self]()
        var float32 = Int(py=args[10]) != 0
        comptime for wide in range(2):
            if float32 == (wide == 1):
                launch_fold[DTYPE, DType.float32 if wide == 1 else DTYPE](
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
                    Int(py=args[9]) != 0,
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
            .def_py_method[Launcher.forward]("forward")
            .def_py_method[Launcher.stats]("stats")
            .def_py_method[Launcher.fold]("fold")
        )
        return builder.finalize()
    except e:
        abort(t"failed to create layernorm_linear_sm90: {e}")
