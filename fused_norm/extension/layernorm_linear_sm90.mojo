"""A CPython extension that launches the sm_90a kernels on PyTorch's stream.

Built once per dtype: mojo build -I . -D dtype=bfloat16 --emit shared-lib
--target-accelerator=nvidia:sm_90a. Addresses are data pointers; all matrices
are contiguous, start at multiples of 16 bytes, and have rows of a multiple of
8 elements. Nothing here checks that.
"""

from std.os import abort
from std.memory import OpaquePointer
from std.python import PythonObject
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype
from max.gpu.host import DeviceAttribute, DeviceContext, DeviceStream

from op.layernorm_linear.sm90.launch import (
    launch_fold,
    launch_forward,
    launch_product,
    launch_statistics,
)

comptime DTYPE = get_defined_dtype["dtype", DType.bfloat16]()


@fieldwise_init
struct Launcher[dtype: DType](Movable, Writable):
    """A device and one of its streams, kept between calls.

    The parameter keeps the types of two extensions apart that are loaded into
    one process.

    Parameters:
        dtype: Type of x, the weight and y.
    """

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
        out self: Launcher[Self.dtype], args: PythonObject, kwargs: PythonObject
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
    def gemm(py_self: PythonObject, args: PythonObject) raises -> PythonObject:
        """Queues y = x @ w^T.

        Args:
            py_self: The launcher.
            args: Addresses y, x, w; sizes m, n, k.

        Returns:
            None.
        """
        var launcher = py_self.downcast_value_ptr[Self]()
        launch_product[Self.dtype](
            launcher[].ctx,
            launcher[].stream,
            Int(py=args[0]),
            Int(py=args[1]),
            Int(py=args[2]),
            Int(py=args[3]),
            Int(py=args[4]),
            Int(py=args[5]),
            launcher[].multiprocessors,
        )
        return PythonObject(None)

    @staticmethod
    def forward(
        py_self: PythonObject, args: PythonObject
    ) raises -> PythonObject:
        """Queues y = LayerNorm(x) W^T + b from a folded weight.

        Args:
            py_self: The launcher.
            args: Addresses y, mean, rstd, x, wc, s, c; sizes m, n, k; eps.
                y, mean and rstd are written.

        Returns:
            None.
        """
        var launcher = py_self.downcast_value_ptr[Self]()
        launch_forward[Self.dtype](
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
            Float32(py=args[10]),
            launcher[].multiprocessors,
        )
        return PythonObject(None)

    @staticmethod
    def stats(py_self: PythonObject, args: PythonObject) raises -> PythonObject:
        """Queues the row statistics of x.

        Args:
            py_self: The launcher.
            args: Addresses mean, rstd, x; sizes m, k; eps.

        Returns:
            None.
        """
        var launcher = py_self.downcast_value_ptr[Self]()
        launch_statistics[Self.dtype](
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
    def fold(py_self: PythonObject, args: PythonObject) raises -> PythonObject:
        """Queues the fold of a weight.

        Args:
            py_self: The launcher.
            args: Addresses wc, s, c, w, gamma, beta, bias, the last three 0
                where there is none; sizes n, k; whether rows are centred;
                whether gamma and beta are float32, and not of the weight's
                type.

        Returns:
            None.
        """
        var launcher = py_self.downcast_value_ptr[Self]()
        var float32 = Int(py=args[10]) != 0
        comptime for wide in range(2):
            if float32 == (wide == 1):
                launch_fold[
                    Self.dtype, DType.float32 if wide == 1 else Self.dtype
                ](
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
        comptime Type = Launcher[DTYPE]
        _ = (
            builder.add_type[Type]("Launcher")
            .def_py_init[Type.py_init]()
            .def_py_method[Type.gemm]("gemm")
            .def_py_method[Type.forward]("forward")
            .def_py_method[Type.stats]("stats")
            .def_py_method[Type.fold]("fold")
        )
        return builder.finalize()
    except e:
        abort(t"failed to create layernorm_linear_sm90: {e}")
